"""Names as they are shown to users, and those that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_SHOWN = 20


def near_names(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'a'?`, or what there is to choose from; empty where there is nothing."""
    names = list(names)
    folded = {other.casefold(): other for other in reversed(names)}
    near = [folded[other] for other in difflib.get_close_matches(name.casefold(), folded, n=3)]
    if near:
        return f"; did you mean {', '.join(map(repr, near))}?"
    shown = ", ".join(map(repr, names[:_SHOWN])) + (", …" if len(names) > _SHOWN else "")
    return f"; it has {shown}" if shown else ""
