"""What the runner knows of its workers: who they are, when they last gave a sign of life, and what they have done."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.pipeline.cluster.messages import BEAT_SECONDS, Beat, Counts, Facts, State
from batchgen.pipeline.drive import Tally
from batchgen.pipeline.generation import Figures
from batchgen.pipeline.progress import ProgressSnapshot, WorkerProgress
from batchgen.sampling_params import SamplingParams


@dataclass
class Member:
    """One incarnation of a worker."""

    facts: Facts
    beat_at: float
    figures: Mapping[str, Any] = field(default_factory=dict)
    tasks: dict[int, Counts] = field(default_factory=dict)
    state: State = "ready"
    is_lost: bool = False


class Crew:
    """The workers of a run, by the name of their incarnation."""

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`timeout`: seconds without a sign of life after which a worker is taken for hung."""
        self._timeout = timeout + 2 * BEAT_SECONDS
        self._clock = clock
        self.members: dict[str, Member] = {}

    def take(self, beat: Beat) -> Member | None:
        """Note a sign of life; returns the member, or None where the worker has not said who it is."""
        member = self.members.get(beat.worker)
        if member is None:
            if beat.facts is None:
                return None
            member = self.members[beat.worker] = Member(Facts(**beat.facts), 0.0)
        member.beat_at = self._clock()
        member.state = beat.state
        member.figures = beat.figures
        member.tasks = {int(task): Counts(*counts) for task, *counts in beat.tasks}
        return member

    def at(self, address: str) -> list[str]:
        """The workers at an address that are not lost."""
        return [name for name, each in self.members.items() if each.facts.address == address and not each.is_lost]

    def named(self, name: str) -> list[str]:
        """The workers whose process has this name, and that are not lost."""
        return [worker for worker, each in self.members.items() if each.facts.name == name and not each.is_lost]

    def knows(self, name: str) -> bool:
        """Whether a process of this name has ever been ready."""
        return any(each.facts.name == name for each in self.members.values())

    def silent(self) -> list[str]:
        """Workers that have not been heard of for too long."""
        late = self._clock() - self._timeout
        return [name for name, each in self.members.items() if not each.is_lost and each.beat_at < late]

    @property
    def living(self) -> list[Member]:
        """Those that are not lost."""
        return [each for each in self.members.values() if not each.is_lost]

    @property
    def kv_tokens(self) -> int:
        """What the smallest KV cache holds: what fits there fits everywhere."""
        return min((each.facts.kv_tokens for each in self.living), default=0)

    def total(self, name: str) -> int:
        """A counter over all workers of the run, lost ones too."""
        return sum(int(each.figures.get(name, 0)) for each in self.members.values())

    def now(self, name: str) -> int:
        """A gauge over the workers that live."""
        return sum(int(each.figures.get(name, 0)) for each in self.living)

    @property
    def kv_use(self) -> float:
        """Mean use of the KV caches, 0 to 1."""
        living = self.living
        return sum(float(each.figures.get("kv_share", 0.0)) for each in living) / len(living) if living else 0.0

    @property
    def progress(self) -> tuple[WorkerProgress, ...]:
        """What each living worker has drawn."""
        return tuple(
            WorkerProgress(name, int(each.figures.get("num_drawn_tokens", 0)))
            for name, each in self.members.items()
            if not each.is_lost
        )

    def snapshot(self, tally: Tally, sampling: SamplingParams) -> ProgressSnapshot:
        """How far a run is, whose rows `tally` counts."""
        return ProgressSnapshot(
            num_rows=tally.num_rows,
            num_done=tally.num_done,
            num_errors=tally.num_errors,
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=self.total("num_drawn_tokens"),
            finished_tokens=tally.completion_tokens,
            most_row_tokens=None if sampling.max_tokens is None else sampling.max_tokens * sampling.num_sequences,
            sequences_per_row=sampling.num_sequences,
            num_in_flight=self.now("num_unfinished"),
            num_running=self.now("num_running"),
            num_waiting=self.now("num_waiting"),
            kv_use=self.kv_use,
            computed_tokens=self.total("num_computed_tokens"),
            cached_tokens=self.total("num_cached_tokens"),
            num_preemptions=self.total("num_preemptions"),
            num_copies=self.total("num_copies"),
            num_steps=self.total("num_steps"),
            workers=self.progress,
        )

    def _sums(self) -> dict[str, float]:
        """The counters of all engines together."""
        sums: dict[str, float] = {}
        for each in self.members.values():
            for name, value in each.figures.items():
                if isinstance(value, int | float) and not name.endswith("share"):
                    sums[name] = sums.get(name, 0) + value
        sums["block_size"] = max((each.figures.get("block_size", 0) for each in self.members.values()), default=0)
        return sums

    @property
    def figures(self) -> Figures | None:
        """For the report and the metrics."""
        if not self.members:
            return None
        workers = [
            {
                "name": each.facts.name,
                "host": each.facts.host,
                "pid": each.facts.pid,
                "lost": each.is_lost,
                "engine": dict(each.figures),
            }
            for each in self.members.values()
        ]
        peaks = [float(each.figures.get("peak_kv_share", 0.0)) for each in self.members.values()]
        return Figures(
            self.total("num_cached_tokens"),
            sum(int(each.figures.get("kv_cache_bytes", 0)) for each in self.living),
            max(peaks),
            {"engine": self._sums(), "workers": workers},
        )
