"""Makes a model on a processor compute each token by itself, whatever tokens are computed with it."""

from __future__ import annotations

from transformers import PreTrainedModel

from batchgen.engine.aligned import align_functions
from batchgen.engine.attention import ATTENTION_NAME
from batchgen.engine.experts import pack_experts
from batchgen.engine.linear import pack_linears
from batchgen.engine.probe import probe_attention


def make_rows_independent(model: PreTrainedModel) -> None:
    """Pack every matrix product and align every curved function; ModelError where a packed product is wrong.

    Norms, softmax and the functions of routers go row by row in torch already.
    """
    pack_linears(model, model.get_output_embeddings())
    pack_experts(model)
    align_functions(model, lambda: probe_attention(model, ATTENTION_NAME))
