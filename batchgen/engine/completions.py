"""From finished sequences to the records that users get."""

from __future__ import annotations

import time

from batchgen.engine.beam import FinishedBeam
from batchgen.engine.logprob_trail import trail_entries
from batchgen.engine.sequence import Ending, Sequence, SequenceGroup
from batchgen.records import Completion, RowError, Sample, TokenLogprob
from batchgen.tokenizer import Tokenizer


def completion_of(group: SequenceGroup, tokenizer: Tokenizer | None) -> Completion:
    """The completion of a group whose sequences have all ended."""
    if group.search is not None:
        num_return = group.search.params.num_return or group.search.params.width
        # What a search that failed had finished so far is not what it would have returned.
        finished = group.search.finished[:num_return] if group.error is None else []
        samples = [_beam_sample(beam, group, tokenizer) for beam in finished]
    else:
        samples = [_sample_of(sequence, tokenizer) for sequence in _best(group)]
    return Completion(
        prompt_index=group.prompt_index,
        prompt_token_ids=group.prompt_token_ids.tolist(),
        samples=samples,
        error=group.error or _incomplete(group, samples),
        prompt_logprobs=group.prompt_logprobs,
        cached_tokens=group.cached_tokens,
        seconds=time.monotonic() - group.started if group.started else 0.0,
    )


def _incomplete(group: SequenceGroup, samples: list[Sample]) -> RowError | None:
    """The error of a row with a text that was cut before its grammar had its end; the text itself is kept."""
    if group.grammar is None:
        return None
    cut = [(number, sample) for number, sample in enumerate(samples) if sample.finish_reason == "length"]
    if not cut:
        return None
    number, sample = cut[0]
    code = "incomplete_json" if group.grammar.form.type == "json_schema" else "incomplete_text"
    which = f"sample {number}" if len(samples) > 1 else "the text"
    message = f"{which} was cut after {len(sample.token_ids)} tokens, before it was whole; raise sampling.max_tokens"
    return RowError(code, message)


def _best(group: SequenceGroup) -> list[Sequence]:
    """With best_of the n samples of the highest mean log-probability, the best first; else all, by number."""
    if group.params.best_of is None:
        return group.sequences
    return sorted(group.sequences, key=_place)[: group.params.n]


def _place(sequence: Sequence) -> tuple[bool, bool, float, int]:
    # A sample that failed has no mean, and comes last; before it those that are not whole.
    mean = sequence.cumulative_logprob / max(1, sequence.num_generated - sequence.num_forced)
    is_cut = sequence.group.grammar is not None and sequence.ending is not None and sequence.ending.is_cut
    return (sequence.ending is None, is_cut, -mean, sequence.sample)


def _logprobs_of(beam: FinishedBeam, group: SequenceGroup) -> list[list[TokenLogprob]] | None:
    return None if group.params.logprobs is None else trail_entries(beam.trail)


def _beam_sample(beam: FinishedBeam, group: SequenceGroup, tokenizer: Tokenizer | None) -> Sample:
    sample = _sample(group, beam.token_ids, beam.ending, tokenizer)
    sample.cumulative_logprob, sample.logprobs, sample.score = (
        beam.cumulative_logprob,
        _logprobs_of(beam, group),
        beam.score,
    )
    return sample


def _sample_of(sequence: Sequence, tokenizer: Tokenizer | None) -> Sample:
    group = sequence.group
    if sequence.ending is None:
        # A failed sample has no text: what it had so far would be truncated silently.
        return Sample(token_ids=[], text=None, finish_reason=None, seed=group.seed)
    sample = _sample(group, sequence.generated_token_ids, sequence.ending, tokenizer)
    sample.cumulative_logprob, sample.logprobs, sample.seed = sequence.cumulative_logprob, sequence.logprobs, group.seed
    return sample


def _sample(group: SequenceGroup, token_ids: list[int], ending: Ending, tokenizer: Tokenizer | None) -> Sample:
    text, text_complete = ending.text, True
    if text is not None and group.params.include_stop:
        text += str(ending.stop_reason)
    if text is None and tokenizer is not None:
        # The token that ended it is kept among the ids, but is no part of the text.
        hidden = token_ids[-1:] if token_ids and token_ids[-1] in group.stop_token_ids else []
        shown = token_ids if group.params.include_stop else token_ids[: len(token_ids) - len(hidden)]
        text, text_complete = tokenizer.decode_completion(group.prompt_token_ids, shown)
    return Sample(
        token_ids=token_ids,
        text=text,
        finish_reason=ending.finish_reason,
        stop_reason=ending.stop_reason,
        text_complete=text_complete,
    )
