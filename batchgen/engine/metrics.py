"""What an engine did: figures of the whole, never of a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineMetrics:
    """Counters since the engine was made; KV use is sampled every few steps."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    """Tokens that went through the model, recomputed ones too."""
    num_prompt_tokens: int = 0
    """Prompt tokens of finished rows."""
    num_generated_tokens: int = 0
    """Completion tokens of finished rows."""
    num_drawn_tokens: int = 0
    """Completion tokens drawn so far, those of unfinished rows too."""
    num_forced_tokens: int = 0
    """Completion tokens of finished rows that a grammar left no choice for."""
    num_running: int = 0
    """Sequences that hold blocks now."""
    num_waiting: int = 0
    """Sequences that hold none yet, or not any more."""
    num_blocks_held: int = 0
    kv_cache_bytes: int = 0
    num_cached_tokens: int = 0
    """Tokens that were served from shared prefixes instead of being computed."""
    num_preemptions: int = 0
    num_copies: int = 0
    """Blocks copied on write."""
    num_blocks: int = 0
    block_size: int = 0
    max_batch_tokens: int = 0
    """Most tokens of one step."""
    max_sequences: int = 0
    """Most sequences in the batch."""
    peak_blocks_held: int = 0
    num_kv_samples: int = 0
    sum_useful_share: float = 0.0
    sum_shared_blocks: int = 0
    num_shrinks: int = 0
    """Times that the token budget was halved after the device ran out of memory."""

    def sample_kv(self, useful_share: float, num_shared_blocks: int) -> None:
        """Take one measurement of the cache into the means."""
        self.num_kv_samples += 1
        self.sum_useful_share += useful_share
        self.sum_shared_blocks += num_shared_blocks

    @property
    def mean_useful_share(self) -> float:
        """Tokens over slots in held blocks, blocks with several owners counted once; 1.0 where none was measured."""
        return self.sum_useful_share / self.num_kv_samples if self.num_kv_samples else 1.0

    @property
    def mean_shared_blocks(self) -> float:
        """Blocks with more than one owner."""
        return self.sum_shared_blocks / self.num_kv_samples if self.num_kv_samples else 0.0

    @property
    def kv_share(self) -> float:
        """The share of the pool that is held now."""
        return self.num_blocks_held / self.num_blocks if self.num_blocks else 0.0

    @property
    def peak_kv_share(self) -> float:
        """The largest share of the pool that was held."""
        return self.peak_blocks_held / self.num_blocks if self.num_blocks else 0.0
