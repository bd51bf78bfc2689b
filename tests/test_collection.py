"""Garbage collection is paused for imports, and comes back."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from batchgen.collection import collection_paused


def test_collection_comes_back_after_an_error() -> None:
    def fail() -> None:
        with collection_paused():
            assert not gc.isenabled()
            raise ImportError("broken")

    with pytest.raises(ImportError, match="broken"):
        fail()
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_importing_the_engine_part_by_part_is_importing_the_engine() -> None:
    script = (
        "import gc, sys, batchgen\n"
        "parts = batchgen.import_engine(); assert 'torch' not in sys.modules\n"
        "next(parts); assert 'torch' in sys.modules and 'batchgen.engine' not in sys.modules and gc.isenabled()\n"
        "list(parts); assert 'batchgen.engine.engine' in sys.modules and gc.isenabled()\n"
        "assert gc.get_freeze_count() > 10 * len(gc.get_objects()), 'later collections look at little'\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert "leaked" not in ended.stderr, "extensions find everything taken down at the end"
