"""One peer on one workload, in the peer's own environment: run by benchmarks/peers.py as a file, not as a module.

    PYTHON benchmarks/peer_runs.py transformers|openvino|vllm WORKLOAD.json --model DIR [--scale S] [--threads N]

Prints one JSON line. The seconds are those of the generate call alone: loading, compiling and a first small call lie
before it. Token ids go in and come out, and every request runs to its forced length. Nothing but the standard library
and the peer is imported, since the peer's environment has nothing else.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

WARM_UP = {"prompts": [[11] * 40, [12] * 30], "max_new": [4, 4]}


class Peer(NamedTuple):
    """An engine, ready to run."""

    version: str
    settings: str
    run: Callable[[dict[str, Any]], list[list[list[int]]]]
    """A workload to the generated ids: by prompt, by sample."""


def transformers_peer(options: argparse.Namespace) -> Peer:
    """`generate_batch`'s continuous batching; for beams, which it lacks, `generate` prompt by prompt."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()

    def beams(work: dict[str, Any]) -> list[list[list[int]]]:
        outputs = []
        for prompt, max_new in zip(work["prompts"], work["max_new"], strict=True):
            config = GenerationConfig(
                max_new_tokens=max_new, num_beams=work["beam_width"], do_sample=False, eos_token_id=None, pad_token_id=0
            )
            ids = model.generate(torch.tensor([prompt]), generation_config=config)
            outputs.append([ids[0, len(prompt) :].tolist()])
        return outputs

    def batched(work: dict[str, Any]) -> list[list[list[int]]]:
        samples = work["n"]
        config = GenerationConfig(
            max_new_tokens=max(work["max_new"]),
            num_return_sequences=samples,
            eos_token_id=-1,
            pad_token_id=0,
            do_sample=work["temperature"] > 0,
            **({"temperature": work["temperature"], "top_k": 0, "top_p": 1.0} if work["temperature"] > 0 else {}),
        )
        batching = ContinuousBatchingConfig(num_blocks=1024, page_size=64, max_batch_tokens=512)
        outputs: list[list[list[int]]] = [[] for _ in work["prompts"]]
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, warmup=False
        ) as manager:
            for row, (prompt, max_new) in enumerate(zip(work["prompts"], work["max_new"], strict=True)):
                manager.add_request(list(prompt), request_id=f"r{row}", max_new_tokens=max_new)
            wanted = samples * len(outputs)
            while wanted:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("the batching manager stopped")
                if result is not None and result.is_finished():
                    # Samples are called r0__1 and so on.
                    outputs[int(result.request_id.split("__")[0][1:])].append(list(result.generated_tokens))
                    wanted -= 1
        return outputs

    def run(work: dict[str, Any]) -> list[list[list[int]]]:
        with torch.inference_mode():
            return beams(work) if work["beam_width"] > 1 else batched(work)

    return Peer(transformers.__version__, "bfloat16, sdpa, pages 1024 x 64, 512 tokens a step", run)


def openvino_peer(options: argparse.Namespace) -> Peer:
    """openvino-genai's continuous batching over a model that `optimum-cli export openvino` made (`--model`)."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size, scheduling.max_num_seqs, scheduling.enable_prefix_caching = 4, 256, True
    properties = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": "bf16"}
    pipe = genai.ContinuousBatchingPipeline(options.model, scheduling, "CPU", properties)

    def config_of(work: dict[str, Any], max_new: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_new
        config.ignore_eos, config.eos_token_id, config.stop_token_ids = True, -1, set()
        if work["beam_width"] > 1:
            config.num_beams, config.num_beam_groups = work["beam_width"], 1
        if work["temperature"] > 0:
            config.do_sample, config.temperature, config.top_p = True, work["temperature"], 1.0
        config.num_return_sequences = work["n"]
        return config

    def run(work: dict[str, Any]) -> list[list[list[int]]]:
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in work["prompts"]]
        results = pipe.generate(prompts, [config_of(work, max_new) for max_new in work["max_new"]])
        return [[list(map(int, ids)) for ids in result.m_generation_ids] for result in results]

    return Peer(genai.__version__, "bf16, 256 sequences, prefix caching", run)


def vllm_peer(options: argparse.Namespace) -> Peer:
    """vLLM's offline LLM on a processor, compiled, in this process."""
    import vllm

    model = vllm.LLM(
        model=options.model,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=256,
        seed=1,
        enable_prefix_caching=True,
        disable_log_stats=True,
        distributed_executor_backend="uni",
        max_logprobs=16,
    )

    def run(work: dict[str, Any]) -> list[list[list[int]]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in work["prompts"]]
        if work["beam_width"] > 1:
            params = vllm.sampling_params.BeamSearchParams(
                beam_width=work["beam_width"], max_tokens=work["max_new"][0], ignore_eos=True
            )
            found = model.beam_search(prompts, params)
            return [
                [each.sequences[0].tokens[len(prompt) :]] for prompt, each in zip(work["prompts"], found, strict=True)
            ]
        params = [
            vllm.SamplingParams(
                n=work["n"],
                temperature=work["temperature"],
                max_tokens=max_new,
                min_tokens=max_new,
                ignore_eos=True,
                detokenize=False,
            )
            for max_new in work["max_new"]
        ]
        return [[list(each.token_ids) for each in r.outputs] for r in model.generate(prompts, params, use_tqdm=False)]

    return Peer(vllm.__version__, "bfloat16, compiled, one process, prefix caching", run)


PEERS = {"transformers": transformers_peer, "openvino": openvino_peer, "vllm": vllm_peer}


def restart_for_vllm(threads: int) -> None:
    """Bound cores, tcmalloc and Intel's OpenMP, as its documentation asks: some of it must be there at the start."""
    if os.environ.get("PEER_RUNS_RESTARTED"):
        return
    os.environ |= {
        "PEER_RUNS_RESTARTED": "1",
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    libraries = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4") + glob.glob(f"{sys.prefix}/lib/libiomp5.so")
    os.environ["LD_PRELOAD"] = ":".join(libraries)
    os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("workload")
    parser.add_argument("--model", required=True)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if options.peer == "vllm":
        restart_for_vllm(options.threads)
    with open(options.workload, encoding="utf-8") as file:
        work = json.load(file)
    count = max(1, round(len(work["prompts"]) * options.scale))
    work |= {"prompts": work["prompts"][:count], "max_new": work["max_new"][:count]}
    peer = PEERS[options.peer](options)
    peer.run({**WARM_UP, "n": 1, "temperature": 0.0, "beam_width": 1})
    start = time.perf_counter()
    outputs = peer.run(work)
    seconds = time.perf_counter() - start
    generated = sum(len(ids) for samples in outputs for ids in samples)
    wanted = work["n"] * sum(work["max_new"])
    if generated != wanted:
        sys.exit(f"{options.peer} generated {generated} tokens, {wanted} were asked for")
    print(json.dumps({"version": peer.version, "settings": peer.settings, "seconds": seconds, "tokens": generated}))


if __name__ == "__main__":
    main()
