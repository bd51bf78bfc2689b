"""batchgen beside its peers: the same workload files, one after the other, in one run on one machine.

    python -m benchmarks.peers [plain shared parallel beam] [--engines NAME ...] [--python PEER=PYTHON ...]
                               [--openvino-model DIR] [--repeat 1] [--scale 1.0] [--json FILE]

Engines are batchgen, batchgen-int8 (weights, inputs and KV cache), transformers (generate_batch; generate for beams),
openvino and vllm. The last two run where they are installed: name the interpreter of their environment, as in
`--python openvino=/opt/openvino/bin/python`; for OpenVINO also the model that `optimum-cli export openvino --task
text-generation-with-past --weight-format fp16` made of the same weights. Each engine runs in a process of its own. The
seconds are those of the generate call alone; of several repetitions, taken in turn, the median counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from batchgen.resources import locate_model
from benchmarks.throughput import MODEL, NAMES

HERE = Path(__file__).parent
OWN = {"batchgen": [], "batchgen-int8": ["--quantization", "int8", "--kv-dtype", "int8"]}
PEERS = ("transformers", "openvino", "vllm")


def main() -> None:
    """Print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="workload", help=f"any of {', '.join(NAMES)}; default: all")
    parser.add_argument("--engines", nargs="+", choices=[*OWN, *PEERS], default=[*OWN, "transformers"])
    parser.add_argument("--python", nargs="+", default=[], metavar="PEER=PYTHON", help="interpreters of the peers")
    parser.add_argument("--openvino-model", metavar="DIR")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the prompts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if "openvino" in options.engines and not options.openvino_model:
        parser.error("openvino needs --openvino-model")
    options.python = dict(entry.split("=", 1) for entry in options.python)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in options.workloads or NAMES:
        runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in options.engines}
        for _ in range(options.repeat):
            for engine in options.engines:
                runs[engine].append(run(engine, name, options))
        results[name] = runs
        print_table(name, runs)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def run(engine: str, workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """One engine on one workload, in its own process."""
    return run_own(engine, workload, options) if engine in OWN else run_peer(engine, workload, options)


def run_own(engine: str, workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """batchgen, by its own benchmark."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "result.json"
        command = [sys.executable, "-m", "benchmarks.throughput", workload, *OWN[engine], "--scale", str(options.scale)]
        call([*command, "--json", str(file)])
        result: dict[str, Any] = json.loads(file.read_text())[0]
    return result


def run_peer(engine: str, workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """A peer, by benchmarks/peer_runs.py in its own environment."""
    model = options.openvino_model if engine == "openvino" else str(locate_model(MODEL))
    command = [options.python.get(engine, sys.executable), str(HERE / "peer_runs.py"), engine]
    command += [str(HERE / "workloads" / f"{workload}.json"), "--model", model]
    printed = call([*command, "--scale", str(options.scale), "--threads", str(options.threads)])
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def call(command: list[str]) -> str:
    """What a command prints; its errors go where ours go."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def print_table(workload: str, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Seconds, and how many times those of batchgen's first line each engine takes."""
    print(f"{workload:16} {'seconds':>9} {'ratio':>7}")
    base = None
    for engine, results in runs.items():
        seconds = statistics.median(result["seconds"] for result in results)
        base = base or seconds
        print(f"  {engine:14} {seconds:9.2f} {seconds / base:6.2f}x", flush=True)


if __name__ == "__main__":
    main()
