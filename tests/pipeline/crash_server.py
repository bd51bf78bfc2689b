"""Real processes that run jobs over fakes and are killed: a server that has imported everything forks one for each.

Starting Python for each run would take most of a test's time. Used as `with CrashServer() as server`; run as a
program, it is the server.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from itertools import count, islice
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

import pyarrow as pa

from batchgen.config import JobConfig
from batchgen.data.file_backend import FileBackend, OsBackend, WritableFile
from batchgen.errors import BatchgenError, ExitCode
from batchgen.pipeline.ports import Services
from batchgen.pipeline.redo import rerun
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.services import default_services, make_feeder
from batchgen.pipeline.session import OpenOptions
from tests.pipeline import worker_fakes
from tests.pipeline.fakes import FakeEngine, FakeWorld, make_job


@dataclass
class Run:
    """One run of a job, and how it ends."""

    job: dict[str, Any]
    base_dir: str
    command: Literal["run", "rerun", "overwrite"] = "run"
    """What is run: the job, a rerun of every second row, or the job over an output of another one."""
    kill_at: int | None = None
    """SIGKILL itself at the N-th file operation."""
    fail_at: int | None = None
    """Raise an error of the system at the N-th operation of `fail_kinds`."""
    fail_errno: int = 0
    fail_kinds: tuple[str, ...] = ("write", "sync")
    is_sticky: bool = False
    """Whether every later one of them fails too."""
    max_open_files: int | None = None
    """Limit of file descriptors beyond those that are open at the start."""
    has_child: bool = False
    """Whether prompts are made in a child process, as in earnest."""
    is_real: bool = False
    """Whether the model and everything else is real; nothing of the above is."""
    has_workers: bool = False
    """Whether the services are those of worker processes; nothing of the above is used."""
    step_seconds: float = 0.0
    wait_seconds: float = 0.0

    @classmethod
    def of(cls, job: JobConfig, **options: Any) -> Run:
        """A run of this job."""
        return cls(job.model_dump(mode="json", by_alias=True), str(job.base_dir), **options)

    @property
    def output_dir(self) -> Path:
        """Where its output lies."""
        return Path(self.base_dir) / self.job["output"]["path"]


class CountingBackend(OsBackend):
    """Calls back before every operation that changes something, with its kind and path."""

    def __init__(self, before: Callable[[str, Path], None]) -> None:
        self.before = before

    def make_directory(self, path: Path) -> None:
        self.before("make_directory", path)
        super().make_directory(path)

    def create(self, path: Path) -> WritableFile:
        self.before("create", path)
        return _CountingFile(super().create(path), path, self.before)

    def link(self, source: Path, target: Path) -> None:
        self.before("link", target)
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self.before("rename", target)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self.before("unlink", path)
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self.before("sync", path)
        super().sync_directory(path)


class _CountingFile:
    def __init__(self, file: WritableFile, path: Path, before: Callable[[str, Path], None]) -> None:
        self._file = file
        self._path = path
        self._before = before
        self.close = file.close

    def write(self, data: bytes) -> None:
        half = len(data) // 2
        self._file.write(data[:half])
        # In the middle of a write: what is on the disk is torn.
        self._before("write", self._path)
        self._file.write(data[half:])

    def sync(self) -> None:
        self._before("sync", self._path)
        self._file.sync()


def _backend(run: Run) -> FileBackend:
    count = 0

    def before(kind: str, path: Path) -> None:
        nonlocal count
        if run.kill_at is not None:
            if count == run.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
        if run.fail_at is not None and kind in run.fail_kinds:
            failing = count == run.fail_at or (run.is_sticky and count > run.fail_at)
            count += 1
            if failing:
                raise OSError(run.fail_errno, os.strerror(run.fail_errno))

    return CountingBackend(before) if run.kill_at is not None or run.fail_at is not None else OsBackend()


def _run(run: Run) -> int:
    job = JobConfig.model_validate(run.job).model_copy(update={"base_dir": Path(run.base_dir)})
    services = default_services() if run.is_real else _fake_services(run, job)
    if run.has_workers:
        services = worker_fakes.services()
    if run.max_open_files is not None:
        _limit_open_files(run.max_open_files)
    options = OpenOptions(wait_seconds=run.wait_seconds, overwrite=run.command == "overwrite")
    try:
        if run.command == "rerun":
            rerun(job, "batchgen.row % 2 == 0", services=services, options=options)
        else:
            run_job(job, services=services, options=options)
    except BatchgenError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return int(error.exit_code)
    except Exception:  # noqa: BLE001  As the program does: any other error is a bug.
        traceback.print_exc()
        return int(ExitCode.BUG)
    return 0


def _fake_services(run: Run, job: JobConfig) -> Services:
    pause = (lambda: time.sleep(run.step_seconds)) if run.step_seconds else None
    world = FakeWorld(_backend(run), lambda: FakeEngine(on_step=pause), model_directory=job.base_dir / "model")
    return replace(world.services, make_feeder=make_feeder) if run.has_child else world.services


def _limit_open_files(num_more: int) -> None:
    """Let this process open so many files more, wherever their numbers are free."""
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in count() if number not in taken)
    limit = next(islice(free, num_more, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def _serve() -> NoReturn:
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    with tempfile.TemporaryDirectory() as directory:
        # What is imported late, by pyarrow above all, is then there for every child.
        _run(Run.of(make_job(Path(directory))))
    for module in sys.argv[1:]:
        import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 2)
            os._exit(_run(Run(**request["run"])))
        print(child, flush=True)
    sys.exit()


class CrashServer:
    """The test's side of the server."""

    def __init__(self, log: Path, is_real: bool = False, has_workers: bool = False) -> None:
        """With `is_real` or `has_workers` it has loaded what such runs need too."""
        self.log = log
        """What the runs wrote to stderr."""
        modules = ["batchgen.engine.engine"] * is_real + ["batchgen.pipeline.cluster.generation"] * has_workers
        command = [sys.executable, "-m", "tests.pipeline.crash_server", *modules]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> CrashServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def start(self, run: Run) -> int:
        """Begin a run in a process group of its own; returns its pid."""
        return self._ask({"run": asdict(run), "log": str(self.log)})

    def wait(self, pid: int) -> int:
        """The exit code of a run; negative for the signal that ended it."""
        return self._ask({"wait": pid})

    def run(self, run: Run) -> int:
        """A whole run."""
        return self.wait(self.start(run))

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


if __name__ == "__main__":
    _serve()
