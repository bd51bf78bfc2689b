"""A worker as a process of its own; run as a program by `processes`."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from distributed import Worker

from batchgen.config import TlsConfig
from batchgen.pipeline.cluster.plugin import ENGINE_PLUGIN, EnginePlugin, EngineWorker
from batchgen.pipeline.cluster.settings import LOOPBACK, configure, is_loopback, security_for
from batchgen.pipeline.confinement import die_with_parent

LEAVE_SECONDS = 25.0
"""Time to hand tasks back in good order; a reclaimed machine grants 30 s."""

LEFT, FAILED, LOST_SCHEDULER = 0, 1, 71
"""How the process ends: it was asked to leave; something is wrong; the scheduler has closed the connection."""


@dataclass(frozen=True)
class WorkerOptions:
    """All that a worker process is told."""

    scheduler: str
    name: str
    parent: int
    cores: list[int] | None = None
    """To run on; None: where it was started."""
    memory_share: float = 1.0
    tls: dict[str, str] | None = None
    slots: int = 2

    def to_text(self) -> str:
        """One argument of the command line."""
        return json.dumps(asdict(self))


async def serve(options: WorkerOptions) -> int:
    """Work until the scheduler goes, or SIGTERM; returns the status to end with."""
    tls = None if options.tls is None else TlsConfig(**options.tls)
    security = security_for(options.scheduler, tls, Path())
    leaving = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leaving.set)
    told = asyncio.ensure_future(leaving.wait())
    with tempfile.TemporaryDirectory(prefix="batchgen-worker-") as scratch:
        worker = EngineWorker(
            options.scheduler,
            name=options.name,
            nthreads=options.slots,
            memory_limit=0,
            host=LOOPBACK if is_loopback(options.scheduler) else None,
            security=security,
            # The pages that dask always serves over HTTP are not encrypted.
            dashboard=False,
            dashboard_address=f"{LOOPBACK}:0",
            local_directory=scratch,
            death_timeout=60,
        )
        worker.memory_share = options.memory_share
        joining = asyncio.ensure_future(worker)
        await asyncio.wait({joining, told}, return_when=asyncio.FIRST_COMPLETED)
        if not joining.done():
            return LEFT  # The scheduler has not answered: nobody knows this worker, and it has nothing to hand back.
        await joining
        async with worker:
            gone = asyncio.ensure_future(Worker.finished(worker))
            await asyncio.wait({gone, told}, return_when=asyncio.FIRST_COMPLETED)
            if leaving.is_set():
                await leave(worker)
            gone.cancel()
            return LEFT if leaving.is_set() else LOST_SCHEDULER


async def leave(worker: EngineWorker) -> None:
    """Hand everything back; the messages about it must be on their way before the connection is closed."""
    plugin = worker.plugins.get(ENGINE_PLUGIN)
    host = plugin.host if isinstance(plugin, EnginePlugin) else None
    if host is not None:
        host.leave()
        await asyncio.to_thread(host.wait_until_left, LEAVE_SECONDS)
        # What other threads sent has been scheduled on this loop by now, and dask sends in batches.
        await asyncio.sleep(0.1)


def main() -> None:
    """The argument is WorkerOptions as JSON."""
    options = WorkerOptions(**json.loads(sys.argv[1]))
    die_with_parent(options.parent)
    faulthandler.enable()
    if options.cores is not None:
        os.sched_setaffinity(0, options.cores)
    configure()
    try:
        status = asyncio.run(serve(options))
    except BaseException:  # noqa: BLE001  The last act of the process is to say why.
        traceback.print_exc()
        status = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of tasks may still wait for an engine that does not answer; nothing they could do is of use.
    os._exit(status)


if __name__ == "__main__":
    main()
