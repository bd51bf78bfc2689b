"""docs/models.md: where a model may come from, which families run, which are refused and why."""

from __future__ import annotations

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batchgen.engine.refused import REASONS
from batchgen.gguf.architectures import ARCHITECTURES
from batchgen.gguf.vocabulary import PRE_TOKENIZERS
from tests.engine.families import ACCEPTED, DIFFERENT, small_config

TEXT = """# Models

`model.path` is a Hugging Face id, a directory with `config.json` and safetensors, a GGUF file, or `package:NAME/FILE`
inside an installed Python package. Pickle is never read. A directory without a tokenizer serves token-id prompts.

## Which models run

batchgen runs transformers' own model code with its paged attention in place of theirs. That is right for most
decoder-only models and silently wrong for some, so every load begins with a self-check: a miniature of the same
config, with random weights in float32, computes texts of different lengths both ways (each alone with transformers'
eager attention; all together in chunks, over shuffled blocks, past the sliding window), and the logits must agree at
every position. A model that fails is refused with the reason. The verdict is kept in `$XDG_CACHE_HOME/batchgen`.

Checkpoints quantized by GPTQ, AWQ, fp8 and the like are refused by name: use the unquantized one, or a GGUF file.
RoPE of the types `dynamic` and `longrope` is frozen by `model.max_model_len`, because it would otherwise depend on
the neighbours in a batch; with `auto` that is the length for which the model was first trained.

### Families checked

The tests generate with a tiny random model of each and compare the ids with the model's own eager `generate`. Those in
bold are part of the fast suite. "Window" and "experts" tell what a tiny model of the family's default config has.

"""
REFUSED = """
### Families refused by name

Each has a test that shows the wrong output which its refusal prevents. Configs of other families that fail the
self-check are refused too, for example lfm2 and granitemoehybrid with layers that are not attention, or llama4 past
its attention chunk.

"""
GGUF = """
## GGUF

A GGUF file is converted once into the cache, to config.json, safetensors and tokenizer.json. Its architecture must be
one of {architectures}; every tensor type that the `gguf` package dequantizes is taken. Quantized weights become
float32, so `model.dtype: float32` computes with exactly what the file says; `auto` is bfloat16. The tokenizer must be
SentencePiece (`llama`) or byte-level BPE (`gpt2`) with one of the pre-tokenizers {pre}.
"""


def models_page(notice: str) -> str:
    """The page; `notice` says that it is generated."""
    rows = ["| model type | class | window | experts |", "|---|---|---|---|", *map(_row, sorted(ACCEPTED))]
    refused = ["| model type | reason |", "|---|---|", *(f"| {name} | {why} |" for name, why in REASONS.items())]
    gguf = GGUF.format(
        architectures=", ".join(f"`{name}`" for name in ARCHITECTURES),
        pre=", ".join(f"`{name}`" for name in sorted(PRE_TOKENIZERS)),
    )
    title, _, text = TEXT.partition("\n\n")
    return f"{title}\n\n{notice}\n{text}" + "\n".join(rows) + "\n" + REFUSED + "\n".join(refused) + "\n" + gguf


def _row(family: str) -> str:
    config = small_config(family)
    name = f"**{family}**" if family in DIFFERENT else family
    experts = any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    return f"| {name} | {MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]} | {_window(config)} | {'yes' if experts else ''} |"


def _window(config: PretrainedConfig) -> str:
    types = set(getattr(config, "layer_types", None) or ())
    if types:
        return "some layers" if "sliding_attention" in types else "chunk" if "chunked_attention" in types else ""
    return "all layers" if getattr(config, "sliding_window", None) else ""
