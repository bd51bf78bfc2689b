"""A prompt that does not fit, in a whole job with a real engine: it never takes the place of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.config import JobConfig
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.services import default_services
from tests.data.reading import write_jsonl
from tests.engine.models import CONTEXT, save_model
from tests.pipeline.fakes import make_job

PROMPTS = ["short", "x" * (10 * CONTEXT), "brief", "y" * (10 * CONTEXT), "end"]


def answers(root: Path, name: str, rows: list[dict[str, Any]], truncate: str) -> list[dict[str, Any]]:
    write_jsonl(root / f"{name}.jsonl", rows)
    job: JobConfig = make_job(
        root,
        model={"path": "model", "dtype": "float32"},
        input={"path": f"{name}.jsonl"},
        prompt={"column": "prompt", "truncate": truncate},
        sampling={"n": 1, "seed": 1, "max_tokens": 6, "ignore_eos": True},
        engine={"device": "cpu", "kv_cache_memory": "8MiB", "threads": 1},
        output={"path": name, "shard_rows": 2, "token_ids": True},
    )
    run_job(job, services=default_services())
    return pq.read_table(root / name / "data").to_pylist()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("home")
    save_model(root / "model", "plain")
    return root


@pytest.mark.case(11)
def test_a_prompt_that_is_too_long_is_an_error_row_and_its_neighbours_stay_in_their_places(home: Path) -> None:
    rows = [{"id": f"row {row}", "prompt": prompt} for row, prompt in enumerate(PROMPTS)]
    # The same rows with short prompts in the place of the long ones: a row's answer depends on itself alone.
    calm = answers(home, "calm", [{**row, "prompt": row["prompt"][:20]} for row in rows], "error")
    found = answers(home, "long", rows, "error")
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert [row["batchgen"]["row"] for row in found] == list(range(len(rows)))
    assert [row["batchgen"]["error_code"] for row in found] == [None, "prompt_too_long", None, "prompt_too_long", None]
    for row, prompt in enumerate(PROMPTS):
        if len(prompt) < CONTEXT:
            assert found[row] == calm[row]
        else:
            assert (found[row]["prompt"], found[row]["completions"]) == (prompt, None)


@pytest.mark.case(11)
@pytest.mark.parametrize("truncate", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_it_is_cut_only_where_the_job_says_so(home: Path, truncate: str) -> None:
    rows = [{"prompt": prompt} for prompt in PROMPTS[:3]]
    found = answers(home, truncate, rows, truncate)
    assert [row["batchgen"]["status"] for row in found] == ["ok"] * 3
    assert found[1]["batchgen"]["prompt_tokens"] == CONTEXT - 6
    assert all(len(row["token_ids"][0]) == 6 for row in found)
