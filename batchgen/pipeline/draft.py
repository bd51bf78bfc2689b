"""A first job file for some data and a model: the columns are read, the rest is said in comments."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from typing import Literal

import pyarrow as pa

from batchgen.config import InputConfig, OutputConfig
from batchgen.data.inputs import find_inputs
from batchgen.data.reader import scan_inputs
from batchgen.data.schema import output_layout, output_schema
from batchgen.pipeline.bounded_reader import DecodingInChildren
from batchgen.sampling_params import SamplingParams
from batchgen.units import plural

_CHATS = ("messages", "conversation", "conversations", "chat")
_PROMPTS = ("prompt", "instruction", "question", "query", "input", "text", "content", "topic", "title")
_IDS = ("id", "uid", "uuid", "key", "custom_id")


def draft_job(inputs: Sequence[Path], model: str, job: Path) -> str:
    """The text of a job file that is to lie at `job`; raises InputError for data that cannot be read.

    Types of columns are found in the first file alone.
    """
    base = job.parent
    paths = [_relative(path, base) for path in inputs]
    config = InputConfig(path=paths if len(paths) > 1 else paths[0])
    found = find_inputs(config, base)
    scan = scan_inputs(found.files[:1], config, decoding=DecodingInChildren())
    schema = scan.source_schema
    num_rows = sum(file.num_rows for file in scan.files)
    of = f"{found.files[0].name}: {plural(num_rows, 'row')}" + (
        f"; {len(found.files):,} files" if len(found.files) > 1 else ""
    )
    return _TEXT.format(
        columns="\n".join(f"#   {_one_line(name)}: {kind}" for name, kind in _columns(schema)),
        found=_one_line(of),
        model=json.dumps(_model_path(model, base), ensure_ascii=False),
        path=json.dumps(paths if len(paths) > 1 else paths[0], ensure_ascii=False),
        carried=_carried(schema),
        prompt=_prompt(schema),
        output=json.dumps(_free_path(base, f"out/{job.stem}"), ensure_ascii=False),
        prefix=_prefix(schema),
        run=f"batchgen run {job.name}",
    )


def _columns(schema: pa.Schema) -> list[tuple[str, str]]:
    return [(field.name, str(field.type)) for field in schema]


def _carried(schema: pa.Schema) -> str:
    ids = [name for name in schema.names if name.lower() in _IDS]
    example = json.dumps(ids or schema.names[:2], ensure_ascii=False)
    return f"  # columns: {_one_line(example)}   # carried into the output; all of them if this is left out"


def _prompt(schema: pa.Schema) -> str:
    names = {name.lower(): name for name in reversed(schema.names)}
    for name in _CHATS:
        if name in names and not pa.types.is_string(schema.field(names[name]).type):
            return f"  messages_column: {json.dumps(names[name], ensure_ascii=False)}"
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    chosen = next((names[name] for name in _PROMPTS if names.get(name) in texts), None)
    chosen = chosen or next((name for name in texts if name.lower() not in _IDS), None)
    value = "Hello" if chosen is None else f"{{{{ {_expression(chosen)} }}}}"
    return "\n".join(
        [
            "  messages:                     # through the model's chat template; a model without one: template:",
            "    # - {role: system, content: You answer in one short paragraph.}",
            f"    - {{role: user, content: {json.dumps(value, ensure_ascii=False)}}}",
        ]
    )


def _free_path(base: Path, path: str) -> str:
    """The path, with a number behind it where something is there already, such as the output that is read here."""
    return next(free for free in chain([path], (f"{path}-{n}" for n in count(2))) if not os.path.lexists(base / free))


def _prefix(schema: pa.Schema) -> str:
    """A line that names our columns otherwise, where the data is an output of batchgen and has them; else none."""
    taken = set(_own_names("list")) & set(schema.names)
    if not taken:
        return ""
    own = set(_own_names("list")) | set(_own_names("explode"))
    free = next(prefix for n in count(2) if {(prefix := f"run{n}_") + name for name in own}.isdisjoint(schema.names))
    return f"{f'  prefix: {free}':32}# the data has {' and '.join(sorted(taken))} already\n"


def _own_names(samples: Literal["list", "explode"]) -> list[str]:
    return output_schema(
        output_layout(pa.schema([]), OutputConfig(path="out", samples=samples), SamplingParams())
    ).names


def _expression(name: str) -> str:
    return name if name.isidentifier() else f"row[{json.dumps(name, ensure_ascii=False)}]"


def _model_path(model: str, base: Path) -> str:
    return _relative(Path(model), base) if Path(model).exists() else model


def _relative(path: Path, base: Path) -> str:
    return str(path) if path.is_absolute() else os.path.relpath(path, base)


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


_TEXT = """\
# {run}    runs this job; run it again to go on after an interruption.
# batchgen plan, preview and validate look at it first. docs/job-file.md has every key.
version: 1

model:
  path: {model}   # a Hugging Face id, a directory, or a GGUF file

# {found}. Its columns:
{columns}
input:
  path: {path}
{carried}

prompt:                         # Jinja over the columns of a row
{prompt}

sampling:
  n: 1                          # completions of each row
  temperature: 0.7              # 0: always the most likely token
  max_tokens: 256               # of one completion
  seed: 1                       # the same rows again with the same seed

output:
  path: {output}
{prefix}  # samples: explode            # a row for each sample, where n is larger than 1
  # shard_rows: 4096            # input rows in one Parquet file

# run:
#   max_error_rate: 0.05        # end with exit code 3 when more rows fail
#   max_runtime: 4h             # stop in good order before a scheduler does
"""
