"""The program itself with a real, tiny model: killed, it goes on, and its rows are those of the undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest
import yaml

from batchgen.data.files import OutputFiles
from tests.engine.models import save_model
from tests.pipeline.crashes import Rows, check_output, committed_rows

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


def write_job(home: Path, output: str) -> Path:
    """A job file whose prompts are rendered in the feeder's child, and whose rows take many steps."""
    job = {
        "version": 1,
        # A resumed run has other neighbours in its batches. In float32 the engine's log-probabilities still follow
        # them in their last bits (with other engine.max_sequences too, without any crash); in bfloat16 they do not.
        "model": {"path": "model", "dtype": "bfloat16"},
        "input": {"path": "in.jsonl"},
        "prompt": {"template": "Write about {{ topic }}."},
        "sampling": {"n": 2, "seed": 3, "max_tokens": 60, "ignore_eos": True},
        "engine": {"kv_cache_memory": "4MiB", "max_sequences": 8, "threads": 1},
        "output": {"path": output, "shard_rows": 5, "token_ids": True},
        "run": {"journal_interval": "50ms", "grace": "20s"},
    }
    path = home / f"{output}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def start(job: Path) -> subprocess.Popen[bytes]:
    """The program in a process group of its own."""
    command = [sys.executable, "-m", "batchgen.cli", "run", str(job)]
    with (job.parent / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def run(job: Path) -> int:
    return start(job).wait(300)


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
    process = start(job)
    wait_for_record(home / "main-killed", 0, process)
    process.kill()
    process.wait()
    killed_at = time.monotonic()
    while group_is_alive(process.pid):
        assert time.monotonic() - killed_at < 5, "a child outlived the run"
        time.sleep(0.01)
    assert run(job) == 0
    check_output(FILES, home / "main-killed", expected(home))


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_whole_group_is_killed_again_and_again(home: Path) -> None:
    chance = random.Random(4)
    job = write_job(home, "group-killed")
    for number in count():
        process = start(job)
        try:
            process.wait(chance.uniform(6.0, 14.0) + 2 * number)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0
    check_output(FILES, home / "group-killed", expected(home))
