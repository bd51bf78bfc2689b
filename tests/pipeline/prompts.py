"""A small model directory and inputs for tests of the feeder."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

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
