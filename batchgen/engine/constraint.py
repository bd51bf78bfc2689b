"""Where one sequence stands in the grammar that its text must match."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.grammar import Grammar, LLMatcher
from batchgen.records import RowError


class Constraint:
    """Follows the tokens of one sequence; says which may come next, and which must.

    It has a matcher from the first drawn token on: a sequence that waits costs nothing but its tokens.
    """

    __slots__ = ("_grammar", "_is_fresh", "_matcher", "_token_ids")

    def __init__(self, grammar: Grammar, token_ids: Sequence[int] = ()) -> None:
        self._grammar = grammar
        self._token_ids = [*token_ids]
        self._matcher: LLMatcher | None = None
        self._is_fresh = False

    @property
    def matcher(self) -> LLMatcher:
        """For computing the mask of the next token."""
        if self._matcher is None:
            self._matcher = self._grammar.take()
            if self._token_ids and not self._matcher.consume_tokens(self._token_ids):
                self.recover()
        assert self._matcher is not None
        return self._matcher

    @property
    def num_words(self) -> int:
        """int32 words of a mask."""
        return self._grammar.num_words

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take tokens in, each of which was allowed."""
        self._token_ids.extend(token_ids)
        if self._matcher is not None and not self._matcher.consume_tokens(list(token_ids)):
            self.recover()

    def forced(self) -> list[int]:
        """The tokens that must come next, as the tokenizer would write them; empty where there is a choice."""
        if not self._token_ids:
            return self._grammar.prefix
        found: list[int] = [] if self._stands_at_prefix else self.matcher.compute_ff_tokens()
        return found

    @property
    def is_over(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        if self._stands_at_prefix:
            return self._grammar.is_constant
        return bool(self.matcher.is_stopped() and self.matcher.is_accepting())

    @property
    def _stands_at_prefix(self) -> bool:
        return self._matcher is None and self._token_ids == self._grammar.prefix

    @property
    def error(self) -> RowError | None:
        """Why there is no next token: the grammar needs more than its limits here."""
        if not self.matcher.is_error():
            return None
        message = str(self.matcher.get_error()).replace("<non-verbose/>", "").strip()
        return RowError("grammar_limit", f"after {len(self._token_ids)} tokens the grammar gives up: {message}")

    def recover(self) -> None:
        """Go on with a matcher that nothing was done with before: what others have learnt may fill up its limits."""
        if self._is_fresh:
            return
        self._is_fresh = True
        self._matcher = self._grammar.take(fresh=True)
        if self._token_ids:
            self._matcher.consume_tokens(self._token_ids)

    def fork(self) -> Constraint:
        """An independent one at the same place, for a sample that splits off."""
        return Constraint(self._grammar, self._token_ids)

    def release(self) -> None:
        """The sequence is finished; a second call does nothing."""
        if self._matcher is not None:
            self._grammar.give_back(self._matcher)
            self._matcher = None
