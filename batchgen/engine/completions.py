"""From finished sequences to the records that users get."""

from __future__ import annotations

from batchgen.engine.sequence import Sequence, SequenceGroup
from batchgen.records import Completion, Sample
from batchgen.tokenizer import Tokenizer


def completion_of(group: SequenceGroup, tokenizer: Tokenizer | None) -> Completion:
    """The completion of a group whose sequences have all ended."""
    prompt_token_ids = group.prompt_token_ids.tolist()
    return Completion(
        prompt_index=group.prompt_index,
        prompt_token_ids=prompt_token_ids,
        samples=[_sample_of(sequence, prompt_token_ids, tokenizer) for sequence in group.sequences],
        error=group.error,
        cached_tokens=group.cached_tokens,
    )


def _sample_of(sequence: Sequence, prompt_token_ids: list[int], tokenizer: Tokenizer | None) -> Sample:
    group = sequence.group
    if sequence.finish_reason is None:
        # A failed sample has no text: what it had so far would be truncated silently.
        return Sample(token_ids=[], text=None, finish_reason=None, seed=group.seed)
    token_ids = sequence.generated_token_ids
    text, text_complete = sequence.text, True
    if text is None and tokenizer is not None:
        # The token that ended it is kept among the ids, but is no part of the text.
        shown = token_ids[:-1] if token_ids and token_ids[-1] in group.stop_token_ids else token_ids
        text, text_complete = tokenizer.decode_completion(prompt_token_ids, shown)
    return Sample(
        token_ids=token_ids,
        text=text,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        text_complete=text_complete,
        cumulative_logprob=sequence.cumulative_logprob,
        seed=group.seed,
        logprobs=sequence.logprobs,
    )
