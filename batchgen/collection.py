"""Garbage collection, left out where nothing becomes garbage."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """No collection meanwhile, in all threads: for imports, which make many objects that all stay.

    Looking through them again and again takes about a fifth of the time that torch and transformers need.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def exempt_from_collection() -> None:
    """No collection looks at what is there by now, until the interpreter takes itself down.

    For a process of ours whose imports are done: their million objects would be looked through several times while the
    model loads. What is garbage by now stays, too.
    """
    gc.freeze()
    # Extensions complain of what is left when all is over. Registered once, however often it is called.
    atexit.unregister(gc.unfreeze)
    atexit.register(gc.unfreeze)
