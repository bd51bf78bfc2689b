"""`${env:NAME}` in values that must not be stored: kept as written, filled in only where they are used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_VARIABLE = re.compile(r"\$\{env:([^}]*)\}")


def with_secrets(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text with variables of the environment filled in; KeyError with the name of one that is not set."""
    return _VARIABLE.sub(lambda match: environ[match.group(1)], text)


def without_secrets(text: str, source: str, environ: Mapping[str, str] = os.environ) -> str:
    """A message about a value made from `source`, with what `with_secrets` filled in taken out again."""
    names = [name for name in _VARIABLE.findall(source) if environ.get(name)]
    for name in sorted(names, key=lambda name: -len(environ[name])):
        text = text.replace(environ[name], f"${{env:{name}}}")
    return text
