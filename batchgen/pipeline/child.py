"""A child process that runs untrusted templates: it can be killed at any moment, and dies with its parent.

It is started as a new interpreter, never forked, and without importing the caller's main module. Kernel timers on its
processor time end it when a template does not come back, so neither a busy nor a suspended machine looks like one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

from batchgen.config import InputConfig
from batchgen.data.input_rows import InputScan
from batchgen.errors import BatchgenError, InputError
from batchgen.pipeline.choosing import ChooserSpec, RowChooser, chunks
from batchgen.pipeline.confinement import arm, child_code, limit_memory
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.pipeline.preparer import EncodedRow, Preparer
from batchgen.pipeline.prompts import PreparerSpec
from batchgen.records import RowRange

MEMORY_BYTES = 2 * 2**30
"""Memory that templates and rows may take beyond what a child holds at its start."""

_POLL_SECONDS = 0.1
_CHOSEN_ROWS = 4096
"""Physical rows of one request to choose from."""
_SILENT_SECONDS = 600.0
_MAIN = child_code("batchgen.pipeline.child")


class Limits(NamedTuple):
    """What a child may use; seconds are those of its processor time."""

    start_seconds: float = 60.0
    """To load the tokenizer, and to compile and probe the templates."""
    step_seconds: float = 10.0
    """To render the rows of one request, and to encode each part of them."""
    memory_bytes: int = MEMORY_BYTES


class ChildDied(Exception):
    """The child has ended; `out_of_time` tells whether its timer did it."""

    def __init__(self, exit_status: int | None) -> None:
        super().__init__(f"the process that renders prompts ended with status {exit_status}")
        self.out_of_time = exit_status == -signal.SIGPROF


class ChildClosed(Exception):
    """The parent does not want the answer any more."""


@dataclass(frozen=True)
class _Failure:
    """What a child sends instead of an answer."""

    error: BatchgenError


class TemplateChild:
    """A running child. It lives no longer than the thread that made it, and than `close`."""

    def __init__(self, spec: PreparerSpec | ChooserSpec, limits: Limits, is_closing: Callable[[], bool]) -> None:
        """Start, and wait until it is ready; raises the JobError that it found, or ChildDied."""
        self._is_closing = is_closing
        self._connection, far_end = Pipe()
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(far_end.fileno()), str(os.getpid())],
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # Not in the terminal's foreground: Ctrl-C is the parent's to handle.
                process_group=0,
            )
        try:
            self._request((spec, limits))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def prepare(self, rows: RowRange) -> list[EncodedRow]:
        """Have a range of rows prepared; raises what the child raised, ChildDied or ChildClosed."""
        answer: list[EncodedRow] = self._request(rows)
        return answer

    def choose(self, rows: RowRange) -> list[int]:
        """Have the rows of a range chosen; raises like `prepare`."""
        answer: list[int] = self._request(rows)
        return answer

    def _request(self, message: Any) -> Any:
        try:
            self._connection.send(message)
            while (answer := self._receive()) is None:
                pass
        except (EOFError, OSError) as error:
            raise ChildDied(self._reap()) from error
        if isinstance(answer, _Failure):
            raise answer.error
        return answer

    def _receive(self) -> Any:
        silent_since = time.monotonic()
        while not self._connection.poll(_POLL_SECONDS):
            if self._is_closing():
                raise ChildClosed
            if time.monotonic() - silent_since > _SILENT_SECONDS:
                self._process.kill()
        return self._connection.recv()

    def _reap(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        return self._process.poll()

    def close(self) -> None:
        """End the process; a second call does nothing."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def choose_rows_in_child(scan: InputScan, config: InputConfig, limits: Limits = Limits()) -> Iterator[list[int]]:  # noqa: B008
    """The rows of each file that `input.where` keeps; InputError where it is wrong, or does not come back."""
    try:
        with machine_errors():
            child = TemplateChild(ChooserSpec(scan.to_json(), config), limits, lambda: False)
    except ChildDied as death:
        raise InputError("input.where: compiling it takes too long or too much memory; simplify it") from death
    with contextlib.closing(child):
        for file in scan.files:
            kept: list[int] = []
            for rows in chunks(file, _CHOSEN_ROWS):
                try:
                    kept += child.choose(rows)
                except ChildDied as death:
                    what = f"more than {limits.step_seconds:g} s" if death.out_of_time else "too much memory"
                    raise InputError(
                        f"{file.path}: rows {rows.start} to {rows.stop - 1}: input.where takes {what}; simplify it"
                    ) from death
            yield kept


def main() -> None:
    """What the child runs: answer requests until the parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        _serve(connection)


def _serve(connection: Connection[Any, Any]) -> None:
    spec, limits = connection.recv()
    worker: Preparer | RowChooser | None = None
    while True:
        try:
            if worker is None:
                # Jinja computes constants while it compiles.
                limit_memory(limits.memory_bytes)
                arm(limits.start_seconds)
                with machine_errors():
                    worker = RowChooser(spec) if isinstance(spec, ChooserSpec) else Preparer(spec)
                arm(0)
                connection.send(True)
            else:
                connection.send(_answer(worker, connection.recv(), limits, connection))
        except (EOFError, OSError):
            raise
        except BatchgenError as error:
            connection.send(_Failure(error))
        except MemoryError:  # While compiling, it is a JobError by then.
            # Nothing more is sure to work here; the parent finds the row by asking for one at a time.
            os._exit(1)
        except Exception:  # noqa: BLE001  What ends a child must be known to the parent, whatever it is.
            connection.send(_Failure(BatchgenError(f"preparing prompts failed:\n{traceback.format_exc()}")))


def _answer(
    worker: Preparer | RowChooser, rows: RowRange, limits: Limits, connection: Connection[Any, Any]
) -> list[EncodedRow] | list[int]:
    def alive() -> None:
        arm(limits.step_seconds)
        connection.send(None)

    answer = worker.answer(rows, alive)
    arm(0)
    return answer
