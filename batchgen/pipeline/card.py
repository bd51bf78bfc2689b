"""README.md of an output: a dataset card, so that the directory can be loaded and understood as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping

from batchgen import __version__
from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.data.layout import CARD_MARK, is_own_card
from batchgen.data.ledger import Ledger


def card(job: JobConfig, num_rows: int, errors: Mapping[str, int], num_shards: int) -> str:
    """The text of the card."""
    num_errors = sum(errors.values())
    lines = [
        "---",
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: train",
        "    path: data/*.parquet",
        "tags:",
        "- synthetic",
        "- batchgen",
        "---",
        CARD_MARK,
        "",
        "# Completions",
        "",
        f"Generated with `{_code(job.model.path)}` by batchgen {__version__}.",
        "",
        f"- {num_rows:,} input rows in {num_shards:,} files: {num_rows - num_errors:,} ok, {num_errors:,} error",
        *(f"  - {count:,} {code}" for code, count in sorted(errors.items())),
        f"- sampling: `{_code(json.dumps(job.sampling.model_dump(mode='json'), ensure_ascii=False))}`",
        "- the struct column `batchgen` identifies each row (`source`, `row`, `sample`) and says how it ended",
        "- `_batchgen/` holds the job, its plan and the records of what is committed",
        "",
    ]
    return "\n".join(lines)


def write_card(files: OutputFiles, ledger: Ledger, text: str) -> None:
    """Write the card where it is not there or says something else, unless there is a README.md that is not ours."""
    path = ledger.paths.card
    if files.status(path) is None or (is_own_card(files, path) and files.read(path) != text.encode()):
        files.replace(path, text.encode(), ledger.temporary("README.md"))


def _code(text: str) -> str:
    return text.replace("`", "'").replace("\n", " ")
