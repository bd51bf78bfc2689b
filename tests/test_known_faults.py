"""Each number of docs/known-faults.md has a test that shows what is right, and each marked test its number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUMBER = re.compile(r"^\| (\d+) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)


def numbers_of(page: str) -> list[int]:
    """The numbers of a page, in order."""
    return [int(number) for number in NUMBER.findall(page)]


def marked(sources: Iterable[str]) -> set[int]:
    """The numbers that tests are marked with."""
    found: set[int] = set()
    for source in sources:
        for test in ast.walk(ast.parse(source)):
            if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
                found.update(*map(_numbers, test.decorator_list))
    return found


def _numbers(decorator: ast.expr) -> set[int]:
    if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func) != "pytest.mark.case":
        return set()
    return {ast.literal_eval(argument) for argument in decorator.args}


def test_every_case_of_the_page_has_a_marked_test_and_every_mark_its_case() -> None:
    page = (ROOT / "docs/known-faults.md").read_text(encoding="utf-8")
    numbers = numbers_of(page)
    assert numbers == list(range(1, 58))
    assert page.count("\n| ") - page.count("\n| | ") == len(numbers), "a line has no number"
    tests = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert marked(tests) == set(numbers)


def test_only_marks_of_tests_count() -> None:
    source = "@pytest.mark.case(1)\n@pytest.mark.slow\ndef test_a(): ...\n\n@pytest.mark.case(2)\ndef other(): ...\n"
    assert marked([source, "@pytest.mark.case(3)\n@pytest.mark.case(4)\ndef test_b(): ..."]) == {1, 3, 4}
    assert numbers_of("| 7 | a#1 | b |\n| | x | y |\n|---|---|---|\n| 8 | c | d |\n") == [7, 8]
