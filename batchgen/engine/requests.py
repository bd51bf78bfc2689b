"""From a Prompt to the sequence group that the scheduler runs, or to the reason why it cannot."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from batchgen.engine.sequence import Sequence, SequenceGroup, Status
from batchgen.records import FinishReason, PartialSample, Prompt, RowError
from batchgen.sampling_params import SamplingParams
from batchgen.tokenizer import StopStringMatcher, Tokenizer


class RequestRefused(Exception):
    """This one prompt cannot be run; `error` becomes its completion's error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """Checks prompts against the model and builds their groups."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    default_seed: int
    """For params without a seed; drawn once per engine."""

    def build(self, prompt_index: int, prompt: Prompt, params: SamplingParams) -> SequenceGroup:
        """A group with its sequences; raises RequestRefused."""
        token_ids = self._token_ids(prompt)
        seed = self.default_seed if params.seed is None else params.seed
        room = self.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.stop and self.tokenizer is None:
            raise RequestRefused("stop_without_tokenizer", "stop strings need a tokenizer, and the model has none")
        group = SequenceGroup(
            prompt_index=prompt_index,
            prompt_token_ids=token_ids,
            params=params,
            source=prompt.source,
            row=prompt_index if prompt.row is None else prompt.row,
            seed=seed,
            max_tokens=max_tokens,
            stop_token_ids=self._stop_token_ids(params),
        )
        self._add_sequences(group, prompt.partial)
        return group

    def _token_ids(self, prompt: Prompt) -> array[int]:
        if prompt.token_ids is not None:
            ids = prompt.token_ids
        elif prompt.text is None:
            raise RequestRefused("null_prompt", "the prompt has neither text nor token ids")
        elif self.tokenizer is None:
            raise RequestRefused("no_tokenizer", "the model has no tokenizer; give the prompt as token ids")
        else:
            ids = self.tokenizer.encode(prompt.text)
        if not ids:
            raise RequestRefused("empty_prompt", "the prompt has no tokens")
        bad = next((token_id for token_id in ids if not 0 <= token_id < self.vocab_size), None)
        if bad is not None:
            raise RequestRefused("bad_token_id", f"token id {bad} is outside the vocabulary of {self.vocab_size}")
        if len(ids) >= self.max_model_len:
            raise RequestRefused(
                "prompt_too_long",
                f"the prompt has {len(ids)} tokens, and the model's context of {self.max_model_len} no room for more",
            )
        return array("i", ids)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        return eos | frozenset(params.stop_token_ids)

    def _add_sequences(self, group: SequenceGroup, partial: list[PartialSample]) -> None:
        begun = {sample.sample: sample for sample in partial}
        group.num_unfinished = group.params.n
        # Samples that an earlier run began differ already after the prompt, so each one stands alone.
        group.has_unborn = group.params.n > 1 and not begun
        for index in range(group.params.n):
            sequence = Sequence(group, index, group.prompt_token_ids[:])
            if group.has_unborn and index > 0:
                sequence.status = Status.UNBORN
            if group.params.stop and self.tokenizer is not None:
                matcher = StopStringMatcher(self.tokenizer, group.params.stop)
                sequence.matcher = matcher.start(group.prompt_token_ids.tolist())
            if index in begun:
                self._resume(sequence, begun[index])
            elif group.max_tokens == 0:
                self._end(sequence, "length")
            group.sequences.append(sequence)

    def _resume(self, sequence: Sequence, begun: PartialSample) -> None:
        for token_id in begun.token_ids:
            sequence.append(token_id)
        sequence.cumulative_logprob = begun.cumulative_logprob
        sequence.logprobs = begun.logprobs
        if sequence.finish_reason is not None:
            self._end(sequence, sequence.finish_reason)

    @staticmethod
    def _end(sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        sequence.status = Status.FINISHED
        sequence.group.num_unfinished -= 1
