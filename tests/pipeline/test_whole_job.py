"""The program itself with a real, tiny model: killed, it goes on, and its rows are those of the undisturbed run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen.config import load_job
from batchgen.data.files import OutputFiles
from batchgen.pipeline.status import status
from batchgen.pipeline.stored import read_output
from tests.engine.models import save_model
from tests.pipeline.crash_server import CrashServer, Run
from tests.pipeline.crashes import Rows, check_output, committed_rows
from tests.pipeline.kills import Killed, check_all_ended, children_of, kill_at_random
from tests.program import start_job

pytestmark = pytest.mark.slow

FILES = OutputFiles()
NUM_ROWS = 24


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, inputs, and the output of an undisturbed run."""
    home = tmp_path_factory.mktemp("home")
    save_model(home / "model", "plain")
    rows = [f'{{"id": {row}, "topic": "topic {row * 7}"}}\n' for row in range(NUM_ROWS)]
    (home / "in.jsonl").write_text("".join(rows))
    assert run(write_job(home, "calm")) == 0
    return home


def write_job(home: Path, output: str, **run_keys: Any) -> Path:
    """A job file whose prompts are rendered in the feeder's child, and whose rows take many steps."""
    job = {
        "version": 1,
        "model": {"path": "model", "dtype": "bfloat16"},
        "input": {"path": "in.jsonl"},
        "prompt": {"template": "Write about {{ topic }}."},
        "sampling": {"n": 2, "seed": 3, "max_tokens": 60, "ignore_eos": True},
        "engine": {"kv_cache_memory": "4MiB", "max_sequences": 8, "threads": 1},
        "output": {"path": output, "shard_rows": 5, "token_ids": True},
        "run": {"journal_interval": "50ms", "grace": "60s", **run_keys},
    }
    path = home / f"{output}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def run(job: Path) -> int:
    return start_job(job).wait(300)


def expected(home: Path) -> Rows:
    return committed_rows(FILES, home / "calm")


def wait_for_record(output: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while not (output / "_batchgen" / "commits" / f"{number:08d}.json").exists():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_main_process_alone_is_killed(home: Path) -> None:
    job = write_job(home, "main-killed")
    process = start_job(job)
    wait_for_record(home / "main-killed", 0, process)
    children = children_of(process.pid)
    process.kill()
    process.wait()
    check_all_ended(children, home / "main-killed")
    assert run(job) == 0
    check_output(FILES, home / "main-killed", expected(home))


@pytest.mark.parametrize("killed", ["main", "group"])
def test_kills_at_random_moments_lose_nothing(home: Path, tmp_path: Path, killed: Killed) -> None:
    def run_of(path: str) -> Run:
        job = load_job(write_job(home, f"{killed}-{path}"))
        return Run.of(job, is_real=True)

    with CrashServer(tmp_path / "stderr", is_real=True) as server:
        kill_at_random(server, run_of, killed, num_kills=25)


def signalled(job: Path, num_steps: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.pipeline.signalled", str(job), str(num_steps), *options]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)


def test_sigterm_ends_in_good_order_and_the_next_run_goes_on_behind_the_tokens(home: Path) -> None:
    # Nothing but the end in good order writes to the journal.
    job = write_job(home, "signalled", journal_interval="1h")
    result = signalled(job, 100)
    assert result.returncode == 75
    assert result.stderr.endswith("got SIGTERM: stopped in good order; the same command goes on from here\n")
    found = status(read_output(FILES, home / "signalled"))
    assert 0 < found.num_begun + found.num_journaled + found.num_committed < NUM_ROWS
    assert found.num_begun > 0
    assert run(job) == 0
    check_output(FILES, home / "signalled", expected(home))


def test_a_step_that_hangs_ends_with_the_grace(home: Path) -> None:
    job = write_job(home, "hanging", grace="1s")
    assert signalled(job, 100, "hang").returncode == 75
    assert run(job) == 0
    check_output(FILES, home / "hanging", expected(home))


@pytest.mark.case(56)
def test_a_grace_of_five_seconds_is_enough(home: Path) -> None:
    job = write_job(home, "five", grace="5s")
    assert signalled(job, 150).returncode == 75
    assert run(job) == 0
    check_output(FILES, home / "five", expected(home))
