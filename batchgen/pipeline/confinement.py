"""What a child process does to itself before it touches what may run away: it ends in time, and with its parent."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def child_code(module: str) -> str:
    """Python code of a child, for `-c`: it runs `main` of a module. Its second argument is the id of its parent.

    It is bound to its parent before it imports the module, which takes seconds on a busy machine: a run that is killed
    leaves no child behind for so long. What it imports stays, and no garbage collection looks at it.
    """
    bind = "from batchgen.pipeline.confinement import die_with_parent; die_with_parent(int(sys.argv[2]))"
    return f"import gc, sys; {bind}; gc.disable(); from {module} import main; gc.freeze(); gc.enable(); main()"


def arm(seconds: float) -> None:
    """Let the kernel end this process once it has used so much processor time; 0: not at all."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def die_with_parent(parent: int) -> None:
    """End this process when the one with id `parent` ends, and leave signals to that one."""
    # The parent alone decides about signals: a scheduler sends them to every process of a job.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def limit_memory(beyond: int) -> None:
    """Bound private memory, which is what rows and templates take; mapped libraries do not count."""
    if sys.platform != "linux":
        return
    with open("/proc/self/status", encoding="ascii") as status:
        held = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = held + beyond if hard == resource.RLIM_INFINITY else min(hard, held + beyond)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
