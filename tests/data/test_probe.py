"""A file system that does not keep what the ledger builds on is found before anything is generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.data.file_backend import OsBackend, OsWritableFile, WritableFile
from batchgen.data.files import OutputFiles
from batchgen.data.probe import probe_file_system
from batchgen.errors import OutputUnavailable


class _NoLinks(OsBackend):
    def link(self, source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")


class _OverwritingLinks(OsBackend):
    def link(self, source: Path, target: Path) -> None:
        target.unlink(missing_ok=True)
        super().link(source, target)


class _NoExclusion(OsBackend):
    def create(self, path: Path) -> WritableFile:
        path.unlink(missing_ok=True)
        return OsWritableFile(path)


class _NoSync(OsBackend):
    def sync_directory(self, path: Path) -> None:
        raise OSError(22, "Invalid argument")


def test_a_good_file_system_passes_and_keeps_nothing(tmp_path: Path) -> None:
    probe_file_system(OutputFiles(), tmp_path / "probe")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case(48)
@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (_NoLinks(), "has no hard links"),
        (_OverwritingLinks(), "lets a hard link overwrite"),
        (_NoExclusion(), "creates a file a second time"),
        (_NoSync(), "cannot sync the directory"),
    ],
)
def test_a_file_system_that_lacks_something_is_refused_with_the_reason(
    tmp_path: Path, backend: OsBackend, reason: str
) -> None:
    with pytest.raises(OutputUnavailable, match=reason):
        probe_file_system(OutputFiles(backend), tmp_path / "probe")
    assert list(tmp_path.iterdir()) == []
