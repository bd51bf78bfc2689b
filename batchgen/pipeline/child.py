"""A child process for untrusted templates and files: it can be killed at any moment, and dies with its parent.

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
from enum import Enum
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple, Protocol

from batchgen.errors import BatchgenError
from batchgen.pipeline.confinement import arm, child_code, limit_memory
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.pipeline.ports import EncodedRow
from batchgen.records import RowRange

MEMORY_BYTES = 2 * 2**30
"""Memory that templates and rows may take beyond what a child holds at its start."""

_POLL_SECONDS = 0.1
_SILENT_SECONDS = 600.0
PREPARER = "batchgen.pipeline.preparer"
"""Module of the worker that makes prompts."""


class Limits(NamedTuple):
    """What a child may use; seconds are those of its processor time."""

    start_seconds: float = 60.0
    """To load the tokenizer, and to compile and probe the templates."""
    step_seconds: float = 10.0
    """To render the rows of one request, and to encode each part of them; 0: without a limit."""
    memory_bytes: int = MEMORY_BYTES


class ChildDied(Exception):
    """The child has ended; `out_of_time` tells whether its timer did it."""

    def __init__(self, exit_status: int | None) -> None:
        super().__init__(f"the process that renders prompts ended with status {exit_status}")
        self.out_of_time = exit_status == -signal.SIGPROF


class ChildClosed(Exception):
    """The parent does not want the answer any more."""


class _Sign(Enum):
    """What a child sends while it works on an answer."""

    ALIVE = 0


@dataclass(frozen=True)
class _Renewal:
    """What a child is sent to go on with another worker."""

    spec: Any


@dataclass(frozen=True)
class _Failure:
    """What a child sends instead of an answer."""

    error: BatchgenError


class BoundedChild:
    """A running child of bounded memory and time. It lives no longer than the thread that made it, and than `close`."""

    def __init__(
        self, spec: Any, limits: Limits, is_closing: Callable[[], bool] = lambda: False, worker: str = PREPARER
    ) -> None:
        """Start, and wait until it is ready; raises the JobError that it found, or ChildDied.

        `worker` is the module whose `main` serves with what it makes of `spec`.
        """
        self._is_closing = is_closing
        self._connection, far_end = Pipe()
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", child_code(worker), str(far_end.fileno()), str(os.getpid())],
                pass_fds=[far_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                # What this one frees it gives back at once, and so has its whole limit for what comes next.
                env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system"},
                # Not in the terminal's foreground: Ctrl-C is the parent's to handle.
                process_group=0,
            )
        try:
            self.ask((spec, limits))
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def prepare(self, rows: RowRange) -> list[EncodedRow]:
        """Have a range of rows prepared; raises what the child raised, ChildDied or ChildClosed."""
        answer: list[EncodedRow] = self.ask(rows)
        return answer

    def renew(self, spec: Any) -> None:
        """Have a new worker made, of another spec and in the same limits; raises like the start."""
        self.ask(_Renewal(spec))

    def ask(self, request: Any) -> Any:
        """What the child's worker answers to a request; raises like `prepare`."""
        try:
            self._connection.send(request)
            while (answer := self._receive()) is _Sign.ALIVE:
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


class Worker(Protocol):
    """What a child does."""

    def answer(self, request: Any, alive: Callable[[], None]) -> Any:
        """The answer to a request; `alive` is called each time a part of the work is done."""


def serve(make_worker: Callable[[Any], Worker]) -> None:
    """What a child runs: make a worker from its spec, and answer requests until the parent closes the connection."""
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, OSError):
        _serve(connection, make_worker)


def _serve(connection: Connection[Any, Any], make_worker: Callable[[Any], Worker]) -> None:
    spec, limits = connection.recv()
    worker: Worker | None = None
    while True:
        try:
            if worker is None:
                # Jinja computes constants while it compiles.
                limit_memory(limits.memory_bytes)
                worker = _made(make_worker, spec, limits)
                connection.send(True)
            elif isinstance(request := connection.recv(), _Renewal):
                worker = _made(make_worker, request.spec, limits)
                connection.send(True)
            else:
                connection.send(_answer(worker, request, limits, connection))
        except (EOFError, OSError):
            raise
        except BatchgenError as error:
            connection.send(_Failure(error))
        except MemoryError:  # While compiling, it is a JobError by then.
            # Nothing more is sure to work here; the parent finds the row by asking for one at a time.
            os._exit(1)
        except Exception:  # noqa: BLE001  What ends a child must be known to the parent, whatever it is.
            connection.send(_Failure(BatchgenError(f"preparing prompts failed:\n{traceback.format_exc()}")))


def _made(make_worker: Callable[[Any], Worker], spec: Any, limits: Limits) -> Worker:
    arm(limits.start_seconds)
    with machine_errors():
        worker = make_worker(spec)
    arm(0)
    return worker


def _answer(worker: Worker, request: Any, limits: Limits, connection: Connection[Any, Any]) -> Any:
    def alive() -> None:
        arm(limits.step_seconds)
        connection.send(_Sign.ALIVE)

    answer = worker.answer(request, alive)
    arm(0)
    return answer


def pieces(rows: RowRange, size: int) -> Iterator[RowRange]:
    """A range in pieces of at most `size` physical rows."""
    for start in range(rows.start, rows.stop, size):
        yield rows._replace(start=start, stop=min(start + size, rows.stop))


def is_one(rows: RowRange) -> bool:
    """Whether a range has but one row."""
    return rows.stop - rows.start == 1
