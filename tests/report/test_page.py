from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from batchgen.commands.finish import finish
from batchgen.commands.report import report, write_report
from batchgen.config import JobConfig
from batchgen.data.files import OutputFiles
from batchgen.errors import Interrupted, JobError, OutputUnavailable, TooManyRowErrors
from batchgen.pipeline.runner import run_job
from batchgen.pipeline.stored import read_output
from batchgen.report.page import NUM_SAMPLE_ROWS, make_page
from tests.pipeline.fakes import FakeWorld, interrupt_after, make_job

EVIL = "</article><script>document.title='owned'</script>{{ 7 * 7 }}<img src=x onerror=alert(1)>"
VOID = {"meta", "link", "br", "img"}


def finished_job(base: Path, **sections: object) -> JobConfig:
    job = make_job(base, 0, **sections)
    lines = [json.dumps({"prompt": "bad!" if row % 9 == 8 else f"{EVIL} {row}"}) for row in range(40)]
    (base / "in.jsonl").write_text("\n".join(lines) + "\n")
    finish(job, lambda progress: run_job(job, services=FakeWorld().services, progress=progress))
    return job


class Reader(HTMLParser):
    """Notes the elements, checks that they close in order, and collects what would load something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href", "onerror")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_a_run_ends_with_a_page_that_loads_nothing_and_escapes_rows(tmp_path: Path) -> None:
    job = finished_job(tmp_path)
    html = (job.output_dir / "_batchgen" / "report.html").read_text()
    reader = read(html)
    assert "script" not in reader.elements
    assert "img" not in reader.elements
    assert reader.loads == ["href=data:,"]
    assert not re.search(r"url\(|@import", html)
    assert any("</article><script>" in text for text in reader.text)
    assert reader.elements.count("svg") >= 7
    assert any("{{ 7 * 7 }}" in text for text in reader.text)


def test_the_page_has_what_a_user_asks_of_a_run(tmp_path: Path) -> None:
    page = make_page(read_output(OutputFiles(), finished_job(tmp_path).output_dir))
    assert (page.is_done, page.state) == (True, "done: 40 of 40 rows committed")
    assert {fact.name: fact.value for fact in page.facts}["rows with an error"] == "4"
    assert [(error.code, error.num_rows) for error in page.errors] == [("no_allowed_token", 4)]
    assert len(page.rows) == NUM_SAMPLE_ROWS
    assert [chart.title for chart in page.row_charts[:3]] == ["Prompt lengths", "Completion lengths", "Finish reasons"]
    (run,) = page.runs
    assert run.rows == "40"
    settings = {title: dict(values) for title, values in page.settings}
    assert settings["Sampling"]["n"] == "2"
    assert "batchgen" in settings["Versions"]


def test_an_output_that_is_not_done_has_a_page_too(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    with pytest.raises(Interrupted):
        run_job(job, services=FakeWorld(make=interrupt_after(20)).services)
    page = make_page(read_output(OutputFiles(), job.output_dir))
    assert (page.is_done, page.state) == (False, "not done: 4 of 10 rows committed")
    assert len(page.rows) == 4


def test_an_output_without_rows_has_a_page(tmp_path: Path) -> None:
    job = make_job(tmp_path, 0)
    (tmp_path / "in.jsonl").write_text("")
    run_job(job, services=FakeWorld().services)
    stored = read_output(OutputFiles(), job.output_dir)
    page = make_page(stored)
    assert (page.charts, page.rows, page.errors) == ([], [], [])
    read(write_report(stored).read_text())


def test_too_many_errors_leave_a_page_and_other_ends_none(tmp_path: Path) -> None:
    job = make_job(tmp_path, 0, run={"max_error_rate": 0.1})
    (tmp_path / "in.jsonl").write_text('{"prompt": "bad!"}\n')
    with pytest.raises(TooManyRowErrors):
        finish(job, lambda progress: run_job(job, services=FakeWorld().services, progress=progress))
    assert "no_allowed_token" in (job.output_dir / "_batchgen" / "report.html").read_text()


def test_run_report_false_writes_none_and_nothing_to_do_writes_none(tmp_path: Path) -> None:
    job = finished_job(tmp_path, run={"report": False})
    path = job.output_dir / "_batchgen" / "report.html"
    assert not path.exists()
    again = job.model_copy(update={"run": job.run.model_copy(update={"report": True})})
    finish(again, lambda progress: run_job(again, services=FakeWorld().services, progress=progress))
    assert not path.exists()


def test_the_command_prints_where_the_page_is_or_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(tmp_path)
    capsys.readouterr()
    report(job.output_dir, to=tmp_path / "page.html", as_json=False)
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    read((tmp_path / "page.html").read_text())
    report(job.output_dir, to=None, as_json=True)
    figures = json.loads(capsys.readouterr().out)
    assert figures["status"]["num_rows"] == 40
    assert figures["errors"]["no_allowed_token"]["rows"] == 4
    assert figures["completion_tokens"]["count"] == 72
    with pytest.raises(JobError, match="no output of batchgen here"):
        report(tmp_path / "none", to=None, as_json=False)
    with pytest.raises(OutputUnavailable, match="choose another file"):
        report(job.output_dir, to=tmp_path / "none" / "page.html", as_json=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
@pytest.mark.parametrize("width", [360, 1200])
def test_a_browser_shows_it_without_a_word_and_without_scrolling_sideways(
    tmp_path: Path, scheme: int, width: int
) -> None:
    page = finished_job(tmp_path).output_dir / "_batchgen" / "report.html"
    probe = tmp_path / "probe.html"
    probe.write_text(
        f'<iframe id="f" style="border:0" width="{width}" height="900" src="{page.as_uri()}"></iframe>'
        "<script>f.onload = () => { const d = f.contentDocument; document.body.dataset.seen = ["
        "d.documentElement.scrollWidth, d.title, d.querySelectorAll('svg').length,"
        "f.contentWindow.getComputedStyle(d.body).backgroundColor].join('|') }</script>"
    )
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", "--enable-logging=stderr", "--dump-dom"]
    command += ["--virtual-time-budget=3000", f"--user-data-dir={tmp_path / 'profile'}", probe.as_uri()]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in result.stderr
    found = re.search(r'data-seen="([^"]*)"', result.stdout)
    assert found is not None, result.stdout[-2000:]
    scroll_width, title, num_charts, background = found.group(1).split("|")
    assert int(scroll_width) <= width
    assert title == "out · batchgen"
    assert int(num_charts) >= 7
    assert background == ("rgb(20, 22, 26)" if scheme == 0 else "rgb(255, 255, 255)")
