"""Prompts ahead of the engine: read, rendered and tokenized in a child process, in input order, bounded."""

from __future__ import annotations

import datetime
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from batchgen.config import JobConfig
from batchgen.data.input_rows import InputRow, InputScan
from batchgen.errors import BatchgenError, InputError, JobError
from batchgen.pipeline.child import BoundedChild, ChildClosed, ChildDied, Limits
from batchgen.pipeline.machine_errors import machine_errors
from batchgen.pipeline.ports import EncodedRow, PreparedRow
from batchgen.pipeline.prompts import PreparerSpec
from batchgen.records import RowError, RowRange

__all__ = ["Limits", "PreparedRow", "PromptFeeder", "preparer_spec"]

BATCH_ROWS = 64
"""Rows of one request to the child."""
_QUEUED_BATCHES = 4
_ATTEMPTS = 2
"""How often a request is made when its child dies: once more, since something else may have killed it."""
_MAX_CRASHES = 16
"""Rows that may end their child one after another; with more, it is the machine and not the rows."""
_POLL_SECONDS = 0.1

_Item = list[EncodedRow] | BatchgenError | None
"""A batch, what ended the feeder, or None after the last batch."""


class _Order(NamedTuple):
    """Rows to prepare."""

    spec: PreparerSpec
    ranges: Iterable[RowRange]
    begun: Future[None]
    """Done when the child works by the spec."""


def preparer_spec(
    job: JobConfig, scan: InputScan, model_directory: Path, max_model_len: int, started: datetime.datetime | None = None
) -> PreparerSpec:
    """What prompts are made from; `started` is the time that templates see, by default now."""
    return PreparerSpec(
        scan=scan.to_json(),
        input=job.input,
        prompt=job.prompt,
        model_directory=model_directory,
        max_model_len=max_model_len,
        sampling=job.sampling,
        started=started or datetime.datetime.now(),
    )


class PromptFeeder:
    """Prepares the rows of some ranges in the background, in order.

    A row whose template does not come back, or ends the child, becomes an error row; the rows beside it are prepared
    by a new child.
    """

    def __init__(
        self,
        spec: PreparerSpec,
        ranges: Iterable[RowRange] | None = None,
        *,
        limits: Limits = Limits(),  # noqa: B008
    ) -> None:
        """Start the child. With `ranges` it is waited for, as `wait` does; without them `begin` names the rows."""
        self._spec = spec
        self._limits = limits
        self._queue: queue.Queue[_Item] = queue.Queue(_QUEUED_BATCHES)
        self._ready: deque[EncodedRow] = deque()
        self._is_over = False
        self._num_crashes = 0
        self._closing = threading.Event()
        self._checked: Future[None] = Future()
        self._orders: queue.Queue[_Order] = queue.Queue(1)
        self._child: BoundedChild | None = None
        # The child dies with the thread that starts it, so one thread does both, to its end.
        self._thread = threading.Thread(target=self._run, name="prompt-feeder", daemon=True)
        self._thread.start()
        if ranges is not None:
            self.begin(spec, ranges)

    @property
    def is_checked(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._checked.done()

    def wait(self) -> None:
        """Wait until the child has compiled and tried the templates; JobError for what is wrong with every row."""
        self._await(self._checked)

    def begin(self, spec: PreparerSpec, ranges: Iterable[RowRange]) -> None:
        """Prepare these rows by `spec`, which may say more than the one that was checked; raises like `wait`."""
        self.wait()
        order = _Order(spec, ranges, Future())
        self._orders.put(order)
        self._await(order.begun)

    def _await(self, future: Future[None]) -> None:
        try:
            future.result()
        except BaseException:
            self.close()
            raise

    def get(self, timeout: float) -> PreparedRow | None:
        """The next row; None where none is ready within `timeout` seconds, or there is none left.

        Its `row.values` are not kept. Raises InputError where the input cannot be read any further, and, with
        `input.on_error: fail`, for the first row with an error.
        """
        if not self._ready and not self._is_over:
            self._take(timeout)
        if not self._ready:
            return None
        encoded = self._ready.popleft()
        row = InputRow(encoded.source, encoded.row, {})
        ids = None if encoded.token_ids is None else encoded.token_ids.tolist()
        return PreparedRow(row, ids, encoded.error, encoded.format_name, encoded.is_thinking, encoded.parameters)

    @property
    def is_over(self) -> bool:
        """Whether `get` has given every row."""
        return self._is_over and not self._ready

    @property
    def child_pid(self) -> int | None:
        """Process id of the child; None where there is none at the moment."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """End the thread and the child; a second call does nothing."""
        self._closing.set()
        self._is_over = True
        self._ready.clear()
        self._thread.join()

    def _take(self, timeout: float) -> None:
        try:
            item = self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        except queue.Empty:
            return
        if isinstance(item, list):
            self._ready.extend(item)
            return
        self._is_over = True
        if item is not None:
            raise item

    def _run(self) -> None:
        try:
            try:
                self._child = self._start()
            except BaseException as error:  # noqa: BLE001  Whoever waits must know, whatever it is.
                self._checked.set_exception(error)
                return
            self._checked.set_result(None)
            order = self._next_order()
            try:
                self._renew(order.spec)
            except BaseException as error:  # noqa: BLE001  Likewise.
                order.begun.set_exception(error)
                return
            order.begun.set_result(None)
            for rows in _batches(order.ranges):
                self._put(self._without_errors(self._prepare(rows)))
            self._put(None)
        except BatchgenError as error:
            self._put(error)
        except ChildClosed:
            pass
        finally:
            self._drop_child()

    def _put(self, item: _Item) -> None:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return
        raise ChildClosed

    def _next_order(self) -> _Order:
        while not self._closing.is_set():
            with suppress(queue.Empty):
                return self._orders.get(timeout=_POLL_SECONDS)
        raise ChildClosed

    def _renew(self, spec: PreparerSpec) -> None:
        """Go on by another spec, with the child that is there if it still is."""
        if spec is self._spec:
            return
        self._spec = spec
        assert self._child is not None
        try:
            self._child.renew(spec)
        except ChildDied:
            self._drop_child()
            self._child = self._start()

    def _start(self) -> BoundedChild:
        for _ in range(_ATTEMPTS):
            try:
                with machine_errors():
                    return BoundedChild(self._spec, self._limits, self._closing.is_set)
            except OSError as error:
                raise BatchgenError(f"the process that renders prompts cannot be started: {error}") from error
            except ChildDied as death:
                if death.out_of_time:
                    raise JobError("prompt: compiling the templates takes too long; simplify them") from death
                last = death
        raise BatchgenError(
            f"{last}, {_ATTEMPTS} times before the first row; see whether the machine has memory left, and try "
            "`batchgen preview`"
        ) from last

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    def _prepare(self, rows: RowRange) -> list[EncodedRow]:
        """Every row of a range; where the child does not survive it, row by row."""
        for _ in range(_ATTEMPTS):
            try:
                if self._child is None:
                    self._child = self._start()
                prepared = self._child.prepare(rows)
            except ChildDied as death:
                self._drop_child()
                last = death
                if death.out_of_time:
                    break
            else:
                self._num_crashes = 0
                return prepared
        if rows.stop - rows.start == 1:
            self._num_crashes = 0 if last.out_of_time else self._num_crashes + 1
            if self._num_crashes == _MAX_CRASHES:
                raise BatchgenError(
                    f"{last}, for {_MAX_CRASHES} rows in a row; see to the machine and run again"
                ) from last
            return [EncodedRow(rows.source, rows.start, None, _fatal_error(last, self._limits))]
        singles = (rows._replace(start=row, stop=row + 1) for row in range(rows.start, rows.stop))
        return [encoded for single in singles for encoded in self._prepare(single)]

    def _without_errors(self, batch: list[EncodedRow]) -> list[EncodedRow]:
        if self._spec.input.on_error == "fail":
            for encoded in batch:
                if encoded.error is not None:
                    path = self._spec.scan["files"][encoded.source]["path"]
                    code, message = encoded.error
                    raise InputError(f"{path}: row {encoded.row}: {code}: {message}; input.on_error is fail")
        return batch


def _batches(ranges: Iterable[RowRange]) -> Iterator[RowRange]:
    for rows in ranges:
        for start in range(rows.start, rows.stop, BATCH_ROWS):
            yield rows._replace(start=start, stop=min(start + BATCH_ROWS, rows.stop))


def _fatal_error(death: ChildDied, limits: Limits) -> RowError:
    if death.out_of_time:
        return RowError("template_timeout", f"the prompt took more than {limits.step_seconds:g} s of processor time")
    return RowError("template_crash", "making the prompt ended its process; it may need too much memory")
