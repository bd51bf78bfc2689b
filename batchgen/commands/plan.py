"""`batchgen plan`: what a job will take, before it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.commands.document import print_document
from batchgen.config import JobConfig
from batchgen.pipeline.forecast import Estimate, Forecast, forecast
from batchgen.pipeline.prompt_sample import histogram
from batchgen.units import duration, plural

BAR_WIDTH = 32


def plan(job: JobConfig, *, measure: bool, again: bool, as_json: bool) -> None:
    """Print the plan on stdout, what takes time on stderr; raises what a run would for a wrong job."""
    found = forecast(job, measure=measure, again=again, say=lambda text: print(text, file=sys.stderr), services=None)
    if as_json:
        print_document(found.to_json())
        return
    for line in plan_lines(found):
        print(line)


def plan_lines(found: Forecast) -> Iterator[str]:
    """The plan in words."""
    yield from found.notes
    done = f", {found.num_done:,} of them committed already" if found.num_done else ""
    files = plural(found.num_files, "file")
    yield f"rows         {found.num_rows:,} in {files}{done}; {plural(found.num_shards, 'shard')} to write"
    yield from _prompt_lines(found)
    limit = "unlimited" if found.max_tokens is None else f"at most {found.max_tokens:,} tokens"
    yield f"completions  {found.num_sequences} a row, {limit} each"
    yield from _machine_lines(found)
    if found.at_most is not None and found.half is not None:
        yield f"time         {_time(found.half)} if completions have half of max_tokens"
        yield f"             {_time(found.at_most)} if all have max_tokens"
    elif found.calibration is None:
        yield "time         not measured"
    for warning in found.warnings:
        yield f"warning      {warning}"
    if found.recommended:
        yield f"machine      {found.machine}"
        yield f"recommended  engine: {_mapping(found.recommended)}"
    if found.recommended_run:
        yield f"             run: {_mapping(found.recommended_run)}"


def _prompt_lines(found: Forecast) -> Iterator[str]:
    sample = found.sample
    yield (
        f"prompts      {sample.mean_length:,.0f} tokens on average, 95 % within {sample.quantile(0.95):,}, "
        f"longest {sample.quantile(1.0):,} (of {sample.num_rows:,} rows)"
    )
    bins = histogram(sample.lengths)
    most = max((count for *_, count in bins), default=1)
    for first, last, count in bins if len(bins) > 1 else ():
        yield f"  {first:>7,} - {last:<7,} {'#' * round(BAR_WIDTH * count / most):<{BAR_WIDTH}} {count:,}"
    yield f"prefixes     {sample.shared_share:.0%} of the prompt tokens are shared with another row of the sample"


def _machine_lines(found: Forecast) -> Iterator[str]:
    measured = found.calibration
    if measured is None:
        return
    room = measured.num_blocks * measured.block_size
    at_once = "" if found.at_most is None else f", about {found.at_most.sequences_at_once:,} sequences at once"
    yield f"KV cache     {room * measured.kv_bytes_per_token / 2**20:,.0f} MiB, {room:,} tokens{at_once}"
    yield (
        f"measured     {1 / max(1e-9, measured.prompt_seconds):,.0f} prompt tok/s; a step of one sequence "
        f"{1000 * measured.decode_step(1, 0):,.1f} ms, of 64 {1000 * measured.decode_step(64, 0):,.1f} ms"
        f" ({measured.device}, {measured.dtype}, {measured.measured[:10]})"
    )


def _mapping(settings: Mapping[str, Any]) -> str:
    """As YAML has it on one line."""
    return f"{{{', '.join(f'{name}: {value}' for name, value in settings.items())}}}"


def _time(estimate: Estimate) -> str:
    return (
        f"about {duration(max(1, round(estimate.seconds)))}, {estimate.tokens_per_second:,.0f} tok/s, "
        f"{estimate.completion_tokens:,} tokens out"
    )
