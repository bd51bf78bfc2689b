"""What the machine refuses is no fault of the job, wherever it shows: it ends a run with exit code 74."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from batchgen.data.files import remedy
from batchgen.data.input_rows import UnfoldsTooFar
from batchgen.errors import InputError, JobError, OutputUnavailable

_MACHINE = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE}
)
"""Too many open files, no space, a limit of file sizes, a device that fails: running again may do better, another job
file would not."""


@contextmanager
def machine_errors() -> Iterator[None]:
    """Raise OutputUnavailable for an OSError of the machine, and for a JobError that one has led to."""
    try:
        yield
    except (OSError, JobError) as error:
        cause = _machine_error(error)
        if cause is None:
            raise
        what = str(error) if isinstance(error, JobError) else _described(cause)
        raise OutputUnavailable(f"{what}; {remedy(cause.errno)}") from error


@contextmanager
def unfolding_named() -> Iterator[None]:
    """Raise InputError where a file takes more memory than this process may use."""
    try:
        yield
    except UnfoldsTooFar as error:
        raise InputError(str(error)) from error


def _described(error: OSError) -> str:
    reason = str(error.strerror or error)
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _machine_error(error: BaseException | None) -> OSError | None:
    """The OSError of the machine among an error and what led to it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _MACHINE:
            return error
        error = error.__cause__
    return None
