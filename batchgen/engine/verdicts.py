"""Verdicts on a model and a machine, kept between runs so that a check costs its time only once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from batchgen import __version__
from batchgen.errors import ModelError
from batchgen.resources import cache_directory


def remembered(kind: str, key: Any, judge: Callable[[], str]) -> str:
    """The verdict of `judge`, from an earlier run if there was one with the same `key` and the same versions.

    `kind` names the check and its version. A cache that cannot be read or written only costs time.
    """
    note = _note(kind, key)
    if note is not None:
        with suppress(OSError, ValueError):
            verdict = json.loads(note.read_text(encoding="utf-8"))
            if isinstance(verdict, str):
                return verdict
    verdict = judge()
    if note is not None:
        with suppress(OSError):
            note.write_text(json.dumps(verdict), encoding="utf-8")
    return verdict


def _note(kind: str, key: Any) -> Path | None:
    text = json.dumps([key, __version__, transformers.__version__, torch.__version__], sort_keys=True, default=str)
    with suppress(ModelError, OSError):
        directory = cache_directory() / "verdicts"
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()}"
    return None
