"""Where things lie in the output directory."""

from __future__ import annotations

from pathlib import Path

from batchgen.data.commits import shard_name
from batchgen.data.files import OutputFiles

CARD_MARK = "<!-- Written by batchgen; it is written anew by each run as long as this line is here. -->"


class OutputPaths:
    """Names of everything that batchgen keeps in an output directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data"
        self.card = root / "README.md"
        self.state = root / "_batchgen"
        self.plan = self.state / "plan.json"
        self.job = self.state / "job.yaml"
        self.overwriting = self.state / "overwriting.json"
        self.lock = self.state / "lock"
        self.commits = self.state / "commits"
        self.journal = self.state / "journal"
        self.temporary = self.state / "tmp"
        self.metrics = self.state / "metrics"
        self.report = self.state / "report.html"
        self.orphans = self.state / "orphans"

    @property
    def directories(self) -> tuple[Path, ...]:
        """All directories, parents first."""
        return (
            self.root,
            self.state,
            self.data,
            self.commits,
            self.journal,
            self.temporary,
            self.metrics,
            self.orphans,
        )

    def shard(self, number: int) -> Path:
        """Where the finished file of a shard lies."""
        return self.data / shard_name(number)


def is_own_card(files: OutputFiles, path: Path) -> bool:
    """Whether README.md is there and is ours."""
    status = files.status(path)
    return status is not None and status.is_regular and CARD_MARK.encode() in files.read(path)
