"""What the machine refuses ends a run with 74; what is wrong with the job stays what it is."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from batchgen.data.file_backend import OsBackend
from batchgen.errors import InputError, JobError, OutputUnavailable
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.pipeline.runner import run_job
from tests.pipeline.fakes import FakeWorld, make_job


def refusal(code: int, path: str | None = None) -> OSError:
    return OSError(code, os.strerror(code), path)


def run(error: Exception) -> None:
    with machine_errors():
        raise error


def test_an_error_of_the_machine_is_named_with_what_to_do() -> None:
    with pytest.raises(OutputUnavailable, match=r"^/x: Too many open files; raise the limit of open files"):
        run(refusal(errno.EMFILE, "/x"))
    with pytest.raises(OutputUnavailable, match=r"^/x: File too large; raise the limit of file sizes"):
        run(refusal(errno.EFBIG, "/x"))


def test_an_input_that_the_machine_cannot_read_is_no_wrong_input() -> None:
    wrong = InputError("/x: cannot be read: Input/output error")
    wrong.__cause__ = refusal(errno.EIO, "/x")
    with pytest.raises(OutputUnavailable, match=r"^/x: cannot be read: Input/output error; mend it"):
        run(wrong)


@pytest.mark.parametrize(
    "error", [refusal(errno.ENOENT), JobError("no"), ValueError("no")], ids=["missing", "job", "bug"]
)
def test_any_other_error_passes(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        run(error)
    assert caught.value is error


@pytest.mark.case(48)
def test_a_file_system_without_hard_links_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    class NoLinks(OsBackend):
        def link(self, source: Path, target: Path) -> None:
            raise refusal(errno.EPERM)

    world = FakeWorld(backend=NoLinks())
    with pytest.raises(OutputUnavailable, match="has no hard links") as error:
        run_job(make_job(tmp_path), services=world.services)
    assert (error.value.exit_code, world.engines) == (74, [])
