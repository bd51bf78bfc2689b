"""What Engine is asked for is checked before anything is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from batchgen.engine.engine import Engine
from batchgen.errors import JobError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads must be 'auto' or a whole number from 1 to 4096, got 0"),
        ({"threads": 10**6}, "threads must be 'auto' or a whole number from 1 to 4096"),
        ({"max_sequences": 2.5}, "max_sequences must be 'auto' or a whole number"),
        ({"max_model_len": True}, "max_model_len must be 'auto' or a whole number"),
        ({"block_size": 5}, "block_size must be one of 1, 2, 4, 8, 16, 32, 64, got 5"),
        ({"dtype": "int3"}, "dtype must be one of 'auto', 'float32', 'bfloat16', 'float16', got 'int3'"),
        ({"quantization": "int4"}, "quantization must be one of None, 'int8', got 'int4'"),
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"device": "gpu"}, "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
        ({"device": "cpu\n"}, "device must be auto, cpu, cuda or cuda:N"),
    ],
)
def test_options_that_no_engine_takes_are_named_before_a_model_is_looked_for(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=re.escape(message)):
        Engine(tmp_path / "no model", **options)
