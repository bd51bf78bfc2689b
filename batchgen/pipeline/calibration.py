"""How fast a model runs on this machine: measured once in a few seconds, and kept."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from batchgen.config import JobConfig
from batchgen.errors import ModelError
from batchgen.pipeline.identity import recorded_facts
from batchgen.pipeline.ports import EngineLike, ModelFiles
from batchgen.records import Prompt
from batchgen.resources import cache_directory
from batchgen.sampling_params import SamplingParams

FORMAT = 1
_CONTEXTS = (32, 320)
"""Prompt tokens of the sequences that are measured."""
_WIDTHS = (4, 48)
"""Sequences that generate side by side."""
_STEPS = 12
_ROUNDS = 3
_KEPT = 256
"""Calibrations in the cache; the oldest ones go first."""


@dataclass(frozen=True)
class Calibration:
    """A step takes `step_seconds`, and more for each token and for each token of context that it attends to."""

    device: str
    dtype: str
    max_model_len: int
    max_sequences: int
    max_batch_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes_per_token: float
    step_seconds: float
    token_seconds: float
    context_seconds: float
    """For each generated token and each token of its context."""
    prompt_seconds: float
    """For each token of a prompt, in full steps."""
    notes: list[str]
    """What the engine says of this model on this machine."""
    measured: str
    """When, ISO 8601."""

    def decode_step(self, num_sequences: float, context: float) -> float:
        """Seconds of a step in which this many sequences of this mean length generate a token each."""
        return self.step_seconds + num_sequences * (self.token_seconds + context * self.context_seconds)


def calibration_key(job: JobConfig, model: ModelFiles) -> str:
    """Hash of the machine, the model, the versions and the settings that a measurement holds for."""
    facts = {
        "format": FORMAT,
        "facts": recorded_facts(),
        "kernels": _kernels(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "model": {name: entry[0] for name, entry in model.hashes.items()},
        "engine": job.engine.model_dump(mode="json"),
        "settings": job.model.model_dump(mode="json", exclude={"path", "revision"}),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def load_calibration(key: str) -> Calibration | None:
    """What an earlier `plan` measured; None where it did not."""
    with suppress(OSError, ValueError, TypeError, ModelError):
        return Calibration(**json.loads(_path(key).read_text(encoding="utf-8")))
    return None


def keep_calibration(key: str, calibration: Calibration) -> None:
    """Keep it for later; a cache that cannot be written only costs time."""
    with suppress(OSError, ModelError):
        path = _path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(json.dumps(asdict(calibration)), encoding="utf-8")
        for old in sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-_KEPT]:
            old.unlink()


def calibrate(engine: EngineLike, token_ids: Sequence[int]) -> Calibration:
    """Measure: prompts of tokens drawn from `token_ids`, generated past every end."""
    metrics = engine.metrics
    room = metrics.num_blocks * metrics.block_size
    longest = min(_CONTEXTS[1], engine.max_model_len - _STEPS - 2, room - _STEPS - 2)
    contexts = (min(_CONTEXTS[0], longest), longest)
    width = max(1, min(_WIDTHS[1], metrics.max_sequences, room // (contexts[0] + _STEPS + metrics.block_size)))
    # With the long prompts fewer sequences fit into a small cache.
    few = max(1, min(_WIDTHS[0], width, room // (contexts[1] + _STEPS + metrics.block_size)))
    chance = random.Random(0)
    kinds = ((few, contexts[0]), (width, contexts[0]), (few, contexts[1]))
    # The fastest of some rounds: what else the machine did meanwhile is no part of the model. The first warms up.
    rounds = [[_measure(engine, *kind, token_ids, chance) for kind in kinds] for _ in range(_ROUNDS)]
    steps = [min(measured[kind][1] for measured in rounds) for kind in range(len(kinds))]
    prompt_seconds = min(measured[2][0] for measured in rounds)
    fitted = _fit([(number, number * context, step) for (number, context), step in zip(kinds, steps, strict=True)])
    resolved = engine.resolved
    return Calibration(
        device=str(resolved.get("resolved.device", "cpu")),
        dtype=str(resolved.get("model.dtype", "auto")),
        max_model_len=engine.max_model_len,
        max_sequences=metrics.max_sequences,
        max_batch_tokens=metrics.max_batch_tokens,
        block_size=metrics.block_size,
        num_blocks=metrics.num_blocks,
        kv_bytes_per_token=metrics.kv_cache_bytes / max(1, room),
        step_seconds=fitted[0],
        token_seconds=fitted[1],
        context_seconds=fitted[2],
        prompt_seconds=prompt_seconds,
        notes=list(engine.notes),
        measured=time.strftime("%Y-%m-%dT%H:%M:%S"),
    )


def _measure(
    engine: EngineLike, num_sequences: int, context: int, token_ids: Sequence[int], chance: random.Random
) -> tuple[float, float]:
    """(seconds for each prompt token, seconds of a step in which all generate)."""
    params = SamplingParams(max_tokens=_STEPS, temperature=1.0, seed=1, ignore_eos=True)
    for row in range(num_sequences):
        engine.add(Prompt(token_ids=chance.choices(token_ids, k=context), params=params, row=row))
    started = time.monotonic()
    drawn = engine.metrics.num_drawn_tokens
    while engine.num_unfinished and engine.metrics.num_drawn_tokens - drawn < num_sequences:
        engine.step()
    read = time.monotonic()
    first = engine.metrics.num_drawn_tokens
    steps: list[float] = []
    while engine.num_unfinished:
        before = time.monotonic()
        engine.step()
        steps.append(time.monotonic() - before)
    # The median: a single step that something else interrupted says nothing.
    per_step = float(np.median(steps)) if steps else (read - started)
    assert engine.metrics.num_drawn_tokens >= first
    return (read - started) / (num_sequences * context), per_step


def _fit(samples: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """(fixed, per sequence, per sequence and token of context) seconds, none negative, from three kinds of step."""
    (few, few_context, base), (many, many_context, wide), (_, long_context, long) = samples
    more = max(0.0, wide - base)
    per_context = max(0.0, (long - base) / (long_context - few_context)) if long_context > few_context else 0.0
    if many_context > few_context:
        # On a busy machine the small steps are mostly noise: at least half of what more sequences cost is their own.
        per_context = min(per_context, more / 2 / (many_context - few_context))
    rest = more - per_context * (many_context - few_context)
    per_sequence = rest / (many - few) if many > few else 0.0
    fixed = max(0.0, base - few * per_sequence - few_context * per_context)
    return fixed, per_sequence, per_context


def _path(key: str) -> Path:
    return cache_directory() / "calibration" / f"{key}.json"


def _kernels() -> list[tuple[str, int, int]]:
    """The built C++ kernels by name, size and time: with others, or none, a model is as fast as they are."""
    spec = find_spec("batchgen_kernels")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder, "cpu").glob("_native*"))]
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in found]


def _processor() -> Mapping[str, Any]:
    names = {"model name", "cpu family", "model", "stepping"}
    found: dict[str, Any] = {"machine": platform.machine()}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                found[name.strip()] = value.strip()
    return found
