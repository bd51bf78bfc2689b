from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import InputConfig
from batchgen.data import hub_inputs
from batchgen.data.inputs import find_inputs
from batchgen.errors import InputError, InputUnavailable
from tests.data.reading import read_all
from tests.data.servers import ServedHub, serving

ROWS = b'{"prompt": "a"}\n'
CARD = b"""---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*.jsonl}
  - {split: test, path: "main/test.jsonl"}
- config_name: socratic
  data_files: [{split: test, path: socratic/*.jsonl}]
---
"""
URL = "hf://datasets/owner/name"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedHub]:
    with serving(ServedHub()) as server:
        assert isinstance(server, ServedHub)
        api = partial(huggingface_hub.HfApi, endpoint=server.url)
        fetch = partial(huggingface_hub.snapshot_download, endpoint=server.url, cache_dir=tmp_path / "cache")
        monkeypatch.setattr(hub_inputs, "HfApi", api)
        monkeypatch.setattr(hub_inputs, "snapshot_download", fetch)
        yield server


def names(url: str = URL, **config: Any) -> list[str]:
    found = find_inputs(InputConfig.model_validate({"path": url, **config}), Path())
    return [file.name.removeprefix(f"{URL}/") for file in found.files]


def refused(url: str = URL, **config: Any) -> str:
    with pytest.raises(InputError) as raised:
        names(url, **config)
    return str(raised.value)


def serve(hub: ServedHub, *files: str, revision: str = "main") -> None:
    hub.files.update({f"{revision}/{file}": ROWS for file in files})


def test_the_card_says_which_files_a_split_has(hub: ServedHub, tmp_path: Path) -> None:
    serve(hub, "main/train-0.jsonl", "main/train-1.jsonl", "main/test.jsonl", "socratic/test.jsonl", "x.py")
    hub.files["main/README.md"] = CARD
    assert names(config="main", split="train") == ["main/train-0.jsonl", "main/train-1.jsonl"]
    assert names(config="main", split="test") == ["main/test.jsonl"]
    assert names(config="socratic") == ["socratic/test.jsonl"]
    assert refused() == f"input.path: {URL} has several; set input.config to one of 'main', 'socratic'"
    assert refused(config="mian") == f"input.config: {URL} has no 'mian'; did you mean 'main'?"
    assert refused(config="main") == f"input.path: {URL} has several; set input.split to one of 'train', 'test'"
    assert read_all(tmp_path, URL, config="socratic").values == [{"prompt": "a"}]
    assert not [each for each in hub.asked if "x.py" in each], "code of a data set was fetched"


@pytest.mark.parametrize(
    ("files", "split", "found"),
    [
        (["data/train-0-of-1.jsonl", "data/test-0-of-1.jsonl"], "test", ["data/test-0-of-1.jsonl"]),
        (["dev/a.jsonl", "train/a.jsonl"], "validation", ["dev/a.jsonl"]),
        (["one.jsonl", "two.jsonl", "_three.jsonl", "notes.md"], None, ["one.jsonl", "two.jsonl"]),
    ],
)
def test_without_a_card_names_tell_the_split(
    hub: ServedHub, files: list[str], split: str | None, found: list[str]
) -> None:
    serve(hub, *files)
    assert names(split=split) == found


def test_a_data_set_of_other_files_is_taken_as_the_hub_converted_it(hub: ServedHub, tmp_path: Path) -> None:
    serve(hub, "loader.py")
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"prompt": ["p"]}), sink)
    hub.files["refs/convert/parquet/default/test/0000.parquet"] = sink.getvalue().to_pybytes()
    read = read_all(tmp_path, URL, split="test")
    assert read.values == [{"prompt": "p"}]
    assert not [each for each in hub.asked if "loader.py" in each]


def test_a_path_and_a_revision_are_taken_as_written(hub: ServedHub) -> None:
    serve(hub, "a/1.jsonl", "a/2.jsonl", "a/skip.md", "b.jsonl")
    serve(hub, "a/old.jsonl", revision="v1")
    assert names(f"{URL}/a/1.jsonl") == ["a/1.jsonl"]
    assert names(f"{URL}/a") == ["a/1.jsonl", "a/2.jsonl"]
    assert names(f"{URL}/a/*.jsonl") == ["a/1.jsonl", "a/2.jsonl"]
    assert names(f"{URL}@v1/a") == ["a/old.jsonl"]
    assert refused(f"{URL}/c/*.jsonl") == f"input.path: {URL}/c/*.jsonl: the data set has no such input file"
    assert "the Hub has no such revision" in refused(f"{URL}@v9")
    assert "write hf://datasets/OWNER/NAME[@REVISION][/PATH]" in refused("hf://owner/name")


def test_without_a_network_the_cache_serves_what_it_has(hub: ServedHub, tmp_path: Path) -> None:
    serve(hub, "test.jsonl")
    online = read_all(tmp_path, URL)
    hub.failures = 10_000
    assert read_all(tmp_path, URL).scan.files[0].sha256 == online.scan.files[0].sha256
    with pytest.raises(InputUnavailable, match=r"the Hub cannot be reached .* and the data set is not in its cache"):
        names("hf://datasets/owner/other")


def test_a_private_data_set_is_read_with_the_token_and_the_token_goes_nowhere_else(
    hub: ServedHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(hub, "test.jsonl")
    hub.token = "hf_secret"
    assert refused().endswith("the Hub has no such data set, or it is private: set HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "hf_secret" not in json.dumps(read_all(tmp_path, URL).scan.to_json())


def test_a_saved_dict_of_data_sets_gives_one_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        with pa.ipc.new_stream(folder / "data-00000-of-00001.arrow", pa.schema([("prompt", pa.string())])) as writer:
            writer.write_table(pa.table({"prompt": [split]}))
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert read_all(tmp_path, "saved", split="test").values == [{"prompt": "test"}]
    with pytest.raises(InputError, match=r"set input\.split to one of 'train', 'test'"):
        read_all(tmp_path, "saved")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["../out"]}')
    with pytest.raises(InputError, match="which is no folder"):
        read_all(tmp_path, "saved")
