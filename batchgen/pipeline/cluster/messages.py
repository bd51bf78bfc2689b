"""What the runner and its workers say to each other. Rows never travel: they lie on the output's file system."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from batchgen import errors
from batchgen.config import JobConfig
from batchgen.data.input_rows import InputScan
from batchgen.data.writer import ShardSummary, WrittenShard
from batchgen.errors import BatchgenError
from batchgen.pipeline.ports import Services
from batchgen.records import RowRange

BEAT_SECONDS = 1.0
"""A worker's engine gives a sign of life so often, if its steps are that short."""
MIN_TIMEOUT = 1.0
"""Seconds; a shorter `run.worker_timeout` would end workers that are only slow to be scheduled."""


@dataclass(frozen=True)
class LoadOrder:
    """What a worker needs to load its engine; travels once to each worker, later ones included."""

    attempt: str
    """The run that asks."""
    topic: str
    """Where messages to the runner go."""
    job: JobConfig
    """With every `auto` resolved that is known already."""
    model_hashes: Mapping[str, list[Any]]
    """Of the runner's model files: a worker with other ones takes no part."""
    output_root: Path
    make_services: Callable[[], Services]
    timeout: float
    """Seconds without a step after which a worker ends itself."""


@dataclass(frozen=True)
class WorkOrder:
    """What a worker needs to make rows; travels once for each kind of work."""

    number: int
    """Tasks name the order that they belong to."""
    job: JobConfig
    """With every `auto` resolved."""
    scan: InputScan
    source_schema: pa.Schema
    """Columns carried through; those of the first run, where inputs grew."""
    fingerprint: str
    scope: str
    """Of the journal."""
    started: str
    """When the output was begun, ISO 8601."""


class Task(NamedTuple):
    """Rows that a worker shall finish: a shard, or a piece of one."""

    id: int
    order: int
    shard: int
    """Number of the shard that the rows belong to."""
    ranges: tuple[RowRange, ...]
    write: bool
    """Whether the rows are a whole shard, to be written; else they go to the journal alone."""
    segments: tuple[str, ...]
    """Segments of the journal that know something of these rows."""
    committed: tuple[int, ...]
    """Tasks of this worker whose rows are committed: their journal is of no use any more."""


class Counts(NamedTuple):
    """Figures of a task so far."""

    rows: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, other: Counts) -> Counts:
        """The sum."""
        return Counts(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


State = Literal["loading", "ready", "refused", "leaving"]


class Facts(NamedTuple):
    """What a worker is, once its engine is loaded."""

    name: str
    address: str
    host: str
    pid: int
    resolved: dict[str, Any]
    notes: list[str]
    recorded: dict[str, Any]
    max_model_len: int
    kv_tokens: int


class Beat(NamedTuple):
    """A sign of life from inside the step loop."""

    worker: str
    """Name of this incarnation of the worker: no other one has it."""
    address: str
    state: State
    figures: dict[str, Any]
    """Counters of the engine."""
    tasks: list[list[int]]
    """Task id and counts of each task at work."""
    facts: dict[str, Any] | None
    """Until the first task arrives."""


class Done(NamedTuple):
    """A task is finished."""

    worker: str
    task: int
    counts: list[int]
    segments: list[str]
    """Segments of the journal with these rows, where nothing was written."""
    written: dict[str, Any] | None


class HandedBack(NamedTuple):
    """A task is given up in good order: what was finished is in the journal."""

    worker: str
    task: int


class Failed(NamedTuple):
    """The run cannot go on as it is, or this worker cannot take part."""

    worker: str
    error: str
    """Name of its class, which decides the exit code."""
    text: str
    is_refusal: bool
    """Whether this worker alone is concerned."""


Message = Beat | Done | HandedBack | Failed
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Beat, Done, HandedBack, Failed)}


def to_wire(message: Message) -> dict[str, Any]:
    """Plain values for dask's event channel, which adds entries of its own."""
    return {"kind": type(message).__name__, "fields": message._asdict()}


def from_wire(value: Mapping[str, Any]) -> Message:
    """Inverse of `to_wire`."""
    message: Message = _KINDS[value["kind"]](**_with_lists(value["fields"]))
    return message


def _with_lists(value: Any) -> Any:
    """Lists for the tuples that msgpack makes of them: values are compared with those of JSON."""
    if isinstance(value, dict):
        return {key: _with_lists(each) for key, each in value.items()}
    return [_with_lists(each) for each in value] if isinstance(value, list | tuple) else value


def written_to_wire(written: WrittenShard) -> dict[str, Any]:
    """A written file as plain values."""
    return {**written._asdict(), "path": str(written.path), "summary": written.summary.to_json()}


def written_from_wire(value: Mapping[str, Any]) -> WrittenShard:
    """Inverse of `written_to_wire`."""
    summary = ShardSummary.from_json(value["summary"])
    return WrittenShard(Path(value["path"]), summary, value["num_bytes"], value["sha256"])


def failed(worker: str, error: BatchgenError, *, is_refusal: bool) -> Failed:
    """The message about an error."""
    return Failed(worker, type(error).__name__, str(error), is_refusal)


def error_of(message: Failed) -> BatchgenError:
    """The error that a message is about; never unpickled, since it comes from outside."""
    kind = getattr(errors, message.error, None)
    if not isinstance(kind, type) or not issubclass(kind, BatchgenError) or kind is errors.JobFileError:
        return BatchgenError(message.text)
    return kind(message.text)
