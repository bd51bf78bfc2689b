"""The feeder gives every row once, in order, whatever its templates do to its child."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import BatchgenError, InputError, JobError, OutputUnavailable
from batchgen.pipeline import feeder as feeder_module
from batchgen.pipeline.child import Limits
from batchgen.pipeline.feeder import PreparedRow, PromptFeeder
from batchgen.records import RowRange
from tests.pipeline.prompts import plan_prompts

WAIT = 60.0
SLOW = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% if n < 9 %}{% break %}{% endif %}{% endfor %}{% endfor %}"
)
QUICK = Limits(step_seconds=0.7, memory_bytes=2**28)


def drain(feeder: PromptFeeder) -> list[PreparedRow]:
    rows = []
    while not feeder.is_over:
        row = feeder.get(timeout=WAIT)
        if row is not None:
            rows.append(row)
    return rows


@contextmanager
def feeding(base: Path, rows: list[Any], *, limits: Limits = Limits(), **sections: Any) -> Iterator[PromptFeeder]:  # noqa: B008
    spec, scan = plan_prompts(base, rows, **sections)
    with closing(PromptFeeder(spec, scan.ranges, limits=limits)) as feeder:
        yield feeder


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_every_row_comes_once_in_input_order(tmp_path: Path) -> None:
    with feeding(tmp_path, [{"n": number} for number in range(300)], prompt={"template": "n {{ n }}"}) as feeder:
        rows = drain(feeder)
        assert feeder.get(timeout=0) is None
    assert [row.row.row for row in rows] == list(range(300))
    assert all(row.error is None and row.prompt_token_ids for row in rows)
    assert rows[0].prompt_token_ids == [0, *rows[0].prompt_token_ids[1:]]


def test_only_the_ranges_asked_for_are_prepared(tmp_path: Path) -> None:
    spec, _ = plan_prompts(tmp_path, [{"n": number} for number in range(100)], prompt={"template": "n {{ n }}"})
    with closing(PromptFeeder(spec, [RowRange(0, 3, 5), RowRange(0, 70, 71)])) as feeder:
        assert [row.row.row for row in drain(feeder)] == [3, 4, 70]


def test_a_template_that_does_not_come_back_costs_its_row_alone(tmp_path: Path) -> None:
    rows = [{"n": 9 if number == 3 else 1} for number in range(6)]
    template = {"template": "{% if n == 9 %}" + SLOW + "{% endif %}n {{ n }}"}
    with feeding(tmp_path, rows, limits=QUICK, prompt=template) as feeder:
        prepared = drain(feeder)
    assert [row.row.row for row in prepared] == list(range(6))
    assert [row.error and row.error.code for row in prepared] == [None, None, None, "template_timeout", None, None]
    assert prepared[3].error == ("template_timeout", "the prompt took more than 0.7 s of processor time")


def test_memory_that_a_template_takes_is_bounded(tmp_path: Path) -> None:
    rows = [{"n": 1}, {"n": 2**30}, {"n": 1}]
    with feeding(tmp_path, rows, limits=QUICK, prompt={"template": "{{ 'x' * n }}"}) as feeder:
        prepared = drain(feeder)
    assert prepared[1].error == ("template_error", "line 1 of the template: needs too much memory")
    assert [row.error for row in prepared[::2]] == [None, None]


@pytest.mark.case(52)
def test_a_killed_child_is_replaced_and_no_row_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "BATCH_ROWS", 4)
    with feeding(tmp_path, [{"n": number} for number in range(60)], prompt={"template": "n {{ n }}"}) as feeder:
        first = feeder.get(timeout=WAIT)
        assert feeder.child_pid is not None
        os.kill(feeder.child_pid, signal.SIGKILL)
        rows = [first, *drain(feeder)]
    assert [row.row.row for row in rows if row is not None] == list(range(60))
    assert all(row is not None and row.error is None for row in rows)


def test_a_machine_that_kills_every_child_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "_MAX_CRASHES", 2)
    monkeypatch.setattr(feeder_module, "_ATTEMPTS", 1)
    monkeypatch.setattr(feeder_module.BoundedChild, "prepare", _kill_then(feeder_module.BoundedChild.prepare))
    with feeding(tmp_path, [{"n": 1}] * 3, prompt={"column": "n"}) as feeder:
        with pytest.raises(BatchgenError, match="for 2 rows in a row; see to the machine"):
            drain(feeder)
        assert feeder.get(timeout=0) is None


@pytest.mark.parametrize("num_started", [0, 1])
def test_a_child_that_cannot_be_started_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_started: int
) -> None:
    """At the start, and in the place of one that was killed."""
    left = [feeder_module.BoundedChild] * num_started

    def start(*arguments: Any) -> Any:
        if not left:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return left.pop()(*arguments)

    monkeypatch.setattr(feeder_module, "BoundedChild", start)
    monkeypatch.setattr(feeder_module, "BATCH_ROWS", 4)
    rows = [{"n": number} for number in range(60)]

    def feed() -> None:
        with feeding(tmp_path, rows, prompt={"template": "n {{ n }}"}) as feeder:
            assert feeder.child_pid is not None
            os.kill(feeder.child_pid, signal.SIGKILL)
            drain(feeder)

    with pytest.raises(OutputUnavailable, match="Too many open files"):
        feed()


def test_a_row_that_ends_its_child_is_an_error_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeder_module, "_ATTEMPTS", 1)
    monkeypatch.setattr(
        feeder_module.BoundedChild, "prepare", _kill_then(feeder_module.BoundedChild.prepare, only_with=1)
    )
    with feeding(tmp_path, [{"n": "x"}] * 3, prompt={"column": "n"}) as feeder:
        prepared = drain(feeder)
    assert [row.error and row.error.code for row in prepared] == [None, "template_crash", None]


def _kill_then(prepare: Any, only_with: int | None = None) -> Any:
    """`prepare`, with the child killed first where it is asked for a certain row."""

    def killed(self: Any, rows: RowRange) -> Any:
        if only_with is None or rows.start <= only_with < rows.stop:
            os.kill(self.pid, signal.SIGKILL)
        return prepare(self, rows)

    return killed


def test_faults_of_the_job_are_raised_at_the_start(tmp_path: Path) -> None:
    spec, _ = plan_prompts(tmp_path, [{"topic": "x"}], prompt={"template": "{{ topics }}"})
    with pytest.raises(JobError, match="no column 'topics' in the input; did you mean 'topic'"):
        PromptFeeder(spec, [])
    assert not [thread for thread in threading.enumerate() if thread.name == "prompt-feeder"]


def test_a_template_that_does_not_compile_in_time_is_a_job_error(tmp_path: Path) -> None:
    spec, _ = plan_prompts(tmp_path, [{"topic": "x"}], prompt={"template": "{{ 7 ** (7 ** 9) }}"})
    with pytest.raises(JobError, match="compiling the templates takes too long"):
        PromptFeeder(spec, [], limits=Limits(start_seconds=3.0))


def test_a_good_job_passes_the_check(tmp_path: Path) -> None:
    spec, _ = plan_prompts(tmp_path, [{"topic": "x"}], prompt={"template": "{{ topic }}"})
    with closing(PromptFeeder(spec)) as feeder:
        feeder.wait()
        assert feeder.is_checked


def test_the_child_that_checked_prepares_the_rows_by_what_is_known_by_then(tmp_path: Path) -> None:
    spec, scan = plan_prompts(tmp_path, [{"n": "abc"}, {"n": "abcdefgh"}], max_model_len=1, prompt={"column": "n"})
    with closing(PromptFeeder(spec)) as feeder:
        feeder.wait()
        checked = feeder.child_pid
        feeder.begin(replace(spec, max_model_len=6), scan.ranges)
        assert feeder.child_pid == checked
        rows = drain(feeder)
    assert [row.error and row.error.code for row in rows] == [None, "prompt_too_long"]


def test_a_child_that_died_after_the_check_is_replaced(tmp_path: Path) -> None:
    spec, scan = plan_prompts(tmp_path, [{"n": "abc"}] * 3, max_model_len=1, prompt={"column": "n"})
    with closing(PromptFeeder(spec)) as feeder:
        feeder.wait()
        assert feeder.child_pid is not None
        os.kill(feeder.child_pid, signal.SIGKILL)
        feeder.begin(replace(spec, max_model_len=100), scan.ranges)
        assert [row.error for row in drain(feeder)] == [None] * 3


def test_a_fault_that_comes_after_the_check_is_raised_where_rows_begin(tmp_path: Path) -> None:
    spec, scan = plan_prompts(tmp_path, [{"n": "x"}], prompt={"column": "n"})
    with closing(PromptFeeder(spec)) as feeder:
        feeder.wait()
        with pytest.raises(JobError, match="no column 'm' in the input"):
            feeder.begin(replace(spec, prompt=spec.prompt.model_copy(update={"column": "m"})), scan.ranges)
    assert not [thread for thread in threading.enumerate() if thread.name == "prompt-feeder"]


def test_a_check_is_closed_at_any_time(tmp_path: Path) -> None:
    spec, _ = plan_prompts(tmp_path, [{"n": "x"}], prompt={"column": "n"})
    PromptFeeder(spec).close()
    feeder = PromptFeeder(spec)
    feeder.wait()
    pid = feeder.child_pid
    feeder.close()
    assert pid is not None
    assert not is_running(pid)
    assert not [thread for thread in threading.enumerate() if thread.name == "prompt-feeder"]


def test_a_crash_while_the_child_starts_is_raised_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(feeder_module, "BoundedChild", crash)
    spec, _ = plan_prompts(tmp_path, [{"n": "x"}], prompt={"column": "n"})
    with pytest.raises(RuntimeError, match="a bug"):
        PromptFeeder(spec).wait()


def test_an_input_that_changes_under_way_ends_the_run_with_its_name(tmp_path: Path) -> None:
    spec, scan = plan_prompts(tmp_path, [{"n": "x"}], prompt={"column": "n"})
    (tmp_path / "in.jsonl").write_bytes(b'{"n": "y"}\n')
    with closing(PromptFeeder(spec, scan.ranges)) as feeder, pytest.raises(InputError, match=r"in\.jsonl: its content"):
        drain(feeder)


def test_on_error_fail_ends_the_run_at_the_first_bad_row(tmp_path: Path) -> None:
    rows = [{"n": "x"}, {"n": None}]
    failing = {"path": "in.jsonl", "on_error": "fail"}
    message = r"in\.jsonl: row 1: null_prompt: .*input\.on_error is fail"
    with (
        feeding(tmp_path, rows, input=failing, prompt={"column": "n"}) as feeder,
        pytest.raises(InputError, match=message),
    ):
        drain(feeder)


def test_closing_ends_thread_and_child_even_with_a_full_queue(tmp_path: Path) -> None:
    with feeding(tmp_path, [{"n": number} for number in range(2000)], prompt={"template": "{{ n }}"}) as feeder:
        assert feeder.get(timeout=WAIT) is not None
        pid = feeder.child_pid
    assert pid is not None
    assert not is_running(pid)
    feeder.close()
    assert feeder.get(timeout=0) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "prompt-feeder"]


def test_closing_does_not_wait_for_a_template(tmp_path: Path) -> None:
    with feeding(tmp_path, [{"n": 9}], prompt={"template": SLOW + "x"}) as feeder:
        assert feeder.get(timeout=0.2) is None
        pid = feeder.child_pid
    assert pid is not None
    assert not is_running(pid)


PARENT = """
import sys
from pathlib import Path
from tests.pipeline.prompts import plan_prompts
from batchgen.pipeline.feeder import PromptFeeder
spec, scan = plan_prompts(Path(sys.argv[1]), [{"n": 9}], prompt={"template": sys.argv[2] + "x"})
feeder = PromptFeeder(spec, scan.ranges)
print(feeder.child_pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends the child on Linux alone")
def test_a_child_dies_with_its_parent_even_in_a_template(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), SLOW],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        handle = os.pidfd_open(pid)
        parent.kill()
    try:
        ended, _, _ = select.select([handle], [], [], WAIT)
    finally:
        os.close(handle)
    assert ended


def test_the_child_imports_no_torch() -> None:
    code = "import sys, batchgen.pipeline.preparer; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
