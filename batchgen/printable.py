"""Text for a terminal or a log: names and rows of others must not write to it."""

from __future__ import annotations


def printable(text: str) -> str:
    """One line: control characters, line breaks and lone surrogates are escaped."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """The same with line breaks kept: for messages that have several lines of their own."""
    return "\n".join(map(printable, text.split("\n")))
