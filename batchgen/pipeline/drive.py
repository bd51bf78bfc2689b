"""The loop of a run: rows in, steps, finished rows to the journal, whole shards to the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import Any, NamedTuple

from batchgen.data.journal import Journal
from batchgen.data.requests import with_parameters
from batchgen.data.rows import FinishedRow, KeptColumns, RowKey, finished_row
from batchgen.errors import BatchgenError, OutputUnavailable, TooManyRowErrors
from batchgen.pipeline.assembly import Assembly, WholeShard
from batchgen.pipeline.ports import EngineLike, FeederLike, PreparedRow
from batchgen.pipeline.progress import Progress, ProgressSnapshot
from batchgen.pipeline.stop import StopWatch
from batchgen.records import Completion, Prompt
from batchgen.sampling_params import SamplingParams

MAX_OPEN_SHARDS = 8
"""Finished rows of open shards are held in memory; a row that takes very long must not let them pile up."""
MIN_ROWS_FOR_ERROR_RATE = 100
NUM_SLOWEST = 10
"""Rows whose time is kept."""
PROGRESS_SECONDS = 0.25
_WAIT_SECONDS = 0.1


class SlowRow(NamedTuple):
    """A row and how long it took; sorted by time."""

    seconds: float
    """From its first step to its last."""
    source: int
    row: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Tally:
    """Rows of the whole job so far, and tokens of this run."""

    num_rows: int
    num_done: int
    num_errors: int
    num_committed: int = 0
    """Rows that this run committed."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    longest_tokens: int = 0
    """Of one sample."""
    slowest: list[SlowRow] = field(default_factory=list)
    """A heap of the rows that took longest, at most NUM_SLOWEST."""

    @property
    def error_rate(self) -> float:
        """Share of the rows done that are errors."""
        return self.num_errors / self.num_done if self.num_done else 0.0

    def add(self, row: FinishedRow) -> None:
        """Count a row that this run finished."""
        self.add_known(row)
        self.prompt_tokens += row.prompt_tokens or 0
        self.completion_tokens += row.completion_tokens

    def add_known(self, row: FinishedRow) -> None:
        """Count a row that an earlier run finished."""
        self.num_done += 1
        self.num_errors += row.error is not None
        self.longest_tokens = max(self.longest_tokens, *(s.completion_tokens for s in row.samples), 0)

    def note_time(self, slow: SlowRow) -> None:
        """Keep it if it is among the slowest so far."""
        if len(self.slowest) < NUM_SLOWEST:
            heappush(self.slowest, slow)
        else:
            heappushpop(self.slowest, slow)

    def take_back(self, num_error_rows: int) -> None:
        """Error rows are to be generated anew."""
        self.num_done -= num_error_rows
        self.num_errors -= num_error_rows


@dataclass(frozen=True)
class DriveOptions:
    """What of a job the loop needs."""

    sampling: SamplingParams
    kept: KeptColumns
    max_error_rate: float
    journal_seconds: float
    clock: Callable[[], float] = field(default=time.monotonic)


class Drive:
    """Runs the rows of an assembly through an engine until all its shards are committed, or there is a reason to stop.

    Raises Interrupted and TooManyRowErrors, with everything finished in the journal.
    """

    def __init__(
        self,
        engine: EngineLike,
        assembly: Assembly,
        journal: Journal,
        commit: Callable[[WholeShard], None],
        tally: Tally,
        options: DriveOptions,
    ) -> None:
        """`commit` makes a whole shard durable."""
        self._engine = engine
        self._assembly = assembly
        self._journal = journal
        self._commit = commit
        self._tally = tally
        self._options = options
        # One object for all rows of a format: what it comes to is found out once.
        forms = options.sampling.response_format
        choices = {} if forms is None or forms.of is None else forms.of
        self._params = {None: options.sampling} | {
            name: options.sampling.model_copy(update={"response_format": form}) for name, form in choices.items()
        }
        self._keys: dict[int, RowKey] = {}
        """Row of each prompt index in flight."""
        self._latest: tuple[tuple[str | None, dict[str, Any]], SamplingParams] | None = None
        """Rows that ask for the same share one object too."""
        self._thinking: set[int] = set()
        """Those of them whose prompt ends where the model is to go on thinking."""
        self._held: PreparedRow | None = None
        """A row that waits until an open shard is whole."""
        self._next_sync = options.clock() + options.journal_seconds
        self._next_progress = 0.0

    def run(self, feeder: FeederLike, stop: StopWatch, progress: Progress | None) -> None:
        """Work until everything is committed."""
        try:
            while not self._assembly.is_done:
                stop.check()
                self.turn(feeder)
                self._show(progress)
        except OutputUnavailable:
            raise
        except BatchgenError:
            self.save()
            raise
        self._show(progress, now=True)

    def turn(self, feeder: FeederLike) -> None:
        """Admit what there is room for, make one step, and take in what it finished."""
        self._admit(feeder)
        for completion in self._engine.step() if self._engine.num_unfinished else ():
            self._complete(completion)
        self._note_partials()

    def save(self) -> None:
        """Make durable what is finished, and the tokens so far of what is not."""
        for index, samples in self._engine.partials():
            self._journal.add_partial(self._keys[index], samples)
        self._journal.sync()

    def _admit(self, feeder: FeederLike) -> None:
        while self._engine.wants_prompts:
            if self._held is None:
                # An idle engine waits for its rows; a busy one takes what is ready.
                self._held = feeder.get(0.0 if self._engine.num_unfinished else _WAIT_SECONDS)
            if self._held is None:
                if feeder.is_over and not self._engine.num_unfinished and not self._assembly.is_done:
                    raise BatchgenError("the feeder ended before every row was prepared; this is a bug")
                return
            key = (self._held.row.source, self._held.row.row)
            if self._assembly.opens_a_shard(key) and self._assembly.num_open >= MAX_OPEN_SHARDS:
                return
            prepared, self._held = self._held, None
            self._assembly.expect(key)
            self._begin(key, prepared)

    def _begin(self, key: RowKey, prepared: PreparedRow) -> None:
        if prepared.error is not None or prepared.prompt_token_ids is None:
            num_tokens = None if prepared.prompt_token_ids is None else len(prepared.prompt_token_ids)
            self._finish(FinishedRow(*key, error=prepared.error, prompt_tokens=num_tokens))
            return
        prompt = Prompt(
            token_ids=prepared.prompt_token_ids,
            params=self._params_of(prepared),
            source=key[0],
            row=key[1],
            partial=list(self._journal.entries.partials.pop(key, {}).values()),
        )
        index = self._engine.add(prompt)
        self._keys[index] = key
        if prepared.is_thinking:
            self._thinking.add(index)

    def _params_of(self, prepared: PreparedRow) -> SamplingParams:
        base = self._params[prepared.format_name]
        if not prepared.parameters:
            return base
        asked = (prepared.format_name, prepared.parameters)
        if self._latest is None or self._latest[0] != asked:
            self._latest = (asked, with_parameters(base, prepared.parameters))
        return self._latest[1]

    def _complete(self, completion: Completion) -> None:
        key = self._keys.pop(completion.prompt_index)
        is_thinking = completion.prompt_index in self._thinking
        self._thinking.discard(completion.prompt_index)
        row = finished_row(*key, completion, self._options.kept, is_thinking=is_thinking)
        if completion.seconds > 0:
            self._tally.note_time(SlowRow(completion.seconds, *key, row.prompt_tokens or 0, row.completion_tokens))
        self._finish(row)

    def _finish(self, row: FinishedRow) -> None:
        self._journal.add_finished(row)
        self._tally.add(row)
        whole = self._assembly.finish(row)
        if whole is not None:
            self._commit(whole)
        if self._tally.num_done >= MIN_ROWS_FOR_ERROR_RATE:
            check_error_rate(self._tally, self._options.max_error_rate)

    def _note_partials(self) -> None:
        if self._options.clock() >= self._next_sync:
            self.save()
            self._next_sync = self._options.clock() + self._options.journal_seconds

    def _show(self, progress: Progress | None, now: bool = False) -> None:
        if progress is None or (not now and self._options.clock() < self._next_progress):
            return
        self._next_progress = self._options.clock() + PROGRESS_SECONDS
        progress.update(snapshot(self._tally, self._engine, self._options.sampling))


def check_error_rate(tally: Tally, max_error_rate: float) -> None:
    """Raise TooManyRowErrors where a larger share of the rows failed than the job allows."""
    if tally.error_rate > max_error_rate:
        raise TooManyRowErrors(
            f"{tally.num_errors} of {tally.num_done} rows are errors, a share of {tally.error_rate:.1%}; "
            f"run.max_error_rate is {max_error_rate:.1%}. What is committed stays"
        )


def snapshot(tally: Tally, engine: EngineLike, sampling: SamplingParams) -> ProgressSnapshot:
    """Where the run stands; tokens of unfinished rows count too."""
    metrics = engine.metrics
    return ProgressSnapshot(
        num_rows=tally.num_rows,
        num_done=tally.num_done,
        num_errors=tally.num_errors,
        prompt_tokens=tally.prompt_tokens,
        completion_tokens=metrics.num_drawn_tokens,
        finished_tokens=tally.completion_tokens,
        longest_tokens=tally.longest_tokens,
        most_row_tokens=None if sampling.max_tokens is None else sampling.max_tokens * sampling.num_sequences,
        sequences_per_row=sampling.num_sequences,
        num_in_flight=engine.num_unfinished,
        num_running=metrics.num_running,
        num_waiting=metrics.num_waiting,
        kv_use=metrics.kv_share,
        kv_useful=metrics.mean_useful_share,
        computed_tokens=metrics.num_computed_tokens,
        cached_tokens=metrics.num_cached_tokens,
        num_preemptions=metrics.num_preemptions,
        num_copies=metrics.num_copies,
        num_steps=metrics.num_steps,
    )
