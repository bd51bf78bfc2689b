"""One engine in this process, or many workers: as the job says."""

from __future__ import annotations

from contextlib import ExitStack

import batchgen
from batchgen.errors import JobError
from batchgen.pipeline.cluster.placement import num_workers, this_machine
from batchgen.pipeline.generation import Generation, OneEngine
from batchgen.pipeline.session import Session
from batchgen.pipeline.stop import StopWatch


def make_generation(session: Session, stop: StopWatch, stack: ExitStack) -> Generation:
    """What generates the rows of a session; nothing is started or loaded before the first row needs it."""
    run, services = session.job.run, session.services
    if run.scheduler is None and run.workers == 1:
        return OneEngine(session, stop, stack)
    machine = this_machine()
    count = num_workers(run.workers, session.job.engine, machine)
    if run.scheduler is None and count == 1:
        return OneEngine(session, stop, stack)
    if services.make_for_worker is None:
        raise JobError("run.workers: there are no services for worker processes; use 1")
    # By way of the package's lazy name: dask is loaded here and not before.
    return batchgen.ManyWorkers(session, stop, stack, count, machine)
