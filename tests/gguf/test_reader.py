from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.errors import ModelError
from batchgen.gguf.reader import read_gguf
from tests.gguf.writing import write_gguf

METADATA = {"a.text": "ü", "a.flag": True, "a.number": 7, "a.list": ["x", "yz"], "a.ratio": 0.5, "a.ids": [1, 2, 3]}
WEIGHTS = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "v": np.arange(5, dtype=np.float32)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", METADATA, WEIGHTS)


def test_metadata_and_tensors_come_back(file: Path) -> None:
    gguf = read_gguf(file)
    assert METADATA.items() <= gguf.metadata.items()
    assert gguf.tensors["w"].shape == (3, 4)
    np.testing.assert_array_equal(gguf.rows(gguf.tensors["w"]).view(np.float32), WEIGHTS["w"])
    np.testing.assert_array_equal(gguf.rows(gguf.tensors["v"]).view(np.float32), WEIGHTS["v"][None])


def test_every_cut_file_is_refused(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    # The last tensor's padding is not part of it.
    end = max(tensor.offset + tensor.num_bytes for tensor in read_gguf(file).tensors.values())
    for length in range(1, end):
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError):
            read_gguf(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_read_but_never_a_crash(
    file: Path, tmp_path: Path, position: int, value: int
) -> None:
    content = bytearray(file.read_bytes())
    content[position] = value
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(content)
    with suppress(ModelError):
        assert read_gguf(changed).path == changed


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", "llama", {"split.count": 3}, WEIGHTS)
    with pytest.raises(ModelError, match="merge the parts first"):
        read_gguf(file)


def test_big_endian_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(64))
    with pytest.raises(ModelError, match="little-endian"):
        read_gguf(file)
