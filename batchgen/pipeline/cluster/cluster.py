"""A cluster for one run: scheduler and workers on this machine, or a connection to those that the job names."""

from __future__ import annotations

from collections.abc import Iterator

from batchgen.errors import Interrupted
from batchgen.pipeline.cluster.messages import MIN_TIMEOUT, LoadOrder, Task, WorkOrder
from batchgen.pipeline.cluster.placement import Machine, place
from batchgen.pipeline.cluster.processes import SchedulerProcess, WorkerPool
from batchgen.pipeline.cluster.settings import configure, scheduler_address, security_for
from batchgen.pipeline.cluster.transport import DaskTransport, Event
from batchgen.pipeline.session import Session

_EVENT_SECONDS = 0.1


class Cluster:
    """Everything that is started for a run, and ends with it."""

    def __init__(self, session: Session, num_workers: int, machine: Machine) -> None:
        """Start or connect, and have the workers load the model; raises JobError and Interrupted."""
        self._session = session
        self._scheduler: SchedulerProcess | None = None
        self.pool: WorkerPool | None = None
        """Processes of ours; None where the workers are others'."""
        self._transport: DaskTransport | None = None
        try:
            self._open(num_workers, machine)
        except BaseException:
            self.close()
            raise

    def _open(self, num_workers: int, machine: Machine) -> None:
        session, run = self._session, self._session.job.run
        configure()
        if run.scheduler is None:
            placements = place(num_workers, session.job.engine, machine)
            session.watcher.phase(f"starting {num_workers} workers")
            self._scheduler = SchedulerProcess(with_dashboard=run.dashboard)
            address = self._scheduler.address
            self.pool = WorkerPool(address, placements, "local-")
        else:
            address = scheduler_address(run.scheduler, session.job.base_dir)
            session.watcher.phase(f"connecting to {address}")
        topic = f"batchgen-{session.ledger.attempt}"
        security = security_for(address, run.tls, session.job.base_dir)
        self._transport = DaskTransport(address, security, topic, self._check_scheduler)
        if run.dashboard:
            session.watcher.messages([f"dashboard: {self._transport.dashboard}"])
        assert session.services.make_for_worker is not None
        self._transport.load(
            LoadOrder(
                attempt=session.ledger.attempt,
                topic=topic,
                job=session.job.model_copy(update={"base_dir": session.job.base_dir.absolute()}),
                model_hashes=session.model.hashes,
                output_root=session.ledger.paths.root,
                make_services=session.services.make_for_worker,
                timeout=max(MIN_TIMEOUT, run.worker_timeout),
            )
        )

    @property
    def transport(self) -> DaskTransport:
        """The connection."""
        assert self._transport is not None
        return self._transport

    @property
    def pids(self) -> list[int]:
        """Process ids of the scheduler and the workers on this machine."""
        workers = [] if self.pool is None else list(self.pool.pids.values())
        return workers if self._scheduler is None else [self._scheduler.pid, *workers]

    def check(self) -> None:
        """Raise Interrupted where the scheduler is gone."""
        self._check_scheduler()
        self.transport.check()

    def _check_scheduler(self) -> None:
        if self._scheduler is not None:
            self._scheduler.check()

    @property
    def is_alive(self) -> bool:
        """Whether there is a scheduler."""
        try:
            self.check()
        except Interrupted:
            return False
        return True

    def announce(self, order: WorkOrder) -> None:
        """Tell all workers what the next tasks are about."""
        self.transport.announce(order)

    def submit(self, address: str, task: Task) -> None:
        """Run a task on a worker."""
        self.transport.submit(address, task)

    def release(self, task: int) -> None:
        """Nobody waits for a task any more."""
        self.transport.release(task)

    def events(self) -> Iterator[Event]:
        """What has happened; waits a moment if nothing has."""
        return self.transport.events(_EVENT_SECONDS)

    def segments(self, worker: str) -> list[str]:
        """What a worker has journaled in this run."""
        ledger = self._session.ledger
        names = ledger.files.list_directory(ledger.paths.journal)
        return [name for name in names if name.startswith(f"{ledger.attempt}-{worker}-")]

    def close(self) -> None:
        """Leave nothing behind: no process, no connection, no temporary file."""
        if self._transport is not None:
            self._transport.close(unload=self.pool is None)
        if self.pool is not None:
            self.pool.close()
        if self._scheduler is not None:
            self._scheduler.close()
        # Of an earlier run too: workers of a cluster may have written for it until they heard of its end.
        self._session.ledger.clear_temporaries()
