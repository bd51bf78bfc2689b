"""Makes a model on a processor compute each token by itself, whatever tokens are computed with it."""

from __future__ import annotations

import torch
from batchgen_kernels import cpu
from transformers import PreTrainedModel

from batchgen.engine.aligned import align_functions
from batchgen.engine.attention import ATTENTION_NAME
from batchgen.engine.experts import pack_experts
from batchgen.engine.fused import fuse_attention, fuse_layers
from batchgen.engine.fused_decoder import FusedCausalLM, fuse_decoder_layers, fuse_model
from batchgen.engine.linear import pack_linears
from batchgen.engine.probe import probe_attention


def make_rows_independent(
    model: PreTrainedModel, attention_modules: list[torch.nn.Module], int8: bool = False
) -> FusedCausalLM | None:
    """Pack every matrix product, fuse what our kernels know and align every curved function that is left.

    Returns the model as one call, where our kernels know all of it. `attention_modules` follows the swaps. Norms,
    softmax and the functions of routers go row by row in torch already. With `int8` the weights of all linear layers
    but the head are quantized per output, and their inputs per token; routers and experts are not. Raises ModelError
    where a packed product is wrong.
    """
    fused = cpu.is_available() and model.dtype in (torch.float32, torch.bfloat16)
    if fused:
        fuse_layers(model, int8)
    pack_experts(model)
    align_functions(model, lambda: probe_attention(model, ATTENTION_NAME))
    if fused:
        fuse_attention(model, attention_modules, int8)
    pack_linears(model, model.get_output_embeddings(), int8)
    if not fused:
        return None
    fuse_decoder_layers(model, attention_modules)
    return fuse_model(model)
