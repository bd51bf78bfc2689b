"""int8 weights and an int8 KV cache: what they cost in exactness, where they are refused, and what they leave alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from batchgen_kernels import cpu
from torch import nn

from batchgen.engine import linear
from batchgen.engine.attention import ATTENTION_NAME
from batchgen.engine.engine import Engine
from batchgen.engine.fused_decoder import FusedDecoderLayer
from batchgen.engine.independent_rows import make_rows_independent
from batchgen.engine.kv_cache import KVCache, LayerShape
from batchgen.engine.linear import PackedLinear, checked_product, pack_linears
from batchgen.engine.miniature import random_model
from batchgen.errors import JobError, ModelError
from batchgen.records import Prompt
from batchgen.sampling_params import SamplingParams
from tests.engine.models import config_of, random_ids, save_model
from tests.engine.running import run

pytestmark = pytest.mark.skipif(not cpu.is_available(), reason="the C++ kernels are not built")

SCORE = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), "plain")


def scores(directory: Path, **options: Any) -> torch.Tensor:
    """The log-probability of every token of a few prompts."""
    engine = Engine(str(directory), **{"dtype": "bfloat16", "device": "cpu", "kv_cache_memory": "4MiB", **options})
    prompts = [Prompt(token_ids=random_ids(40 + 30 * row, row), row=row) for row in range(4)]
    completions = run(engine, prompts, [SCORE] * len(prompts))
    assert [completion.error for completion in completions] == [None] * len(prompts)
    entries = [entry for completion in completions for entry in (completion.prompt_logprobs or [])[1:]]
    return torch.tensor([entry[0].logprob for entry in entries if entry])


def test_the_loss_is_small_and_there(directory: Path) -> None:
    exact = scores(directory, dtype="float32")
    for options in ({"quantization": "int8"}, {"kv_dtype": "int8"}, {"quantization": "int8", "kv_dtype": "int8"}):
        lossy = scores(directory, **options)
        assert not torch.equal(lossy, scores(directory))
        # Rounding to 1/127 of a row's maximum is an error of some 0.3 % in each of a dozen products in a row.
        assert (lossy - exact).abs().mean() < 0.01 * exact.abs().mean()


def test_an_int8_cache_holds_nearly_twice_the_tokens() -> None:
    shapes = [LayerShape(3, 64, 64)] * 30
    exact, int8 = (KVCache.bytes_per_block(shapes, 16, dtype) for dtype in (torch.bfloat16, torch.int8))
    assert (exact, int8) == (30 * 3 * 128 * 16 * 2, 30 * 3 * (128 + 2 * 4) * 16)
    cache = KVCache(shapes[:1], 2, 16, torch.int8, torch.device("cpu"))
    assert cache.num_bytes == 2 * int8 // 30
    # Scales are copied with the blocks.
    assert [list(tensor.shape) for tensor in cache.tensors] == [[2, 3, 16, 64]] * 2 + [[2, 3, 16]] * 2


def test_every_layer_but_the_head_is_quantized() -> None:
    model = random_model(config_of("plain"), ATTENTION_NAME).to(torch.bfloat16)
    modules: list[nn.Module] = [layer.self_attn for layer in model.model.layers]
    make_rows_independent(model, modules, int8=True)
    assert [type(module) for module in modules] == [FusedDecoderLayer] * 2
    head = model.get_output_embeddings()
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    is_int8 = {module: module.kernel is not None and bool(module.kernel.prepared().column_scales) for module in packed}
    assert [module for module, quantized in is_int8.items() if not quantized] == [head]
    # Where no layer is fused, its products are.
    other = random_model(config_of("capped"), ATTENTION_NAME).to(torch.bfloat16)
    pack_linears(other, other.get_output_embeddings(), int8=True)
    kernels = [module.kernel for module in other.modules() if isinstance(module, PackedLinear)]
    assert sum(bool(kernel and kernel.prepared().column_scales) for kernel in kernels) == len(kernels) - 1 > 10


def test_a_wrong_int8_product_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = torch.randn(40, 70).bfloat16(), torch.randn(40).bfloat16()
    checked_product("layer", weight, bias, int8=True)
    quantize = linear.quantize_weight
    monkeypatch.setattr(linear, "quantize_weight", lambda weight: (quantize(weight)[0], quantize(weight)[1] * 1.1))
    with pytest.raises(ModelError, match="layer: the packed product differs"):
        checked_product("layer", weight, bias, int8=True)


def test_int8_weights_go_with_bfloat16_alone(directory: Path) -> None:
    with pytest.raises(JobError, match=r"model\.quantization: int8 goes with model\.dtype bfloat16, not float32"):
        Engine(str(directory), dtype="float32", device="cpu", quantization="int8", kv_cache_memory="1MiB")


def test_int8_weights_need_the_kernels(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_available", lambda: False)
    with pytest.raises(JobError, match=r"needs the C\+\+ kernels"):
        Engine(str(directory), dtype="bfloat16", device="cpu", quantization="int8", kv_cache_memory="1MiB")
