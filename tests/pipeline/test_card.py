"""The dataset card of an output."""

from __future__ import annotations

from pathlib import Path

from batchgen.pipeline.card import card
from tests.pipeline.fakes import make_job


def test_the_card_has_configs_and_counts(tmp_path: Path) -> None:
    text = card(make_job(tmp_path), 1000, {"bad_json": 2, "empty_prompt": 1}, 3)
    assert "\n  - split: train\n    path: data/*.parquet\n" in text
    assert "- 1,000 input rows in 3 files: 997 ok, 3 error" in text
    assert "  - 2 bad_json" in text


def test_a_model_path_cannot_break_out_of_its_quotes(tmp_path: Path) -> None:
    text = card(make_job(tmp_path, model={"path": "a`b\n# c"}), 1, {}, 1)
    assert "`a'b # c`" in text
