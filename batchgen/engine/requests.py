"""From a Prompt to the sequence group that the scheduler runs, or to the reason why it cannot."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from batchgen.engine.beam import BeamSearch
from batchgen.engine.logprob_trail import trail_of
from batchgen.engine.sequence import Ending, Sequence, SequenceGroup, Status
from batchgen.engine.token_bias import TokenEdits
from batchgen.grammar import Grammar, GrammarError, LLTokenizer, token_trie
from batchgen.records import PartialSample, Prompt, RowError
from batchgen.response_format import ResponseFormat
from batchgen.sampling_params import SamplingParams
from batchgen.tokenizer import RenderedPrompt, StopStringMatcher, Tokenizer


class RequestRefused(Exception):
    """This one prompt cannot be run; `error` becomes its completion's error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.error = RowError(code, message)


class Controls(NamedTuple):
    """What sampling parameters come to with one model."""

    stop_token_ids: frozenset[int]
    stops: StopStringMatcher | None
    edits: TokenEdits
    grammar: Grammar | None


@dataclass(slots=True)
class RequestBuilder:
    """Checks prompts against the model and builds their groups."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    default_seed: int
    """For params without a seed; drawn once per engine."""
    _latest: tuple[SamplingParams, Controls] | None = None
    """Rows of a job share one object: what it comes to is found out once."""
    _trie: LLTokenizer | None = None
    """For grammars; made for the first one."""
    _grammars: dict[ResponseFormat, Grammar] = field(default_factory=dict)
    """Each is compiled once, however many parameters name it."""

    def build(self, prompt_index: int, prompt: Prompt, params: SamplingParams) -> SequenceGroup:
        """A group with its sequences; raises RequestRefused."""
        controls = self.controls(params)
        token_ids = self._token_ids(prompt, params)
        seed = self.default_seed if params.seed is None else params.seed
        room = self.max_model_len - len(token_ids)
        # A second try with twice the tokens would draw the same ones again up to the cut: the sample goes on instead.
        tries = 2 if params.on_incomplete == "retry" else 1
        group = SequenceGroup(
            prompt_index=prompt_index,
            prompt_token_ids=token_ids,
            params=params,
            source=prompt.source,
            row=prompt_index if prompt.row is None else prompt.row,
            seed=seed,
            max_tokens=room if params.max_tokens is None else min(tries * params.max_tokens, room),
            stop_token_ids=controls.stop_token_ids,
            stops=controls.stops,
            edits=controls.edits,
            grammar=controls.grammar,
        )
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = [None] * len(token_ids)
        if params.beam is not None and group.max_tokens > 0:
            group.search = BeamSearch(params.beam, len(group.stop_token_ids), group.max_tokens)
        self._add_sequences(group, prompt.partial)
        return group

    def _token_ids(self, prompt: Prompt, params: SamplingParams) -> array[int]:
        if prompt.token_ids is not None:
            ids = prompt.token_ids
        elif prompt.text is None:
            raise RequestRefused("null_prompt", "the prompt has neither text nor token ids")
        elif self.tokenizer is None:
            raise RequestRefused("no_tokenizer", "the model has no tokenizer; give the prompt as token ids")
        else:
            ids = self.tokenizer.encode(_encodable(prompt.text))
        if not ids:
            raise RequestRefused("empty_prompt", "the prompt has no tokens")
        bad = next((token_id for token_id in ids if not 0 <= token_id < self.vocab_size), None)
        if bad is not None:
            raise RequestRefused("bad_token_id", f"token id {bad} is outside the vocabulary of {self.vocab_size}")
        if len(ids) + (params.max_tokens != 0) > self.max_model_len:
            message = (
                f"the prompt has {len(ids)} tokens, and the model's context of {self.max_model_len} no room for more"
            )
            raise RequestRefused("prompt_too_long", message)
        return array("i", ids)

    def controls(self, params: SamplingParams) -> Controls:
        """What `params` come to with this model; RequestRefused where they do not go with it."""
        if self._latest is None or self._latest[0] is not params:
            self._latest = (params, self._make_controls(params))
        return self._latest[1]

    def _make_controls(self, params: SamplingParams) -> Controls:
        self._check_token_ids("logit_bias", params.logit_bias)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        # A configuration may name ids that the model has no logits for.
        stop_token_ids = frozenset(each for each in eos if each < self.vocab_size) | frozenset(params.stop_token_ids)
        edits = TokenEdits(params.logit_bias, stop_token_ids, params.min_tokens, self._bad_words(params))
        return Controls(stop_token_ids, self._stops(params), edits, self._grammar(params))

    def _check_token_ids(self, name: str, token_ids: Iterable[int]) -> None:
        bad = next((token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size), None)
        if bad is not None:
            message = f"sampling.{name} names token id {bad}, which is outside the vocabulary of {self.vocab_size}"
            raise RequestRefused("bad_token_id", message)

    def _stops(self, params: SamplingParams) -> StopStringMatcher | None:
        if not params.stop:
            return None
        if self.tokenizer is None:
            raise RequestRefused("no_tokenizer", "sampling.stop needs a tokenizer, and the model has none")
        return StopStringMatcher(self.tokenizer, params.stop)

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        form = params.response_format
        if form is None or form in self._grammars:
            return None if form is None else self._grammars[form]
        if self.tokenizer is None:
            raise RequestRefused("no_tokenizer", "sampling.response_format needs a tokenizer, and the model has none")
        try:
            if self._trie is None:
                ends = sorted(each for each in self.eos_token_ids if each < self.vocab_size)
                self._trie = token_trie(self.tokenizer.to_json(), max(self.vocab_size, self.tokenizer.vocab_size), ends)
            self._grammars[form] = Grammar(form, self._trie)
            return self._grammars[form]
        except GrammarError as error:
            raise RequestRefused("bad_grammar", str(error)) from error

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise RequestRefused("no_tokenizer", "sampling.bad_words needs a tokenizer, and the model has none")
        # A word stands at the start of a text or after a space, and has other tokens there.
        spellings = [RenderedPrompt(space + word, (), False) for word in params.bad_words for space in ("", " ")]
        words = (tuple(ids) for ids in self.tokenizer.encode_batch(spellings))
        return [word for word in words if word and max(word) < self.vocab_size]

    def _add_sequences(self, group: SequenceGroup, partial: list[PartialSample]) -> None:
        begun = {sample.sample: sample for sample in partial if group.search is None}
        num_sequences = group.params.num_sequences
        group.num_unfinished = num_sequences
        # Samples that an earlier run began differ already after the prompt, so each one stands alone.
        group.has_unborn = num_sequences > 1 and group.max_tokens > 0 and not begun
        for index in range(num_sequences):
            sequence = group.new_sequence(index)
            if sequence.ending is not None:
                group.has_unborn = False  # A grammar leaves no choice at all: every sample is written already.
            if group.has_unborn and index > 0:
                sequence.status = Status.UNBORN
            if index in begun:
                sequence = self._resumed(sequence, begun[index])
            elif group.max_tokens == 0 and not sequence.is_scored:
                sequence.ending = Ending("length")
            if sequence.ending is not None:
                sequence.status = Status.FINISHED
                group.num_unfinished -= 1
            group.sequences.append(sequence)
        if begun:
            # A sample that is finished computes no prompt; where all are, the first one is computed anew.
            group.scored_sample = next((s.sample for s in group.sequences if s.ending is None), 0)
            if group.needs_scores and group.num_unfinished == 0:
                group.sequences[0] = group.new_sequence(0)
                group.num_unfinished = 1

    @staticmethod
    def _resumed(sequence: Sequence, begun: PartialSample) -> Sequence:
        """The sequence with the tokens that an earlier run generated."""
        while sequence.num_generated < len(begun.token_ids) and sequence.ending is None:
            # What a grammar forces after a token comes by itself.
            sequence.append(begun.token_ids[sequence.num_generated])
        if sequence.generated_token_ids[: len(begun.token_ids)] != begun.token_ids:
            # Another release of the grammar's library forces other tokens: the sample is generated anew.
            sequence.release()
            return sequence.group.new_sequence(sequence.sample)
        sequence.cumulative_logprob = begun.cumulative_logprob
        sequence.trail = trail_of(begun.logprobs or ())
        return sequence


def _encodable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"character {error.start} of the prompt is half of a surrogate pair, which is no character"
        raise RequestRefused("invalid_utf8", what) from error
    return text
