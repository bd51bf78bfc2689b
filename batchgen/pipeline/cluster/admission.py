"""Which workers take part in a run: those whose rows are the rows of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchgen.pipeline.cluster.messages import Facts
from batchgen.pipeline.identity import recorded_facts, warnings_of
from batchgen.pipeline.session import Session


class Admission:
    """Compares what `auto` comes to on each worker with what it came to on the first one."""

    def __init__(self, session: Session, tell: Callable[[list[str]], None]) -> None:
        self._session = session
        self._tell = tell
        self._refused: set[str] = set()
        self.resolved: dict[str, Any] = {}
        """What `auto` came to on the first worker."""

    def is_refused(self, worker: str) -> bool:
        """Whether it takes no part: what it says is not listened to."""
        return worker in self._refused

    def admit(self, worker: str, facts: Facts) -> bool:
        """Whether a worker that is ready may take part; FingerprintMismatch where the output was begun otherwise."""
        if not self.resolved:
            self._session.check_resolved(facts.resolved)
            self.resolved = dict(facts.resolved)
        differing = sorted(key for key in self.resolved if self.resolved[key] != facts.resolved.get(key))
        if differing:
            theirs = ", ".join(f"{key} is {facts.resolved.get(key)}, not {self.resolved[key]}" for key in differing)
            self.refuse(worker, f"worker {facts.name} on {facts.host} takes no part: {theirs}")
            return False
        self._session.keep_notes(facts.notes, facts.resolved)
        self._tell([*facts.notes, *warnings_of(recorded_facts(), facts.recorded)])
        return True

    def refuse(self, worker: str, reason: str) -> None:
        """It takes no part."""
        self._refused.add(worker)
        self._tell([reason])
