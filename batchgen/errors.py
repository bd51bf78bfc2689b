"""Every error that batchgen raises for its users, and the exit code each one ends a job with.

BatchgenError                  1   a bug, or a base to catch
├── EngineStalled              1   the watchdog: a step made no progress
├── JobError                   2   the job file, the inputs or the model are wrong or refused
│   ├── JobFileError           2   ... the job file: all problems at once, each with file:line:column
│   ├── InputError             2   ... the inputs
│   └── ModelError             2   ... the model
├── TooManyRowErrors           3   the share of row errors passed run.max_error_rate
├── OutputLocked               4   another run holds the output
├── FingerprintMismatch        5   the output belongs to another job
├── OutputDamaged              6   the records and the files of the output disagree
├── OutputUnavailable         74   disk full, read-only, store unreachable: mend it and run again
├── InputUnavailable          74   a store of inputs cannot be reached, or there is no room for what it holds
└── Interrupted               75   a signal or run.max_runtime: run again

What is wrong with one row is no exception: it is a `batchgen.records.RowError`, and becomes a row of the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, ClassVar


class ExitCode(IntEnum):
    """What the process tells cron, Slurm or a shell."""

    OK = 0
    BUG = 1
    JOB_REFUSED = 2
    TOO_MANY_ROW_ERRORS = 3
    OUTPUT_LOCKED = 4
    OUTPUT_OF_ANOTHER_JOB = 5
    OUTPUT_DAMAGED = 6
    IO_ERROR = 74
    INTERRUPTED = 75


class BatchgenError(Exception):
    """Base of all errors that batchgen raises on purpose; the message says what, where and what to do."""

    exit_code: ClassVar[ExitCode] = ExitCode.BUG
    result: Mapping[str, Any] = MappingProxyType({})
    """What a command has found all the same, in JSON values: `--json` prints it beside the error."""

    def to_json(self) -> dict[str, Any]:
        """JSON values; `code` is the exit code as a word."""
        return {"code": self.exit_code.name.lower(), "exit_code": int(self.exit_code), "message": str(self)}


class EngineStalled(BatchgenError):
    """A scheduling step made no progress; the message names the sequences that wait."""


class JobError(BatchgenError):
    """The job cannot run as it is written."""

    exit_code = ExitCode.JOB_REFUSED


class JobFileError(JobError):
    """The job file is wrong; `problems` holds one line each, `file:line:column: key: what; what to do`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class InputError(JobError):
    """The inputs are wrong: no file matches, a column does not exist, an archive is cut."""


class ModelError(JobError):
    """The model is not there, not readable, or refused because it would run wrong."""


class TooManyRowErrors(BatchgenError):
    """More rows failed than run.max_error_rate allows; what was committed stays."""

    exit_code = ExitCode.TOO_MANY_ROW_ERRORS


class OutputLocked(BatchgenError):
    """Another process writes this output; the message names its host and pid."""

    exit_code = ExitCode.OUTPUT_LOCKED


class FingerprintMismatch(BatchgenError):
    """The output was begun by a job with another fingerprint; the message names the fields that differ."""

    exit_code = ExitCode.OUTPUT_OF_ANOTHER_JOB


class OutputDamaged(BatchgenError):
    """The output's records contradict its files."""

    exit_code = ExitCode.OUTPUT_DAMAGED


class OutputUnavailable(BatchgenError):
    """The output cannot be written now; nothing that was committed is harmed."""

    exit_code = ExitCode.IO_ERROR


class InputUnavailable(BatchgenError):
    """Inputs elsewhere cannot be fetched now; nothing is wrong with the job."""

    exit_code = ExitCode.IO_ERROR


class Interrupted(BatchgenError):
    """The run was asked to stop; the same command goes on where it ended."""

    exit_code = ExitCode.INTERRUPTED
