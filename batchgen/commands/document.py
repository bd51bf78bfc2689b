"""What `--json` prints: one document on stdout; whatever is said in words goes to stderr."""

from __future__ import annotations

import json
from typing import Any


def print_document(values: dict[str, Any]) -> None:
    """The result of a command. All of it is ASCII: any pipe takes it, and no terminal obeys it."""
    print(json.dumps(values, indent=2))
