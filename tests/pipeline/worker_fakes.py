"""Services of worker processes over fakes: a row whose prompt says so ends, hangs or breaks its process."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.config import JobConfig
from batchgen.data.input_rows import InputRow
from batchgen.data.reader import PromptReader
from batchgen.pipeline.ports import FeedRequest, ModelFiles, PreparedRow, Services
from batchgen.records import Completion, Prompt
from tests.pipeline.fakes import FakeEngine, prepared

STEP_SECONDS = 0.002


class QueueFeeder:
    """As FakeFeeder, but a thread waits for ranges that come while the worker runs."""

    def __init__(self, request: FeedRequest) -> None:
        self._request = request
        self._rows: queue.SimpleQueue[InputRow] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        reader = PromptReader(self._request.scan, self._request.job.input, columns=["prompt"])
        for rows in self._request.ranges:
            for row in reader.read(rows):
                self._rows.put(row)
        reader.close()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive() and self._rows.empty()

    def get(self, timeout: float) -> PreparedRow | None:
        try:
            return prepared(self._rows.get(timeout=timeout) if timeout > 0 else self._rows.get_nowait())
        except queue.Empty:
            return None

    def close(self) -> None:
        self._thread.join()


class HarmfulEngine(FakeEngine):
    """A fake engine whose steps take a while, and whose rows can do harm once they run."""

    def step(self) -> list[Completion]:
        time.sleep(float(os.environ.get("FAKE_STEP_SECONDS", STEP_SECONDS)))
        for group in list(self._groups.values())[: self.running]:
            harm(group.prompt)
        done = super().step()
        self.metrics.num_drawn_tokens = self.num_tokens
        self.metrics.num_running = min(self.running, len(self._groups))
        return done


def harm(prompt: Prompt) -> None:
    """Do what the prompt says."""
    text = "".join(map(chr, prompt.token_ids or ()))
    if "exit" in text:
        os._exit(9)
    if "segfault" in text:
        ctypes.string_at(0)
    if "hang" in text:
        while True:
            pass
    if "raise" in text:
        raise RuntimeError("the device is in an unknown state")


def find_model(job: JobConfig, known: Mapping[str, list[Any]]) -> ModelFiles:
    return ModelFiles(Path(), {"model.safetensors": ["weights", 1, 1, 1]})


def make_engine(job: JobConfig, directory: Path) -> FakeEngine:
    return HarmfulEngine()


def services() -> Services:
    """For the runner and for its workers."""
    return Services(find_model, make_engine, QueueFeeder, make_for_worker=services)
