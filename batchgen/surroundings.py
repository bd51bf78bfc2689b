"""What a process is started with and may be without: a working directory, standard input, output and error."""

from __future__ import annotations

import fcntl
import os
import sys

from batchgen.errors import OutputUnavailable


def open_standard_streams() -> None:
    """Put the null device where one of the three is closed, or cannot be written although it is there to be.

    Else the next file that is opened gets its number, and takes whatever a library or a child writes there. A shell
    that is started so opens its script under that number, and leaves it to the programs that it starts.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if not _is_usable(number, mode):
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 (kept to the end)


def check_working_directory() -> None:
    """OutputUnavailable where the working directory was removed, or may not be entered: no path has a meaning then."""
    try:
        os.getcwd()
    except OSError as error:
        raise OutputUnavailable(
            f"the working directory: {error.strerror}; change to another one, and run again"
        ) from error


def _is_usable(number: int, mode: str) -> bool:
    try:
        access = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return False
    return mode == "r" or access != os.O_RDONLY
