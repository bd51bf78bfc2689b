"""Pages that are written by hand must name what the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.errors import ExitCode
from batchgen.sampling_params import BeamParams, SamplingParams

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("name", [*SamplingParams.model_fields, *BeamParams.model_fields])
def test_the_sampling_page_explains_every_key(name: str) -> None:
    assert f"\n| `{name}` | " in (DOCS / "sampling.md").read_text()


@pytest.mark.parametrize("code", ExitCode)
def test_the_page_on_durability_explains_every_exit_code(code: ExitCode) -> None:
    assert f"\n| {int(code)} | " in (DOCS / "durability.md").read_text()
