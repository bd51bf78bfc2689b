"""What goes together in sampling, and what is refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from batchgen.config import load_job
from batchgen.errors import JobFileError
from batchgen.sampling_params import BeamParams, SamplingParams

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 3, "best_of": 2}, "raise best_of"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens is 4, but max_tokens only 3"),
    ({"max_tokens": 0, "min_tokens": 1}, "min_tokens is 1, but max_tokens only 0"),
    ({"stop": ("a", "")}, "empty string"),
    ({"bad_words": ("",)}, "empty string"),
    ({"temperature": -1}, "greater than or equal to 0"),
    ({"temperature": float("nan")}, "finite number"),
    ({"top_k": -2}, "greater than or equal to -1"),
    ({"top_p": 0}, "greater than 0"),
    ({"top_p": 1.1}, "less than or equal to 1"),
    ({"min_p": 1.1}, "less than or equal to 1"),
    ({"repetition_penalty": 0}, "greater than or equal to 0.000001"),
    ({"repetition_penalty": 1e300}, "less than or equal to 1000000"),
    ({"temperature": 1e300}, "less than or equal to 1000000"),
    ({"logit_bias": {3: -1e308}}, "greater than or equal to -1000"),
    ({"top_k": 2**31}, "less than or equal to 2147483647"),
    ({"max_tokens": 2**31}, "less than or equal to 2147483647"),
    ({"stop_token_ids": (2**70,)}, "less than or equal to 2147483647"),
    ({"n": 2**16 + 1}, "less than or equal to 65536"),
    ({"best_of": 10**22}, "less than or equal to 65536"),
    ({"beam": {"width": 10**22}}, "less than or equal to 65536"),
    ({"presence_penalty": 2.1}, "less than or equal to 2"),
    ({"frequency_penalty": -2.1}, "greater than or equal to -2"),
    ({"logit_bias": {-1: 1.0}}, "greater than or equal to 0"),
    ({"logit_bias": {3: float("inf")}}, "finite number"),
    ({"stop_token_ids": (-1,)}, "greater than or equal to 0"),
    ({"seed": 2**63}, "less than or equal to"),
    ({"logprobs": -1}, "greater than or equal to 0"),
    ({"n": 0}, "greater than or equal to 1"),
    ({"beam": {"width": 2, "num_return": 3}}, "only 2 beams are kept"),
    ({"beam": {"width": 2, "early_stopping": "maybe"}}, "never"),
    ({"beam": {"width": 2}, "n": 2}, "n goes with sampling, not with beam"),
    ({"beam": {"width": 2}, "best_of": 2}, "best_of goes with sampling"),
    ({"beam": {"width": 2}, "top_k": 5}, "top_k goes with sampling"),
    ({"beam": {"width": 2}, "top_p": 0.5}, "top_p goes with sampling"),
    ({"beam": {"width": 2}, "min_p": 0.5}, "min_p goes with sampling"),
    ({"beam": {"width": 2}, "temperature": 0.7}, "temperature goes with sampling"),
    ({"beam": {"width": 2}, "max_tokens": 0}, "generates nothing to search"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        SamplingParams(**settings)


def job_file(directory: Path, sampling: str) -> Path:
    path = directory / "job.yaml"
    path.write_text(
        "version: 1\nmodel: {path: m}\ninput: {path: in.jsonl}\nprompt: {column: p}\noutput: {path: out}\n"
        f"sampling: {sampling}\n"
    )
    return path


def test_every_control_can_stand_in_a_job_file(tmp_path: Path) -> None:
    text = (
        "{n: 2, best_of: 4, temperature: 0.5, top_k: -1, top_p: 0.9, min_p: 0.1, repetition_penalty: 1.1,"
        " presence_penalty: 0.5, frequency_penalty: -0.5, logit_bias: {5: -100, 7: 1.5}, bad_words: [x], min_tokens: 1,"
        " max_tokens: 9, stop: [a, b], stop_token_ids: [3], include_stop: true, ignore_eos: true, logprobs: 2,"
        " prompt_logprobs: 0, seed: 9223372036854775807, beam: null}"
    )
    sampling = load_job(job_file(tmp_path, text)).sampling
    assert (sampling.n, sampling.best_of, sampling.logit_bias) == (2, 4, {5: -100.0, 7: 1.5})
    assert (sampling.stop, sampling.stop_token_ids, sampling.prompt_logprobs) == (("a", "b"), (3,), 0)
    assert sampling.seed == 2**63 - 1
    beams = load_job(job_file(tmp_path, "{beam: {width: 4, early_stopping: never, length_penalty: -1}}")).sampling
    assert beams.beam == BeamParams(width=4, early_stopping="never", length_penalty=-1.0)
    for early_stopping in (True, False):
        text = f"{{beam: {{width: 2, early_stopping: {str(early_stopping).lower()}}}}}"
        loaded = load_job(job_file(tmp_path, text)).sampling.beam
        assert loaded is not None
        assert loaded.early_stopping is early_stopping


@pytest.mark.parametrize(
    "sampling",
    [
        "{beam: {width: 2}, n: 3}",
        "{beam: {width: 2}, temperature: 0.5}",
        "{beam: {width: 2}, max_tokens: 0}",
        "{beam: {width: 2, num_return: 3}}",
        "{n: 2, best_of: 1}",
        "{min_tokens: 5, max_tokens: 2}",
        "{logit_bias: {-3: 1}}",
        "{logit_bias: {3: .inf}}",
        "{stop: ['']}",
    ],
)
def test_a_job_file_with_them_is_refused_with_its_line(tmp_path: Path, sampling: str) -> None:
    with pytest.raises(JobFileError, match=r"job\.yaml:6") as refused:
        load_job(job_file(tmp_path, sampling))
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "is_greedy"),
    [
        ({}, False),
        ({"temperature": 0}, True),
        ({"temperature": 1e-8}, False),
        ({"top_k": 1}, True),
        ({"top_k": 0}, False),
        ({"top_k": -1}, False),
        ({"top_k": None}, False),
    ],
)
def test_temperature_0_and_top_k_1_are_greedy(settings: dict[str, Any], is_greedy: bool) -> None:
    assert SamplingParams(**settings).is_greedy is is_greedy


def test_defaults_draw_from_the_model_as_it_is() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, None, 1.0, 0.0)
    assert not params.has_penalties
    assert (params.num_sequences, SamplingParams(n=2, best_of=5).num_sequences) == (1, 5)
