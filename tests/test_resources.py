from __future__ import annotations

import hashlib
import multiprocessing
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from batchgen import resources
from batchgen.errors import ModelError
from batchgen.resources import cache_directory, content_hash, locate_model
from tests.gguf.test_convert import metadata_of, tiny
from tests.gguf.writing import weights_of, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchgen"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    model, extra = tiny("llama")
    return write_gguf(tmp_path / "m.gguf", "llama", metadata_of("llama", model, extra), weights_of(model, "llama"))


def model_directory(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    assert locate_model(str(directory)) == directory


@pytest.mark.parametrize(
    ("missing", "message"), [("config.json", "no config.json"), ("model.safetensors", "no weights")]
)
def test_an_incomplete_directory_is_refused(tmp_path: Path, missing: str, message: str) -> None:
    directory = model_directory(tmp_path / "model")
    (directory / missing).unlink()
    with pytest.raises(ModelError, match=message):
        locate_model(str(directory))


def test_pickle_is_never_taken(tmp_path: Path) -> None:
    directory = model_directory(tmp_path / "model")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only pytorch_model\.bin, which is pickle and never read"):
        locate_model(str(directory))


def test_a_file_in_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "some_weights"
    model_directory(package / "small")
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert locate_model("package:some_weights/small") == package / "small"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("package:no_such_package_here/m.gguf", "the package no_such_package_here is not installed"),
        ("package:pytest/m.gguf", "the package pytest has no file"),
        ("package:pytest/../_pytest/__init__.py", "the package pytest has no file"),
        ("package:pytest", "write package:NAME/FILE"),
        ("package:os.path/m.gguf", "write package:NAME/FILE"),
        ("./nothing/here.gguf", "no such file or directory"),
    ],
)
def test_what_is_not_there_is_named(path: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        locate_model(path)


def test_a_hub_id_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="give a local directory, or fetch it where there is a network"):
        locate_model("nobody/no-such-model")


def test_a_hub_snapshot_fetches_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def snapshot(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        return str(model_directory(tmp_path / "snapshot"))

    monkeypatch.setattr(resources, "snapshot_download", snapshot)
    assert locate_model("owner/name", revision="v2") == tmp_path / "snapshot"
    assert asked["repo"] == "owner/name"
    assert asked["revision"] == "v2"
    assert not any(fnmatch("pytorch_model.bin", pattern) for pattern in asked["allow_patterns"])
    assert not any(fnmatch("modeling_evil.py", pattern) for pattern in asked["allow_patterns"])


def test_a_revision_of_something_local_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.revision is 'main', but .* is local"):
        locate_model(str(model_directory(tmp_path / "model")), revision="main")


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04 pickle")
    with pytest.raises(ModelError, match="this file is not GGUF"):
        locate_model(str(tmp_path / "model.bin"))


def test_gguf_is_converted_once(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = locate_model(str(gguf))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in first.iterdir()}
    monkeypatch.setattr(resources, "convert_gguf", pytest.fail)
    assert locate_model(str(gguf)) == first


def test_equal_content_at_another_place_is_not_converted_again(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = locate_model(str(gguf))
    other = gguf.with_name("other.gguf")
    other.write_bytes(gguf.read_bytes())
    monkeypatch.setattr(resources, "convert_gguf", pytest.fail)
    assert locate_model(str(other)) == first


def test_changed_content_or_another_converter_converts_again(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = locate_model(str(gguf))
    content = bytearray(gguf.read_bytes())
    content[-1] ^= 1
    gguf.write_bytes(content)
    second = locate_model(str(gguf))
    assert second != first
    monkeypatch.setattr(resources, "CONVERTER_VERSION", 99)
    assert locate_model(str(gguf)) != second


def test_a_torn_conversion_is_never_used(gguf: Path) -> None:
    directory = locate_model(str(gguf))
    weights = directory / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert locate_model(str(gguf)) == directory
    assert weights.read_bytes() == whole


def test_what_a_killed_conversion_left_is_removed(gguf: Path, cache: Path) -> None:
    script = (
        "import os, sys; from batchgen import resources; from pathlib import Path\n"
        "def die(source, directory): (directory / 'model.safetensors').write_bytes(b'half'); os._exit(9)\n"
        "resources.convert_gguf = die\n"
        "resources.locate_model(sys.argv[1])"
    )
    assert subprocess.run([sys.executable, "-c", script, str(gguf)], check=False).returncode == 9
    assert len(list((cache / "gguf").glob("tmp-*"))) == 1
    directory = locate_model(str(gguf))
    assert (directory / "model.safetensors").stat().st_size > 4
    assert list((cache / "gguf").glob("tmp-*")) == []


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "mamba", {}, {})
    with pytest.raises(ModelError, match="mamba"):
        locate_model(str(file))
    assert list((cache / "gguf").iterdir()) == []


def test_two_processes_may_convert_at_once(gguf: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(locate_model, [str(gguf)] * 2, chunksize=1)
    assert found[0] == found[1] == locate_model(str(gguf))


def test_losing_the_race_takes_the_winners_conversion(gguf: Path, tmp_path: Path) -> None:
    winner = locate_model(str(gguf))
    loser = tmp_path / "attempt"
    loser.mkdir()
    (loser / "late").write_text("")
    resources._publish(loser, winner)
    assert not (winner / "late").exists()


def test_the_cache_is_private(gguf: Path, cache: Path) -> None:
    locate_model(str(gguf))
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_others_can_write_is_refused(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    with pytest.raises(ModelError, match="others may write into this cache"):
        cache_directory()


def test_a_relative_cache_home_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "batchgen"
    assert not os.path.exists("relative")


def test_locating_imports_no_torch() -> None:
    script = "import sys, batchgen.resources, batchgen.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file that is worth remembering, and was not changed lately."""
    file = tmp_path / "large"
    file.write_bytes(bytes(2**20))
    os.utime(file, (1, 1))
    return file


def test_the_hash_of_a_large_file_is_remembered(large: Path, cache: Path) -> None:
    expected = hashlib.sha256(bytes(2**20)).hexdigest()
    assert content_hash(large) == expected
    (note,) = (cache / "hashes").iterdir()
    assert note.read_text() == expected
    note.write_text("0" * 64)
    assert content_hash(large) == "0" * 64
    note.write_text("torn")
    assert content_hash(large) == expected


def test_a_file_with_another_time_is_hashed_anew(large: Path) -> None:
    before = content_hash(large)
    large.write_bytes(b"x" * 2**20)
    os.utime(large, (2, 2))
    assert content_hash(large) == hashlib.sha256(b"x" * 2**20).hexdigest() != before


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, cache: Path) -> None:
    """It may be written again without a new time stamp."""
    (tmp_path / "new").write_bytes(bytes(2**20))
    content_hash(tmp_path / "new")
    assert list((cache / "hashes").iterdir()) == []


def test_small_files_are_hashed_each_time(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    assert content_hash(tmp_path / "small") == hashlib.sha256(b"x").hexdigest()
    assert not (cache / "hashes").exists()


def test_a_cache_that_others_may_write_is_not_trusted_with_hashes(large: Path, cache: Path) -> None:
    content_hash(large)
    (note,) = (cache / "hashes").iterdir()
    note.write_text("0" * 64)
    cache.chmod(0o777)
    assert content_hash(large) == hashlib.sha256(bytes(2**20)).hexdigest()
