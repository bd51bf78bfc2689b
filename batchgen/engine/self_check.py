"""Before a model runs: does it compute the same over paged, flattened tokens as by itself?

Several architectures run silently wrong when their attention alone is replaced: recurrent state, a window that
exists only in the mask, a bias that the attention function never sees. So a miniature of the same config, with
random weights in float32, computes texts of different lengths both ways: each alone with transformers' own eager
attention, and all of them together, in chunks, over shuffled blocks of a paged cache, longer than the window.
The logits must agree at every position. The verdict is kept by config and versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig, PreTrainedModel

from batchgen.engine.attention import ATTENTION_NAME, LayerAttention
from batchgen.engine.layers import LayerSpec, layer_specs
from batchgen.engine.miniature import miniature_config, random_model
from batchgen.engine.ops import REFERENCE
from batchgen.engine.positions import freeze_rope
from batchgen.engine.probe import AttentionCall, probe_attention
from batchgen.engine.refused import refusal
from batchgen.engine.step_inputs import StepInputs
from batchgen.engine.verdicts import remembered
from batchgen.errors import ModelError

CHECK = "self_check-1"
"""Names the verdicts: raise the number with every change of what is checked."""

BLOCK_SIZE = 4
TOLERANCE = 1e-3
"""Largest difference of a logit, in standard deviations of all logits; rounding gives about 1e-5."""

TEXT_LENGTHS = (5, 37, 1, 22)
SCHEDULE = (((0, 5), (1, 13), (3, 8)), ((1, 11), (3, 1), (2, 1)), ((3, 13), (1, 1)), ((1, 12),))
"""Per step (text, number of its next tokens): whole texts, chunks, single tokens, side by side."""


_FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError)
"""What a forward pass that does not fit the architecture raises; each becomes the reason of a refusal."""


class Chunk(NamedTuple):
    """The next tokens of one text in a step."""

    text: int
    start: int
    stop: int


def check_architecture(config: PretrainedConfig) -> None:
    """Raise ModelError, by name and reason, if models of this config would run wrong."""
    text_config = config.get_text_config(decoder=True)
    reason = refusal(config) or refusal(text_config)
    if reason is None:
        values = {key: value for key, value in text_config.to_dict().items() if key != "_name_or_path"}
        reason = remembered(CHECK, values, lambda: difference(text_config) or "")
    if reason:
        raise ModelError(f"{text_config.model_type} models cannot run here: {reason}")


def difference(config: PretrainedConfig) -> str | None:
    """What a miniature of this config computes differently when paged; None if all is equal."""
    try:
        small = miniature_config(config)
        eager = random_model(small, "eager")
    except (*_FAILURES, StrictDataclassError) as error:
        return f"no miniature of it can be built to check it ({type(error).__name__}: {error})"
    try:
        return compare(eager, small)
    except ModelError as error:
        return str(error)
    except _FAILURES as error:
        return f"a forward pass over flattened tokens fails ({type(error).__name__}: {error})"


def compare(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    """Run a small model both ways; say where they differ, or None."""
    texts = _texts(config.vocab_size)
    freeze_rope(model, max(TEXT_LENGTHS))
    with torch.inference_mode():
        expected = [model(input_ids=text.unsqueeze(0)).logits[0] for text in texts]
        calls = probe_attention(model, ATTENTION_NAME)
        layers = layer_specs(calls, config)
        if len(calls) != config.num_hidden_layers:
            return f"of {config.num_hidden_layers} layers only {len(calls)} call attention; the others keep other state"
        actual = paged_logits(model, calls, layers, texts)
    spread = torch.cat(expected).std().item()
    for index, (own, paged) in enumerate(zip(expected, actual, strict=True)):
        error = (own - paged).abs().amax(-1) / spread
        if not bool((error <= TOLERANCE).all()):
            position = int((~(error <= TOLERANCE)).nonzero()[0])
            return (
                f"over paged attention the logits of token {position} in a text of {TEXT_LENGTHS[index]} differ "
                f"from the model's own by {error[position].item():.2g} standard deviations"
            )
    return None


def _texts(vocab_size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(min(3, vocab_size - 1), vocab_size, (length,), generator=generator) for length in TEXT_LENGTHS
    ]


def paged_logits(
    model: PreTrainedModel, calls: list[AttentionCall], layers: list[LayerSpec], texts: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Logits of every text [length, V], computed together by SCHEDULE over shuffled blocks."""
    tables = _shuffled_tables()
    num_blocks = sum(len(table) for table in tables)
    states = [_layer_state(spec, num_blocks) for spec in layers]
    for call, state in zip(calls, states, strict=True):
        call.module.batchgen_attention = state  # type: ignore[assignment]
    pieces: list[list[torch.Tensor]] = [[] for _ in texts]
    done = [0] * len(texts)
    for number, step in enumerate(SCHEDULE):
        chunks = [Chunk(text, done[text], done[text] + count) for text, count in step]
        inputs = _step_inputs(chunks, tables)
        for state in states:
            state.step = inputs
        input_ids = torch.cat([texts[chunk.text][chunk.start : chunk.stop] for chunk in chunks])
        positions = torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks])
        output = model(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.arange(len(input_ids)),
        )
        for state in states:
            if state.num_calls != number + 1:
                raise ModelError(f"a layer calls attention {state.num_calls} times in {number + 1} steps")
        sizes = [chunk.stop - chunk.start for chunk in chunks]
        for chunk, logits in zip(chunks, output.logits[0].split(sizes), strict=True):
            pieces[chunk.text].append(logits)
            done[chunk.text] = chunk.stop
    return [torch.cat(parts) for parts in pieces]


def _layer_state(spec: LayerSpec, num_blocks: int) -> LayerAttention:
    # NaN shows every read of a slot that was not written.
    k_cache = torch.full((num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim_k), torch.nan)
    v_cache = torch.full((num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim_v), torch.nan)
    return LayerAttention(REFERENCE, k_cache, v_cache, spec.window)


def _shuffled_tables() -> list[list[int]]:
    counts = [-(-length // BLOCK_SIZE) for length in TEXT_LENGTHS]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    tables = []
    for count in counts:
        tables.append(blocks[:count])
        blocks = blocks[count:]
    return tables


def _step_inputs(chunks: Sequence[Chunk], tables: list[list[int]]) -> StepInputs:
    slots, starts = [], [0]
    width = max(len(table) for table in tables)
    for text, start, stop in chunks:
        table = tables[text]
        slots += [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(start, stop)]
        starts.append(starts[-1] + stop - start)
    rows = [tables[chunk.text] + [0] * (width - len(tables[chunk.text])) for chunk in chunks]
    return StepInputs(
        slots_T=torch.tensor(slots),
        block_tables_SB=torch.tensor(rows, dtype=torch.int32),
        query_starts_S1=torch.tensor(starts, dtype=torch.int32),
        context_lens_S=torch.tensor([chunk.stop for chunk in chunks], dtype=torch.int32),
    )
