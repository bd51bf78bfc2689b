"""A small model directory, inputs and jobs for tests of what prompts are made from."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import yaml

from batchgen.config import JobConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import InputScan, scan_inputs
from batchgen.pipeline.feeder import preparer_spec
from batchgen.pipeline.prompts import PreparerSpec
from tests.data.reading import write_jsonl
from tests.tokenizers import byte_level, save

STARTED = datetime.datetime(2026, 1, 2, 3, 4, 5)
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}<|turn|>"


def model_directory(base: Path, **config: Any) -> Path:
    """A tokenizer with a token for every byte, BOS `<s>` (id 0), and a chat template."""
    return save(byte_level(), base / "model", chat_template=CHAT_TEMPLATE, **config)


def make_job(**sections: Any) -> JobConfig:
    """A job over in.jsonl."""
    given = {"version": 1, "model": {"path": "m"}, "input": {"path": "in.jsonl"}, "output": {"path": "o"}, **sections}
    return JobConfig.model_validate(given)


def plan_prompts(
    base: Path, rows: list[Any], max_model_len: int = 100, **sections: Any
) -> tuple[PreparerSpec, InputScan]:
    """Write `rows`, plan them, and say what their prompts are made from."""
    job = make_job(**sections)
    write_jsonl(base / "in.jsonl", rows)
    scan = scan_inputs(list_inputs(job.input, base), job.input)
    return preparer_spec(job, scan, model_directory(base), max_model_len, STARTED), scan


def write_job(base: Path, rows: list[Any], *, max_model_len: int = 64, **sections: Any) -> Path:
    """A job over `rows` and a model that is a config and a tokenizer: weights do not exist."""
    model = model_directory(base)
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": max_model_len, "vocab_size": 300}))
    write_jsonl(base / "in.jsonl", rows)
    job = {
        "version": 1,
        "model": {"path": str(model)},
        "input": {"path": "in.jsonl"},
        "prompt": {"messages": [{"role": "user", "content": "Say {{ word }}\n"}]},
        "output": {"path": "out"},
        **sections,
    }
    path = base / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path
