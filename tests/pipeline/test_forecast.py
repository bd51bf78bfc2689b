from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.commands.plan import plan_lines
from batchgen.config import load_job
from batchgen.data.input_rows import ScannedFile
from batchgen.pipeline import calibration as calibrations
from batchgen.pipeline.calibration import Calibration, calibrate, keep_calibration, load_calibration
from batchgen.pipeline.forecast import Forecast, assess, estimate, forecast, recommended, sequences_at_once
from batchgen.pipeline.machine_class import SMALL_PROCESSOR, this_class
from batchgen.pipeline.plan import RowIndex
from batchgen.pipeline.ports import Services
from batchgen.pipeline.prompt_sample import PromptSample, histogram, shared_tokens, spread
from batchgen.records import Prompt, RowRange
from tests.pipeline.fakes import FakeEngine, FakeFeeder, FakeMetrics
from tests.pipeline.prompts import write_job

MEASURED = Calibration(
    device="cpu",
    dtype="bfloat16",
    max_model_len=4096,
    max_sequences=256,
    max_batch_tokens=512,
    block_size=16,
    num_blocks=1000,
    kv_bytes_per_token=1024.0,
    step_seconds=0.01,
    token_seconds=0.001,
    context_seconds=0.000001,
    prompt_seconds=0.0005,
    notes=[],
    measured="2026-01-01T00:00:00",
)
SAMPLE = PromptSample(num_rows=4, lengths=[100] * 4, errors={}, shared_tokens=0, token_ids=[1, 2])


def test_shared_tokens_are_whole_blocks_and_never_the_last_token() -> None:
    assert shared_tokens([[1] * 40, [1] * 40, [2] * 40], 16) == 32
    assert shared_tokens([[1] * 33, [1] * 33], 16) == 32
    assert shared_tokens([[1] * 32, [1] * 32], 16) == 16
    assert shared_tokens([[1] * 15, [1] * 15], 16) == 0
    assert shared_tokens([], 16) == 0


def test_the_sample_is_spread_over_all_files() -> None:
    def scanned(source: int, num_rows: int) -> ScannedFile:
        values: dict[str, Any] = {"source": source, "num_rows": num_rows}
        fields = {name: values.get(name) for name in ScannedFile.__dataclass_fields__}
        return ScannedFile(**{**fields, "skipped": ()})

    index = RowIndex([scanned(0, 5000), scanned(1, 5000)])
    ranges = [RowRange(0, 0, 5000), RowRange(1, 0, 5000)]
    pieces = spread(ranges, index, 80)
    assert sum(rows.stop - rows.start for rows in pieces) == 80
    assert pieces[0] == RowRange(0, 0, 10)
    assert pieces[-1] == RowRange(1, 4990, 5000)
    assert {rows.source for rows in pieces} == {0, 1}
    assert spread([RowRange(0, 0, 30)], index, 80) == [RowRange(0, 0, 30)]


def test_histogram_counts_every_length_once() -> None:
    bins = histogram([5, 5, 6, 30, 64], 12)
    assert sum(count for *_, count in bins) == 5
    assert (bins[0][0], bins[-1][1]) == (5, 64)
    assert histogram([]) == []


def test_time_is_prompts_in_full_steps_and_then_steps_of_all_that_fit() -> None:
    found = estimate(MEASURED, SAMPLE, 1000, 1, 50, 50)
    at_once = sequences_at_once(MEASURED, SAMPLE, 1, 50)
    assert at_once == pytest.approx(16_000 / (100 + 25 + 8))
    assert found.completion_tokens == 50_000
    assert found.prompt_tokens == 100_000
    steps = 50_000 / at_once
    assert found.seconds == pytest.approx(50 + steps * (0.01 + at_once * (0.001 + 125 * 0.000001)))


def test_shared_prefixes_take_no_time_and_little_room() -> None:
    shared = replace(SAMPLE, shared_tokens=320)
    assert shared.shared_share == 0.8
    assert estimate(MEASURED, shared, 1000, 1, 50, 50).prompt_tokens == 20_000
    assert sequences_at_once(MEASURED, shared, 1, 50) > 2 * sequences_at_once(MEASURED, SAMPLE, 1, 50)


def test_recommended_settings_stop_where_more_sequences_gain_little() -> None:
    job = load_job(Path(__file__).parent.parent / "job_files/valid/smallest.yaml")
    costly = recommended(replace(MEASURED, step_seconds=0.2), SAMPLE, job, SMALL_PROCESSOR, 10_000)
    cheap = recommended(replace(MEASURED, step_seconds=0.001), SAMPLE, job, SMALL_PROCESSOR, 10_000)
    assert costly["max_sequences"] > cheap["max_sequences"]
    few = recommended(replace(MEASURED, step_seconds=0.2), SAMPLE, job, SMALL_PROCESSOR, 20)
    assert few["max_sequences"] == 32
    assert int(costly["kv_cache_memory"].removesuffix("MiB")) % 64 == 0


class TimedEngine(FakeEngine):
    """A step costs 8 ms, 1 ms for each sequence and 1 us for each token that it attends to, by its own clock."""

    def __init__(self) -> None:
        super().__init__(window=1000, running=1000)
        self.now = 0.0
        self.metrics = FakeMetrics(num_blocks=2000)
        self.metrics.max_sequences = 64  # type: ignore[attr-defined]
        self.metrics.max_batch_tokens = 512  # type: ignore[attr-defined]
        self.metrics.kv_cache_bytes = 2000 * 16 * 512
        self.left: list[list[int]] = []

    @property
    def num_unfinished(self) -> int:
        return len(self.left)

    def add(self, prompt: Prompt) -> int:
        assert prompt.params is not None
        assert prompt.params.ignore_eos
        self.left.append([len(prompt.token_ids or ()), prompt.params.max_tokens or 0])
        return 0

    def step(self) -> list[Any]:
        self.now += 0.008 + sum(0.001 + 0.000001 * context for context, _ in self.left)
        self.metrics.num_drawn_tokens += len(self.left)
        self.left = [[context, left - 1] for context, left in self.left if left > 1]
        return []


def test_calibration_finds_what_a_step_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TimedEngine()
    monkeypatch.setattr(calibrations.time, "monotonic", lambda: engine.now)
    measured = calibrate(engine, [1, 2, 3])
    assert measured.step_seconds == pytest.approx(0.008)
    assert measured.token_seconds == pytest.approx(0.001)
    assert measured.context_seconds == pytest.approx(0.000001)
    assert measured.kv_bytes_per_token == 512
    assert engine.num_unfinished == 0


def test_a_calibration_is_kept_and_a_damaged_one_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_calibration("k") is None
    keep_calibration("k", MEASURED)
    assert load_calibration("k") == MEASURED
    (path,) = (tmp_path / "batchgen" / "calibration").iterdir()
    path.write_text('{"device": "cpu"}')
    assert load_calibration("k") is None


def planned(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Forecast, list[Any]]:
    """A forecast with an engine that is a fake, and the engines that were made for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[TimedEngine] = []

    def make_engine(*_: Any) -> TimedEngine:
        made.append(TimedEngine())
        monkeypatch.setattr(calibrations.time, "monotonic", lambda: made[-1].now)
        return made[-1]

    model = calibrations.ModelFiles(tmp_path / "model", {})
    services = Services(lambda *_: model, make_engine, FakeFeeder)
    found = forecast(load_job(job), say=lambda text: None, services=services, **options)
    monkeypatch.undo()
    return found, made


def test_a_plan_measures_once_and_then_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"word": "x" * (row + 1)} for row in range(20)] + [{"word": None}]
    job = write_job(tmp_path, rows, sampling={"max_tokens": 10, "n": 2})
    first, made = planned(job, tmp_path, monkeypatch)
    assert len(made) == 1
    again, made = planned(job, tmp_path, monkeypatch)
    assert (again, made) == (first, [])
    _, made = planned(job, tmp_path, monkeypatch, again=True)
    assert len(made) == 1
    assert (first.num_rows, first.num_done, first.num_shards) == (21, 0, 1)
    assert first.sample.errors == {"template_error": 1}
    assert first.at_most is not None
    assert first.at_most.completion_tokens == 400
    assert first.half is not None
    assert first.half.seconds < first.at_most.seconds
    values = json.loads(json.dumps(first.to_json()))
    assert sum(count for *_, count in values["sample"]["histogram"]) == 20
    lines = list(plan_lines(first))
    assert lines[0] == "rows         21 in 1 file; 1 shard to write"
    assert any(
        line.startswith("warning      1 of 21 rows of the sample have no prompt: template_error") for line in lines
    )
    assert any(line.startswith("recommended  engine: {block_size: 16") for line in lines)
    assert f"machine      {this_class('cpu').name}" in lines
    assert not any(line.strip().startswith("run: ") for line in lines)


def test_workers_are_recommended_where_there_are_shards_for_them() -> None:
    job = load_job(Path(__file__).parent.parent / "job_files/valid/smallest.yaml")
    few, many = (assess(job, num_rows, 1, SAMPLE, MEASURED, []) for num_rows in (10, 100_000))
    assert few.recommended_run == {}
    workers = this_class("cpu").workers
    assert many.recommended_run == {"workers": workers}
    assert f"             run: {{workers: {workers}}}" in plan_lines(many)


def test_without_measuring_the_rest_is_said_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = write_job(tmp_path, [{"word": "x"}])
    found, made = planned(job, tmp_path, monkeypatch, measure=False)
    assert (made, found.calibration, found.at_most) == ([], None, None)
    assert "time         not measured" in list(plan_lines(found))


def test_what_will_fail_or_be_slow_is_warned_of(tmp_path: Path) -> None:
    job = load_job(Path(__file__).parent.parent / "job_files/valid/smallest.yaml")
    long = job.model_copy(update={"sampling": job.sampling.model_copy(update={"max_tokens": 300})})
    tight = replace(MEASURED, num_blocks=16, dtype="float32", notes=["a note of the engine"])
    found = assess(long, 10, 1, SAMPLE, tight, [])
    text = "\n".join(found.warnings)
    assert "a note of the engine" in text
    assert "4 of 4 prompts do not fit into the KV cache of 256 tokens" in text
    assert "the model runs in float32" in text
    endless = job.model_copy(update={"sampling": job.sampling.model_copy(update={"max_tokens": None})})
    found = assess(endless, 10, 1, SAMPLE, MEASURED, [])
    assert found.at_most is None
    assert "nothing bounds the time" in found.warnings[0]
