"""Which files a job reads, and in which order."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from batchgen.config import InputConfig
from batchgen.data.inputs import find_inputs, list_inputs
from batchgen.errors import InputError


def touch(base: Path, *names: str) -> None:
    for name in names:
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_bytes(b"")


def listed(base: Path, path: str | list[str], **config: object) -> list[str]:
    return [file.name for file in list_inputs(InputConfig.model_validate({"path": path, **config}), base)]


@pytest.mark.case(8)
def test_a_directory_gives_its_data_files_and_passes_over_the_rest(tmp_path: Path) -> None:
    touch(tmp_path, "d/.a.parquet", "d/1.parquet", "d/_SUCCESS", "d/.2.parquet.crc", "d/3.parquet", "d/README.md")
    touch(tmp_path, "d/.ipynb_checkpoints/1.parquet", "d/_tmp/4.parquet", "d/year=2026/5.jsonl.gz")
    found = find_inputs(InputConfig(path="d"), tmp_path)
    assert [file.name for file in found.files] == ["d/1.parquet", "d/3.parquet", "d/year=2026/5.jsonl.gz"]
    assert found.passed_over == [
        ".2.parquet.crc",
        ".a.parquet",
        ".ipynb_checkpoints",
        "README.md",
        "_SUCCESS",
        "_tmp",
    ]


def test_a_dataset_that_was_saved_to_disk_is_its_arrow_files(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "d/dataset_dict.json",
        "d/test/dataset_info.json",
        "d/test/state.json",
        "d/test/data-00000-of-00001.arrow",
    )
    assert listed(tmp_path, "d") == ["d/test/data-00000-of-00001.arrow"]


def test_a_pattern_passes_over_hidden_names_unless_it_names_them(tmp_path: Path) -> None:
    touch(tmp_path, "a.jsonl", ".b.jsonl", "_c.jsonl", "deep/er/d.jsonl", ".x/in.jsonl")
    assert listed(tmp_path, "*.jsonl") == ["a.jsonl"]
    assert listed(tmp_path, "**/*.jsonl") == ["a.jsonl", "deep/er/d.jsonl"]
    assert listed(tmp_path, "_*.jsonl") == ["_c.jsonl"]
    assert listed(tmp_path, ".x/*.jsonl") == [".x/in.jsonl"]


@pytest.mark.case(9)
def test_what_the_job_itself_wrote_is_no_input_of_it(tmp_path: Path) -> None:
    touch(tmp_path, "d/in.jsonl", "d/out/data/part-00000.parquet", "d/out/_batchgen/metrics/m.jsonl", "d/x.parquet")
    own = tmp_path / "d/out/data"
    for path in ("d", "d/**/*.*", "d/*"):
        files = find_inputs(InputConfig(path=path), tmp_path, own=own).files
        assert [file.name for file in files] == ["d/in.jsonl", "d/x.parquet"], path
    assert listed(tmp_path, "d/out") == ["d/out/data/part-00000.parquet"], "another job's rows may be read"


@pytest.mark.case(9)
@pytest.mark.parametrize("path", ["~nosuchuser/in.jsonl", "~nosuchuser/*.jsonl"])
def test_a_home_that_nobody_has_is_a_name_like_any_other(tmp_path: Path, path: str) -> None:
    with pytest.raises(InputError, match=r"no such file|matches no file"):
        listed(tmp_path, path)


def test_a_path_that_is_written_out_is_taken_as_it_is(tmp_path: Path) -> None:
    touch(tmp_path, "_x.jsonl", ".x/in.jsonl", "[1].jsonl")
    assert listed(tmp_path, "_x.jsonl") == ["_x.jsonl"]
    assert listed(tmp_path, ".x/in.jsonl") == [".x/in.jsonl"]
    assert listed(tmp_path, "[1].jsonl") == ["[1].jsonl"]
    assert listed(tmp_path, ".x/../.x/*.jsonl") == [".x/in.jsonl"]


def test_the_list_is_sorted_whatever_the_order_given(tmp_path: Path) -> None:
    touch(tmp_path, "b.jsonl", "a.parquet", "c.jsonl")
    files = list_inputs(InputConfig(path=["c.jsonl", "b.jsonl", "a.parquet"]), tmp_path)
    assert [(file.source, file.name) for file in files] == [(0, "a.parquet"), (1, "b.jsonl"), (2, "c.jsonl")]


@pytest.mark.case(9)
def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "d/a.jsonl")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "d/a.jsonl")
    for path in (["d/a.jsonl", "d/*.jsonl"], ["d", "d/../d/a.jsonl"], ["link.jsonl", "d"]):
        with pytest.raises(InputError, match="is named twice"):
            listed(tmp_path, path)


def test_a_linked_directory_is_walked_once(tmp_path: Path) -> None:
    touch(tmp_path, "d/a.jsonl", "e/b.jsonl")
    (tmp_path / "d/self").symlink_to(tmp_path / "d")
    (tmp_path / "d/e").symlink_to(tmp_path / "e")
    assert listed(tmp_path, "d") == ["d/a.jsonl", "d/e/b.jsonl"]


@pytest.mark.case(10)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nope-*.jsonl", "nope-.*: matches no file"),
        ("promts.jsonl", r"no such file .*did you mean prompts\.jsonl"),
        ("nowhere/a.jsonl", "there is no directory"),
        ("empty", "holds no input files"),
        ("notes.txt2", "its name tells no format"),
    ],
)
def test_what_is_not_there_is_refused_with_a_hint(tmp_path: Path, path: str, message: str) -> None:
    touch(tmp_path, "prompts.jsonl", "notes.txt2", "empty/.hidden.jsonl")
    with pytest.raises(InputError, match=message):
        listed(tmp_path, path)


def test_a_folder_that_cannot_be_looked_into_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(tmp_path, "d/1.jsonl", "d/closed/2.jsonl")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match=r"input\.path: d: cannot be read: Permission denied \(.*closed\)"):
        listed(tmp_path, "d")


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"input\.path: x*: cannot be read: File name too long"):
        listed(tmp_path, "x" * 300)


def test_a_format_that_is_given_takes_any_name(tmp_path: Path) -> None:
    touch(tmp_path, "d/part-0", "d/_SUCCESS")
    files = list_inputs(InputConfig(path="d", format="jsonl"), tmp_path)
    assert [(file.name, file.format) for file in files] == [("d/part-0", "jsonl")]


def test_a_file_outside_the_jobs_directory_has_its_whole_path_as_name(tmp_path: Path) -> None:
    touch(tmp_path, "job/x", "a.jsonl")
    assert listed(tmp_path / "job", "../a.jsonl") == [str(tmp_path / "a.jsonl")]
    assert listed(tmp_path, str(tmp_path / "a.jsonl")) == ["a.jsonl"]
