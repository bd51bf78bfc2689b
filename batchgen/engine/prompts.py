"""What `Engine.generate` is given, prompts of any kind and parameters for them, as what `Engine.add` takes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import repeat

from batchgen.records import Prompt
from batchgen.sampling_params import SamplingParams

AnyPrompt = str | list[int] | Prompt | None
"""Text, token ids, both with more; None is a prompt that is an error."""


def with_params(
    prompts: Iterable[AnyPrompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[Prompt, SamplingParams | None]]:
    """Each prompt, its row the position in `prompts` where it has none, with its parameters: one for all, or its own.

    Raises TypeError at once where one prompt stands for a list of them; while it is read, TypeError for what is no
    prompt, and ValueError where the parameters end before the prompts.
    """
    if isinstance(prompts, (str, bytes, Mapping, Prompt)):
        raise TypeError(f"prompts must be a list or another iterable of prompts, got {type(prompts).__name__}")
    if isinstance(params, (str, Mapping)):
        raise TypeError(f"params must be SamplingParams, or one for each prompt, got {type(params).__name__}")
    return _with_params(prompts, params)


def _with_params(
    prompts: Iterable[AnyPrompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[tuple[Prompt, SamplingParams | None]]:
    each_params = repeat(params) if params is None or isinstance(params, SamplingParams) else iter(params)
    for position, prompt in enumerate(prompts):
        yield _as_prompt(prompt, position), _params_at(each_params, position)


def _params_at(each_params: Iterator[SamplingParams | None], position: int) -> SamplingParams | None:
    for params in each_params:
        return params
    raise ValueError(f"params has {position} entries, but there are more prompts; give one for each, or one for all")


def _as_prompt(prompt: AnyPrompt, position: int) -> Prompt:
    if prompt is None:
        return Prompt(row=position)
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, (str, Prompt, Iterable)):
        raise TypeError(f"prompt {position} must be text, a list of token ids or a Prompt, got {type(prompt).__name__}")
    if isinstance(prompt, Prompt):
        return prompt if prompt.row is not None else replace(prompt, row=position)
    if isinstance(prompt, str):
        return Prompt(text=prompt, row=position)
    return Prompt(token_ids=list(prompt), row=position)
