"""`prompt.few_shot.path`: examples from a file, which become part of the job when it is read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from batchgen.config_yaml import MAX_BYTES, read_yaml

_LINES = (".jsonl", ".ndjson")
_DOCUMENTS = (".json", ".yaml", ".yml")


def read_examples(path: Path, limit: int | None) -> list[Any]:
    """The values in a file, the first `limit` of them: JSON lines, or one list in JSON or YAML.

    Raises ValueError that names the file, and the line where there is one.
    """
    if path.suffix not in (*_LINES, *_DOCUMENTS):
        raise ValueError(f"{path}: examples are read from {', '.join((*_LINES, *_DOCUMENTS))}")
    if path.suffix in _LINES:
        lines = islice(((number, line) for number, line in _lines(path) if line.strip()), limit)
        return [_parse(line, f"{path}:{number}") for number, line in lines]
    content = "".join(line for _, line in _lines(path))
    if path.suffix == ".json":
        values = _parse(content, str(path))
    else:
        document = read_yaml(content, str(path))
        if document.problems:
            raise ValueError(str(document.problems[0]))
        values = document.data
    if not isinstance(values, list):
        raise ValueError(f"{path}: must be a list of examples")
    return values[:limit]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbers, from 1, and text of lines, at most MAX_BYTES of them."""
    num_bytes = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                num_bytes += len(line)
                if num_bytes > MAX_BYTES:
                    raise ValueError(f"{path}: more than {MAX_BYTES >> 20} MiB of examples; set few_shot.limit")
                yield number, line.decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{number}: byte 0x{error.object[error.start]:02X} is not UTF-8") from error


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise ValueError(f"{place}: nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write null")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return values
