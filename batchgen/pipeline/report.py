"""What a run came to: the figures that the summary shows and the exit code follows from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class JobReport:
    """Rows are counted over the whole output, tokens and time over this run alone."""

    data_dir: Path
    """Directory of the Parquet files."""
    data_files: tuple[Path, ...]
    """All committed shards, in their order."""
    num_rows: int
    """Input rows of the job."""
    num_ok: int
    num_errors: int
    errors_by_code: Mapping[str, int] = field(default_factory=dict)
    num_rows_this_run: int = 0
    """Rows that this run committed; 0 where there was nothing to do."""
    prompt_tokens: int = 0
    """Prompt tokens of this run's rows, with those that shared prefixes served."""
    cached_tokens: int = 0
    """Of them, tokens that were not computed because a shared prefix held them."""
    completion_tokens: int = 0
    seconds: float = 0.0
    """From the first step to the last commit, without loading the model."""
    kv_cache_bytes: int = 0
    """Memory that the KV cache was given."""
    kv_peak: float = 0.0
    """Largest share of its blocks that was in use at once, 0 to 1."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """As it took effect: the seed that was drawn, where the job gives none."""
    eos_token_ids: tuple[int, ...] = ()
    """What the model's files supply: the ids that end a sample, unless `sampling.ignore_eos`."""

    unused_generation_config: str = ""
    """`temperature 0.7, top_p 0.9`: what the model's generation_config.json says and no row was drawn by."""
    notes: tuple[str, ...] = ()
    """What else the engine says of this model on this machine, such as why it is slow."""

    @property
    def completion_tokens_per_second(self) -> float:
        """Generated tokens a second of this run; 0 where nothing ran."""
        return self.completion_tokens / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "data_dir": str(self.data_dir),
            "data_files": [str(path) for path in self.data_files],
            "num_rows": self.num_rows,
            "num_ok": self.num_ok,
            "num_errors": self.num_errors,
            "errors": dict(self.errors_by_code),
            "num_rows_this_run": self.num_rows_this_run,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": self.seconds,
            "completion_tokens_per_second": self.completion_tokens_per_second,
            "kv_cache_bytes": self.kv_cache_bytes,
            "kv_peak": self.kv_peak,
            "sampling": self.sampling.model_dump(mode="json"),
            "eos_token_ids": list(self.eos_token_ids),
            "unused_generation_config": self.unused_generation_config,
            "notes": list(self.notes),
        }
