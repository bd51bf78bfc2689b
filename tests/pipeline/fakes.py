"""A fake engine, feeder and job: a whole run in milliseconds, with the same rows every time."""

from __future__ import annotations

import os
import signal
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.config import JobConfig
from batchgen.data.file_backend import FileBackend
from batchgen.data.files import OutputFiles
from batchgen.data.input_rows import InputRow
from batchgen.data.reader import PromptReader
from batchgen.pipeline.ports import FeedRequest, ModelFiles, PreparedRow, Services
from batchgen.records import Completion, PartialSample, Prompt, RowError, Sample

MAX_TOKENS = 12
"""Longest completion of the fake engine."""


@dataclass
class FakeMetrics:
    """The figures that a report shows."""

    num_cached_tokens: int = 0
    num_drawn_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_bytes: int = 0
    kv_share: float = 0.0
    peak_kv_share: float = 0.0
    num_blocks: int = 8
    block_size: int = 16
    mean_useful_share: float = 1.0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_copies: int = 0
    num_steps: int = 0


@dataclass
class _Group:
    prompt: Prompt
    samples: list[PartialSample]

    def __post_init__(self) -> None:
        """Take over what an earlier run generated; it must be what this run would have."""
        for begun in self.prompt.partial:
            sample = self.samples[begun.sample]
            for _ in begun.token_ids:
                self.extend(sample)
            assert sample.token_ids == begun.token_ids, "a partial sample is of another row"
            assert sample.cumulative_logprob == begun.cumulative_logprob

    def draw(self, sample: PartialSample, position: int) -> int:
        """The token at a position: a function of the row's identity alone."""
        prompt = self.prompt
        key = (prompt.source, prompt.row, sample.sample, position, prompt.params and prompt.params.seed)
        return zlib.crc32(repr((key, prompt.token_ids)).encode()) % 1000

    def num_tokens(self, sample: PartialSample) -> int:
        return 1 + self.draw(sample, -1) % MAX_TOKENS

    def extend(self, sample: PartialSample) -> None:
        token = self.draw(sample, len(sample.token_ids))
        sample.token_ids.append(token)
        sample.cumulative_logprob -= token / 7

    def step(self) -> bool:
        """One token for each unfinished sample; returns whether all are finished."""
        left = [sample for sample in self.samples if len(sample.token_ids) < self.num_tokens(sample)]
        for sample in left:
            self.extend(sample)
        return all(len(sample.token_ids) >= self.num_tokens(sample) for sample in self.samples)


class FakeEngine:
    """Draws tokens by hashing the row's identity; a prompt with token 0 fails. Counts what it computes."""

    def __init__(self, window: int = 8, running: int = 3, on_step: Callable[[], None] | None = None) -> None:
        self.window = window
        self.running = running
        self.on_step = on_step
        self.num_rows = 0
        """Prompts that were given to it."""
        self.num_tokens = 0
        """Tokens that it generated, those that it took over not counted."""
        self.metrics = FakeMetrics()
        self.max_model_len = 4096
        self.notes: tuple[str, ...] = ()
        self.resolved: Mapping[str, Any] = {"model.dtype": "float32", "model.max_model_len": 4096}
        self._groups: dict[int, _Group] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._groups)

    @property
    def wants_prompts(self) -> bool:
        return len(self._groups) < self.window

    def add(self, prompt: Prompt) -> int:
        assert prompt.params is not None
        self._groups[self.num_rows] = _Group(prompt, [PartialSample(i, []) for i in range(prompt.params.n)])
        self.num_rows += 1
        return self.num_rows - 1

    def step(self) -> list[Completion]:
        if self.on_step is not None:
            self.on_step()
        done = []
        for index, group in list(self._groups.items())[: self.running]:
            before = sum(len(sample.token_ids) for sample in group.samples)
            is_failing = 0 in (group.prompt.token_ids or ())
            if is_failing or group.step():
                del self._groups[index]
                done.append(_completion(index, group, is_failing))
            self.num_tokens += sum(len(sample.token_ids) for sample in group.samples) - before
        return done

    def partials(self) -> Iterator[tuple[int, list[PartialSample]]]:
        for index, group in self._groups.items():
            yield index, group.samples

    def close(self) -> None:
        self._groups.clear()


def _completion(index: int, group: _Group, is_failing: bool) -> Completion:
    ids = group.prompt.token_ids or []
    if is_failing:
        return Completion(index, ids, [], error=RowError("no_allowed_token", "a prompt that must fail"))
    samples = [
        Sample(
            token_ids=sample.token_ids,
            text=" ".join(map(str, sample.token_ids)),
            finish_reason="stop",
            cumulative_logprob=sample.cumulative_logprob,
            seed=group.prompt.params.seed if group.prompt.params else None,
        )
        for sample in group.samples
    ]
    return Completion(index, ids, samples)


def prepared(row: InputRow) -> PreparedRow:
    """A row with the tokens of its column `prompt`: one per character, 0 for an exclamation mark."""
    if row.error is not None:
        return PreparedRow(row, None, row.error)
    return PreparedRow(row, [0 if char == "!" else ord(char) for char in row.values["prompt"]], None)


class FakeFeeder:
    """Prepares rows when they are asked for, in this process."""

    def __init__(self, request: FeedRequest) -> None:
        reader = PromptReader(request.scan, request.job.input, columns=["prompt"], check_carried=True)
        self._rows = deque(row for rows in request.ranges for row in reader.read(rows))
        reader.close()

    @property
    def is_over(self) -> bool:
        return not self._rows

    def get(self, timeout: float) -> PreparedRow | None:
        if not self._rows:
            return None
        return prepared(self._rows.popleft())

    def close(self) -> None:
        self._rows.clear()


@dataclass
class FakeWorld:
    """Services over fakes, and the engines that were made with them."""

    backend: FileBackend | None = None
    make: Callable[[], FakeEngine] = FakeEngine
    model: str = "weights"
    model_directory: Path = Path()
    engines: list[FakeEngine] = field(default_factory=list)

    @property
    def services(self) -> Services:
        return Services(self._find_model, self._make_engine, FakeFeeder, OutputFiles(self.backend))

    @property
    def num_rows(self) -> int:
        """Rows that were generated."""
        return sum(engine.num_rows for engine in self.engines)

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated."""
        return sum(engine.num_tokens for engine in self.engines)

    def _find_model(self, job: JobConfig, known: Mapping[str, list[Any]]) -> ModelFiles:
        return ModelFiles(self.model_directory, {"model.safetensors": [self.model, 1, 1, 1]})

    def _make_engine(self, job: JobConfig, directory: Path) -> FakeEngine:
        self.engines.append(self.make())
        return self.engines[-1]


def interrupt_after(num_steps: int, kind: type[FakeEngine] = FakeEngine) -> Callable[[], FakeEngine]:
    """An engine that sends this process SIGTERM after some steps."""
    left = num_steps

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    return lambda: kind(on_step=count)


def make_job(root: Path, num_rows: int = 10, **sections: dict[str, Any]) -> JobConfig:
    """A job of one JSONL file with `num_rows` rows, in shards of 4; sections override what stands here."""
    lines = [f'{{"id": {row}, "prompt": "prompt {row}"}}\n' for row in range(num_rows)]
    (root / "in.jsonl").write_text("".join(lines))
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "fake"},
        "input": {"path": "in.jsonl"},
        "prompt": {"column": "prompt"},
        "sampling": {"n": 2, "seed": 1},
        "output": {"path": "out", "shard_rows": 4},
        "run": {"journal_interval": 0},
    }
    merged = {name: {**values.get(name, {}), **sections.get(name, {})} for name in values | sections}
    return JobConfig.model_validate({"version": 1, **merged}).model_copy(update={"base_dir": root})
