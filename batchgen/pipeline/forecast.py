"""What a job will take, before it runs: rows, tokens, prefixes, memory, time, and what to change."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen.config import JobConfig
from batchgen.data.commits import replay
from batchgen.data.files import OutputFiles
from batchgen.data.input_notes import input_notes
from batchgen.data.inputs import find_inputs
from batchgen.data.layout import OutputPaths
from batchgen.data.reader import scan_inputs
from batchgen.pipeline.assembly import counts
from batchgen.pipeline.bounded_reader import DecodingInChildren
from batchgen.pipeline.calibration import Calibration, calibrate, calibration_key, keep_calibration, load_calibration
from batchgen.pipeline.feeder import PromptFeeder, preparer_spec
from batchgen.pipeline.machine_class import MachineClass, this_class
from batchgen.pipeline.plan import RowIndex, limited
from batchgen.pipeline.ports import Services
from batchgen.pipeline.prompt_sample import PromptSample, histogram, sample_prompts, spread
from batchgen.pipeline.services import default_services
from batchgen.pipeline.stored import read_output
from batchgen.resources import context_length

_UNLIMITED = 1 << 20
_BYTES_PER_TOKEN = 6
"""Of text and records in an output, before compression: a bound."""


@dataclass(frozen=True)
class Estimate:
    """Time and tokens of the rows that are left, if completions have a certain mean length."""

    completion_tokens: int
    prompt_tokens: int
    """That must be computed; what shared prefixes serve is taken off."""
    sequences_at_once: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Forecast:
    """Everything that `plan` says of a job."""

    num_rows: int
    num_files: int
    num_done: int
    """Rows that the output has already."""
    num_shards: int
    sample: PromptSample
    max_tokens: int | None
    num_sequences: int
    """Samples or beams of a row."""
    calibration: Calibration | None
    at_most: Estimate | None
    """If every completion has `max_tokens`; None where nothing bounds them, or nothing was measured."""
    half: Estimate | None
    """If completions have half of that."""
    notes: list[str]
    warnings: list[str]
    machine: str
    """The class that the settings are recommended for; empty where nothing was measured."""
    recommended: dict[str, Any]
    """Settings of `engine:` for this machine."""
    recommended_run: dict[str, Any]
    """Settings of `run:` for this machine."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        values = asdict(self)
        lengths = values["sample"].pop("lengths")
        values["sample"].pop("token_ids")
        values["sample"] |= {
            "mean": self.sample.mean_length,
            "shared_share": self.sample.shared_share,
            **{f"p{share}": self.sample.quantile(share / 100) for share in (5, 50, 95, 100)},
            "histogram": histogram(lengths),
        }
        return values


def forecast(
    job: JobConfig, *, measure: bool = True, again: bool = False, say: Callable[[str], None], services: Services | None
) -> Forecast:
    """Read the inputs, make some prompts, and measure the model where no measurement is kept.

    Raises JobError, InputError and ModelError, as a run would. `again` measures anew; `say` hears what takes time.
    """
    services = services or default_services()
    say("reading inputs")
    found = find_inputs(job.input, job.base_dir, own=OutputPaths(job.output_dir).data)
    scan = scan_inputs(found.files, job.input, decoding=DecodingInChildren())
    index = RowIndex(scan.files)
    ranges = limited(scan.ranges, job.input.limit, index)
    num_rows = sum(index.count(rows) for rows in ranges)
    model = services.find_model(job, {})
    max_model_len = job.model.max_model_len
    context = context_length(model.directory) if max_model_len == "auto" else max_model_len
    say("making some prompts")
    spec = preparer_spec(job, scan, model.directory, int(context or _UNLIMITED))
    sample = sample_prompts(PromptFeeder(spec, spread(ranges, index)), job.engine.block_size)
    key = calibration_key(job, model)
    calibration = None if again else load_calibration(key)
    if calibration is None and measure and num_rows:
        say("loading the model and measuring it, once for this machine")
        with closing(services.make_engine(job, model.directory)) as engine:
            calibration = calibrate(engine, sample.token_ids or list(range(100)))
        keep_calibration(key, calibration)
    return assess(job, num_rows, len(scan.files), sample, calibration, input_notes(found.passed_over, scan))


def assess(
    job: JobConfig,
    num_rows: int,
    num_files: int,
    sample: PromptSample,
    calibration: Calibration | None,
    notes: list[str],
) -> Forecast:
    """Put the figures together."""
    num_done = _rows_done(job)
    machine = None if calibration is None else this_class(_device(job, calibration))
    left = max(0, num_rows - num_done)
    max_tokens = job.sampling.max_tokens
    at_most = half = None
    if calibration is not None and max_tokens is not None and sample.lengths:
        at_most = estimate(calibration, sample, left, job.sampling.num_sequences, max_tokens, max_tokens)
        half = estimate(calibration, sample, left, job.sampling.num_sequences, max_tokens / 2, max_tokens)
    return Forecast(
        num_rows=num_rows,
        num_files=num_files,
        num_done=num_done,
        num_shards=-(-left // job.output.shard_rows),
        sample=sample,
        max_tokens=max_tokens,
        num_sequences=job.sampling.num_sequences,
        calibration=calibration,
        at_most=at_most,
        half=half,
        notes=notes,
        warnings=list(warnings(job, left, sample, calibration, at_most)),
        machine="" if machine is None else machine.name,
        recommended={}
        if calibration is None or machine is None
        else recommended(calibration, sample, job, machine, left),
        recommended_run={} if machine is None or num_rows <= job.output.shard_rows else {"workers": machine.workers},
    )


def estimate(
    calibration: Calibration, sample: PromptSample, num_rows: int, per_row: int, mean_tokens: float, max_tokens: int
) -> Estimate:
    """Prompts in full steps, then steps of as many sequences as the cache holds, then the tail of the longest row."""
    ok_share = len(sample.lengths) / sample.num_rows if sample.num_rows else 1.0
    rows = num_rows * ok_share
    prompt_tokens = rows * sample.mean_length * (1 - sample.shared_share)
    num_sequences = rows * per_row
    at_once = min(sequences_at_once(calibration, sample, per_row, mean_tokens), max(1.0, num_sequences))
    context = sample.mean_length + mean_tokens / 2
    steps = num_sequences * mean_tokens / at_once
    tail = max(0.0, max_tokens - mean_tokens) * calibration.decode_step(1, context)
    seconds = prompt_tokens * calibration.prompt_seconds + steps * calibration.decode_step(at_once, context) + tail
    return Estimate(round(num_sequences * mean_tokens), round(prompt_tokens), round(at_once), seconds)


def sequences_at_once(calibration: Calibration, sample: PromptSample, per_row: int, mean_tokens: float) -> float:
    """Sequences that the KV cache holds side by side on average: each is half grown, prompts are shared."""
    own = sample.mean_length * (1 - sample.shared_share) / per_row + mean_tokens / 2 + calibration.block_size / 2
    room = calibration.num_blocks * calibration.block_size - sample.mean_length * sample.shared_share
    return max(1.0, min(calibration.max_sequences, room / max(1.0, own)))


def warnings(
    job: JobConfig, num_rows: int, sample: PromptSample, calibration: Calibration | None, at_most: Estimate | None
) -> Iterable[str]:
    """What will be slow, refused or failed, each with what to do."""
    for code, count in sample.errors.items():
        yield f"{count} of {sample.num_rows} rows of the sample have no prompt: {code}"
    if job.sampling.max_tokens is None:
        yield "sampling.max_tokens is null: nothing bounds the time; a row may fill the model's whole context"
    if calibration is None:
        return
    yield from calibration.notes
    room = calibration.num_blocks * calibration.block_size
    per_row = job.sampling.num_sequences if job.sampling.beam is not None else 1
    longest = [length for length in sample.lengths if length + per_row * (job.sampling.max_tokens or 0) > room]
    if longest:
        yield (
            f"{len(longest)} of {len(sample.lengths)} prompts do not fit into the KV cache of {room:,} tokens with "
            "max_tokens; they will be errors (kv_capacity): raise engine.kv_cache_memory"
        )
    elif at_most is not None and at_most.sequences_at_once < min(
        calibration.max_sequences, num_rows * job.sampling.num_sequences
    ):
        yield (
            f"the KV cache holds about {at_most.sequences_at_once} sequences at once, and "
            f"{calibration.max_sequences} could run: a larger engine.kv_cache_memory is faster"
        )
    if calibration.device == "cpu" and calibration.dtype == "float32":
        yield "the model runs in float32: bfloat16 (model.dtype) is about twice as fast on processors that have it"
    if at_most is not None:
        needed = (at_most.completion_tokens + at_most.prompt_tokens) * _BYTES_PER_TOKEN
        free = shutil.disk_usage(_existing(job.output_dir)).free
        if free < needed:
            yield f"the output may take {needed / 1e9:,.1f} GB and the disk has {free / 1e9:,.1f} GB"
    if num_rows / job.output.shard_rows > 50_000:
        yield f"{num_rows / job.output.shard_rows:,.0f} shards: raise output.shard_rows"


def _device(job: JobConfig, calibration: Calibration) -> str:
    """What was measured: cpu, cuda, or the one GPU that the job names."""
    return job.engine.device if job.engine.device.startswith("cuda:") else calibration.device


def recommended(
    calibration: Calibration, sample: PromptSample, job: JobConfig, machine: MachineClass, num_rows: int
) -> dict[str, Any]:
    """Settings of `engine:`: as many sequences as still help and `num_rows` have, and a cache that holds them."""
    max_tokens = job.sampling.max_tokens or calibration.max_model_len
    context = sample.mean_length + max_tokens / 2
    best = max_sequences = 16
    while best < min(machine.most_sequences, num_rows * job.sampling.num_sequences):
        best *= 2
        gain = _rate(calibration, best, context) / _rate(calibration, best // 2, context)
        if gain < 1.05:
            break
        max_sequences = best
    per_sequence = sample.mean_length * (1 - sample.shared_share) / job.sampling.num_sequences + max_tokens
    blocks = math.ceil(per_sequence / calibration.block_size) + 1
    needed = max_sequences * blocks * calibration.block_size * calibration.kv_bytes_per_token
    return {
        "block_size": machine.block_size,
        "max_sequences": max_sequences,
        "kv_cache_memory": f"{max(64, 64 * math.ceil(needed / 2**20 / 64))}MiB",
    }


def _rate(calibration: Calibration, num_sequences: int, context: float) -> float:
    return num_sequences / max(1e-9, calibration.decode_step(num_sequences, context))


def _rows_done(job: JobConfig) -> int:
    files = OutputFiles()
    if files.status(OutputPaths(job.output_dir.absolute()).plan) is None:
        return 0
    stored = read_output(files, job.output_dir)
    return counts(replay(stored.log.records, stored.plan.fingerprint).shards.values())[0]


def _existing(path: Path) -> Path:
    path = Path(os.path.abspath(path))
    while not path.exists():
        path = path.parent
    return path
