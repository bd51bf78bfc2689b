"""Committed rows as the lines of OpenAI's batch API: answers in one file, errors in another.

Both are made from the Parquet files, which stay what counts; the same output gives the same bytes.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchgen.data.commits import replay
from batchgen.errors import JobError, OutputUnavailable
from batchgen.pipeline.stored import StoredOutput

_BATCH_ROWS = 256
_CHAT_URL = "/v1/chat/completions"
_ID_COLUMNS = ("custom_id",)

Row = dict[str, Any]


def export_requests(stored: StoredOutput, answers: Path, errors: Path) -> tuple[int, int]:
    """Write both files anew; returns (lines of answers, lines of errors). JobError where a row has no id."""
    counts = [0, 0]
    try:
        with ExitStack() as stack:
            targets = [stack.enter_context(_Written(path)) for path in (answers, errors)]
            for line in _lines(stored):
                which = int(line["error"] is not None)
                targets[which].write(json.dumps(line, ensure_ascii=False) + "\n")
                counts[which] += 1
            for target in targets:
                target.publish()
    except OSError as error:
        where = error.filename or answers
        raise OutputUnavailable(f"{where}: cannot be written: {error.strerror}; mend it and run again") from error
    return counts[0], counts[1]


class _Written:
    """A file that appears under its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}")

    def __enter__(self) -> _Written:
        self._file = self._temporary.open("w", encoding="utf-8", newline="\n")
        return self

    def write(self, text: str) -> None:
        """Append some text."""
        self._file.write(text)

    def publish(self) -> None:
        """Give the file its name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._temporary.rename(self._path)

    def __exit__(self, *error: object) -> None:
        self._file.close()
        with suppress(FileNotFoundError):
            self._temporary.unlink()


def _lines(stored: StoredOutput) -> Iterator[Row]:
    id_column = _id_column(stored)
    for rows in _grouped(_rows(stored), stored.layout.struct_name):
        yield _line(stored, rows, id_column)


def _id_column(stored: StoredOutput) -> str:
    named = stored.job.input.id_column
    for name in _ID_COLUMNS if named is None else (named,):
        if name in stored.schema.names:
            return name
    raise JobError(f"{stored.paths.root}: has no column custom_id; name the rows with input.id_column")


def _rows(stored: StoredOutput) -> Iterator[Row]:
    """All committed rows in the order of the input."""
    shards = replay(stored.log.records, stored.plan.fingerprint).shards
    for number, _ in sorted(shards.items(), key=lambda item: item[1].summary.ranges[:1]):
        with pq.ParquetFile(stored.paths.shard(number)) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from batch.to_pylist()


def _grouped(rows: Iterable[Row], struct_name: str) -> Iterator[list[Row]]:
    """The rows of one input row together: there are several where samples are exploded."""
    held: list[Row] = []
    for row in rows:
        if held and _key(held[0], struct_name) != _key(row, struct_name):
            yield held
            held = []
        held.append(row)
    if held:
        yield held


def _key(row: Row, struct_name: str) -> tuple[int, int]:
    return row[struct_name]["source"], row[struct_name]["row"]


def _line(stored: StoredOutput, rows: list[Row], id_column: str) -> Row:
    record = rows[0][stored.layout.struct_name]
    name = f"{stored.plan.fingerprint[:12]}-{record['source']}-{record['row']}"
    line: Row = {"id": f"batch_req_{name}", "custom_id": rows[0][id_column], "response": None, "error": None}
    if record["status"] == "error":
        line["error"] = {"code": record["error_code"], "message": record["error_message"]}
    else:
        body = _body(stored, rows, name)
        line["response"] = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return line


def _body(stored: StoredOutput, rows: list[Row], name: str) -> Row:
    record = rows[0][stored.layout.struct_name]
    is_chat = rows[0].get("url", _CHAT_URL if stored.job.prompt.is_chat else "") == _CHAT_URL
    samples = list(_samples(stored, rows))
    num_completion_tokens = sum(sample["completion_tokens"] for sample in samples)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(datetime.datetime.fromisoformat(stored.plan.started).timestamp()),
        "model": stored.job.model.path,
        "choices": [_choice(index, sample, is_chat) for index, sample in enumerate(samples)],
        "usage": {
            "prompt_tokens": record["prompt_tokens"],
            "completion_tokens": num_completion_tokens,
            "total_tokens": record["prompt_tokens"] + num_completion_tokens,
        },
    }


def _samples(stored: StoredOutput, rows: list[Row]) -> Iterator[Row]:
    """Text, reasoning, tokens and end of each sample, whichever layout holds them."""
    layout = stored.layout
    for row in rows:
        record = row[layout.struct_name]
        texts, reasonings = row[layout.completion_name], row.get(layout.prefix + "reasoning")
        if layout.exploded:
            yield {**record, "text": texts, "reasoning": reasonings}
            continue
        for index, text in enumerate(texts):
            own = {key: record[key][index] for key in ("completion_tokens", "finish_reason")}
            yield {**own, "text": text, "reasoning": reasonings and reasonings[index]}


def _choice(index: int, sample: Row, is_chat: bool) -> Row:
    end = {"logprobs": None, "finish_reason": sample["finish_reason"]}
    if not is_chat:
        return {"index": index, "text": sample["text"], **end}
    message = {"role": "assistant", "content": sample["text"]}
    if sample["reasoning"] is not None:
        message["reasoning_content"] = sample["reasoning"]
    return {"index": index, "message": message, **end}
