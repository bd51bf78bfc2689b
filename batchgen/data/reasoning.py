"""`output.reasoning: split`: what a model thinks before it answers, told from the answer."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_reasoning(text: str, is_open: bool) -> tuple[str | None, str]:
    """(reasoning, answer) of a completion; reasoning is None where there is none.

    Reasoning comes first: from `<think>`, or from the start where the prompt ended with it (`is_open`) or where only
    the end is marked, up to `</think>` or, if that never came, to the end. Space around it is left out of both.
    """
    begun = text.lstrip()
    is_marked = begun.startswith(OPEN)
    if not is_marked and not is_open and (CLOSE not in text or OPEN in text.split(CLOSE)[0]):
        return None, text
    reasoning, _, answer = (begun.removeprefix(OPEN) if is_marked else text).partition(CLOSE)
    return reasoning.strip(), answer.lstrip()


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt ends where the model is to go on thinking."""
    return prompt.rstrip().endswith(OPEN)
