"""Counts over the rows of an output: lengths, endings, errors, and what a contiguous KV cache would have wasted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.pipeline.output_rows import batches
from batchgen.pipeline.stored import StoredOutput

EXAMPLES_PER_CODE = 3


class ErrorExample(NamedTuple):
    """One row that is an error."""

    source: int
    row: int
    message: str


class Lengths:
    """How many values there are of each length in tokens."""

    def __init__(self) -> None:
        self.counts: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)

    def add(self, values: npt.NDArray[Any]) -> None:
        """Count some lengths."""
        new = np.bincount(values.astype(np.int64), minlength=len(self.counts))
        new[: len(self.counts)] += self.counts
        self.counts = new

    @property
    def number(self) -> int:
        """How many values were counted."""
        return int(self.counts.sum())

    @property
    def total(self) -> int:
        """Sum of all values, in tokens."""
        return int((self.counts * np.arange(len(self.counts))).sum())

    def quantile(self, share: float) -> int:
        """The length that this share of the values does not exceed; 0 where there is none."""
        if not self.number:
            return 0
        return int(np.searchsorted(np.cumsum(self.counts), max(1, share * self.number)))

    def bins(self, most: int) -> list[tuple[int, int, int]]:
        """(first length, last length, count) of at most `most` equal bins over what occurs."""
        found = np.flatnonzero(self.counts)
        if not len(found):
            return []
        low, high = int(found[0]), int(found[-1])
        width = -(-(high - low + 1) // most)
        return [
            (start, min(start + width - 1, high), int(self.counts[start : start + width].sum()))
            for start in range(low, high + 1, width)
        ]


class Contiguous(NamedTuple):
    """A KV cache without pages, holding these very rows: each sample reserves its whole room at its first step."""

    used: float
    """Slot-steps that held a token."""
    reserved: float
    """Slot-steps that were reserved."""

    @property
    def useful_share(self) -> float:
        """Of the reserved slots, the share that held a token, over the steps of all samples; 1.0 for no rows."""
        return self.used / self.reserved if self.reserved else 1.0


@dataclass
class RowTally:
    """What the rows of an output add up to."""

    prompt_lengths: Lengths = field(default_factory=Lengths)
    completion_lengths: Lengths = field(default_factory=Lengths)
    """Of samples."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    """Of samples."""
    errors: Counter[str] = field(default_factory=Counter)
    """Rows by error code."""
    examples: dict[str, list[ErrorExample]] = field(default_factory=dict)
    contiguous: Contiguous = field(default_factory=lambda: Contiguous(0.0, 0.0))


def tally_rows(stored: StoredOutput) -> RowTally:
    """Read the column `batchgen` of every committed row; memory stays flat."""
    struct = stored.layout.struct_name
    max_tokens = stored.job.sampling.max_tokens
    max_model_len = stored.plan.identity.get("model.max_model_len")
    if not isinstance(max_model_len, int):
        max_model_len = 0  # Begun without a row, so without a model: nothing will be counted.
    tally = RowTally()
    for batch in batches(stored, [struct]):
        _add(tally, batch.column(struct), stored.layout.exploded, max_tokens, max_model_len)
    return tally


def _add(tally: RowTally, records: Any, exploded: bool, max_tokens: int | None, max_model_len: int) -> None:
    is_first = pc.less_equal(pc.coalesce(records.field("sample"), pa.scalar(0, pa.int32())), pa.scalar(0, pa.int32()))
    by_row = records.filter(is_first) if exploded else records
    tally.prompt_lengths.add(_numbers(by_row.field("prompt_tokens").drop_null()))
    failed = by_row.filter(pc.equal(by_row.field("status"), pa.scalar("error")))
    for record in failed.to_pylist():
        code = record["error_code"]
        tally.errors[code] += 1
        examples = tally.examples.setdefault(code, [])
        if len(examples) < EXAMPLES_PER_CODE:
            examples.append(ErrorExample(record["source"], record["row"], record["error_message"] or ""))
    ok = records.filter(pc.equal(records.field("status"), pa.scalar("ok")))
    if exploded:
        completions, prompts, reasons = (ok.field(name) for name in _SAMPLE_COLUMNS)
    else:
        lists = ok.field("completion_tokens")
        completions, prompts = lists.flatten(), ok.field("prompt_tokens").take(pc.list_parent_indices(lists))
        reasons = ok.field("finish_reason").flatten()
    tally.completion_lengths.add(_numbers(completions))
    for entry in pc.value_counts(reasons).to_pylist():
        tally.finish_reasons[entry["values"] or "none"] += entry["counts"]
    tally.contiguous = _reserved(tally.contiguous, _numbers(prompts), _numbers(completions), max_tokens, max_model_len)


_SAMPLE_COLUMNS = ("completion_tokens", "prompt_tokens", "finish_reason")


def _numbers(values: Any) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = values.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


def _reserved(
    so_far: Contiguous,
    prompts: npt.NDArray[np.int64],
    completions: npt.NDArray[np.int64],
    max_tokens: int | None,
    max_model_len: int,
) -> Contiguous:
    """A sample of c tokens runs for c steps, with the prompt and on average half of them in its reserved room."""
    room = max_model_len - prompts if max_tokens is None else np.minimum(max_tokens, max_model_len - prompts)
    used = (completions * (prompts + completions / 2)).sum()
    reserved = (completions * (prompts + np.maximum(room, completions))).sum()
    return Contiguous(so_far.used + float(used), so_far.reserved + float(reserved))
