"""A real run that gets a signal after some steps of its engine: `python -m tests.pipeline.signalled JOB STEPS [hang]`.

The signal comes from within, so a test need not be quick enough to send it. With `hang`, the step after it never ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from batchgen.config import JobConfig, load_job
from batchgen.errors import BatchgenError
from batchgen.pipeline.ports import EngineLike
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.services import default_services
from batchgen.records import Completion


class Signalling:
    """An engine that sends its process SIGTERM after some steps."""

    def __init__(self, engine: EngineLike, num_steps: int, hangs: bool) -> None:
        self._engine = engine
        self._left = num_steps
        self._hangs = hangs

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            if self._hangs:
                hang()
        return self._engine.step()


def hang() -> None:
    """A call into C that never comes back, whatever signals come: the second lock of a mutex."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def main(job_path: Path, num_steps: int, hangs: bool) -> int:
    """Run the job; returns its exit code."""
    services = default_services()

    def make_engine(job: JobConfig, directory: Path) -> EngineLike:
        return Signalling(services.make_engine(job, directory), num_steps, hangs)  # type: ignore[return-value]

    try:
        run_job(load_job(job_path), services=replace(services, make_engine=make_engine))
    except BatchgenError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), "hang" in sys.argv[3:]))
