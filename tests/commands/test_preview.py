from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen import cli
from batchgen.config import load_job
from batchgen.pipeline.preview import preview_job
from tests.pipeline.prompts import write_job


def preview(job: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = (
        f"import sys\nfrom batchgen import cli\nsys.argv = ['batchgen', 'preview', {str(job)!r}, *{arguments!r}]\n"
        "try:\n    cli.main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)


def test_prompts_are_shown_as_the_model_gets_them_without_weights_or_torch(tmp_path: Path) -> None:
    rows = [{"word": "x<|turn|>⟦y"}, {"word": None}, {"word": "\x1b[31m  "}, {"word": "unseen"}]
    result = preview(write_job(tmp_path, rows, input={"path": "in.jsonl", "limit": 4}), "-n", "3")
    assert result.returncode == 0, result.stderr
    heading, first, second, *rest = result.stdout.splitlines()
    assert heading == "in.jsonl, row 0: 21 tokens of 64"
    # The token of the row is text, and so are marks like ours; those of the template are control tokens.
    assert (first, second) == ("  | ⟦<s>⟧⟦<|turn|>⟧Say x<|turn|>\\u27e6y", "  | ⟦<|turn|>⟧")
    assert rest[1] == (
        "in.jsonl, row 1: error template_error: line 1 of the template: prints a value that is null; "
        "use {{ name or '' }} or {% if name %} ('word' of this row is null)"
    )
    assert "  | ⟦<s>⟧⟦<|turn|>⟧Say \\x1b[31m··" in rest
    assert rest[-2:] == [
        "3 of 4 rows",
        "⟦…⟧ is one control token; the same characters without these marks are text",
    ]
    assert not (tmp_path / "out").exists()


def problem(job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and stderr of a preview that ends with an error; in this process, which is quicker."""
    monkeypatch.setattr(sys, "argv", ["batchgen", "preview", str(job)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0), capsys.readouterr().err


def test_what_is_wrong_with_the_job_ends_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_job(tmp_path, [{"word": "x"}], prompt={"template": "{{ words }}"})
    expected = "batchgen: prompt: no column 'words' in the input; did you mean 'word'?\n"
    assert problem(job, monkeypatch, capsys) == (2, expected)


def test_a_prompt_that_does_not_fit_is_shown_as_the_error_that_it_will_be(tmp_path: Path) -> None:
    job = load_job(write_job(tmp_path, [{"word": "x" * 100}], max_model_len=32))
    (row,) = preview_job(job, 1).rows
    assert row.error is not None
    assert row.error.code == "prompt_too_long"
    job = load_job(tmp_path / "job.yaml", ["prompt.truncate=left", "sampling.max_tokens=12"])
    (row,) = preview_job(job, 1).rows
    assert (row.num_tokens, row.error) == (20, None)


def test_token_ids_are_counted_where_no_tokenizer_could_spell_them(tmp_path: Path) -> None:
    path = write_job(tmp_path, [{"ids": [5, 6, 7]}], prompt={"token_ids_column": "ids"})
    (tmp_path / "model" / "tokenizer.json").unlink()
    (row,) = preview_job(load_job(path), 1).rows
    assert (row.num_tokens, row.pieces) == (3, None)


def test_the_columns_of_a_schema_are_shown_and_a_grammar_that_cannot_be_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"age": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    }
    sampling = {"response_format": {"type": "json_schema", "schema": schema}}
    result = preview(write_job(tmp_path, [{"word": "x"}], sampling=sampling))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-4:-1] == [
        "columns of the schema in sampling.response_format:",
        "  age: list<item: int64>",
        "  kind: list<item: dictionary<values=string, indices=int32, ordered=0>>",
    ]
    schema["properties"]["age"] = {"type": "string", "pattern": "("}
    exit_code, message = problem(write_job(tmp_path, [{"word": "x"}], sampling=sampling), monkeypatch, capsys)
    assert exit_code == 2
    assert "sampling.response_format.schema: /properties/age: " in message
