"""Files that are made from the code and checked in: `python -m tests.generated` writes them, `--check` compares.

The command-line page depends on typer's layout, so versions are pinned in constraints.txt.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

from batchgen.cli import app
from batchgen.commands.schema import schema_text
from batchgen.config import OPERATIONAL_KEYS, OPERATIONAL_SECTIONS, job_schema
from tests.block_size_page import block_size_page
from tests.json_documents import json_section
from tests.models_page import models_page
from tests.program import PROGRAM, ROOT

NOTICE = "<!-- Made by `make generate`; edit what it is made from. -->\n"
COMMANDS = (
    (),
    *((command.name or command.callback.__name__,) for command in app.registered_commands if command.callback),
)


def job_file_page() -> str:
    """docs/job-file.md: every key of every section with type, default, unit and meaning."""
    schema = job_schema()
    parts = [
        "# The job file\n",
        NOTICE,
        "A job is one YAML file. `batchgen validate job.yaml` checks it without loading data or a model, and "
        "`batchgen run job.yaml --set sampling.temperature=0.5` changes a key for one run. Relative paths are relative "
        "to the job file. A key that is left out has its default; a key that does not exist is an error.\n",
        "The first line connects editors that speak the YAML language server to the schema:\n",
        "```yaml\n" + (ROOT / "tests/job_files/valid/every_key.yaml").read_text() + "```\n",
        "Keys marked *operational* may change between two runs of one job: they cannot change a row. All others "
        "belong to the job's identity, and an output is only ever continued by the job that began it.\n",
        "`version: 1` names this format and is required; version 1 only ever gains optional keys.\n",
    ]
    for section, node in schema["properties"].items():
        if section != "version":
            parts.append(_section(section, node, schema))
    return "\n".join(parts)


def _section(section: str, node: dict[str, Any], schema: dict[str, Any]) -> str:
    definition = _definition(node, schema)
    required = "required" if section in schema["required"] else "optional"
    title = f"## {section} ({required}{', operational' if section in OPERATIONAL_SECTIONS else ''})\n"
    rows = ["| key | type | default | meaning |", "|---|---|---|---|", *_rows(section, "", definition, schema)]
    return "\n".join([title, definition["description"], "", *rows, ""])


def _rows(section: str, prefix: str, definition: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    """A row for each key, and under a key that is a mapping itself a row for each of its keys."""
    for name, key in definition["properties"].items():
        default = "required" if name in definition.get("required", ()) else f"`{json.dumps(key.get('default'))}`"
        meaning = key["description"]
        if "unit" in key:
            meaning += f" Unit: {key['unit']}."
        if f"{section}.{name}" in OPERATIONAL_KEYS:
            meaning += " *Operational.*"
        if "examples" in key:
            meaning += " Example: " + ", ".join(f"`{json.dumps(example)}`" for example in key["examples"]) + "."
        yield f"| `{prefix}{name}` | {_type(key)} | {default} | {meaning} |"
        choices = [choice for choice in key.get("anyOf", [key]) if "$ref" in choice.get("items", choice)]
        for choice in choices:
            inner = f"{prefix}{name}{'[]' if 'items' in choice else ''}."
            yield from _rows(section, inner, _definition(choice.get("items", choice), schema), schema)


def _definition(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    definition: dict[str, Any] = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return definition


def _type(node: dict[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(_type(choice) for choice in node["anyOf"]))
    if "$ref" in node:
        return "mapping"
    if "enum" in node or "const" in node:
        return " or ".join(f"`{json.dumps(choice)}`" for choice in node.get("enum", [node.get("const")]))
    if node["type"] == "array":
        return f"list of {_type(node['items'])}".replace("list of mapping", "list of mappings")
    if "examples" in node:
        return f"text such as {' or '.join(node['examples'])}"
    names = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "mapping"}
    bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<="}
    # The largest seed is 2 ** 63 - 1, which says nothing to a reader.
    limits = [f"{sign} {node[key]:,.10g}" for key, sign in bounds.items() if key in node and node[key] < (1 << 31) - 1]
    return " ".join([names.get(node["type"], str(node["type"])), ", ".join(limits)]).strip()


def cli_page() -> str:
    """docs/cli.md: what --help says, for the program and for each command; then the keys of `--json`."""
    parts = ["# The command line\n", NOTICE]
    for command in COMMANDS:
        parts.append(f"## {' '.join(('batchgen', *command))}\n")
        parts.append(f"```console\n$ {' '.join(('batchgen', *command, '--help'))}\n{_help(command)}```\n")
    parts.append(json_section())
    return "\n".join(parts)


def _help(command: tuple[str, ...]) -> str:
    # In a process of its own: the width is read from the environment, and nothing else may have an influence.
    environ = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "NO_COLOR": "1"}
    arguments = [*PROGRAM, *command, "--help"]
    return subprocess.run(arguments, env=environ, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@cache
def generated_files() -> dict[str, str]:
    """Path from the root of the repository -> text; made once, since the page of models takes seconds."""
    return {
        "schemas/job.v1.schema.json": schema_text(),
        "docs/job-file.md": job_file_page(),
        "docs/cli.md": cli_page(),
        "docs/models.md": models_page(NOTICE),
        "docs/block-size.md": block_size_page(NOTICE),
    }


def stale_files() -> list[str]:
    """A diff for each checked-in file that is not what the code makes."""
    diffs = []
    for name, text in generated_files().items():
        path = ROOT / name
        old = path.read_text() if path.exists() else ""
        if old != text:
            lines = difflib.unified_diff(
                old.splitlines(keepends=True), text.splitlines(keepends=True), f"{name} (checked in)", f"{name} (made)"
            )
            diffs.append("".join(lines))
    return diffs


def main(arguments: list[str]) -> int:
    """Write the files, or with `--check` print what is stale; returns the exit code."""
    if arguments == ["--check"]:
        diffs = stale_files()
        print("\n".join(diffs) + "run `make generate`" if diffs else "generated files are up to date")
        return int(bool(diffs))
    for name, text in generated_files().items():
        (ROOT / name).write_text(text)
        print(f"wrote {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
