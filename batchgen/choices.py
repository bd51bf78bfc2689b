"""What a job file and the Python interface take where the choices are few; `get_args` of a type lists them."""

from __future__ import annotations

from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Of weights and KV cache."""
Quantization = Literal["int8"]
"""Of weights; None leaves them as they are."""
KvDtype = Literal["auto", "int8"]
"""Of the KV cache."""
BlockSize = Literal[1, 2, 4, 8, 16, 32, 64]
"""Tokens in one block of the KV cache."""
DEVICE_PATTERN = r"^(auto|cpu|cuda(:\d+)?)$"
"""A regular expression."""
