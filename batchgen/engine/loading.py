"""Makes the parts of an engine: model, cache, scheduler, runner, sampler; resolves every `auto`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, get_args

import torch
from batchgen_kernels import cpu
from batchgen_kernels.segments import SEGMENT_TOKENS

from batchgen.bounds import MAX_COUNT, MAX_PROCESSES
from batchgen.choices import DEVICE_PATTERN, BlockSize, Dtype, KvDtype, Quantization
from batchgen.engine.batch import Batch, Draws
from batchgen.engine.beam import Continuation
from batchgen.engine.block_pool import BlockPool
from batchgen.engine.device import Device, device_at
from batchgen.engine.independent_rows import make_rows_independent
from batchgen.engine.kv_cache import KVCache, LayerShape
from batchgen.engine.made_up import largest_batch
from batchgen.engine.masks import AllowedTokens
from batchgen.engine.memory import TouchAhead, num_blocks_for
from batchgen.engine.model_loader import LoadedModel, load_model
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.ops import Ops, select_ops
from batchgen.engine.prefix_cache import PrefixCache
from batchgen.engine.row_probe import row_dependence
from batchgen.engine.sampler import Sampler
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import Sequence
from batchgen.errors import JobError
from batchgen.records import TokenLogprob
from batchgen.resources import locate_model
from batchgen.tokenizer import Tokenizer
from batchgen.units import parse_bytes

CPU_MAX_SEQUENCES = 256
CPU_MAX_BATCH_TOKENS = 512
"""A step costs a fixed part and a part per token: few, full steps win, and past this nothing is gained."""
TOUCHED_BYTES = 512 << 20
"""Of the KV cache, while the model is made ready: what the first steps write to."""
GPU_MAX_SEQUENCES = 1024
GPU_MAX_BATCH_TOKENS = 8192


class Runner(Protocol):
    """What computes batches: the ModelRunner, or a fake one."""

    def execute(self, batch: Batch, drawn_R: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [R, V], the rows of `batch.logits_layout()`; unseen tokens of the batch are among `drawn_R`.

        `drawn_R` are the token ids of the step before, where that one is still on its way.
        """
        ...


class Drawer(Protocol):
    """What turns logits into tokens: the Sampler, or a fake one."""

    def sample(
        self,
        logits_LV: torch.Tensor,
        rows: list[int],
        sequences: list[Sequence],
        allowed: AllowedTokens | None = None,
    ) -> Draws:
        """One draw per sequence, from the logits row beside it and of what is allowed."""
        ...

    def continuations(
        self, logits_LV: torch.Tensor, rows: list[int], beams: list[Sequence]
    ) -> list[list[Continuation]]:
        """The best next tokens of each live beam."""
        ...

    def score(self, logits_RV: torch.Tensor, token_ids: list[int], top: int) -> list[list[TokenLogprob]]:
        """Log-probabilities of given tokens, one per row."""
        ...


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What Engine was asked for; see its docstring."""

    model: str
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | str = "auto"
    block_size: int = 16
    kv_cache_memory: int | str = "auto"
    max_batch_tokens: int | str = "auto"
    max_sequences: int | str = "auto"
    threads: int | str = "auto"
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of."""

    runner: Runner
    sampler: Drawer
    scheduler: Scheduler
    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    kv_cache_bytes: int = 0
    is_asynchronous: bool = False
    """Whether the device runs steps on its own: then the next one is planned and launched meanwhile."""
    notes: tuple[str, ...] = ()
    """What a user should know about this model on this machine."""
    resolved: Mapping[str, str | int | list[int]] = field(default_factory=dict)
    """What each `auto` that can change a token came to, under the names of the job file."""


_CHOICES: dict[str, tuple[object, ...]] = {
    "dtype": get_args(Dtype),
    "quantization": (None, *get_args(Quantization)),
    "kv_dtype": get_args(KvDtype),
    "block_size": get_args(BlockSize),
}
_MOST = {**dict.fromkeys(("max_model_len", "max_batch_tokens", "max_sequences"), MAX_COUNT), "threads": MAX_PROCESSES}


def _check_options(options: EngineOptions) -> None:
    """JobError for what no engine takes; a job file is checked before, with its lines."""
    for name, choices in _CHOICES.items():
        if (value := getattr(options, name)) not in choices:
            raise JobError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    for name, most in _MOST.items():
        value = getattr(options, name)
        if value != "auto" and (type(value) is not int or not 1 <= value <= most):
            raise JobError(f"{name} must be 'auto' or a whole number from 1 to {most}, got {value!r}")
    if not re.fullmatch(DEVICE_PATTERN, options.device):
        raise JobError(f"device must be auto, cpu, cuda or cuda:N, got {options.device!r}")


def load_parts(options: EngineOptions, device: Device | None = None, ops: Ops | None = None) -> EngineParts:
    """Load the model and make everything around it. Raises ModelError, and JobError for options that do not fit.

    `device` and `ops` are those that the options and the machine imply; this is where others plug in.
    """
    _check_options(options)
    directory = locate_model(options.model, options.revision)
    device = device or device_at(resolve_device(options.device))
    on_cpu = device.where.type == "cpu"
    ops = ops or select_ops(device.where)
    if options.threads != "auto":
        # A setting of the whole process; the C++ kernels follow it too.
        torch.set_num_threads(int(options.threads))
    loaded = load_model(directory, options.dtype, device.where, options.max_model_len)
    int8 = _check_quantization(options, loaded, device.where)
    scheduler, cache = _make_cache(options, loaded, ops, device)
    touching = TouchAhead(cache.tensors, TOUCHED_BYTES) if on_cpu else None
    fused = make_rows_independent(loaded.model, loaded.attention_modules, int8) if on_cpu else None
    sampler = Sampler(ops, device)
    runner = ModelRunner(loaded, cache, ops, device, fused)
    dependence = ""
    if on_cpu and not device.is_asynchronous:
        dependence = row_dependence(runner, loaded, options.quantization)
    if touching is not None:
        touching.finish()
    return EngineParts(
        runner=runner,
        sampler=sampler,
        scheduler=scheduler,
        tokenizer=loaded.tokenizer,
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        kv_cache_bytes=cache.num_bytes,
        is_asynchronous=device.is_asynchronous,
        notes=tuple(note for note in (_kernels_note(on_cpu), dependence, _unused_note(loaded)) if note),
        resolved={
            "model.dtype": str(loaded.dtype).removeprefix("torch."),
            "model.max_model_len": loaded.max_model_len,
            "resolved.device": device.where.type,
            "resolved.attention_segment": SEGMENT_TOKENS,
            "resolved.eos_token_ids": sorted(loaded.eos_token_ids),
            "resolved.unused_generation_config": _unused_settings(loaded),
        },
    )


def _kernels_note(on_cpu: bool) -> str:
    reason = cpu.why_unavailable() if on_cpu else ""
    return reason and f"slow: {reason}. Until then attention and sampling run through torch, many times slower"


def _unused_settings(loaded: LoadedModel) -> str:
    """`temperature 0.7, top_p 0.9`"""
    return ", ".join(f"{name} {value}" for name, value in loaded.unused_settings.items())


def _unused_note(loaded: LoadedModel) -> str:
    settings = _unused_settings(loaded)
    if not settings:
        return ""
    return f"not used of the model's generation_config.json: {settings}; what you want of it belongs under sampling"


def resolve_device(device: str) -> torch.device:
    """`auto` is a GPU if there is one. Raises JobError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise JobError(f'engine.device is "{device}", but torch finds no GPU here; use "cpu" or "auto"')
    return torch.device(device)


def _make_cache(options: EngineOptions, loaded: LoadedModel, ops: Ops, device: Device) -> tuple[Scheduler, KVCache]:
    on_cpu = device.where.type == "cpu"
    max_sequences = _count(options.max_sequences, CPU_MAX_SEQUENCES if on_cpu else GPU_MAX_SEQUENCES)
    default_tokens = max(CPU_MAX_BATCH_TOKENS if on_cpu else GPU_MAX_BATCH_TOKENS, max_sequences)
    max_batch_tokens = _count(options.max_batch_tokens, default_tokens)
    max_sequences = min(max_sequences, max_batch_tokens)
    shapes = [LayerShape(spec.num_kv_heads, spec.head_dim_k, spec.head_dim_v) for spec in loaded.layers]

    def cache_of(num_blocks: int) -> KVCache:
        return KVCache(shapes, num_blocks, options.block_size, _kv_dtype(options, loaded), device.where)

    def run_largest_step() -> None:
        batch = largest_batch(max_batch_tokens, max_sequences, loaded.vocab_size, options.block_size)
        num_blocks = max(len(s.table.block_ids) for s in batch.sequences if s.table)
        logits_RV = ModelRunner(loaded, cache_of(num_blocks), ops, device).execute(batch)
        Sampler(ops, device).sample(logits_RV, list(range(len(logits_RV))), [sequence for _, sequence in batch.samples])

    memory = options.kv_cache_memory
    if memory == "auto":
        budget = device.cache_memory(run_largest_step)
    else:
        budget = parse_bytes(memory) if isinstance(memory, str) else memory
    per_block = KVCache.bytes_per_block(shapes, options.block_size, _kv_dtype(options, loaded))
    most_useful = max_sequences * -(-loaded.max_model_len // options.block_size)
    try:
        num_blocks = num_blocks_for(budget, per_block, most_useful)
    except ValueError as error:
        raise JobError(f"engine.kv_cache_memory: {error}; raise it") from error
    pool = BlockPool(num_blocks, options.block_size)
    scheduler = Scheduler(
        pool,
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        prefix_cache=PrefixCache(pool) if options.prefix_caching else None,
    )
    return scheduler, cache_of(num_blocks)


def _kv_dtype(options: EngineOptions, loaded: LoadedModel) -> torch.dtype:
    return torch.int8 if options.kv_dtype == "int8" else loaded.dtype


def _check_quantization(options: EngineOptions, loaded: LoadedModel, device: torch.device) -> bool:
    """Whether weights become int8; JobError where this cannot be."""
    if options.quantization is None:
        return False
    for wrong, message in (
        (device.type != "cpu", "is built for processors only; on a GPU leave it out"),
        (not cpu.is_available(), f"needs the C++ kernels: {cpu.why_unavailable()}"),
        (loaded.dtype != torch.bfloat16, f"goes with model.dtype bfloat16, not {loaded.dtype}".replace("torch.", "")),
    ):
        if wrong:
            raise JobError(f"model.quantization: {options.quantization} {message}")
    return True


def _count(value: int | str, default: int) -> int:
    return default if value == "auto" else int(value)
