from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchgen.data.files import OutputFiles
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.stored import read_output
from batchgen.report.tally import Lengths, tally_rows
from tests.pipeline.fakes import FakeWorld, make_job


@pytest.mark.parametrize("samples", ["list", "explode"])
def test_the_tally_is_what_the_rows_add_up_to(tmp_path: Path, samples: str) -> None:
    job = make_job(tmp_path, 0, output={"path": "out", "samples": samples}, sampling={"n": 3, "max_tokens": 20})
    lines = [json.dumps({"prompt": "bad!" if row % 4 == 1 else "x" * (row + 1)}) for row in range(30)]
    (tmp_path / "in.jsonl").write_text("\n".join([*lines, '{"prom']) + "\n")
    run_job(job, services=FakeWorld().services)
    tally = tally_rows(read_output(OutputFiles(), job.output_dir))

    rows: list[dict[str, Any]] = pq.read_table(job.output_dir / "data").to_pylist()
    records = [row["batchgen"] for row in rows]
    ok = [record for record in records if record["status"] == "ok"]
    pairs = [
        (record["prompt_tokens"], count)
        for record in ok
        for count in (record["completion_tokens"] if samples == "list" else [record["completion_tokens"]])
    ]
    assert len(pairs) == 3 * 22
    assert tally.completion_lengths.number == len(pairs)
    assert tally.completion_lengths.total == sum(count for _, count in pairs)
    assert tally.prompt_lengths.number == 30
    assert tally.prompt_lengths.total == sum(4 if row % 4 == 1 else row + 1 for row in range(30))
    assert dict(tally.finish_reasons) == {"stop": len(pairs)}
    assert dict(tally.errors) == {"no_allowed_token": 8, "bad_json": 1}
    assert [example.row for example in tally.examples["no_allowed_token"]] == [1, 5, 9]
    used = sum(count * (prompt + count / 2) for prompt, count in pairs)
    reserved = sum(count * (prompt + 20) for prompt, count in pairs)
    assert tally.contiguous.useful_share == pytest.approx(used / reserved)


def test_lengths_know_quantiles_and_bins() -> None:
    lengths = Lengths()
    assert (lengths.number, lengths.quantile(0.5), lengths.bins(4)) == (0, 0, [])
    lengths.add(np.array([5, 6, 6]))
    lengths.add(np.array([12]))
    assert (lengths.number, lengths.total) == (4, 29)
    assert [lengths.quantile(share) for share in (0.25, 0.5, 0.75, 1.0)] == [5, 6, 6, 12]
    assert lengths.bins(4) == [(5, 6, 3), (7, 8, 0), (9, 10, 0), (11, 12, 1)]
    assert lengths.bins(100)[0] == (5, 5, 1)
