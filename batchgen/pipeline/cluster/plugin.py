"""What dask's workers run: a plugin that holds the engine, and the task that waits for it."""

from __future__ import annotations

import pickle
import secrets
from typing import Any

from distributed import Worker, WorkerPlugin, get_worker

from batchgen.pipeline.cluster.host import EngineHost, Place
from batchgen.pipeline.cluster.messages import LoadOrder, Message, Task, WorkOrder, to_wire

ENGINE_PLUGIN = "batchgen-engine"
WORK_PLUGIN = "batchgen-work"
_POLL_SECONDS = 0.2


class EngineWorker(Worker):
    """A dask worker that knows its share of the machine; any other one takes the machine for its own."""

    memory_share: float = 1.0


class EnginePlugin(WorkerPlugin):
    """Loads the engine once per worker; it stays warm between tasks, with its prefix cache."""

    name = ENGINE_PLUGIN

    def __init__(self, order: LoadOrder) -> None:
        self._order = order
        self.host: EngineHost | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return EnginePlugin, (self._order,)

    def setup(self, worker: Worker) -> None:
        """Begin to load; messages tell the runner how it went."""
        share = worker.memory_share if isinstance(worker, EngineWorker) else 1.0

        def send(message: Message) -> None:
            worker.log_event(self._order.topic, to_wire(message))

        place = Place(str(worker.name), worker.address, share)
        self.host = EngineHost(self._order, secrets.token_hex(6), place, send)

    def teardown(self, worker: Worker) -> None:
        """Let go of the engine."""
        if self.host is not None:
            self.host.close()


class WorkPlugin(WorkerPlugin):
    """Tells the engine's host what the next tasks are about."""

    name = WORK_PLUGIN

    def __init__(self, order: WorkOrder) -> None:
        self._order = order

    def setup(self, worker: Worker) -> None:
        """Registered after the engine's plugin, and so set up after it on workers that come later too."""
        host_of(worker).accept(self._order)


def host_of(worker: Worker) -> EngineHost:
    """The engine's host of a worker of ours."""
    plugin = worker.plugins[ENGINE_PLUGIN]
    assert isinstance(plugin, EnginePlugin)
    assert plugin.host is not None
    return plugin.host


def run_task(content: bytes, key: str) -> None:
    """A dask task: holds one of the worker's threads until its rows are finished or handed back.

    `content` is the pickled Task: dask looks into named tuples. What came of it travels as a message, which is there
    even if the worker dies a moment later.
    """
    task: Task = pickle.loads(content)
    worker = get_worker()
    host = host_of(worker)
    done = host.submit(task)
    while not done.wait(_POLL_SECONDS):
        state = worker.state.tasks.get(key)
        if state is None or state.state == "cancelled":
            host.abandon(task.id)
