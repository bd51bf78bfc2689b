"""What the README and the pages show is run, and must come out as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from batchgen.config import load_job
from tests.program import ROOT, batchgen

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WHOLE = {
    "version": 1,
    "model": {"path": "model"},
    "input": {"path": "rows.jsonl"},
    "prompt": {"column": "text"},
    "output": {"path": "out"},
}
"""What a page may leave out when it shows one section of a job."""


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def transcript(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block with the lines that follow it."""
    commands: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    return commands


def shape(line: str) -> str:
    """A line with what differs between machines taken out: figures, texts, and how a path begins."""
    line = re.sub(r"^  > .*", "  > TEXT", line)
    line = re.sub(r"(\d+ (h|min) )?\d[\d,.]* (s|min)\b", "TIME", line)
    line = re.sub(r"\d[\d,]*(\.\d+)?", "#", line)
    return re.sub(r"\S*/(data|_batchgen)\b", r"\1", line)


def test_the_quickstart_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """With fewer rows and shorter texts, since the shape of what is printed does not depend on them."""
    shown = transcript(blocks(README, "console")[0])
    assert [command for command, _ in shown] == ["make run", "make run", "make test"]
    first, again = ([shape(line) for line in lines] for _, lines in shown[:2])
    out = f"output.path={tmp_path / 'quickstart'}"
    arguments = [
        "run",
        "jobs/quickstart.yaml",
        "--set",
        out,
        "--set",
        "input.limit=3",
        "--set",
        "sampling.max_tokens=4",
    ]

    run = batchgen(*arguments)
    assert run.returncode == 0, run.stderr
    begin = first.index(shape("done: 72 rows: 72 ok, 0 error"))
    # Beside the phases there may be a warning, such as that no C++ compiler was there.
    phases = first[:begin]
    assert [line for line in run.stderr.splitlines() if line in phases] == phases
    printed = [shape(line) for line in run.stdout.splitlines()]
    assert printed[: len(first) - begin] == first[begin:]

    second = batchgen(*arguments)
    assert second.returncode == 0, second.stderr
    assert [shape(line) for line in second.stdout.splitlines()] == again


def test_the_wrong_job_file_of_the_readme_gives_the_problems_shown(tmp_path: Path) -> None:
    job = blocks(README, "yaml")[0].replace("temperature", "temprature").replace("output:", "ouput: ")
    (tmp_path / "job.yaml").write_text(job)
    ((command, lines),) = transcript(blocks(README, "console")[1])
    result = batchgen(*command.split()[1:], cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines() == lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_job_on_a_page_is_valid(page: Path, tmp_path: Path) -> None:
    for name in ("person.schema.json", "place.schema.json"):
        (tmp_path / name).write_text('{"type": "object", "properties": {"name": {"type": "string"}}}')
    for index, text in enumerate(blocks(page.read_text(), "yaml")):
        shown = yaml.safe_load(text)
        if "apiVersion" in shown:
            continue  # Kubernetes'.
        job = text if "version" in shown else yaml.safe_dump({**WHOLE, **shown})
        (tmp_path / f"{index}.yaml").write_text(job)
        load_job(tmp_path / f"{index}.yaml")


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(README, "python")
    exec(example, {})
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [line[:6] for line in lines] == ["0 None", "1 None"]
