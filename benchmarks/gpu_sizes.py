"""How large `make gpu-check` is: as a GPU needs it, or small enough to walk through on a processor."""

from __future__ import annotations

from typing import NamedTuple

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from benchmarks.kernel_cases import LLAMA_8B, ModelShape

QWEN_600M = Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
    eos_token_id=None,
)  # fmt: skip

TINY_LLAMA = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


class Sizes(NamedTuple):
    """All that makes a run long."""

    copied_bytes: int
    """Of the copy that the bandwidth is taken from."""
    matrix_side: int
    """Of the product that the matrix rate is taken from."""
    model: ModelShape
    """Whose kernels are timed, and whose decode step."""
    num_layers: int
    num_tokens: int
    """Of the element-wise kernels."""
    num_rows: int
    """Of the kernels that draw, and sequences of the decode step."""
    decode_context: int
    few_context: int
    prompt: int
    shared_prefix: int
    """Tokens, a multiple of the split of attention."""
    num_sharing: int
    config: PreTrainedConfig
    """Of the model that the engine runs."""
    num_prompts: int
    lengths: tuple[int, int]
    """In and out, uniform between these."""
    engine_prefix: int
    profiled_steps: int


FULL = Sizes(
    copied_bytes=1 << 30,
    matrix_side=8192,
    model=LLAMA_8B,
    num_layers=32,
    num_tokens=16384,
    num_rows=256,
    decode_context=1024,
    few_context=32768,
    prompt=2048,
    shared_prefix=4096,
    num_sharing=64,
    config=QWEN_600M,
    num_prompts=256,
    lengths=(100, 1024),
    engine_prefix=1024,
    profiled_steps=30,
)

DRY_RUN = Sizes(
    copied_bytes=1 << 16,
    matrix_side=32,
    model=ModelShape("dry run", 32, 48, 4, 2, 16, 16, 300),
    num_layers=2,
    num_tokens=32,
    num_rows=4,
    decode_context=40,
    few_context=300,
    prompt=20,
    shared_prefix=256,
    num_sharing=3,
    config=TINY_LLAMA,
    num_prompts=4,
    lengths=(3, 9),
    engine_prefix=20,
    profiled_steps=2,
)
