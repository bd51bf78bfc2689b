"""What an output was begun with: the job's identity, its inputs, and the fingerprint over them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from batchgen.data.sealed import Body, canonical

FORMAT = 1
"""Of everything under _batchgen/; an output of a higher one is refused, never guessed at."""

Identity = dict[str, Any]
"""Dotted keys and JSON values: everything that decides the rows."""


@dataclass(frozen=True)
class PlanRecord:
    """The content of plan.json."""

    fingerprint: str
    """Hash of `identity`, which is that of the first run: inputs that are appended later leave it as it is."""
    identity: Identity
    scan: dict[str, Any]
    """The inputs as `InputScan.to_json` wrote them; grows with `input.on_growth: append`."""
    job: dict[str, Any]
    """The job as it was first run, for people and for `rerun`."""
    base_dir: str
    """Directory that relative paths of the job start from."""
    started: str
    """When the output was begun, ISO 8601: the time that templates see, in every run."""
    recorded: dict[str, Any]
    """Versions and features of the machine: a difference warns, and refuses nothing."""
    hashes: dict[str, list[Any]]
    """Content hashes of the model's files by name, with size, mtime in ns and inode, which spare hashing again."""
    format: int = FORMAT

    def to_body(self) -> Body:
        """What is sealed."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_body(cls, body: Body) -> PlanRecord:
        """Inverse of `to_body`; raises KeyError where a field is missing."""
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})


def fingerprint_of(identity: Identity) -> str:
    """Hash of everything that decides the rows."""
    return hashlib.sha256(canonical(identity)).hexdigest()


def differences(then: Identity, now: Identity) -> list[str]:
    """One line for each field that differs: `sampling.seed: 1 in the output, 2 in the job`."""
    lines = []
    for key in sorted(then.keys() | now.keys()):
        before, after = canonical(then.get(key)).decode(), canonical(now.get(key)).decode()
        if before != after:
            lines.append(f"{key}: {_shown(before)} in the output, {_shown(after)} in the job")
    return lines


def _shown(text: str) -> str:
    return text if len(text) <= 100 else text[:80] + "…" + text[-19:]
