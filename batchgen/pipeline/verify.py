"""Records against files: whether an output is what its records say, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from batchgen.data.commits import ShardFile, replay, shard_number
from batchgen.errors import OutputDamaged
from batchgen.pipeline.assembly import counts
from batchgen.pipeline.plan import incompleteness
from batchgen.pipeline.stored import StoredOutput


@dataclass(frozen=True)
class Verification:
    """What was found; the output is intact where there is no problem."""

    num_files: int
    num_rows: int
    """Rows of the job."""
    num_committed: int
    errors: dict[str, int]
    """Committed error rows by code."""
    problems: list[str] = field(default_factory=list)
    """Damage, a line each."""
    notes: list[str] = field(default_factory=list)
    """What is no damage, but worth knowing."""


def verify(stored: StoredOutput) -> Verification:
    """Read every committed file whole: size, hash, checksum of each page, schema, and each key once."""
    problems = list(stored.log.damaged.values())
    try:
        shards = replay(stored.log.records, stored.plan.fingerprint).shards
    except OutputDamaged as error:
        problems.append(str(error))
        shards = {}
    for number, shard in sorted(shards.items()):
        problem = _problem(stored, number, shard)
        if problem is not None:
            problems.append(f"{stored.paths.shard(number)}: {problem}")
    num_committed, errors = counts(shards.values())
    return Verification(
        num_files=len(shards),
        num_rows=stored.num_rows,
        num_committed=num_committed,
        errors=errors,
        problems=problems,
        notes=list(_notes(stored, shards)),
    )


def _problem(stored: StoredOutput, number: int, shard: ShardFile) -> str | None:
    found = stored.inspect(stored.paths.shard(number))
    if found.problem is not None or found.shard == shard:
        return found.problem
    return "is a whole file, but not the one that was committed"


def _notes(stored: StoredOutput, shards: dict[int, ShardFile]) -> Iterator[str]:
    if stored.log.torn is not None:
        yield f"{stored.log.torn}: was cut off while it was written; the next run puts it aside"
    for name in stored.files.list_directory(stored.paths.data):
        number = shard_number(name)
        if number is None:
            yield f"{stored.paths.data / name}: is not batchgen's"
        elif number not in shards:
            yield f"{stored.paths.data / name}: has no record; the next run takes it up or puts it aside"
    unfinished = incompleteness(stored.expected, shards.values(), stored.index)
    if unfinished is not None:
        yield f"{unfinished}; run the job again to go on"
