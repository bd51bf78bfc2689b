"""Small records with their checksum: a record is whole and unchanged, or it is none."""

from __future__ import annotations

import hashlib
import json
from typing import Any

Body = dict[str, Any]


def canonical(body: Any) -> bytes:
    """The one spelling of JSON values that is hashed."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def seal(body: Body) -> bytes:
    """A record as one line of JSON: the checksum of its body, then the body."""
    content = canonical(body)
    return b'{"sha256":"%s","body":%s}\n' % (hashlib.sha256(content).hexdigest().encode(), content)


def unseal(data: bytes) -> Body | None:
    """The body of a record; None where a byte is missing, changed or too many."""
    try:
        body = json.loads(data)["body"]
        intact = isinstance(body, dict) and seal(body) == data
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return body if intact else None
