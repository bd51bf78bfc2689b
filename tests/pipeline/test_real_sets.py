"""Public prompt sets through whole jobs: their rows rendered and encoded as written, their columns carried through."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.config import JobConfig
from batchgen.pipeline.ports import EngineLike, FeederLike, FeedRequest, ModelFiles, Services
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.services import default_services, make_feeder
from batchgen.records import Prompt
from tests.data.reading import SHARED_DATA
from tests.engine.models import save_model
from tests.pipeline.fakes import FakeEngine
from tests.pipeline.prompts import model_directory
from tests.tokenizers import load

pytestmark = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the public prompt sets are not here")

SHOTS = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in range(4)]
JOBS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], str]]] = {
    "gsm8k_test.jsonl": (
        {
            "template": "Q: {{ question }}\nA: ",
            "few_shot": {"examples": SHOTS, "answer": "{{ answer }}", "separator": "\n\n"},
        },
        lambda row: (
            "".join(f"Q: {shot['question']}\nA: {shot['answer']}\n\n" for shot in SHOTS) + f"Q: {row['question']}\nA: "
        ),
    ),
    "HumanEval.jsonl.gz": ({"column": "prompt"}, lambda row: str(row["prompt"])),
    "seed_tasks.jsonl": (
        {"messages": [{"role": "user", "content": "{{ instruction }}\n{{ instances[0].input }}"}]},
        lambda row: f"<|turn|>{row['instruction']}\n{row['instances'][0]['input']}<|turn|>",
    ),
}


class NotingEngine(FakeEngine):
    """Keeps the ids of each row."""

    def __init__(self) -> None:
        super().__init__(window=64, running=64)
        self.ids: dict[int | None, list[int] | None] = {}

    def add(self, prompt: Prompt) -> int:
        self.ids[prompt.row] = prompt.token_ids
        # The fake one fails prompts with token 0, which is the BOS of these tests.
        return super().add(replace(prompt, token_ids=[token_id + 1 for token_id in prompt.token_ids or ()]))


def make_job(base: Path, name: str, prompt: dict[str, Any], **sections: Any) -> JobConfig:
    return JobConfig.model_validate(
        {
            "version": 1,
            "model": {"path": "model", "max_model_len": 8192},
            "input": {"path": str(SHARED_DATA / name), "max_row_bytes": 2**20},
            "prompt": prompt,
            "sampling": {"seed": 1, "max_tokens": 8, "stop": ["\ndef "]},
            "output": {"path": "out", "shard_rows": 500},
            **sections,
        }
    ).model_copy(update={"base_dir": base})


def rows_of(name: str) -> list[dict[str, Any]]:
    content = (SHARED_DATA / name).read_bytes()
    text = (gzip.decompress(content) if name.endswith(".gz") else content).decode()
    return [json.loads(line) for line in text.split("\n") if line]


@pytest.mark.parametrize("name", JOBS)
def test_every_row_is_encoded_as_written_and_carried_as_it_was(tmp_path: Path, name: str) -> None:
    prompt, text_of = JOBS[name]
    model = model_directory(tmp_path)
    engine = NotingEngine()

    def feeder(asked: FeedRequest) -> FeederLike:
        return make_feeder(asked._replace(model_directory=model, max_model_len=8192))

    def make_engine(job: JobConfig, directory: Path) -> EngineLike:
        return engine

    services = Services(lambda job, known: ModelFiles(model, {}), make_engine, feeder)
    report = run_job(make_job(tmp_path, name, prompt), services=services)
    rows = rows_of(name)
    assert (report.num_rows, report.num_ok) == (len(rows), len(rows))
    tokenizer = load(model)
    spelled = {row: tokenizer.decode(ids or []) for row, ids in engine.ids.items()}
    assert [spelled[index].removeprefix("<s>") for index in range(len(rows))] == [text_of(row) for row in rows]
    table = pa.concat_tables([pq.read_table(path) for path in report.data_files])
    assert table.drop_columns(["completions", "batchgen"]).to_pylist() == rows


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_real_engine_answers_them(tmp_path: Path, name: str) -> None:
    prompt, _ = JOBS[name]
    model = save_model(tmp_path / "model", "plain")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}<|turn|>"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    job = make_job(
        tmp_path,
        name,
        {**prompt, "truncate": "left"},
        model={"path": str(model)},
        engine={"kv_cache_memory": "8MiB", "threads": 1},
        input={"path": str(SHARED_DATA / name), "limit": 60},
    )
    report = run_job(job, services=default_services())
    assert (report.num_rows, report.num_ok) == (60, 60)
    assert report.completion_tokens > 60
