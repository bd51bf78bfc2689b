"""Each refusal, and the wrong output that it prevents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from batchgen.engine.attention import ATTENTION_NAME
from batchgen.engine.layers import LayerSpec
from batchgen.engine.probe import attention_calls
from batchgen.engine.refused import REASONS
from batchgen.engine.self_check import TEXT_LENGTHS, check_architecture, paged_logits
from batchgen.errors import ModelError
from tests.engine.families import config_of, small_config, small_model

pytestmark = pytest.mark.usefixtures("own_cache")

BY_CONFIG = {
    "granitemoehybrid": "only 2 call attention",
    "lfm2": "only 2 call attention",
    "llama4_text": "differ from the model's own",
    "bert": "differ from the model's own",
}
"""Families of which some configs are refused: by the self-check alone."""

SETTINGS: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [1, 3]},
    "llama4_text": {"attention_chunk_size": 16},
}


@pytest.mark.parametrize("family", REASONS)
def test_refused_by_name_and_reason(family: str) -> None:
    with pytest.raises(ModelError, match=f"^{family} models cannot run here: {REASONS[family]}$"):
        check_architecture(small_config(family))


@pytest.mark.parametrize("family", BY_CONFIG)
def test_refused_by_what_the_config_says(family: str) -> None:
    with pytest.raises(ModelError, match=f"^{family} models cannot run here: .*{BY_CONFIG[family]}"):
        check_architecture(small_config(family, **SETTINGS.get(family, {})))


@pytest.mark.parametrize("family", [*REASONS, *BY_CONFIG])
def test_without_the_refusal_the_output_would_be_wrong(family: str) -> None:
    """Run as an accepted model would be: the logits of some text are not the model's own."""
    model = small_model(family, **SETTINGS.get(family, {}))
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 128, (length,), generator=generator) for length in TEXT_LENGTHS]
    with torch.inference_mode():
        own = torch.cat([model(input_ids=text.unsqueeze(0)).logits[0] for text in texts])
        calls = attention_calls(model, ATTENTION_NAME)
        layers = [
            LayerSpec(call.layer_idx, call.num_heads, call.num_kv_heads, call.head_dim_k, call.head_dim_v, call.window)
            for call in calls
        ]
        paged = torch.cat(paged_logits(model, calls, layers, texts))
    assert (own - paged).abs().max() > 0.1 * own.std()


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8", "compressed-tensors", "mxfp4"])
def test_quantized_checkpoints_are_refused_by_method(method: str) -> None:
    config = config_of("llama", quantization_config={"quant_method": method})
    with pytest.raises(ModelError, match=f"quantized by {method}; use the unquantized one, or a GGUF file"):
        check_architecture(config)
