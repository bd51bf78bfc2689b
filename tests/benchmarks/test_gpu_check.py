"""What of `make gpu-check` can run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, gpu_engine, gpu_references
from benchmarks.decode_step import DecodeStep, measure_decode_step
from benchmarks.gpu_sizes import DRY_RUN
from benchmarks.kernel_cases import SMOLLM2
from benchmarks.kernels_gpu import Batch, attention_case, measure_all

CPU = torch.device("cpu")
TINY = SMOLLM2._replace(features=32, inner=48, heads=4, kv_heads=2, k_dim=16, v_dim=8, vocabulary=300)


@pytest.mark.slow
def test_every_comparison_holds_in_the_interpreter() -> None:
    assert gpu_references.compare_all(CPU)["ok"]


def test_a_wrong_kernel_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_references, "silu_mul_triton", lambda x: torch.full((len(x), x.shape[1] // 2), torch.nan))
    monkeypatch.setattr(gpu_references, "rms_norm_triton", gpu_references.rms_norm_reference)
    monkeypatch.setattr(gpu_references, "rotary_triton", lambda q, k, cos, sin: (q, k))
    wrong = [comparison.name.split()[0] for comparison in gpu_references.elementwise(CPU) if comparison.error > 0.1]
    assert wrong == ["silu_mul", "rotary"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert gpu_check.main(["--output", str(tmp_path / "out.json")]) == 2
    assert "no GPU here" in capsys.readouterr().err


def test_sections_that_failed_leave_their_targets_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        {"kernel": "paged_attention decode", "shape": "64 x 4160, 4096 shared", "share_of_floor": 0.5, "seconds": 9.0},
        {"kernel": "paged_attention decode, prefix once", "shape": "64 x 4160, 4096 shared", "seconds": 1.0},
    ]
    results = {"kernels": {"kernels": rows}, "decode_step": {"failed": "out of memory"}}
    monkeypatch.setattr(gpu_check, "_run_section", lambda name, scratch, device, is_dry_run: results[name])
    outcome = gpu_check.check("cpu", list(results), tmp_path)
    reached = {verdict["target"]: (verdict["value"], verdict["reached"]) for verdict in outcome["targets"]}
    assert reached["shared-prefix attention against unshared, 64 x 4k"] == (9.0, True)
    assert reached["decode attention, share of the copy bandwidth"] == (0.5, False)
    assert reached["decode step of the 8B shape, share of its floor"] == (None, False)
    assert not outcome["ok"]
    json.dumps(outcome)


def test_bytes_count_a_shared_prefix_once() -> None:
    batch = Batch([80, 96], [1, 1], shared=64)
    once = attention_case(TINY, batch, CPU)
    each = attention_case(TINY, batch, CPU, share=False)
    per_token = TINY.kv_heads * (TINY.k_dim + TINY.v_dim) * 2
    assert each.num_bytes - once.num_bytes == 64 * per_token
    assert batch.num_blocks == 4 + 1 + 2
    assert torch.equal(once.run().isfinite().all(), torch.tensor(True))


def test_operations_count_the_pairs_that_are_seen() -> None:
    case = attention_case(TINY, Batch([10], [4]), CPU)
    assert case.num_operations == 2 * (7 + 8 + 9 + 10) * TINY.heads * (TINY.k_dim + TINY.v_dim)


def test_a_decode_step_draws_the_same_tokens_again() -> None:
    torch.manual_seed(0)
    contexts = [5, 40, 17]
    step = DecodeStep(TINY, 2, contexts, 64, CPU)
    first = step.run().clone()
    step.tokens.zero_()
    step.begin(contexts)
    assert torch.equal(step.run(), first)
    assert step.cache_bytes() == 2 * sum(contexts) * TINY.kv_heads * (TINY.k_dim + TINY.v_dim) * 4


def test_workloads_share_what_they_say() -> None:
    workload = gpu_engine.Workload.uniform(5, 3, 9, 1000, shared=20)
    assert len({tuple(prompt[:20]) for prompt in workload.prompts}) == 1
    assert all(23 <= len(prompt) <= 29 for prompt in workload.prompts)


def test_every_kernel_is_measured_beside_its_floor() -> None:
    rows = measure_all(CPU, DRY_RUN)["kernels"]
    assert {row["kernel"].split(",")[0] for row in rows} == {
        "rms_norm", "silu_mul", "rotary", "store_kv", "copy_blocks", "paged_attention decode",
        "paged_attention prefill", "sample", "top_tokens", "token_ranks",
    }  # fmt: skip
    assert all(row["seconds"] > 0 and row["share_of_floor"] > 0 for row in rows)
    assert gpu_check._prefix_gain({"kernels": {"kernels": rows}}) > 0


def test_a_step_is_compared_with_itself_where_nothing_can_be_captured() -> None:
    measured = measure_decode_step(DRY_RUN, CPU)
    assert measured["ok"]
    assert measured["shape"] == "dry run, 2 layers, 4 sequences"


@pytest.mark.slow
def test_a_dry_run_walks_through_every_section(tmp_path: Path) -> None:
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path / "out.json")]) == 0
    outcome = json.loads((tmp_path / "out.json").read_text())
    assert [name for name in gpu_check.SECTIONS if "failed" in outcome[name]] == []
    assert outcome["targets"] == []
    assert outcome["ok"]
