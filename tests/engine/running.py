"""Engines run to their end, with every block counted after every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchgen.engine.engine import Engine
from batchgen.records import Completion, Prompt
from batchgen.sampling_params import SamplingParams


def steps(engine: Engine, limit: int = 100_000) -> Iterator[list[Completion]]:
    """Step until nothing is left."""
    for _ in range(limit):
        if not engine.num_unfinished:
            return
        yield engine.step()
        engine.check_integrity()
    raise AssertionError(f"not finished after {limit} steps")


def run(
    engine: Engine, prompts: Sequence[Prompt | list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    """Add all prompts, step to the end; completions in the order of the prompts. All blocks are free at the end."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    indexes = [
        engine.add(prompt if isinstance(prompt, Prompt) else Prompt(token_ids=prompt, row=row), one)
        for row, (prompt, one) in enumerate(zip(prompts, each, strict=True))
    ]
    done = {completion.prompt_index: completion for step in steps(engine) for completion in step}
    assert engine.metrics.num_blocks_held == 0
    return [done[index] for index in indexes]
