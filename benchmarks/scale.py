"""Planner, dispatcher and ledger at the size of 1,000 workers and 100 million rows, without a model or a network.

`python -m benchmarks.scale` prints JSON: seconds, bytes and peak memory of each part. The records are real files in a
temporary directory (`--directory`), the workers are names. `--dask 25000` adds dask itself: so many shards that do
nothing, on two real workers, and signs of life as fast as they can be heard.
"""

from __future__ import annotations

import argparse
import json
import pickle
import queue
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed import Client, as_completed, get_worker

from batchgen.data.commits import CommitLog, ShardFile, read_log, replay
from batchgen.data.files import OutputFiles
from batchgen.data.input_rows import ScannedFile
from batchgen.data.writer import ShardSummary
from batchgen.pipeline.cluster.dispatch import Dispatcher
from batchgen.pipeline.cluster.messages import Beat, from_wire, to_wire
from batchgen.pipeline.cluster.placement import Placement
from batchgen.pipeline.cluster.processes import SchedulerProcess, WorkerPool
from batchgen.pipeline.plan import RowIndex, gaps, plan_shards
from batchgen.records import RowRange, Shard

FINGERPRINT = "0" * 64
ATTEMPT = "20260101T000000-00000000"
NUM_BEATS = 20_000
"""Signs of life of 1,000 workers in 20 seconds."""


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def inputs(num_rows: int, num_files: int) -> list[ScannedFile]:
    """Files with the same number of rows each."""
    rows = num_rows // num_files
    return [
        ScannedFile(
            source,
            f"/data/part-{source:05d}.parquet",
            f"part-{source:05d}.parquet",
            "parquet",
            None,
            1,
            1,
            1,
            FINGERPRINT,
            rows,
            columns={},
        )
        for source in range(num_files)
    ]


def committed(shard: Shard, index: RowIndex) -> ShardFile:
    """The record of a shard, as a run would write it."""
    rows = sum(index.count(each) for each in shard.ranges)
    summary = ShardSummary(shard.number, shard.ranges, FINGERPRINT, ATTEMPT, rows, rows, {}, rows * 100, rows * 200)
    return ShardFile(summary, 10**7, FINGERPRINT)


def dispatch(shards: list[Shard], index: RowIndex, num_workers: int) -> dict[str, Any]:
    """Hand out and take in everything, each worker finishing in turn."""
    dispatcher = Dispatcher(shards, index, num_workers, 1)
    for number in range(num_workers):
        dispatcher.add_worker(f"{number:012x}")
    num_bytes = num_tasks = 0
    slowest = 0.0
    while not dispatcher.is_done:
        seconds, given = timed(dispatcher.assignments)
        slowest = max(slowest, seconds)
        for _, task in given:
            num_bytes += len(pickle.dumps(task))
            num_tasks += 1
        for worker in dispatcher.workers:
            for task_id in dispatcher.running(worker)[:1]:
                dispatcher.done(task_id)
    return {"tasks": num_tasks, "task_bytes": num_bytes / num_tasks, "slowest_turn_seconds": slowest}


def ledger(shards: list[Shard], index: RowIndex, directory: Path, share: float) -> dict[str, Any]:
    """Write the records of a run that crashed at `share`, then read them as the next run would, and plan the rest."""
    files = OutputFiles()
    log = CommitLog(files, directory, FINGERPRINT, 0)
    done = shards[: int(len(shards) * share)]

    def write() -> None:
        for shard in done:
            log.append("shard", committed(shard, index))

    write_seconds, _ = timed(write)
    size = sum(path.stat().st_size for path in directory.iterdir())

    def resume() -> list[Shard]:
        state = replay(read_log(files, directory).records, FINGERPRINT)
        ranges = [rows for shard in state.shards.values() for rows in shard.summary.ranges]
        whole = [RowRange(file.source, 0, file.num_rows) for file in index._files]
        return plan_shards(gaps(whole, ranges), 4096, len(state.shards), index)

    resume_seconds, rest = timed(resume)
    return {
        "records": len(done),
        "bytes_per_record": size / len(done),
        "milliseconds_per_commit_record": 1000 * write_seconds / len(done),
        "resume_seconds": resume_seconds,
        "shards_left": len(rest),
    }


def dask_shards(count: int) -> dict[str, Any]:
    """dask alone: tasks that do nothing, two in flight on each of two workers, as the runner hands them out."""
    scheduler = SchedulerProcess()
    pool = WorkerPool(scheduler.address, [Placement([0], 0.5, {}), Placement([1], 0.5, {})], "scale-")
    client = Client(scheduler.address, set_as_default=False)
    try:
        client.wait_for_workers(2)
        addresses = list(client.scheduler_info()["workers"])
        status = Path(f"/proc/{scheduler.pid}/status")
        before = _resident(status)

        def run() -> None:
            def submit(number: int) -> Any:
                address = addresses[number % 2]
                return client.submit(int, number, key=f"shard-{number}", workers=[address], pure=False)

            waiting = as_completed([submit(number) for number in range(4)], loop=client.loop)
            following = iter(range(4, count))
            for future in waiting:
                future.release()
                number = next(following, None)
                if number is not None:
                    waiting.add(submit(number))

        seconds, _ = timed(run)
        growth = _resident(status) - before
        beat_seconds, _ = timed(lambda: _hear_beats(client, addresses, NUM_BEATS))
        return {
            "shards": count,
            "seconds": seconds,
            "milliseconds_per_shard": 1000 * seconds / count,
            "scheduler_growth_bytes": growth,
            "beats_per_second": NUM_BEATS / beat_seconds,
        }
    finally:
        client.close()
        pool.close()
        scheduler.close()


def _hear_beats(client: Client, addresses: list[str], count: int) -> None:
    """Let workers give signs of life as fast as they can, and hear all of them."""
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    client.subscribe_topic("beats", lambda event: heard.put(from_wire(event[1])))
    futures = [
        client.submit(_send_beats, count // len(addresses), workers=[address], pure=False) for address in addresses
    ]
    for _ in range(count):
        heard.get(timeout=60)
    for future in futures:
        future.release()


def _send_beats(count: int) -> None:
    figures = {f"num_things_{at:02d}": 10**6 + at for at in range(24)}
    tasks = [[task, 1000, 0, 10**5, 10**6] for task in range(2)]
    beat = Beat("0123456789ab", "tls://10.0.0.1:40000", "ready", figures, tasks, None)
    worker = get_worker()
    for _ in range(count):
        worker.log_event("beats", to_wire(beat))


def _resident(status: Path) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def measure(num_rows: int, num_files: int, num_workers: int, directory: Path) -> dict[str, Any]:
    """All figures without dask."""
    index = RowIndex(inputs(num_rows, num_files))
    whole = [RowRange(file.source, 0, file.num_rows) for file in index._files]
    plan_seconds, shards = timed(lambda: plan_shards(whole, 4096, 0, index))
    dispatch_seconds, dispatched = timed(lambda: dispatch(shards, index, num_workers))
    return {
        "rows": num_rows,
        "files": num_files,
        "workers": num_workers,
        "shards": len(shards),
        "plan_seconds": plan_seconds,
        "dispatch_seconds": dispatch_seconds,
        **dispatched,
        **ledger(shards, index, directory, 0.6),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--directory", type=Path, help="Where the records are written for a moment.")
    parser.add_argument("--dask", type=int, metavar="SHARDS", help="Measure dask itself with so many shards.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        figures = measure(options.rows, options.files, options.workers, Path(directory))
    if options.dask:
        figures["dask"] = dask_shards(options.dask)
    print(json.dumps(figures, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
