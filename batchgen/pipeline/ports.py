"""What the runner needs of an engine and of a feeder, so that tests plug in fakes."""

from __future__ import annotations

import datetime
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.data.input_rows import InputRow, InputScan
from batchgen.pipeline.where import OutputFilter
from batchgen.records import Completion, PartialSample, Prompt, RowError, RowRange


class PreparedRow(NamedTuple):
    """A row on its way to the engine: rendered and tokenized, or with the reason why it could not be."""

    row: InputRow
    prompt_token_ids: list[int] | None
    error: RowError | None
    format_name: str | None = None
    """Which of `sampling.response_format.of` it has, where rows select."""
    is_thinking: bool = False
    """Whether the prompt ends where the model is to go on thinking."""
    parameters: dict[str, Any] | None = None
    """Sampling parameters that the row itself asks for, under our names."""


class EncodedRow(NamedTuple):
    """A prepared row as it travels back: ids in four bytes each, no values."""

    source: int
    row: int
    token_ids: array[int] | None
    error: RowError | None
    format_name: str | None = None
    is_thinking: bool = False
    """Whether the prompt ends where the model is to go on thinking."""
    parameters: dict[str, Any] | None = None
    """Sampling parameters that the row itself asks for, under our names."""


class EngineLike(Protocol):
    """An engine that is driven one step at a time."""

    @property
    def num_unfinished(self) -> int:
        """Prompts in flight."""
        ...

    @property
    def wants_prompts(self) -> bool:
        """Whether the window has room for another prompt."""
        ...

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and completion together."""
        ...

    @property
    def metrics(self) -> Any:
        """Counters since the engine was made."""
        ...

    @property
    def resolved(self) -> Mapping[str, Any]:
        """What `auto` came to and can change a token: `model.dtype`, `model.max_model_len`, `device` and so on."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about this model on this machine."""
        ...

    def add(self, prompt: Prompt) -> int:
        """Queue one prompt and return its index."""
        ...

    def step(self) -> list[Completion]:
        """Compute one batch; returns the completions that it finished."""
        ...

    def partials(self) -> Iterator[tuple[int, list[PartialSample]]]:
        """The tokens so far of the prompts that are not finished."""
        ...

    def close(self) -> None:
        """Drop everything in flight."""
        ...


class FeederLike(Protocol):
    """Prepares rows in the background, in input order."""

    def get(self, timeout: float) -> PreparedRow | None:
        """The next row; None where none is ready within `timeout` seconds, or there is none left."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether `get` has given every row."""
        ...

    def close(self) -> None:
        """End threads and children; a second call does nothing."""
        ...


class ModelFiles(NamedTuple):
    """A model on this machine."""

    directory: Path
    hashes: dict[str, list[Any]]
    """By file name: sha256, size, mtime in ns, inode."""


MakeEngine = Callable[[JobConfig, Path], EngineLike]
"""(job with every `auto` that is known already resolved, model directory) -> engine."""


class FeedRequest(NamedTuple):
    """What a feeder is to prepare."""

    job: JobConfig
    scan: InputScan
    ranges: Iterable[RowRange]
    """In the order in which the rows are wanted; a worker adds to them while it runs."""
    model_directory: Path
    max_model_len: int
    started: datetime.datetime
    """When the output was begun: the time that templates see, in every run."""


MakeFeeder = Callable[[FeedRequest], FeederLike]


class PromptCheck(Protocol):
    """The prompts of a job: tried in the background, and later prepared."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` need not wait for the templates any more."""
        ...

    def wait(self) -> None:
        """JobError for what would be wrong with every prompt; called before the model is loaded."""
        ...

    def make_feeder(self, request: FeedRequest) -> FeederLike:
        """Prepare rows with what the check has started; once, after `wait`. Closing the check ends it too."""
        ...

    def close(self) -> None:
        """End threads and children; a second call does nothing."""
        ...


class NoCheck:
    """The check of who finds out while rows are prepared."""

    is_done = True

    def __init__(self, make_feeder: MakeFeeder) -> None:
        self.make_feeder = make_feeder

    def wait(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to end."""


CheckPrompts = Callable[[FeedRequest], PromptCheck]
"""Starts to check the prompts."""

FindModel = Callable[[JobConfig, Mapping[str, list[Any]]], ModelFiles]
"""(job, hashes known from an earlier run) -> model."""


class RowChoice(Protocol):
    """Chooses rows of an output."""

    @property
    def columns(self) -> list[str]:
        """Those that it looks at."""
        ...

    def choose(self, rows: Sequence[dict[str, Any]]) -> list[bool]:
        """Of each row whether it is chosen; JobError where that cannot be said."""
        ...

    def close(self) -> None:
        """End what evaluates it."""
        ...


MakeFilter = Callable[[str, list[str]], RowChoice]
"""(expression, columns of the output) -> what chooses; JobError where the expression is wrong."""


@dataclass(frozen=True)
class Services:
    """The outside world of a run; tests replace parts of it."""

    find_model: FindModel
    make_engine: MakeEngine
    make_feeder: MakeFeeder
    files: OutputFiles = field(default_factory=OutputFiles)
    check_prompts: CheckPrompts | None = None
    """None: what is wrong with every prompt is found when rows are prepared."""
    import_engine: Callable[[], Iterator[None]] = lambda: iter(())
    """Imports what `make_engine` needs, a part at a time; what is left out is imported there."""
    make_filter: MakeFilter = OutputFilter
    make_for_worker: Callable[[], Services] | None = None
    """The services of a worker process, which imports this function by its name; None: there are no workers."""
