"""`--where` over an output: what one process alone would say, and an end in time where it does not come back."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.errors import JobError
from batchgen.pipeline.bounded_filter import BoundedFilter
from batchgen.pipeline.child import Limits
from batchgen.pipeline.redo import rerun
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.services import default_services
from tests.pipeline.fakes import FakeWorld, make_job

ENDLESS = "(range(99999) | map('string') | map('length') | list | sort | list | sort | length) * n == 1"


def test_rows_are_chosen_by_the_columns_that_the_expression_names() -> None:
    rows = [{"n": number, "other": object} for number in range(200)]
    with closing(BoundedFilter("n % 70 == 0", ["n", "other"])) as row_filter:
        assert row_filter.columns == ["n"]
        assert [n for n, chosen in enumerate(row_filter.choose(rows)) if chosen] == [0, 70, 140]
        assert row_filter.choose([]) == []


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("m > 1", "--where: no column 'm' in the output"),
        ("n >", "--where: "),
        ("n > 'a'", "--where: .*not supported"),
        ("n.__class__", "--where: access to attribute '__class__'"),
        ("('a' * (n * 10000000000)) == ''", "--where: .*memory"),
        (ENDLESS, r"--where: takes more than 0\.05 s; simplify it"),
    ],
)
def test_what_is_wrong_or_takes_too_much_is_a_job_error(where: str, message: str) -> None:
    with (
        pytest.raises(JobError, match=message),
        closing(BoundedFilter(where, ["n"], Limits(step_seconds=0.05))) as row_filter,
    ):
        row_filter.choose([{"n": 5}])


def test_a_rerun_chooses_its_rows_in_such_a_process(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_job(job, services=FakeWorld().services)
    assert default_services().make_filter is BoundedFilter
    world = FakeWorld()
    rerun(job, "id in (2, 7)", services=replace(world.services, make_filter=BoundedFilter))
    assert world.num_rows == 2
