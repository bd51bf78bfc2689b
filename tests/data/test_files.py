"""The seam: exclusive names, no symbolic links, and errors that say which file and what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.data.file_backend import OsBackend, WritableFile
from batchgen.data.files import OutputFiles
from batchgen.data.ledger import Ledger
from batchgen.errors import JobError, OutputUnavailable

FILES = OutputFiles()


def test_a_new_file_is_written_and_read(tmp_path: Path) -> None:
    FILES.write_new(tmp_path / "a", b"one")
    assert FILES.read(tmp_path / "a") == b"one"
    assert FILES.list_directory(tmp_path) == ["a"]


def test_a_taken_name_is_a_signal_and_not_a_failure(tmp_path: Path) -> None:
    FILES.write_new(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        FILES.write_new(tmp_path / "a", b"two")
    FILES.write_new(tmp_path / "b", b"two")
    with pytest.raises(FileExistsError):
        FILES.link(tmp_path / "b", tmp_path / "a")
    assert FILES.read(tmp_path / "a") == b"one"


def test_replace_leaves_no_temporary(tmp_path: Path) -> None:
    FILES.write_new(tmp_path / "a", b"one")
    FILES.replace(tmp_path / "a", b"two", tmp_path / "temporary")
    assert FILES.read(tmp_path / "a") == b"two"
    assert FILES.list_directory(tmp_path) == ["a"]


def test_what_is_not_there_has_no_status_and_can_be_removed_twice(tmp_path: Path) -> None:
    assert FILES.status(tmp_path / "a") is None
    assert FILES.list_directory(tmp_path / "none") == []
    FILES.unlink(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        FILES.read(tmp_path / "a")


def test_a_file_where_a_directory_must_be_is_a_wrong_job(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        for root in (tmp_path / name, tmp_path / name / "below"):
            with pytest.raises(JobError, match=f"{name}: is a file, where a directory must be; choose another output"):
                Ledger.acquire(FILES, root)
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(JobError, match="file: is a file, where a directory must be"):
        FILES.list_directory(tmp_path / "file")


def test_a_link_to_a_directory_that_is_not_mounted_is_to_be_mended(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for root in (tmp_path / "link", tmp_path / "link/below"):
        Ledger.acquire(FILES, root).close()
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    for root in (tmp_path / "link", tmp_path / "link/below"):
        with pytest.raises(OutputUnavailable, match="link: is a symbolic link to a directory that is not there"):
            Ledger.acquire(FILES, root)


def test_a_symbolic_link_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(OutputUnavailable, match="symbolic link"):
        FILES.read(tmp_path / "link")
    status = FILES.status(tmp_path / "link")
    assert status is not None
    assert not status.is_regular


class _FullFile:
    def write(self, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "no space")

    def sync(self) -> None:
        raise AssertionError("a file whose write failed must not be synced")

    def close(self) -> None:
        pass


class _FullDisk(OsBackend):
    def create(self, path: Path) -> WritableFile:
        super().create(path).close()
        return _FullFile()


def test_a_full_disk_names_path_bytes_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(OutputUnavailable) as error:
        OutputFiles(_FullDisk()).write_new(tmp_path / "a", b"12345")
    assert str(tmp_path / "a") in str(error.value)
    assert "write 5 bytes" in str(error.value)
    assert "free some space" in str(error.value)
    assert not (tmp_path / "a").exists()


def test_a_vanished_directory_is_an_output_that_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(OutputUnavailable, match="No such file or directory"):
        FILES.create(tmp_path / "gone" / "a")


def test_too_many_open_files_name_the_limit(tmp_path: Path) -> None:
    class Exhausted(OsBackend):
        def create(self, path: Path) -> WritableFile:
            raise OSError(errno.EMFILE, "too many")

    with pytest.raises(OutputUnavailable, match="ulimit -n"):
        OutputFiles(Exhausted()).create(tmp_path / "a")


def test_a_lock_excludes_others_until_it_is_released(tmp_path: Path) -> None:
    held = FILES.try_lock(tmp_path / "lock")
    assert held is not None
    assert FILES.try_lock(tmp_path / "lock") is None
    held.release()
    again = FILES.try_lock(tmp_path / "lock")
    assert again is not None
    again.release()


def test_asking_for_the_lock_does_not_take_it(tmp_path: Path) -> None:
    assert not FILES.is_locked(tmp_path / "lock")
    held = FILES.try_lock(tmp_path / "lock")
    assert held is not None
    assert FILES.is_locked(tmp_path / "lock")
    held.release()
    assert not FILES.is_locked(tmp_path / "lock")
    again = FILES.try_lock(tmp_path / "lock")
    assert again is not None
    again.release()


def test_a_lock_whose_file_was_removed_is_no_longer_current(tmp_path: Path) -> None:
    held = FILES.try_lock(tmp_path / "lock")
    assert held is not None
    assert held.is_current()
    os.unlink(tmp_path / "lock")
    assert not held.is_current()
    held.release()


def test_a_child_does_not_inherit_the_lock(tmp_path: Path) -> None:
    held = FILES.try_lock(tmp_path / "lock")
    assert held is not None
    command = [sys.executable, "-c", "print('up', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        held.release()
        again = FILES.try_lock(tmp_path / "lock")
        child.communicate(b"\n")
    assert again is not None
    again.release()
