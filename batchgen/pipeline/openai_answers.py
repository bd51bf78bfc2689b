"""Committed rows as the lines of OpenAI's batch API."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from batchgen.pipeline.output_rows import Row, committed_files, key_of, rows
from batchgen.pipeline.stored import StoredOutput

_CHAT_URL = "/v1/chat/completions"


def _id_column(stored: StoredOutput) -> str | None:
    """The column that names the requests, where the output has one."""
    name = stored.job.input.id_column or "custom_id"
    return name if name in stored.schema.names else None


def answer_lines(stored: StoredOutput) -> Iterator[dict[str, Any]]:
    """A line for each input row, in the order of the input; `error` is None in those that are answers.

    Rows without an id of their own are named by their place. The same output gives the same lines.
    """
    name_column = _id_column(stored)
    files = committed_files(stored)
    numbers = sorted(files, key=lambda number: files[number].summary.ranges[:1])
    for (source, number), group in groupby(rows(stored, numbers), lambda row: key_of(row, stored)):
        samples = list(group)
        record = samples[0][stored.layout.struct_name]
        name = f"{stored.plan.fingerprint[:12]}-{source}-{number}"
        custom_id = f"row-{source}-{number}" if name_column is None else samples[0][name_column]
        line: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": str(custom_id), "response": None, "error": None}
        if record["status"] == "error":
            line["error"] = {"code": record["error_code"], "message": record["error_message"]}
        else:
            body = _body(stored, samples, name)
            line["response"] = {"status_code": 200, "request_id": f"req_{name}", "body": body}
        yield line


def _body(stored: StoredOutput, samples: list[Row], name: str) -> dict[str, Any]:
    """OpenAI's `chat.completion` or `text_completion` object."""
    record = samples[0][stored.layout.struct_name]
    is_chat = samples[0].get("url", _CHAT_URL if stored.job.prompt.is_chat else "") == _CHAT_URL
    texts = list(_samples(stored, samples))
    num_completion_tokens = sum(sample["completion_tokens"] for sample in texts)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(datetime.datetime.fromisoformat(stored.plan.started).timestamp()),
        "model": stored.job.model.path,
        "choices": [_choice(index, sample, is_chat) for index, sample in enumerate(texts)],
        "usage": {
            "prompt_tokens": record["prompt_tokens"],
            "completion_tokens": num_completion_tokens,
            "total_tokens": record["prompt_tokens"] + num_completion_tokens,
        },
    }


def _samples(stored: StoredOutput, rows_of_one: list[Row]) -> Iterator[dict[str, Any]]:
    """Text, reasoning, tokens and end of each sample, whichever layout holds them."""
    layout = stored.layout
    for row in rows_of_one:
        record = row[layout.struct_name]
        texts, reasonings = row[layout.completion_name], row.get(layout.prefix + "reasoning")
        if layout.exploded:
            yield {**record, "text": texts, "reasoning": reasonings}
            continue
        for index, text in enumerate(texts):
            own = {key: record[key][index] for key in ("completion_tokens", "finish_reason")}
            yield {**own, "text": text, "reasoning": reasonings and reasonings[index]}


def _choice(index: int, sample: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    end = {"logprobs": None, "finish_reason": sample["finish_reason"]}
    if not is_chat:
        return {"index": index, "text": sample["text"], **end}
    message = {"role": "assistant", "content": sample["text"]}
    if sample["reasoning"] is not None:
        message["reasoning_content"] = sample["reasoning"]
    return {"index": index, "message": message, **end}
