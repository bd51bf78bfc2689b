"""The engine on a GPU: its tokens beside the processor's, its time beside transformers', and its idle share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedConfig

from batchgen.engine.device import device_at
from batchgen.engine.engine import Engine
from batchgen.engine.loading import EngineOptions, load_parts
from batchgen.records import Prompt
from batchgen.sampling_params import SamplingParams
from benchmarks.gpu_sizes import TINY_LLAMA


class Workload(NamedTuple):
    """Prompts with the number of tokens that each one generates, forced."""

    prompts: list[list[int]]
    new_tokens: list[int]

    @classmethod
    def uniform(cls, count: int, low: int, high: int, vocabulary: int, shared: int = 0) -> Workload:
        """Prompt and output lengths uniform in low..high; the first `shared` tokens of all prompts are the same."""
        draw = random.Random(0)
        prefix = [draw.randrange(vocabulary) for _ in range(shared)]
        prompts = [prefix + [draw.randrange(vocabulary) for _ in range(draw.randint(low, high))] for _ in range(count)]
        return cls(prompts, [draw.randint(low, high) for _ in range(count)])


WARM_UP = Workload.uniform(4, 8, 16, 500)


def save_random_model(config: PreTrainedConfig, directory: Path, dtype: torch.dtype) -> Path:
    """Write a model with seeded random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    return directory


def run_engine(engine: Engine, workload: Workload) -> list[list[int]]:
    """Generate greedily; returns the token ids in the order of the prompts."""
    prompts = [
        Prompt(token_ids=ids, params=SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        for ids, count in zip(workload.prompts, workload.new_tokens, strict=True)
    ]
    outputs: list[list[int]] = [[] for _ in prompts]
    for completion in engine.generate(prompts):
        assert completion.error is None, completion.error
        outputs[completion.prompt_index] = completion.samples[0].token_ids
    return outputs


def run_transformers(model: Any, workload: Workload) -> None:
    """Generate the same with transformers' continuous batching."""
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(workload.new_tokens))
    unfinished = len(workload.prompts)
    # On a GPU it sizes itself; on a processor, in a dry run, that would be most of the machine's memory.
    small = None if model.device.type == "cuda" else ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    batching = model.continuous_batching_context_manager(config, continuous_batching_config=small)
    with torch.inference_mode(), batching as manager:
        for index, (ids, count) in enumerate(zip(workload.prompts, workload.new_tokens, strict=True)):
            manager.add_request(ids, request_id=str(index), max_new_tokens=count)
        while unfinished:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("transformers' batching manager stopped early")
            if result is not None and result.is_finished():
                unfinished -= 1


def tokens_equal_those_of_the_processor(directory: Path, device: str) -> dict[str, Any]:
    """Greedy ids of a tiny fp32 model on the processor, on the device, and there without recorded steps.

    Prompts share a prefix that is longer than a split of attention.
    """
    save_random_model(TINY_LLAMA, directory, torch.float32)
    workload = Workload.uniform(24, 5, 60, TINY_LLAMA.vocab_size, shared=270)
    outputs = []
    for name, records in (("cpu", True), (device, True), (device, False)):
        options = EngineOptions(str(directory), dtype="float32", device=name, kv_cache_memory="64MiB")
        engine = Engine.from_parts(load_parts(options, device_at(torch.device(name), records=records)))
        outputs.append(run_engine(engine, workload))
        engine.close()
    processor, recorded, eager = outputs
    same = sum(ours == theirs for ours, theirs in zip(recorded, processor, strict=True))
    replayed = sum(ours == theirs for ours, theirs in zip(recorded, eager, strict=True))
    count = len(workload.prompts)
    return {"prompts": count, "equal": same, "replayed as eager": replayed, "ok": same == replayed == count}


def _seconds(run: Callable[..., Any], *arguments: Any) -> float:
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def time_engine(
    directory: Path, device: str, workloads: dict[str, Workload], profiled_steps: int = 30
) -> dict[str, Any]:
    """Seconds of each workload, loading and a warm-up left out, and the idle share of steps of the first one."""
    engine = Engine(str(directory), dtype="bfloat16", device=device)
    run_engine(engine, WARM_UP)
    seconds = {name: _seconds(run_engine, engine, workload) for name, workload in workloads.items()}
    return {"seconds": seconds, "profile": idle_share(engine, next(iter(workloads.values())), device, profiled_steps)}


def time_transformers(directory: Path, device: str, workloads: dict[str, Workload]) -> dict[str, Any]:
    """Seconds of each workload by transformers' continuous batching, loading and a warm-up left out."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device).eval()
    run_transformers(model, WARM_UP)
    return {"seconds": {name: _seconds(run_transformers, model, workload) for name, workload in workloads.items()}}


def idle_share(engine: Engine, workload: Workload, device: str, num_steps: int = 30) -> dict[str, float]:
    """The share of some steps' time in which no kernel ran, from a profile."""
    for ids, count in zip(workload.prompts, workload.new_tokens, strict=True):
        engine.add(Prompt(token_ids=ids, params=SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)))
    activity = ProfilerActivity.CUDA if device.startswith("cuda") else ProfilerActivity.CPU
    for _ in range(num_steps):
        engine.step()
    with profile(activities=[activity]) as profiler:
        start = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        taken = time.perf_counter() - start
    busy = sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6
    engine.close()
    return {"seconds": taken, "busy_seconds": busy, "idle_share": max(0.0, 1 - busy / taken)}
