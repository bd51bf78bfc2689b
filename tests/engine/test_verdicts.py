"""Verdicts are judged once per key and version, and a cache that fails costs time only."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.engine.verdicts import remembered

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_verdict_is_judged_once_per_key() -> None:
    judged: list[int] = []

    def judge() -> str:
        judged.append(1)
        return "differs"

    assert remembered("check-1", {"layers": 2}, judge) == "differs"
    assert remembered("check-1", {"layers": 2}, judge) == "differs"
    assert len(judged) == 1
    remembered("check-1", {"layers": 3}, judge)
    remembered("check-2", {"layers": 2}, judge)
    assert len(judged) == 3


@pytest.mark.parametrize("damage", ["", '"cut', "[1]"])
def test_a_damaged_note_is_judged_anew(own_cache: Path, damage: str) -> None:
    remembered("check-1", 1, lambda: "differs")
    (note,) = (own_cache / "verdicts").iterdir()
    note.write_text(damage)
    assert remembered("check-1", 1, lambda: "") == ""
    assert note.read_text() == '""'


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert remembered("check-1", 1, lambda: "differs") == "differs"
