"""The end of a process of ours: when all is closed and delivered, it is over at once."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ends_at_once() -> Iterator[None]:
    """For all that a process does: it ends with the code of the SystemExit that leaves this block.

    The interpreter does not take itself down, which frees an engine's modules and memory piece by piece for a second
    or two after the last row. Threads are waited for, what is registered with atexit is called, and output is flushed,
    all as ever. Any other exception, or one of the exit callbacks registered before, leaves the end to the interpreter.
    """
    codes: list[int] = []
    # Called in reverse: what is registered by then is called after this one, and so would never be.
    if atexit._ncallbacks() == 0:
        atexit.register(_leave, codes)
    try:
        yield
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            codes.append(end.code or 0)
        raise
    codes.append(0)


def _leave(codes: list[int]) -> None:
    if not codes:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):
        # The interpreter has a code of its own for this.
        return
    os._exit(codes[0])
