from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from batchgen.errors import BatchgenError, JobError
from batchgen.pipeline.whole_file import whole_file


def write(path: Path, text: str = "all of it") -> None:
    with whole_file(path) as file:
        file.write(text)


def test_the_file_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with whole_file(path) as file:
        file.write("all of it")
        assert not path.exists()
    assert path.read_text() == "all of it"
    with pytest.raises(KeyError), whole_file(path) as file:
        raise KeyError(file.write("half"))
    assert path.read_text() == "all of it"
    assert os.listdir(tmp_path) == ["a"]


def test_a_path_that_can_be_no_file_is_a_wrong_command(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file/a", tmp_path / ("x" * 300)):
        with pytest.raises(JobError, match=r"cannot be written: .*; choose another file"):
            write(path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_device_is_no_fault_of_the_command() -> None:
    with pytest.raises(BatchgenError, match="/dev/full: cannot be written: No space left on device") as refused:
        write(Path("/dev/full"))
    assert refused.value.exit_code == 74


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    write(tmp_path / "pipe")
    reader.join(10)
    assert read == ["all of it"]
    assert (tmp_path / "pipe").is_fifo()
