"""What the names of input files say: their format, and which of them are no inputs."""

from __future__ import annotations

from pathlib import PurePath

from batchgen.data.compression import SUFFIXES
from batchgen.data.input_rows import FormatName

FORMAT_SUFFIXES: dict[str, FormatName] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".txt": "text",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_SIDE_FILES = frozenset({"dataset_info.json", "dataset_dict.json", "state.json"})
"""What `datasets.save_to_disk` writes beside its data."""


def is_passed_over(name: str) -> bool:
    """Whether directories and patterns leave out this name, whatever its format."""
    return name.startswith((".", "_")) or name.endswith((".crc", "~", ".tmp")) or name in _SIDE_FILES


def suffix_format(path: PurePath) -> FormatName | None:
    """The format that a name claims, an ending of compression looked through."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in SUFFIXES:
        suffixes.pop()
    return FORMAT_SUFFIXES.get(suffixes[-1]) if suffixes else None
