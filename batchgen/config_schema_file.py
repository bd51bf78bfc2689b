"""`schema` of a response format as a path: the JSON Schema in that file takes its place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from batchgen.config_yaml import KeyPath, Problem, YamlDocument, key_name
from batchgen.response_format import MAX_GRAMMAR_BYTES

_FORMAT: KeyPath = ("sampling", "response_format")


def with_schema_files(data: dict[str, Any], document: YamlDocument, base_dir: Path) -> dict[str, Any]:
    """`data` with the texts of schema files where their paths were; what is wrong is added to the problems."""
    sampling = data.get("sampling")
    form = sampling.get("response_format") if isinstance(sampling, dict) else None
    if not isinstance(sampling, dict) or not isinstance(form, dict):
        return data
    form = _with_schema(form, _FORMAT, document, base_dir)
    if isinstance(form.get("of"), dict):
        of = {name: _with_schema(each, (*_FORMAT, "of", name), document, base_dir) for name, each in form["of"].items()}
        form = {**form, "of": of}
    return {**data, "sampling": {**sampling, "response_format": form}}


def _with_schema(form: Any, key: KeyPath, document: YamlDocument, base_dir: Path) -> Any:
    name = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(name, str) or name.lstrip().startswith("{"):
        return form  # No path; JSON text is what a job that was stored has.
    path = base_dir / Path(os.path.expanduser(name))
    text, what = _read(path)
    if what is not None:
        key = (*key, "schema")
        place = next(document.places[key[:end]] for end in range(len(key), 0, -1) if key[:end] in document.places)
        document.problems.append(Problem(place.value, f"{key_name(key)}: {path}: {what}"))
        # Any schema will do: the problem is told, and the job is not run.
        text = "{}"
    return {**form, "schema": text}


def _read(path: Path) -> tuple[str, str | None]:
    """(text, None), or what is wrong."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_GRAMMAR_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        return "", f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        return "", "is not UTF-8"
    if len(content) > MAX_GRAMMAR_BYTES:
        return "", f"is larger than {MAX_GRAMMAR_BYTES >> 20} MiB"
    if not text.lstrip().startswith("{"):
        return "", "holds no JSON Schema, which is a JSON object"
    return text, None
