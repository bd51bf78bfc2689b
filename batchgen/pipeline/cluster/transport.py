"""The runner's side of dask: plugins and tasks out, messages in. Nothing here decides."""

from __future__ import annotations

import pickle
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from distributed import Client, Future, Security, WorkerPlugin

from batchgen.errors import Interrupted
from batchgen.pipeline.cluster.messages import LoadOrder, Message, Task, WorkOrder, from_wire
from batchgen.pipeline.cluster.plugin import ENGINE_PLUGIN, WORK_PLUGIN, EnginePlugin, WorkPlugin, run_task

_CALL_SECONDS = 60.0
_CONNECT_SECONDS = 20.0
_POLL_SECONDS = 0.2
_DEFAULT_PORT = 8786
_CLOSE_SECONDS = 5.0


class WorkerGone(NamedTuple):
    """The scheduler has lost the connection to a worker; what it had sent before has arrived before."""

    address: str


class TaskBroke(NamedTuple):
    """dask itself could not run a task, or had to give it up."""

    task: int
    reason: str


Event = Message | WorkerGone | TaskBroke


class DaskTransport:
    """A connection to a scheduler; all its methods return in bounded time."""

    def __init__(
        self, address: str, security: Security | None, topic: str, check: Callable[[], None] = lambda: None
    ) -> None:
        """Connect; raises Interrupted where the scheduler does not answer, or what `check` raises meanwhile."""
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._futures: dict[int, Future[None]] = {}
        self._topic = topic
        try:
            _wait_for(address, check)
            self._client = Client(
                address, security=security, timeout=_CONNECT_SECONDS, set_as_default=False, name="batchgen"
            )
        except OSError as error:
            check()
            raise Interrupted(f"{address}: the scheduler does not answer ({error}); see to it and run again") from error
        self._client.subscribe_topic(topic, self._take_message)
        self._client.subscribe_topic("all", self._take_cluster_event)

    @property
    def dashboard(self) -> str:
        """Where dask's dashboard is."""
        return str(self._client.dashboard_link)

    def check(self) -> None:
        """Raise Interrupted where the connection is lost; it is not taken up again, since tasks are lost with it."""
        if self._client.status != "running":
            raise Interrupted(
                "the connection to the scheduler is lost; what is committed and journaled stays, and the same command "
                "goes on from here"
            )

    def load(self, order: LoadOrder) -> None:
        """Have every worker, those that come later too, load its engine."""
        self._register(EnginePlugin(order), ENGINE_PLUGIN)

    def announce(self, order: WorkOrder) -> None:
        """Tell every worker, those that come later too, what the next tasks are about."""
        self._register(WorkPlugin(order), WORK_PLUGIN)

    def _register(self, plugin: WorkerPlugin, name: str) -> None:
        try:
            self._client.register_plugin(plugin, name=name)
        except OSError as error:
            raise Interrupted(f"the connection to the scheduler is lost ({error}); run again") from error

    def submit(self, address: str, task: Task) -> None:
        """Run a task on one worker and no other."""
        key = f"{self._topic}-{task.order}-{task.id}"
        future = self._client.submit(
            run_task,
            pickle.dumps(task),
            key,
            key=key,
            workers=[address],
            allow_other_workers=False,
            pure=False,
            retries=0,
        )
        self._futures[task.id] = future
        future.add_done_callback(lambda done: self._check_future(task.id, done))

    def release(self, task: int) -> None:
        """Nobody waits for a task any more: a worker that still has it hands it back."""
        future = self._futures.pop(task, None)
        if future is not None:
            future.release()

    def events(self, timeout: float) -> Iterator[Event]:
        """What has arrived; waits for the first one."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                yield self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return
            deadline = 0.0

    def close(self, *, unload: bool) -> None:
        """End the connection; `unload`: have the workers let go of their engines first."""
        for task in list(self._futures):
            self.release(task)
        if unload and self._client.status == "running":
            # A worker that does not answer keeps its engine; the run is over all the same.
            thread = threading.Thread(target=self._unload, daemon=True)
            thread.start()
            thread.join(_CLOSE_SECONDS)
        self._client.close(timeout=_CLOSE_SECONDS)

    def _unload(self) -> None:
        with suppress(OSError, KeyError):
            for name in (WORK_PLUGIN, ENGINE_PLUGIN):
                self._client.unregister_worker_plugin(name)

    def _take_message(self, event: tuple[float, Mapping[str, Any]]) -> None:
        self._events.put(from_wire(event[1]))

    def _take_cluster_event(self, event: tuple[float, Any]) -> None:
        message = event[1]
        if isinstance(message, dict) and message.get("action") == "remove-worker":
            self._events.put(WorkerGone(str(message["worker"])))

    def _check_future(self, task: int, future: Future[None]) -> None:
        if task in self._futures and future.status == "error":
            self._events.put(TaskBroke(task, repr(future.exception(timeout=1))))


def _wait_for(address: str, check: Callable[[], None]) -> None:
    """Until somebody listens at an address; before dask's own attempts, which look at nothing else meanwhile."""
    where = urlsplit(address)
    deadline = time.monotonic() + _CALL_SECONDS
    while True:
        try:
            socket.create_connection((where.hostname, where.port or _DEFAULT_PORT), timeout=_CALL_SECONDS).close()
        except OSError:
            check()
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return
