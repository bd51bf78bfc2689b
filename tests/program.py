"""The program, started as its users start it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAM = (sys.executable, "-m", "batchgen.cli")


def batchgen(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run([*PROGRAM, *arguments], cwd=cwd, check=False, capture_output=True, text=True)


def start_job(job: Path) -> subprocess.Popen[bytes]:
    """Run a job in a process group of its own; what it says goes to a file `log` beside the job."""
    with (job.parent / "log").open("ab") as log:
        return subprocess.Popen([*PROGRAM, "run", str(job)], stdout=log, stderr=log, start_new_session=True)
