"""The engine of a worker process: one thread loads it, drives it and gives signs of life; tasks come from others."""

from __future__ import annotations

import faulthandler
import os
import platform
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import Any

from batchgen.config import JobConfig
from batchgen.data.layout import OutputPaths
from batchgen.data.lock import read_holder
from batchgen.data.probe import probe_file_system
from batchgen.engine.memory import available_memory
from batchgen.errors import BatchgenError, OutputUnavailable
from batchgen.pipeline.cluster.messages import (
    BEAT_SECONDS,
    Beat,
    Done,
    Facts,
    HandedBack,
    LoadOrder,
    Message,
    State,
    Task,
    WorkOrder,
    failed,
    written_to_wire,
)
from batchgen.pipeline.cluster.rows import RowMaker, WorkerNames
from batchgen.pipeline.identity import recorded_facts
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.pipeline.ports import EngineLike, ModelFiles, Services

CRASH_STATUS = 70
"""With it a worker process ends itself after what it cannot go on from."""
CACHE_SHARE = 0.5
"""Of the memory that is left beside the models, for a machine's KV caches; the rest is for the work."""
_WAIT_SECONDS = 0.1


class Place:
    """Where a worker runs, as whoever started it has said."""

    def __init__(self, name: str, address: str, memory_share: float = 1.0) -> None:
        """`memory_share`: of the machine's memory, for this worker's KV cache; there may be others beside it."""
        self.name = name
        self.address = address
        self.memory_share = memory_share


class EngineHost:
    """Holds the engine. Its thread alone touches it; every other method may be called from any thread."""

    def __init__(self, order: LoadOrder, worker: str, place: Place, send: Callable[[Message], None]) -> None:
        """`worker` is the name of this incarnation; `send` takes messages to the runner from any thread."""
        self._order = order
        self._worker = worker
        self._place = place
        self._send = send
        self._paths = OutputPaths(order.output_root)
        self._inbox: queue.SimpleQueue[Task] = queue.SimpleQueue()
        self._work_orders: dict[int, WorkOrder] = {}
        self._waiting: dict[int, threading.Event] = {}
        self._give_up: set[int] = set()
        self._is_leaving = threading.Event()
        self._is_closing = threading.Event()
        self._has_left = threading.Event()
        self._state: State = "loading"
        self._facts: Facts | None = None
        self._rows: RowMaker | None = None
        self._num_makers = 0
        self._next_beat = 0.0
        self._next_watch = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def accept(self, order: WorkOrder) -> None:
        """Take note of what tasks of this order are about."""
        self._work_orders[order.number] = order

    def submit(self, task: Task) -> threading.Event:
        """Queue a task; the event is set when it is finished or given back, and a message has told the runner."""
        done = self._waiting[task.id] = threading.Event()
        self._inbox.put(task)
        return done

    def abandon(self, task: int) -> None:
        """Nobody waits for a task any more: what is finished of it goes to the journal, and it is handed back."""
        self._give_up.add(task)

    def leave(self) -> None:
        """Hand everything back in good order and take nothing more."""
        self._is_leaving.set()

    def wait_until_left(self, timeout: float) -> bool:
        """Whether everything was handed back within `timeout` seconds."""
        return self._has_left.wait(timeout)

    def close(self) -> None:
        """Let the thread end, wherever it is; does not wait for it."""
        self._is_closing.set()

    def _run(self) -> None:
        try:
            try:
                services = self._order.make_services()
                with machine_errors():
                    engine, model = self._load(services)
                self._state = "ready"
                self._beat(engine, [], now=True)
                self._serve(services, engine, model)
            except BatchgenError as error:
                is_refusal = self._state == "refused"
                self._send(failed(self._worker, error, is_refusal=is_refusal))
            finally:
                faulthandler.cancel_dump_traceback_later()
                self._has_left.set()
                for done in self._waiting.values():
                    done.set()
        except BaseException:  # noqa: BLE001  The engine is in an unknown state: only another process can go on.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(CRASH_STATUS)

    def _load(self, services: Services) -> tuple[EngineLike, ModelFiles]:
        order = self._order
        self._beat(None, [], now=True)
        if not self._is_current(services):
            self._refuse(f"does not see the output {order.output_root}; it must be on a file system that all share")
        model = services.find_model(order.job, order.model_hashes)
        theirs = {name: entry[0] for name, entry in order.model_hashes.items()}
        mine = {name: entry[0] for name, entry in model.hashes.items()}
        if mine != theirs:
            names = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            self._refuse(f"has another {', '.join(names)} in {model.directory}")
        size = sum(int(entry[1]) for entry in model.hashes.values())
        engine = services.make_engine(with_memory_share(order.job, self._place.memory_share, size), model.directory)
        self._facts = Facts(
            name=self._place.name,
            address=self._place.address,
            host=platform.node(),
            pid=os.getpid(),
            resolved=dict(engine.resolved),
            notes=list(engine.notes),
            recorded=recorded_facts(),
            max_model_len=engine.max_model_len,
            kv_tokens=engine.metrics.num_blocks * engine.metrics.block_size,
        )
        return engine, model

    def _is_current(self, services: Services) -> bool:
        """Whether the run that asks has the lock under this path: it is the same directory, and the run goes on."""
        holder = read_holder(services.files, self._paths.lock)
        return holder is not None and holder.attempt == self._order.attempt

    def _refuse(self, reason: str) -> None:
        self._state = "refused"
        raise BatchgenError(f"worker {self._place.name} on {platform.node()} {reason}")

    def _serve(self, services: Services, engine: EngineLike, model: ModelFiles) -> None:
        """Work until there is nobody to work for."""
        try:
            with machine_errors():
                self._loop(services, engine, model)
        except BatchgenError:
            if self._rows is not None:
                self._save_after_failure(self._rows)
            raise
        except FileNotFoundError:
            # The next run of this output removes what it finds of this one; nobody waits for the rest of it.
            if self._is_current(services):
                raise
        finally:
            self._end_rows()
            engine.close()

    def _loop(self, services: Services, engine: EngineLike, model: ModelFiles) -> None:
        current = -1
        while not self._is_closing.is_set():
            if self._is_leaving.is_set():
                self._state = "leaving"
            rows = self._rows
            if rows is not None and (self._state == "leaving" or not self._give_up.isdisjoint(rows.task_ids)):
                self._hand_back(rows)
                self._end_rows()
            if self._state == "leaving":
                self._return_inbox()
                self._beat(engine, [], now=True)
                return
            task = self._next_task(is_idle=self._rows is None or self._rows.is_idle)
            if task is not None:
                self._facts = None
                if self._rows is None or task.order != current:
                    self._end_rows()
                    self._rows, current = self._make_rows(services, engine, model, task.order), task.order
                self._rows.add(task)
            finished = [] if self._rows is None else self._rows.turn()
            for each in finished:
                written = None if each.written is None else written_to_wire(each.written)
                self._send(Done(self._worker, each.task.id, list(each.counts), each.segments, written))
                self._settle(each.task.id)
            self._beat(engine, [] if self._rows is None else self._rows.counts, now=bool(finished))

    def _end_rows(self) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.close()

    def _save_after_failure(self, rows: RowMaker) -> None:
        try:
            rows.save()
        except OutputUnavailable:
            traceback.print_exc()

    def _make_rows(self, services: Services, engine: EngineLike, model: ModelFiles, number: int) -> RowMaker:
        self._num_makers += 1
        names = WorkerNames(self._order.attempt, f"{self._worker}-{self._num_makers}", self._paths.temporary)
        if self._num_makers == 1:
            probe_file_system(services.files, names.temporary("probe"))
        kv_tokens = engine.metrics.num_blocks * engine.metrics.block_size
        return RowMaker(self._work_orders[number], services, engine, model, names, self._paths, kv_tokens)

    def _next_task(self, *, is_idle: bool) -> Task | None:
        try:
            task = self._inbox.get(timeout=_WAIT_SECONDS) if is_idle else self._inbox.get_nowait()
        except queue.Empty:
            return None
        if task.id in self._give_up:
            self._return(task.id)
            return None
        return task

    def _hand_back(self, rows: RowMaker) -> None:
        rows.save()
        for task in rows.task_ids:
            self._return(task)

    def _return_inbox(self) -> None:
        while not self._inbox.empty():
            self._return(self._inbox.get().id)

    def _return(self, task: int) -> None:
        self._send(HandedBack(self._worker, task))
        self._settle(task)

    def _settle(self, task: int) -> None:
        self._give_up.discard(task)
        done = self._waiting.pop(task, None)
        if done is not None:
            done.set()

    def _beat(self, engine: EngineLike | None, tasks: list[list[int]], *, now: bool = False) -> None:
        """A sign of life, from inside the loop: if the loop hangs, there is none."""
        at = time.monotonic()
        if at >= self._next_watch and engine is not None:
            self._next_watch = at + min(BEAT_SECONDS, self._order.timeout / 4)
            # A thread of the C library's, which needs no lock of the interpreter: it ends a process that hangs.
            faulthandler.dump_traceback_later(self._order.timeout, exit=True)
        if not now and at < self._next_beat:
            return
        self._next_beat = at + min(BEAT_SECONDS, self._order.timeout / 4)
        metrics = None if engine is None else engine.metrics
        figures = asdict(metrics) if is_dataclass(metrics) and not isinstance(metrics, type) else {}
        if metrics is not None:
            # Properties, which asdict leaves out.
            figures |= {"kv_share": metrics.kv_share, "peak_kv_share": metrics.peak_kv_share}
            figures["num_unfinished"] = engine.num_unfinished if engine is not None else 0
        facts: dict[str, Any] | None = None if self._facts is None else self._facts._asdict()
        self._send(Beat(self._worker, self._place.address, self._state, figures, tasks, facts))


def with_memory_share(job: JobConfig, share: float, model_bytes: int) -> JobConfig:
    """The job with a KV cache that leaves room for the workers beside it and for their models."""
    if share >= 1 or job.engine.kv_cache_memory != "auto" or job.engine.device.startswith("cuda"):
        return job
    num_workers = round(1 / share)
    spare = available_memory() - num_workers * model_bytes
    memory = max(1, int(spare * CACHE_SHARE * share))
    return job.model_copy(update={"engine": job.engine.model_copy(update={"kv_cache_memory": memory})})
