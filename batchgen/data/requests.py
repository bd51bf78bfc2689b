"""Rows that hold a request of OpenAI's API: a chat or a text, with sampling parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from batchgen.config_problems import wrong_value
from batchgen.data.chat_messages import type_name
from batchgen.data.input_rows import RowFailure
from batchgen.data.json_text import parsed
from batchgen.sampling_params import SamplingParams

_NUMBER = (int, float)
_PARAMETERS: dict[str, tuple[str, tuple[type, ...]]] = {
    "max_tokens": ("max_tokens", (int,)),
    "max_completion_tokens": ("max_tokens", (int,)),
    "temperature": ("temperature", _NUMBER),
    "top_p": ("top_p", _NUMBER),
    "n": ("n", (int,)),
    "best_of": ("best_of", (int,)),
    "stop": ("stop", (str, list)),
    "seed": ("seed", (int,)),
    "presence_penalty": ("presence_penalty", _NUMBER),
    "frequency_penalty": ("frequency_penalty", _NUMBER),
    "logit_bias": ("logit_bias", (dict,)),
    "top_k": ("top_k", (int,)),
    "min_p": ("min_p", _NUMBER),
    "repetition_penalty": ("repetition_penalty", _NUMBER),
    "min_tokens": ("min_tokens", (int,)),
    "stop_token_ids": ("stop_token_ids", (list,)),
    "ignore_eos": ("ignore_eos", (bool,)),
}
"""Key of a request -> name of ours, and the types that it may have: OpenAI's, and those that vLLM adds."""

_IGNORED = frozenset(
    {
        "model",
        "messages",
        "prompt",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
    }
)
_WITHOUT_EFFECT = {
    "stream": False,
    "echo": False,
    "logprobs": False,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
}
"""What may be said where it asks for nothing."""


def request_of(value: Any, column: str) -> dict[str, Any]:
    """The body of a row; RowFailure `null_prompt` or `bad_request`. Keys that are null are as good as left out."""
    if value is None:
        raise RowFailure("null_prompt", f"column {column!r} is null")
    if isinstance(value, str):
        try:
            value = parsed(value)
        except (ValueError, RecursionError) as error:
            raise RowFailure("bad_request", f"column {column!r} holds text that is no JSON object") from error
    if not isinstance(value, dict):
        raise RowFailure("bad_request", f"column {column!r} holds {type_name(value)}, not the body of a request")
    body = {key: item for key, item in value.items() if item is not None}
    if ("messages" in body) == ("prompt" in body):
        raise RowFailure("bad_request", "the request must have either messages or a prompt")
    if not isinstance(body.get("prompt", ""), str):
        raise RowFailure("bad_request", f"the prompt is {type_name(body['prompt'])}, not a string")
    return body


def parameters_of(body: Mapping[str, Any], base: SamplingParams) -> dict[str, Any]:
    """What the request asks for otherwise than the job's `sampling`, under our names; RowFailure `bad_parameters`."""
    asked: dict[str, Any] = {}
    for key, value in body.items():
        if key in _PARAMETERS:
            name, types = _PARAMETERS[key]
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise RowFailure("bad_parameters", f"{key} is {type_name(value)}")
            asked[name] = [value] if name == "stop" and isinstance(value, str) else value
        elif key not in _IGNORED and (key not in _WITHOUT_EFFECT or value != _WITHOUT_EFFECT[key]):
            raise RowFailure("bad_parameters", f"{key!r} is not read from requests; see to it in the job's sampling")
    try:
        with_parameters(base, asked)
    except ValidationError as error:
        name, reason = wrong_value(error.errors(include_url=False)[0], ("sampling",))
        raise RowFailure("bad_parameters", f"{name}: {reason}" if name else reason) from error
    return asked


def with_parameters(base: SamplingParams, asked: Mapping[str, Any]) -> SamplingParams:
    """The job's sampling with what a request asks for otherwise."""
    return SamplingParams.model_validate({**dict(base), **asked})
