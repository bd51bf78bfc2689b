"""The scheduler as a process of its own; run as a program by `processes`."""

from __future__ import annotations

import asyncio
import json
import sys

from distributed import Scheduler

from batchgen.pipeline.cluster.settings import LOOPBACK, configure
from batchgen.pipeline.confinement import die_with_parent

DASHBOARD_PORT = 8787


async def serve(with_dashboard: bool) -> None:
    """Listen on loopback, say where, and never end by oneself."""
    # dask always serves some pages over HTTP: not where others could read them, and on a port that is free.
    pages = f"{LOOPBACK}:{DASHBOARD_PORT if with_dashboard else 0}"
    async with Scheduler(
        host=LOOPBACK, port=0, protocol="tcp://", dashboard=with_dashboard, dashboard_address=pages
    ) as scheduler:
        print(json.dumps({"address": scheduler.address}), flush=True)
        await scheduler.finished()


def main() -> None:
    """Arguments: process id of the parent, and whether there is a dashboard."""
    die_with_parent(int(sys.argv[1]))
    with_dashboard = sys.argv[2] == "dashboard"
    configure(with_pages=with_dashboard)
    asyncio.run(serve(with_dashboard))


if __name__ == "__main__":
    main()
