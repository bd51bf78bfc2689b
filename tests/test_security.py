"""Each line of docs/security.md has its test; those that belong to no part alone are here, with canaries."""

from __future__ import annotations

import gzip
import json
import re
import resource
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import InputConfig
from batchgen.data import text_rows
from batchgen.data.formats.registry import FORMATS
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import scan_inputs
from batchgen.engine.engine import Engine
from batchgen.errors import ModelError
from batchgen.pipeline.runner import run_job
from batchgen.printable import printable, printable_lines
from tests.commands.test_preview import preview
from tests.data.reading import read_all, write_jsonl
from tests.data.servers import Served, serving
from tests.pipeline.fakes import FakeWorld, make_job
from tests.pipeline.prompts import write_job
from tests.program import batchgen

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^\| .+ \| `(\w+)` \|$", re.MULTILINE)


def test_every_line_of_the_page_names_a_test_that_is_there() -> None:
    page = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    named = LINE.findall(page)
    assert len(named) == page.count("\n| ") - 1, "a line names no test"
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name in named if f"def {name}(" not in sources] == []


def test_nothing_that_a_row_names_is_fetched_or_read(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("canary")
    with serving(Served({"image.png": b"canary"})) as server:
        url = f"{server.url}/image.png"
        image = {"type": "image_url", "image_url": {"url": url}}
        rows: list[Any] = [
            {"messages": [{"role": "user", "content": [image]}]},
            {"messages": [{"role": "user", "content": url}]},
            {"messages": [{"role": "user", "content": f"file://{tmp_path}/secret.txt"}]},
            {"messages": [{"role": "user", "content": "{% include 'secret.txt' %}{{ messages }}"}]},
        ]
        result = preview(
            write_job(tmp_path, rows, max_model_len=999, prompt={"messages_column": "messages"}), "-n", "9"
        )
        assert server.asked == []
    assert result.returncode == 0, result.stderr
    assert "error unknown_content_part" in result.stdout
    assert "canary" not in result.stdout
    # A template in a row is text.
    assert "{% include 'secret.txt' %}{{ messages }}" in result.stdout


def test_no_value_of_a_row_becomes_a_path(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    evil = "../../../canary"
    write_jsonl(home / "evil.jsonl", [{"id": evil, "prompt": evil, "custom_id": evil}])
    job = make_job(home, input={"path": "evil.jsonl", "id_column": "id"})
    run_job(job, services=FakeWorld().services)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
    assert not [path for path in home.rglob("*") if "canary" in path.name]


@pytest.mark.parametrize("text", ["\x1b]0;title\x07", "\x1b[2J", "\r", "\x00", "\x9b31m", "\u202e", "\ud800"])
def test_control_characters_of_rows_and_names_do_not_reach_the_terminal(
    text: str,
) -> None:
    shown = printable(f"a{text}b")
    assert text not in shown
    assert shown.isprintable()
    assert printable_lines(f"x\ny{text}") == f"x\ny{printable(text)}"


def test_an_error_message_with_control_characters_is_escaped_at_the_end_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text('version: 1\n"x\\e[31m": 1\n')
    result = batchgen("validate", str(tmp_path / "job.yaml"))
    assert result.returncode == 2
    assert "\\x1b[31m" in result.stderr
    assert "\x1b" not in result.stderr


def test_an_archive_that_unfolds_into_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=1) as bomb:
        zeros = b"0" * 2**20
        for _ in range(256):
            bomb.write(zeros)
        bomb.write(b'\n{"prompt": "after"}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read = read_all(tmp_path, "bomb.jsonl.gz", max_row_bytes=2**20)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert read.errors == {0: "row_too_long"}
    assert read.values == [{"prompt": "after"}]
    assert grown < 64 * 1024, f"{grown} KiB"


def test_long_rows_of_an_archive_are_carried_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_rows, "TABLE_BYTES", 25_000)
    with gzip.open(tmp_path / "in.jsonl.gz", "wt") as file:
        file.writelines(f'{{"n": {number}, "text": "{"x" * 10_000}"}}\n' for number in range(9))
    config = InputConfig(path="in.jsonl.gz")
    scan = scan_inputs(list_inputs(config, tmp_path), config)
    with closing(FORMATS["jsonl"].open(scan.files[0], scan.schema, config.max_row_bytes)) as cursor:
        for start in (0, 4):
            tables = list(cursor.tables(start, 9))
            assert max(table.num_rows for table in tables) <= 4
            assert [n for table in tables for n in table["n"].to_pylist()] == list(range(start, 9))


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_row_of_columns_larger_than_the_limit_is_an_error_row(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"prompt": ["a", "x" * 5000, "b"], "more": [[1], [2], list(range(1000))]})
    path = tmp_path / f"in.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    read = read_all(tmp_path, path.name, max_row_bytes=2000)
    assert read.errors == {1: "row_too_long", 2: "row_too_long"}
    assert read.values == [{"prompt": "a", "more": [1]}]
    # What is carried through is not dropped for its size.
    assert read.table.equals(table)
    assert read_all(tmp_path, path.name).errors == {}


def test_a_model_with_code_of_its_own_is_refused_and_the_code_is_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (model / "config.json").write_text(json.dumps(config))
    (model / "own.py").write_text(f"open({str(canary)!r}, 'w')\nclass Own: pass\n")
    (model / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="needs Python code from its own repository"):
        Engine(str(model))
    assert not canary.exists()
