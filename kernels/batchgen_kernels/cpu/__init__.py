"""The C++ twins of the ops: chosen at run time by the processor's instruction sets; `is_available()` first."""

from __future__ import annotations

from batchgen_kernels.cpu.attention import copy_blocks, paged_attention, store_kv
from batchgen_kernels.cpu.decoder_stack import (
    DecoderLayer,
    DecoderModel,
    DecoderStack,
    DecoderStep,
    Norm,
    TokenChunks,
)
from batchgen_kernels.cpu.elementwise import rms_norm, rotary, silu_mul
from batchgen_kernels.cpu.library import (
    INTERFACE_VERSION,
    Features,
    KernelsUnavailable,
    empty_in_huge_pages,
    features,
    is_available,
    levels,
    set_level,
    set_num_threads,
    why_unavailable,
)
from batchgen_kernels.cpu.linear import PackedGatedLinear, PackedLinear
from batchgen_kernels.cpu.sample import SampleSteps, sample, token_ranks, top_tokens

__all__ = [
    "INTERFACE_VERSION",
    "DecoderLayer",
    "DecoderModel",
    "DecoderStack",
    "DecoderStep",
    "Features",
    "KernelsUnavailable",
    "Norm",
    "PackedGatedLinear",
    "PackedLinear",
    "SampleSteps",
    "TokenChunks",
    "copy_blocks",
    "empty_in_huge_pages",
    "features",
    "is_available",
    "levels",
    "paged_attention",
    "rms_norm",
    "rotary",
    "sample",
    "set_level",
    "set_num_threads",
    "silu_mul",
    "store_kv",
    "token_ranks",
    "top_tokens",
    "why_unavailable",
]
