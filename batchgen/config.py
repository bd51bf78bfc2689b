"""The job file: one frozen record, read and checked as a whole before anything is loaded."""

from __future__ import annotations

import datetime
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, Field, ValidationError
from pydantic.json_schema import SkipJsonSchema

from batchgen.config_examples import read_examples
from batchgen.config_problems import explain
from batchgen.config_prompt import FewShotConfig, Message, PromptConfig
from batchgen.config_schema_file import with_schema_files
from batchgen.config_sections import (
    EngineConfig,
    InputConfig,
    ModelConfig,
    OutputConfig,
    RunConfig,
    Section,
    TlsConfig,
)
from batchgen.config_yaml import MAX_BYTES, Entry, KeyPath, Place, Problem, YamlDocument, key_name, read_yaml
from batchgen.errors import JobFileError
from batchgen.sampling_params import SamplingParams

__all__ = [
    "JSON",
    "EngineConfig",
    "FewShotConfig",
    "InputConfig",
    "JobConfig",
    "Message",
    "ModelConfig",
    "OutputConfig",
    "PromptConfig",
    "RunConfig",
    "SamplingParams",
    "TlsConfig",
    "identity_defaults",
    "job_schema",
    "load_job",
]

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None

OPERATIONAL_SECTIONS = frozenset({"engine", "run"})
OPERATIONAL_KEYS = frozenset({"output.path", "output.shard_rows", "input.on_growth"})
"""With the sections above: what may change between two runs of one job, since it cannot change a row."""

_OWN_FIELDS = frozenset({"base_dir", "variables"})
"""Fields of JobConfig that the file does not have."""

_SUBSTITUTION = re.compile(r"\$\{([^}]*)\}")
_OVERRIDE = Entry(*[Place(sys.maxsize, 0, "--set ")] * 2)
_OVERRIDE_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class JobConfig(Section):
    """A whole job. Relative paths in it are relative to `base_dir`, the directory of the job file."""

    version: Annotated[Literal[1], Field(description="Version of the job file's format.")]
    model: ModelConfig
    input: InputConfig
    prompt: PromptConfig
    sampling: SamplingParams = SamplingParams()
    engine: EngineConfig = EngineConfig()
    output: OutputConfig
    run: RunConfig = RunConfig()
    base_dir: SkipJsonSchema[Annotated[Path, Field(exclude=True)]] = Path()
    variables: SkipJsonSchema[Annotated[dict[str, str], Field(exclude=True, repr=False, default_factory=dict)]]
    """What `${NAME}` in output.path stands for. Never stored: a variable of the environment may be a secret."""

    @property
    def output_dir(self) -> Path:
        """Directory of the output, with its variables filled in; `~` is the home directory."""
        path = _SUBSTITUTION.sub(lambda match: self.variables.get(match[1], match[0]), self.output.path)
        return self.base_dir / Path(os.path.expanduser(path))

    @property
    def model_source(self) -> str:
        """`model.path` with a relative path made relative to the job file; a Hugging Face id stays as it is."""
        path = self.model.path
        if path.startswith("package:"):
            return path
        local = self.base_dir / Path(os.path.expanduser(path))
        is_local = local.exists() or path.startswith((".", "/", "~")) or path.endswith(".gguf")
        return str(local) if is_local else path

    def identity(self) -> dict[str, JSON]:
        """All that decides the rows: dotted keys (`sampling.n`) and plain values; operational keys are left out.

        `auto` and a null seed stand as written: what they were resolved to is the runner's to record.
        """
        sections = self.model_dump(mode="json", by_alias=True, exclude={"version"})
        return {"version": self.version, **_identity_keys(sections)}


def identity_defaults() -> dict[str, JSON]:
    """What `identity` has for keys that a job leaves out.

    An output that an older release began lacks the keys that came later, and means these values.
    """
    models = {name: field.annotation for name, field in JobConfig.model_fields.items()}
    sections = {
        name: model for name, model in models.items() if isinstance(model, type) and issubclass(model, BaseModel)
    }
    built = {name: model.model_construct() for name, model in sections.items()}
    return _identity_keys({name: section.model_dump(mode="json", by_alias=True) for name, section in built.items()})


def _identity_keys(sections: Mapping[str, Mapping[str, JSON]]) -> dict[str, JSON]:
    keys = {
        f"{section}.{key}": value
        for section, values in sections.items()
        if section not in OPERATIONAL_SECTIONS
        for key, value in values.items()
    }
    return {key: value for key, value in keys.items() if key not in OPERATIONAL_KEYS}


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file (draft 2020-12)."""
    schema = JobConfig.model_json_schema(by_alias=True)
    sections = [*schema["$defs"].values(), schema]
    for node in [key for section in sections for key in section["properties"].values()]:
        node.pop("title", None)  # pydantic makes them from the names, and editors would show both
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "batchgen job, version 1"}


def load_job(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    today: datetime.date | None = None,
) -> JobConfig:
    """Read and check a job file; `overrides` are `section.key=value`, the values YAML.

    Raises JobFileError with all problems at once. `environ` and `today` fill `${env:NAME}` and `${run_date}`.
    """
    path = Path(path)
    document = read_yaml(_read_text(path), str(path))
    if document.problems and not isinstance(document.data, dict):
        raise _job_file_error(document.problems)
    data = _sections(document, str(path))
    for override in overrides:
        data = _override(data, document, override)
    data = _with_examples(data, document, path.parent)
    data = with_schema_files(data, document, path.parent)
    data = _without_own_fields(data, document)
    written = _output_path(data)
    variables = _variables(written, document, environ, today or datetime.date.today())
    if written is not None:
        # Checked as it will be, kept as it is written.
        filled = _SUBSTITUTION.sub(lambda match: variables.get(match[1], match[0]), written)
        data = {**data, "output": {**data["output"], "path": filled}}
    problems = document.problems
    job = None
    try:
        # JSON is the form in which pydantic's strict mode takes a list for a tuple, but no "4" for a 4.
        job = JobConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems += explain(error, document.places, Place(0, 0, f"{path}: "), job_schema())
    if job is None or problems:
        raise _job_file_error(problems)
    output = job.output.model_copy(update={"path": written})
    return job.model_copy(update={"output": output, "base_dir": path.parent, "variables": variables})


def _job_file_error(problems: list[Problem]) -> JobFileError:
    return JobFileError([str(problem) for problem in sorted(problems)])


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        advice = "; batchgen init DATA writes a first job file" if isinstance(error, FileNotFoundError) else ""
        raise JobFileError([f"{path}: cannot be read: {error.strerror}{advice}"]) from error
    if len(content) > MAX_BYTES:
        raise JobFileError(
            [f"{path}: larger than {MAX_BYTES >> 20} MiB; a job file names its data, it does not hold it"]
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise JobFileError([f"{path}:{line}: byte 0x{content[error.start]:02X} is not UTF-8"]) from error


def _sections(document: YamlDocument, name: str) -> dict[str, Any]:
    """The document as a mapping of sections; a section whose keys are all commented out is an empty one."""
    if document.data is None:
        raise JobFileError([f"{name}: the file is empty; a job has version, model, input, prompt and output"])
    if not isinstance(document.data, dict):
        raise JobFileError([f"{name}:1:1: must be a mapping of sections such as `model:` and `input:`"])
    return {key: {} if value is None and key != "version" else value for key, value in document.data.items()}


def _without_own_fields(data: dict[str, Any], document: YamlDocument) -> dict[str, Any]:
    """`data` without the fields that are no keys of the file; adds to the document's problems."""
    for name in _OWN_FIELDS & data.keys():
        document.problems.append(Problem(document.places[(name,)].key, f"{name}: unknown key"))
    return {key: value for key, value in data.items() if key not in _OWN_FIELDS}


def _override(data: dict[str, Any], document: YamlDocument, override: str) -> dict[str, Any]:
    """A copy of `data` with one `section.key=value` set; what is wrong with it is added to the document's problems."""
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not _OVERRIDE_KEY.fullmatch(key):
        what = f"{override}: must be section.key=value, such as sampling.temperature=0.5"
        document.problems.append(Problem(_OVERRIDE.key, what))
        return data
    value = read_yaml(text, key)
    if value.problems:
        document.problems += [Problem(_OVERRIDE.key, f"{key}: {problem.what}") for problem in value.problems]
        return data
    path: KeyPath = tuple(key.split("."))
    document.places = {place: entry for place, entry in document.places.items() if place[: len(path)] != path}
    for end in range(1, len(path) + 1):
        document.places.setdefault(path[:end], _OVERRIDE)
    document.places.update((path + child, _OVERRIDE) for child in value.places)
    return _with(data, path, value.data, document)


def _with(data: dict[str, Any], path: KeyPath, value: Any, document: YamlDocument) -> dict[str, Any]:
    # Copies along the path: an alias may have made one mapping stand in two places.
    head, rest = str(path[0]), path[1:]
    if not rest:
        return {**data, head: value}
    inner = data.get(head)
    if inner is not None and not isinstance(inner, dict):
        what = f"{head}.{key_name(rest)}: {head} is no mapping"
        document.problems.append(Problem(_OVERRIDE.key, what))
        return data
    return {**data, head: _with(inner or {}, rest, value, document)}


def _with_examples(data: dict[str, Any], document: YamlDocument, base_dir: Path) -> dict[str, Any]:
    """`data` with the examples of `prompt.few_shot.path` in the place of the path: what they say is the job's own."""
    prompt = data.get("prompt")
    if not isinstance(prompt, dict) or not isinstance(shots := prompt.get("few_shot"), dict):
        return data
    if not isinstance(name := shots.get("path"), str) or "examples" in shots:
        return data
    limit = shots.get("limit")
    kept = {key: value for key, value in shots.items() if key not in ("path", "limit")}
    try:
        kept["examples"] = read_examples(
            base_dir / Path(os.path.expanduser(name)), limit if isinstance(limit, int) and limit > 0 else None
        )
    except ValueError as error:
        key = ("prompt", "few_shot", "path")
        document.problems.append(Problem(document.places.get(key, _OVERRIDE).value, f"{key_name(key)}: {error}"))
        kept["examples"] = [{}]
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        kept["limit"] = limit
    return {**data, "prompt": {**prompt, "few_shot": kept}}


def _output_path(data: dict[str, Any]) -> str | None:
    """`output.path` as it is written; None where there is no such text."""
    output = data.get("output")
    path = output.get("path") if isinstance(output, dict) else None
    return path if isinstance(path, str) else None


def _variables(
    path: str | None, document: YamlDocument, environ: Mapping[str, str], today: datetime.date
) -> dict[str, str]:
    """What each `${env:NAME}` and `${run_date}` of output.path stands for; adds to the document's problems."""
    variables: dict[str, str] = {}
    for match in _SUBSTITUTION.finditer(path or ""):
        name = match[1]
        if name == "run_date":
            variables[name] = today.isoformat()
        elif name.startswith("env:") and environ.get(name[4:]):
            variables[name] = environ[name[4:]]
        else:
            reason = "is not set" if name.startswith("env:") else "is unknown; use ${run_date} or ${env:NAME}"
            place = document.places.get(("output", "path"), document.places[("output",)]).value
            document.problems.append(Problem(place, f"output.path: {match[0]} {reason}"))
    return variables
