"""Runs that are killed at random moments, and what must be so right after a kill."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Literal

from batchgen.data.files import OutputFiles
from tests.pipeline.crash_server import CrashServer, Run
from tests.pipeline.crashes import check_output, committed_rows

FILES = OutputFiles()

Killed = Literal["process", "main", "group"]
"""process: a run without a child. main: a run alone, whose child must end by itself. group: both at once."""


def kill_at_random(server: CrashServer, run_of: Callable[[str], Run], killed: Killed, num_kills: int) -> None:
    """Kill jobs again and again; each must end with the rows of the one that was left in peace.

    `run_of` gives the run for an output's path. Half of the kills come at any moment, half while rows are generated:
    what goes before takes longest.
    """
    chance = random.Random(num_kills)
    calm = run_of("calm")
    assert server.run(calm) == 0
    expected = committed_rows(FILES, calm.output_dir)
    # Not the first one, which waits for the server.
    started_at = time.monotonic()
    pid = start(server, run_of("timed"), at_work=True)
    at_work_at = time.monotonic()
    assert server.wait(pid) == 0
    ended_at = time.monotonic()
    kills = kills_at_work = 0
    for number in count():
        run = run_of(f"out-{number}")
        while kills < num_kills:
            at_work = kills_at_work < (kills + 1) // 2
            seconds = chance.uniform(0.0, ended_at - (at_work_at if at_work else started_at))
            if not is_killed(server, run, killed, at_work, seconds):
                break
            kills += 1
            kills_at_work += at_work
        else:
            assert server.run(run) == 0
        check_output(FILES, run.output_dir, expected)
        if kills == num_kills:
            return


def is_killed(server: CrashServer, run: Run, killed: Killed, at_work: bool, seconds: float) -> bool:
    """Kill a run so long after its start, or after it went to work; False where it was done by then."""
    pid = start(server, run, at_work)
    time.sleep(seconds)
    children = children_of(pid)
    for each in [pid, *children] if killed == "group" else [pid]:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    code = server.wait(pid)
    assert code in (0, -signal.SIGKILL)
    if code == 0:
        return False
    check_all_ended(children, run.output_dir)
    return True


def start(server: CrashServer, run: Run, at_work: bool) -> int:
    """Start a run and return its pid; with `at_work` not before it writes to its journal, or has ended."""
    journal = run.output_dir / "_batchgen" / "journal"
    before = set(FILES.list_directory(journal))
    pid = server.start(run)
    while at_work and is_alive(pid) and before.issuperset(FILES.list_directory(journal)):
        time.sleep(0.001)
    return pid


def children_of(pid: int) -> list[int]:
    """The processes that this one has started and that are there."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(child) for child in path.read_text().split()]
    return found


def check_all_ended(pids: list[int], output: Path) -> None:
    """Nothing outlives a killed run, and its lock is free, within five seconds."""
    end = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) or FILES.is_locked(output / "_batchgen" / "lock"):
        assert time.monotonic() < end, "something outlived the run"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
