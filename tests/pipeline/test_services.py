"""The parts that a real run is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.data.inputs import list_inputs
from batchgen.data.reader import scan_inputs
from batchgen.errors import JobError
from batchgen.pipeline.ports import FeedRequest
from batchgen.pipeline.services import default_services
from tests.data.reading import write_jsonl
from tests.pipeline.prompts import STARTED, make_job, model_directory


def test_faults_of_every_prompt_are_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "in.jsonl", [{"topic": "x"}])
    job = make_job(prompt={"template": "{{ topics }}"})
    scan = scan_inputs(list_inputs(job.input, tmp_path), job.input)
    request = FeedRequest(job, scan, (), model_directory(tmp_path), 1, STARTED)
    check = default_services().check_prompts
    assert check is not None
    with pytest.raises(JobError, match="no column 'topics' in the input"):
        check(request).wait()
