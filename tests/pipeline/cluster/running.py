"""Jobs with worker processes over fakes, in this process or as a program of their own that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.errors import BatchgenError
from batchgen.pipeline.runner import run_job
from tests.pipeline.crashes import Rows, check_output, committed_rows
from tests.pipeline.fakes import make_job
from tests.pipeline.worker_fakes import services
from tests.program import ROOT

FILES = OutputFiles()
NUM_ROWS = 60


class Watching:
    """A Progress that keeps what it is told, and can act on it."""

    def __init__(self, on_update: Callable[[Any], None] = lambda snapshot: None) -> None:
        self.on_update = on_update
        self.messages: list[str] = []
        self.snapshots: list[Any] = []

    def phase(self, name: str) -> None:
        self.messages.append(name)

    def update(self, snapshot: Any) -> None:
        self.snapshots.append(snapshot)
        self.on_update(snapshot)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None:
        pass


def job_of(
    root: Path,
    output: str,
    workers: int,
    prompts: dict[int, str] | None = None,
    *,
    num_rows: int = NUM_ROWS,
    **run: Any,
) -> JobConfig:
    """A job with shards of 7 rows; `prompts` replace those of some rows."""
    sections = {
        "output": {"path": output, "shard_rows": 7},
        "run": {"journal_interval": 0.1, "workers": workers, **run},
    }
    job = make_job(root, num_rows=num_rows, **sections)
    lines = [{"id": row, "prompt": (prompts or {}).get(row, f"prompt {row}")} for row in range(num_rows)]
    (root / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return job


def rows_of(job: JobConfig) -> Rows:
    return committed_rows(FILES, job.output_dir)


def calm(root: Path, name: str = "calm", num_rows: int = NUM_ROWS) -> Rows:
    """The rows of one engine that nothing happens to."""
    job = job_of(root, name, 1, num_rows=num_rows)
    run_job(job, services=services())
    return rows_of(job)


def check(job: JobConfig, expected: Rows) -> None:
    """Whole, equal, each row once, and nothing left over."""
    check_output(FILES, job.output_dir, expected)


def children(pid: int | None = None) -> dict[int, str]:
    """Command lines of the living descendants of a process."""
    found: dict[int, str] = {}
    todo = [pid or os.getpid()]
    while todo:
        parent = todo.pop()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
                command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == parent and fields[0] != "Z":
                found[int(path.name)] = command
                todo.append(int(path.name))
    return found


def pids(kind: str, parent: int | None = None) -> list[int]:
    """Process ids of the schedulers or workers that a process has started."""
    return [pid for pid, command in children(parent).items() if f"cluster.{kind}_process" in command]


def num_open_files(pid: int) -> int:
    """Open file descriptors of a process."""
    return len(list((Path("/proc") / str(pid) / "fd").iterdir()))


def listening(family: Iterable[int]) -> list[str]:
    """Addresses and ports that these processes listen on."""
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    pids = set(family)
    return [line.split()[3] for line in lines if any(f"pid={pid}," in line for pid in pids)]


def wait_until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Fail where a condition does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def start(job: JobConfig, step_seconds: float = 0.02) -> subprocess.Popen[bytes]:
    """The job as a process of its own."""
    request = json.dumps([job.model_dump(mode="json", by_alias=True), str(job.base_dir)])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FAKE_STEP_SECONDS": str(step_seconds)}
    log = (job.base_dir / "log").open("ab")
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.cluster.running", request],
            cwd=ROOT,
            env=environ,
            stdout=log,
            stderr=log,
        )


def main() -> int:
    values, base_dir = json.loads(sys.argv[1])
    job = JobConfig.model_validate(values).model_copy(update={"base_dir": Path(base_dir)})
    try:
        run_job(job, services=services())
    except BatchgenError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    return 0


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
