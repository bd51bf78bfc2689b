"""`sampling.response_format.schema` as a path: the JSON Schema in that file takes its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchgen.config_yaml import KeyPath, Problem, YamlDocument
from batchgen.response_format import MAX_GRAMMAR_BYTES

_KEY: KeyPath = ("sampling", "response_format", "schema")


def with_schema_file(data: dict[str, Any], document: YamlDocument, base_dir: Path) -> dict[str, Any]:
    """`data` with the text of the schema's file where its path was; what is wrong is added to the problems."""
    sampling = data.get("sampling")
    form = sampling.get("response_format") if isinstance(sampling, dict) else None
    name = form.get("schema") if isinstance(form, dict) else None
    if not isinstance(sampling, dict) or not isinstance(form, dict) or not isinstance(name, str):
        return data
    if name.lstrip().startswith("{"):
        return data  # A schema as JSON text, as it stands in a job that was stored.
    path = base_dir / Path(name).expanduser()
    text, what = _read(path)
    if what is not None:
        place = next(document.places[_KEY[:end]] for end in (3, 2, 1) if _KEY[:end] in document.places).value
        document.problems.append(Problem(place, f"sampling.response_format.schema: {path}: {what}"))
        # Any schema will do: the problem is told, and the job is not run.
        text = "{}"
    return {**data, "sampling": {**sampling, "response_format": {**form, "schema": text}}}


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
