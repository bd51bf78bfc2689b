"""Links between pages, to files and to headings: all of them lead somewhere, and every page is reached from another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")


def links_of(page: Path) -> list[str]:
    """Targets of the links outside code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return LINK.findall(re.sub(r"`[^`\n]*`", "", text))


def anchors_of(page: Path) -> set[str]:
    """Headings as GitHub names them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in links_of(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
        assert target.is_relative_to(ROOT), f"{page.relative_to(ROOT)}: {link}"
        assert not anchor or anchor in anchors_of(target), f"{page.relative_to(ROOT)}: {link}: no such heading"


def test_every_page_is_reached_from_the_readme() -> None:
    reached: set[Path] = set()
    left = [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page) if "://" not in link]
        left += [target for target in targets if target.suffix == ".md"]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []
