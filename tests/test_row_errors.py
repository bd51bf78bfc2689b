"""Every code that a row error can have is written down where users look for it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
RAISED = re.compile(r'Row(?:Failure|Error)\(\s*"(\w+)"')
DOCUMENTED = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def documented(page: str, *headings: str) -> set[str]:
    """Codes of the tables under these headings."""
    sections = re.split(r"^## ", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {code for section in sections if section.splitlines()[0] in headings for code in DOCUMENTED.findall(section)}


def test_every_code_of_a_row_error_is_documented_and_no_other() -> None:
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "batchgen").rglob("*.py"))
    raised = {code for source in sources for code in RAISED.findall(source)}
    codes = documented("inputs.md", "Rows that are errors") | documented("prompts.md", "Prompts that are errors")
    assert raised == codes
