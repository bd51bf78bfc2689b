"""What sampling asks for reaches Parquet: a whole job with a tiny model, from its inputs to its columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.commands.summary import summary_lines
from batchgen.config import JobConfig
from batchgen.data.file_backend import FileBackend
from batchgen.data.files import OutputFiles
from batchgen.data.schema import TOKEN_LOGPROB
from batchgen.errors import JobError
from batchgen.pipeline.ports import FeedRequest, PreparedRow, Services
from batchgen.pipeline.report import JobReport
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.services import find_model, make_engine
from tests.engine.tiny import EOS, TinyModel, make_tiny
from tests.pipeline.fakes import FakeFeeder, make_job

PER_TOKEN = pa.list_(pa.list_(TOKEN_LOGPROB))
NUM_ROWS = 5


class LettersFeeder(FakeFeeder):
    """One token of the tiny vocabulary per character; an exclamation mark is a token that no vocabulary has."""

    def get(self, timeout: float) -> PreparedRow | None:
        prepared = super().get(timeout)
        if prepared is None or prepared.prompt_token_ids is None:
            return prepared
        ids = [5 + char % 20 if char else 9999 for char in prepared.prompt_token_ids]
        return prepared._replace(prompt_token_ids=ids)


def make_feeder(request: FeedRequest) -> LettersFeeder:
    return LettersFeeder(request)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(tmp_path_factory.mktemp("tiny"), temperature=0.3, top_p=0.5, do_sample=True)


def job_of(tiny: TinyModel, root: Path, samples: str = "list", **sampling: Any) -> JobConfig:
    return make_job(
        root,
        NUM_ROWS,
        model={"path": str(tiny.directory), "dtype": "float32"},
        sampling={"n": 1, "seed": 1, "max_tokens": 6, **sampling},
        engine={"device": "cpu", "kv_cache_memory": "1MiB", "max_sequences": 16},
        output={"path": "out", "shard_rows": 2, "samples": samples, "token_ids": True},
    )


def services(backend: FileBackend | None = None) -> Services:
    return Services(find_model, make_engine, make_feeder, OutputFiles(backend))


def run(job: JobConfig) -> tuple[JobReport, pa.Table]:
    report = run_job(job, services=services())
    for shard in report.data_files:
        assert pq.read_schema(shard).equals(pq.read_schema(report.data_files[0])), "shards differ in their schema"
    return report, pq.read_table(job.output_dir / "data")


def test_samples_as_lists_have_log_probabilities_per_sample_and_the_prompts_once(
    tiny: TinyModel, tmp_path: Path
) -> None:
    _, table = run(job_of(tiny, tmp_path, n=3, logprobs=2, prompt_logprobs=1, ignore_eos=True))
    assert table.schema.field("logprobs").type == pa.list_(PER_TOKEN)
    assert table.schema.field("prompt_logprobs").type == PER_TOKEN
    assert table.schema.field("token_ids").type == pa.list_(pa.list_(pa.int32()))
    for row in table.to_pylist():
        assert [len(sample) for sample in row["logprobs"]] == [6, 6, 6]
        for ids, positions, total in zip(
            row["token_ids"], row["logprobs"], row["batchgen"]["cumulative_logprob"], strict=True
        ):
            assert [position[0]["token_id"] for position in positions] == ids
            assert sum(position[0]["logprob"] for position in positions) == pytest.approx(total, abs=1e-5)
            assert all(2 <= len(position) <= 3 for position in positions)
        assert len(row["prompt_logprobs"]) == row["batchgen"]["prompt_tokens"]
        assert row["prompt_logprobs"][0] is None
        assert all(1 <= len(position) <= 2 for position in row["prompt_logprobs"][1:])
        assert row["batchgen"]["score"] == [None] * 3


def test_exploded_samples_have_the_values_of_the_lists(tiny: TinyModel, tmp_path: Path) -> None:
    settings = {"n": 3, "logprobs": 1, "prompt_logprobs": 0}
    (tmp_path / "list").mkdir()
    (tmp_path / "explode").mkdir()
    _, listed = run(job_of(tiny, tmp_path / "list", **settings))
    _, exploded = run(job_of(tiny, tmp_path / "explode", "explode", **settings))
    assert exploded.schema.field("logprobs").type == PER_TOKEN
    assert exploded.schema.field("prompt_logprobs").type == PER_TOKEN
    rows = exploded.to_pylist()
    assert len(rows) == 3 * NUM_ROWS
    for row, one in enumerate(listed.to_pylist()):
        for sample in range(3):
            other = rows[3 * row + sample]
            assert other["logprobs"] == one["logprobs"][sample]
            assert other["prompt_logprobs"] == one["prompt_logprobs"]
            assert other["token_ids"] == one["token_ids"][sample]
            assert other["completion"] == one["completions"][sample]


@pytest.mark.parametrize("samples", ["list", "explode"])
def test_beams_have_scores_and_log_probabilities_best_first(tiny: TinyModel, tmp_path: Path, samples: str) -> None:
    job = job_of(tiny, tmp_path, samples, beam={"width": 4, "num_return": 3}, logprobs=1, seed=None)
    report, table = run(job)
    rows = table.to_pylist()
    scores = [row["batchgen"]["score"] for row in rows]
    ids = [row["token_ids"] for row in rows]
    positions = [row["logprobs"] for row in rows]
    if samples == "explode":
        scores, ids, positions = (
            [each[i : i + 3] for i in range(0, len(each), 3)] for each in (scores, ids, positions)
        )
    assert len(scores) == NUM_ROWS
    for row_scores, row_ids, row_positions in zip(scores, ids, positions, strict=True):
        assert sorted(row_scores, reverse=True) == row_scores
        assert len({tuple(beam) for beam in row_ids}) == 3
        assert [[entries[0]["token_id"] for entries in beam] for beam in row_positions] == row_ids
    assert any("width 4" in line and "seed" not in line for line in summary_lines(report) if "sampling" in line)


def test_columns_that_are_not_asked_for_are_not_there(tiny: TinyModel, tmp_path: Path) -> None:
    _, table = run(job_of(tiny, tmp_path))
    assert not {"logprobs", "prompt_logprobs"} & set(table.column_names)


@pytest.mark.case(31)
def test_max_tokens_0_scores_prompts(tiny: TinyModel, tmp_path: Path) -> None:
    """Case 31, as a job."""
    report, table = run(job_of(tiny, tmp_path, max_tokens=0, prompt_logprobs=3))
    assert report.completion_tokens == 0
    for row in table.to_pylist():
        assert row["completions"] == [""]
        assert row["batchgen"]["finish_reason"] == ["length"]
        assert all(len(position) >= 3 for position in row["prompt_logprobs"][1:])


@pytest.mark.case(41)
def test_an_error_row_has_null_columns_and_the_same_schema(tiny: TinyModel, tmp_path: Path) -> None:
    """Case 41: a shard of error rows alone among others."""
    job = job_of(tiny, tmp_path, logprobs=1, prompt_logprobs=1)
    prompts = ["ab", "cd", "!", "!!", "ef"]
    (tmp_path / "in.jsonl").write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts))
    report, table = run(job)
    assert report.errors_by_code == {"bad_token_id": 2}
    for row, prompt in zip(table.to_pylist(), prompts, strict=True):
        failed = "!" in prompt
        assert (row["logprobs"] is None, row["prompt_logprobs"] is None) == (failed, failed)


@pytest.mark.case(23)
def test_what_the_models_files_supply_is_shown_and_stored_and_nothing_else_is_taken(
    tiny: TinyModel, tmp_path: Path
) -> None:
    """Case 23: generation_config.json says temperature 0.3 and top_p 0.5, and the eos id."""
    job = job_of(tiny, tmp_path, seed=None)
    report, _ = run(job)
    lines = list(summary_lines(report))
    shown = f"  sampling   n 1, temperature 1, top_p 1, max_tokens 6, seed {report.sampling.seed}; ends at token {EOS}"
    assert shown in lines
    unused = "do_sample True, temperature 0.3, top_p 0.5"
    assert f"  not used   {unused} (of the model's generation_config.json)" in lines
    identity = json.loads((job.output_dir / "_batchgen" / "plan.json").read_text())
    identity = identity.get("plan", identity)
    text = json.dumps(identity)
    assert f'"sampling.seed": {report.sampling.seed}' in text
    assert f'"resolved.eos_token_ids": [{EOS}]' in text
    assert f'"resolved.unused_generation_config": "{unused}"' in text
    assert '"sampling.temperature": 1.0' in text
    again, _ = run(job)
    assert again.num_rows_this_run == 0
    assert again.eos_token_ids == (EOS,)
    assert again.unused_generation_config == unused


def test_what_is_not_used_of_the_models_files_is_told_before_the_first_row(tiny: TinyModel) -> None:
    (note,) = tiny.engine().notes
    assert note.startswith("not used of the model's generation_config.json: do_sample True, temperature 0.3, top_p 0.5")


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"logit_bias": {32: 1.0}}, r"sampling\.logit_bias names token id 32, .* vocabulary of 32"),
        ({"stop_token_ids": [99]}, r"sampling\.stop_token_ids names token id 99"),
        ({"beam": {"width": 17}}, r"sampling\.beam\.width is 17, but only 16 sequences"),
    ],
)
def test_what_no_row_could_run_with_ends_the_job_and_leaves_no_plan(
    tiny: TinyModel, tmp_path: Path, sampling: dict[str, Any], reason: str
) -> None:
    job = job_of(tiny, tmp_path, **sampling)
    with pytest.raises(JobError, match=reason):
        run_job(job, services=services())
    assert not (job.output_dir / "_batchgen" / "plan.json").exists()
