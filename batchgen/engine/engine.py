"""The engine: prompts in, completions out, one step at a time."""

from __future__ import annotations

import os
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from batchgen.engine.batch import Batch, Draws, LogitsLayout
from batchgen.engine.beam import Continuation
from batchgen.engine.completions import completion_of
from batchgen.engine.loading import EngineOptions, EngineParts, load_parts
from batchgen.engine.masks import MaskMaker
from batchgen.engine.metrics import EngineMetrics
from batchgen.engine.prompts import AnyPrompt, with_params
from batchgen.engine.requests import RequestBuilder, RequestRefused
from batchgen.engine.sequence import Sequence, SequenceGroup, Status
from batchgen.errors import EngineStalled, JobError
from batchgen.records import Completion, PartialSample, Prompt, RowError
from batchgen.sampling_params import MAX_SEED, SamplingParams
from batchgen.tokenizer import Tokenizer

DEFAULT_WINDOW = 8192
"""Prompts in flight: two shards of the default size, so that rows with a common prefix meet."""
MOST_SAMPLES = 2**16
"""Samples of the prompts in flight, each with a copy of its prompt: where n is large, fewer prompts are in flight."""
KV_SAMPLE_STEPS = 4
"""Every so many steps the use of the KV cache is measured."""
_ELSEWHERE = "the engine is at work in another thread; call it from one, or make an engine for each"


class Flight(NamedTuple):
    """A step on its way: what it was asked, and what it will bring."""

    batch: Batch
    draws: Draws
    continuations: list[list[Continuation]]


class Engine:
    """Generates completions for prompts with one model on one device.

    `model` is a Hub id, a directory, a GGUF file or `package:NAME/FILE`; every option but those of the model's identity
    (`revision`, `dtype`, `quantization`, `kv_dtype`, `max_model_len`) changes speed and memory only, never a token.

    Raises ModelError where the model is not found, not readable or refused.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        revision: str | None = None,
        dtype: str = "auto",
        quantization: str | None = None,
        kv_dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | str = "auto",
        block_size: int = 16,
        kv_cache_memory: int | str = "auto",
        max_batch_tokens: int | str = "auto",
        max_sequences: int | str = "auto",
        threads: int | str = "auto",
        prefix_caching: bool = True,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        if window < 1:
            raise JobError(f"window must be at least 1, got {window}")
        options = EngineOptions(
            model=os.fspath(model),
            revision=revision,
            dtype=dtype,
            quantization=quantization,
            kv_dtype=kv_dtype,
            device=device,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            threads=threads,
            prefix_caching=prefix_caching,
        )
        self._begin(load_parts(options), window)

    @classmethod
    def from_parts(cls, parts: EngineParts, window: int = DEFAULT_WINDOW) -> Engine:
        """An engine over parts that are made already; this is where a fake model plugs in."""
        engine = cls.__new__(cls)
        engine._begin(parts, window)
        return engine

    def _begin(self, parts: EngineParts, window: int) -> None:
        self._runner = parts.runner
        self._sampler = parts.sampler
        self._scheduler = parts.scheduler
        self._is_asynchronous = parts.is_asynchronous
        self._flights: deque[Flight] = deque()
        """Steps that were launched and not accounted for, the oldest first: between two steps one at the most."""
        self._notes = parts.notes
        self._resolved = parts.resolved
        self._window = window
        self._requests = RequestBuilder(
            tokenizer=parts.tokenizer,
            vocab_size=parts.vocab_size,
            max_model_len=parts.max_model_len,
            eos_token_ids=parts.eos_token_ids,
            default_seed=secrets.randbelow(MAX_SEED),
        )
        self._masks = MaskMaker(parts.vocab_size)
        self._groups: dict[int, SequenceGroup] = {}
        self._num_samples = 0
        self._refused: list[Completion] = []
        self._ready: deque[Completion] = deque()
        self._inboxes: dict[int, deque[Completion]] = {}
        """By prompt index: where a `generate` waits for its completion."""
        self._next_index = 0
        self._at_work = threading.Lock()
        """Held while a step is made: an engine is one thread's at a time."""
        self._metrics = EngineMetrics(
            num_blocks=parts.scheduler.pool.num_blocks,
            block_size=parts.scheduler.pool.block_size,
            kv_cache_bytes=parts.kv_cache_bytes,
            max_batch_tokens=parts.scheduler.max_batch_tokens,
            max_sequences=parts.scheduler.max_sequences,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where the model's directory has none; prompts are then token ids."""
        return self._requests.tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of prompt and completion together."""
        return self._requests.max_model_len

    @property
    def resolved(self) -> Mapping[str, str | int | list[int]]:
        """What each `auto` that can change a token came to, under the names of the job file."""
        return self._resolved

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about this model on this machine: where equal bytes cannot be promised."""
        return self._notes

    def check_params(self, params: SamplingParams) -> None:
        """Raise JobError for what would make every prompt with these parameters an error."""
        try:
            self._requests.controls(params)
        except RequestRefused as refused:
            raise JobError(refused.error.message) from refused
        most = self._scheduler.max_sequences
        if params.beam is not None and params.beam.width > most:
            raise JobError(
                f"sampling.beam.width is {params.beam.width}, but only {most} sequences run at once; "
                "raise engine.max_sequences"
            )

    @property
    def num_unfinished(self) -> int:
        """Prompts in flight, those whose completion is ready but not yet handed out among them."""
        return len(self._groups) + len(self._refused) + len(self._ready)

    @property
    def wants_prompts(self) -> bool:
        """Whether the window has room for another prompt."""
        return self.num_unfinished < self._window and self._num_samples < MOST_SAMPLES

    @property
    def metrics(self) -> EngineMetrics:
        """Counters since the engine was made."""
        self._metrics.num_preemptions = self._scheduler.num_preemptions
        self._metrics.num_copies = self._scheduler.num_copies
        self._metrics.num_cached_tokens = self._scheduler.num_cached_tokens
        self._metrics.peak_blocks_held = self._scheduler.peak_blocks_held
        self._metrics.num_running = len(self._scheduler.running)
        self._metrics.num_waiting = self._scheduler.num_waiting
        self._metrics.num_blocks_held = self._scheduler.pool.num_held
        return self._metrics

    def generate(
        self,
        prompts: Iterable[AnyPrompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> Iterator[Completion]:
        """Yield a completion per prompt as they finish; `prompt_index` is its position in `prompts`.

        `params` is one for all, or one per prompt. What is wrong with one prompt is its completion's `error`; nothing
        is raised for it, but a TypeError for what is no prompt at all. Closing the iterator drops what is in flight.
        """
        return self._generate(with_params(prompts, params))

    def _generate(self, requests: Iterator[tuple[Prompt, SamplingParams | None]]) -> Iterator[Completion]:
        source = enumerate(requests)
        positions: dict[int, int] = {}
        inbox: deque[Completion] = deque()
        exhausted = False
        try:
            while not exhausted or positions:
                while not exhausted and len(positions) < self._window and self._num_samples < MOST_SAMPLES:
                    entry = next(source, None)
                    if entry is None:
                        exhausted = True
                        break
                    position, request = entry
                    index = self.add(*request)
                    positions[index] = position
                    self._inboxes[index] = inbox
                if not inbox:
                    self._advance()
                while inbox:
                    completion = inbox.popleft()
                    completion.prompt_index = positions.pop(completion.prompt_index)
                    yield completion
        finally:
            self.abort(*positions)

    def add(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue one prompt and return its index, which counts the prompts of this engine from 0.

        A prompt that cannot run comes back from the next `step` with its error.
        """
        if self._at_work.locked():
            raise RuntimeError(_ELSEWHERE)
        index = self._next_index
        self._next_index += 1
        try:
            group = self._requests.build(index, prompt, params or prompt.params or SamplingParams())
        except RequestRefused as refused:
            self._refused.append(Completion(index, list(prompt.token_ids or []), [], error=refused.error))
        else:
            self._groups[index] = group
            self._num_samples += group.params.num_sequences
            self._scheduler.add(group)
        return index

    def step(self) -> list[Completion]:
        """Compute one batch; returns the completions that it finished, but for those that a `generate` waits for.

        Raises EngineStalled when nothing moves.
        """
        self._advance()
        completions = [*self._ready]
        self._ready.clear()
        return completions

    def _advance(self) -> None:
        """One step; completions go to whoever added their prompts.

        On an asynchronous device a step is left running: the next call plans and launches its successor, which takes
        its tokens on the device, and only then waits for it.
        """
        if not self._at_work.acquire(blocking=False):
            raise RuntimeError(_ELSEWHERE)
        try:
            self._compute()
        finally:
            self._at_work.release()

    def _compute(self) -> None:
        batch = self._scheduler.schedule()
        num_left = 0
        if batch.sequences:
            self._launch(batch)
            num_left = int(self._is_asynchronous and not _needs_ids(batch))
        has_moved = bool(batch.sequences or self._flights)
        while len(self._flights) > num_left:
            self._land()
        completions = [*self._refused, *map(self._complete, self._scheduler.take_finished())]
        self._refused.clear()
        for completion in completions:
            self._inboxes.pop(completion.prompt_index, self._ready).append(completion)
        if not completions and not has_moved and self._scheduler.has_unfinished:
            raise EngineStalled(self._scheduler.describe_waiting())

    def abort(self, *prompt_indexes: int) -> None:
        """Drop prompts, in whatever state; unknown and finished ones are ignored."""
        doomed = set(prompt_indexes)
        self._refused = [completion for completion in self._refused if completion.prompt_index not in doomed]
        groups: list[SequenceGroup] = []
        for index in doomed:
            self._inboxes.pop(index, None)
            group = self._groups.pop(index, None)
            if group is not None:
                groups.append(group)
                self._num_samples -= group.params.num_sequences
        self._scheduler.abort(groups)

    def partials(self) -> Iterator[tuple[int, list[PartialSample]]]:
        """The tokens so far of every prompt that has generated some and is not finished; beams begin anew."""
        for index, group in self._groups.items():
            if group.search is not None:
                continue
            begun = [
                PartialSample(s.sample, s.generated_token_ids, s.cumulative_logprob, s.logprobs)
                for s in group.sequences
                if len(s.token_ids) - group.num_prompt_tokens > s.num_forced
            ]
            if begun:
                yield index, begun

    def check_integrity(self) -> None:
        """Assert that every block has exactly the owners that it counts."""
        self._scheduler.check_integrity()

    def close(self) -> None:
        """Drop everything in flight and give the blocks back."""
        self.abort(*self._groups, *(completion.prompt_index for completion in self._refused))
        self._flights.clear()
        self._ready.clear()
        self._masks.close()

    def _launch(self, batch: Batch) -> None:
        """Set a step on its way; on a processor it has run when this returns."""
        try:
            masks = self._masks.start([sequence for _, sequence in batch.samples])
            drawn = (self._flights[-1].draws.token_ids,) if self._flights else ()
            try:
                logits_RV = self._runner.execute(batch, *drawn)
            finally:
                # Also where the step fails: nobody else may touch a matcher meanwhile.
                allowed = None if masks is None else masks.result()
            layout = batch.logits_layout()
            draws = self._sampler.sample(logits_RV, *_rows_of(batch.samples, layout), allowed)
            continuations = self._sampler.continuations(logits_RV, *_rows_of(batch.beams, layout))
            self._score_prompts(batch, logits_RV, layout)
        except (torch.OutOfMemoryError, MemoryError) as error:
            while self._flights:
                self._land()
            self._recover(batch, error)
        except BaseException:
            self._roll_back(batch)
            raise
        else:
            self._scheduler.launch(batch)
            self._flights.append(Flight(batch, draws, continuations))

    def _land(self) -> None:
        """Wait for the oldest step on its way, and account for what it drew."""
        batch, draws, continuations = self._flights[0]
        try:
            drawn = draws.read()
        except BaseException:
            self._roll_back()
            raise
        self._flights.popleft()
        self._metrics.num_drawn_tokens += self._scheduler.update(batch, drawn, continuations)
        self._metrics.num_steps += 1
        self._metrics.num_computed_tokens += batch.num_tokens
        if self._metrics.num_steps % KV_SAMPLE_STEPS == 0:
            self._metrics.sample_kv(self._scheduler.useful_share(), self._scheduler.pool.num_shared)

    def _roll_back(self, *batches: Batch) -> None:
        """Forget `batches` and every step on its way.

        What they published was perhaps never written: nobody may find it, should the engine be used again.
        """
        for batch in (*batches, *(flight.batch for flight in reversed(self._flights))):
            self._scheduler.rollback(batch)
        self._flights.clear()

    def _score_prompts(self, batch: Batch, logits_RV: torch.Tensor, layout: LogitsLayout) -> None:
        """Log-probabilities of prompt tokens, each from the logits of the token before it."""
        for index in batch.scored:
            start, num_tokens = batch.starts[index], batch.counts[index]
            group = batch.sequences[index].group
            assert group.prompt_logprobs is not None
            followers = group.prompt_token_ids[start + 1 : start + 1 + num_tokens].tolist()
            first = layout.scored_row[index]
            top = group.params.prompt_logprobs or 0
            group.prompt_logprobs[start + 1 : start + 1 + len(followers)] = self._sampler.score(
                logits_RV[first : first + len(followers)], followers, top
            )
            group.num_scored = max(group.num_scored, start + 1 + len(followers))

    def _recover(self, batch: Batch, error: Exception) -> None:
        """The step did not fit: go on with half the tokens; a sequence that fails alone becomes a row error."""
        alone = len(batch.sequences) == 1
        self._scheduler.rollback(batch)
        self._metrics.num_shrinks += 1
        if not self._scheduler.shrink() and alone:
            sequence = batch.sequences[0]
            # It may have ended in the step before. A beam left its search in the rollback; the search goes on without.
            is_searched = sequence.group.search is not None and sequence.group.num_unfinished > 0
            if is_searched or sequence.status is not Status.FINISHED:
                message = f"the device ran out of memory with this row alone: {error}"
                self._scheduler.fail(sequence, RowError("out_of_memory", message))
            self._scheduler.restore()

    def _complete(self, group: SequenceGroup) -> Completion:
        del self._groups[group.prompt_index]
        self._num_samples -= group.params.num_sequences
        completion = completion_of(group, self.tokenizer)
        self._metrics.num_prompt_tokens += group.num_prompt_tokens
        self._metrics.num_generated_tokens += sum(len(sample.token_ids) for sample in completion.samples)
        for sequence in group.sequences:
            self._metrics.num_forced_tokens += sequence.num_forced
            sequence.release()
        # Sequences and group refer to each other: parted, they are freed here, not by a late garbage collection.
        group.sequences.clear()
        return completion


def _needs_ids(batch: Batch) -> bool:
    """Whether the step after this one cannot be planned before the host knows what this one found."""
    return bool(batch.beams or batch.scored or any(s.group.draws_follow_text for _, s in batch.samples))


def _rows_of(entries: list[tuple[int, Sequence]], layout: LogitsLayout) -> tuple[list[int], list[Sequence]]:
    return [layout.last_row[index] for index, _ in entries], [sequence for _, sequence in entries]
