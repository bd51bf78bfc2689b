"""What `sample`, `top_tokens` and `token_ranks` take and give. Legend: R rows, N entries of a list of edits,
K tokens kept and C tokens asked for per row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

GROUP_TOKENS = 256
"""Token ids per group of a draw; part of the fingerprint: other values draw other tokens."""

MIN_TEMPERATURE = 1e-30
"""Lower ones (but 0) act as this, so that no score overflows."""


class TokenBias(NamedTuple):
    """Values added to logits, -inf to ban; one entry per (row, token) at most, row -1 skips an entry."""

    row_N: Tensor
    token_N: Tensor
    value_N: Tensor


class TokenCounts(NamedTuple):
    """The tokens that stand in each row's context, for the penalties; one entry per (row, token) at most.

    row_N, token_N (int64; row -1 skips an entry); output_count_N (int32): times generated, 0 if only in the prompt.
    """

    row_N: Tensor
    token_N: Tensor
    output_count_N: Tensor


@dataclass(frozen=True)
class SampleParams:
    """Sampling controls, one entry per row; None where no row uses one."""

    temperature_R: Tensor | None = None
    """fp32; 0: argmax, the lowest id on ties; None: 1."""
    top_k_R: Tensor | None = None
    """Integers; 0, negative and V or more keep all; 1: argmax, the lowest id on ties."""
    top_p_R: Tensor | None = None
    """fp32; 1 keeps all."""
    min_p_R: Tensor | None = None
    """fp32; 0 keeps all."""
    repetition_penalty_R: Tensor | None = None
    """fp32; divides positive logits of tokens in prompt or output, multiplies negative ones; 1: none."""
    presence_penalty_R: Tensor | None = None
    """fp32; taken off the logits of generated tokens; 0: none."""
    frequency_penalty_R: Tensor | None = None
    """fp32; taken off once for each time a token was generated; 0: none."""
    bias: TokenBias | None = None
    counts: TokenCounts | None = None
    """Needed where there are penalties."""
    all_greedy: bool = False
    """Every row is greedy, as the host knows; temperature, top_* and min_p are not read."""


NO_EDITS = SampleParams()


class TopTokens(NamedTuple):
    """The best tokens of each row, best first; all is -inf where a row has no finite best."""

    token_ids_RK: Tensor
    """int64."""
    scores_RK: Tensor
    """fp32: log-softmax after the edits."""
    logprobs_RK: Tensor
    """fp32: log-softmax of the logits as the model gave them."""


class TokenRanks(NamedTuple):
    """Where given tokens stand, and the best ones beside them."""

    logprobs_RC: Tensor
    """fp32: log-softmax."""
    ranks_RC: Tensor
    """int64, 1 for the most likely token."""
    best_ids_RK: Tensor
    """As `top_tokens` finds them, of the logits as they are."""
    best_logprobs_RK: Tensor


class SampleResult(NamedTuple):
    """What was drawn; where `ok_R` is False (all tokens masked, or logits not finite) token and logprob are 0."""

    token_ids_R: Tensor
    """int64."""
    logprobs_R: Tensor
    """fp32: log-softmax of the logits as the model gave them, before bias, penalties, temperature and filters."""
    ok_R: Tensor
    """bool."""
