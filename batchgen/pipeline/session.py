"""An output opened for a job: inputs scanned, model found, lock held, fingerprint compared, records recovered."""

from __future__ import annotations

import datetime
import json
import secrets
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.config import JobConfig, identity_defaults
from batchgen.data.input_notes import input_notes
from batchgen.data.input_rows import InputScan
from batchgen.data.inputs import find_inputs
from batchgen.data.journal import Journal
from batchgen.data.layout import OutputPaths
from batchgen.data.ledger import Ledger, read_plan
from batchgen.data.plan_record import PlanRecord, differences, fingerprint_of
from batchgen.data.reader import scan_inputs
from batchgen.data.recovery import Inspect
from batchgen.data.schema import OutputLayout, output_layout, output_schema
from batchgen.data.verification import inspect_shard
from batchgen.data.writer import ParquetShardWriter
from batchgen.errors import FingerprintMismatch, OutputDamaged
from batchgen.pipeline.assembly import ShardBuilder
from batchgen.pipeline.bounded_reader import BoundedReader, DecodingInChildren
from batchgen.pipeline.growth import reconcile
from batchgen.pipeline.identity import identity_of, recorded_facts, resolved_of, warnings_of, without_inputs
from batchgen.pipeline.plan import RowIndex, limited
from batchgen.pipeline.ports import EngineLike, FeederLike, FeedRequest, ModelFiles, NoCheck, PromptCheck, Services
from batchgen.pipeline.progress import Progress
from batchgen.records import RowRange
from batchgen.sampling_params import MAX_SEED
from batchgen.units import plural

RUN_SCOPE = "run"


class Watcher:
    """Passes on to a Progress what there is to tell, if anyone watches."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress

    def phase(self, name: str) -> None:
        """Something slow begins."""
        if self.progress is not None:
            self.progress.phase(name)

    def messages(self, lines: list[str]) -> None:
        """Lines for the user."""
        if self.progress is not None:
            for line in lines:
                self.progress.message(line)


@dataclass
class Session:
    """Everything that the work on an output needs; made by `open_session`."""

    job: JobConfig
    """With every `auto` resolved as far as an earlier run or the engine has resolved it."""
    services: Services
    watcher: Watcher
    scan: InputScan
    layout: OutputLayout
    schema: pa.Schema
    model: ModelFiles
    ledger: Ledger
    plan: PlanRecord | None
    """None for an output that has not begun."""
    kv_tokens: int = 0
    """Tokens that the KV cache of this run's engine holds; 0 before it is loaded."""
    damaged: list[int] = field(default_factory=list)
    """Committed files that are not what was committed; found when damage is to be repaired."""
    opened: datetime.datetime = field(default_factory=lambda: datetime.datetime.now().replace(microsecond=0))
    """When this run opened the output."""
    notes: list[str] = field(default_factory=list)
    """What the engines of this run say of model and machine, for the summary."""

    @property
    def index(self) -> RowIndex:
        """Which physical rows are rows."""
        return RowIndex(self.scan.files)

    @property
    def expected(self) -> list[RowRange]:
        """All rows of the job, those that are committed among them."""
        return limited(self.scan.ranges, self.job.input.limit, self.index)

    @property
    def eos_token_ids(self) -> list[int]:
        """The ids that end a sample, as the model's files named them when the output was begun."""
        ids: list[int] = [] if self.plan is None else self.plan.identity.get("resolved.eos_token_ids", [])
        return ids

    @property
    def unused_generation_config(self) -> str:
        """What the model's generation_config.json says about sampling and no row was drawn by."""
        settings: str = "" if self.plan is None else self.plan.identity.get("resolved.unused_generation_config", "")
        return settings

    @property
    def num_rows(self) -> int:
        """Rows of the job."""
        return sum(self.index.count(rows) for rows in self.expected)

    @property
    def inspect(self) -> Inspect:
        """Reads a whole shard file of this output."""
        return partial(
            inspect_shard,
            self.services.files,
            schema=self.schema,
            struct_name=self.layout.struct_name,
            rows_of=self.index.numbers,
        )

    @property
    def started(self) -> datetime.datetime:
        """When the output was begun, which is now for a new one."""
        return self.opened if self.plan is None else datetime.datetime.fromisoformat(self.plan.started)

    def check_prompts(self) -> None:
        """JobError for what would be wrong with every prompt, before a model is loaded."""
        with closing(self.start_check()) as check:
            check.wait()

    def start_check(self) -> PromptCheck:
        """Begin to look for what would be wrong with every prompt."""
        self.watcher.phase("checking the prompts")
        services = self.services
        request = FeedRequest(self.job, self.scan, (), self.model.directory, 1, self.started)
        return NoCheck(services.make_feeder) if services.check_prompts is None else services.check_prompts(request)

    def make_engine(self, check: PromptCheck) -> EngineLike:
        """Load the model if the prompts are good.

        JobError where they are not; FingerprintMismatch where `auto` comes to something else than when the output was
        begun.
        """
        # Importing takes longer than the check, which is another process. What fails here fails again below.
        with suppress(ImportError):
            for _ in self.services.import_engine():
                if check.is_done:
                    break
        check.wait()
        self.watcher.phase("loading the model")
        engine = self.services.make_engine(self.job, self.model.directory)
        self.watcher.messages(list(engine.notes))
        self.keep_notes(engine.notes, engine.resolved)
        self.kv_tokens = engine.metrics.num_blocks * engine.metrics.block_size
        self.check_resolved(engine.resolved)
        return engine

    def keep_notes(self, notes: Iterable[str], resolved: Mapping[str, Any]) -> None:
        """Keep each for the summary once; what generation_config.json says has a line of its own there."""
        unused = resolved.get("resolved.unused_generation_config")
        self.notes += [note for note in notes if note not in self.notes and not (unused and str(unused) in note)]

    def check_resolved(self, resolved: Mapping[str, Any]) -> None:
        """FingerprintMismatch where `auto` comes to something else than when the output was begun."""
        if self.plan is not None:
            stored = resolved_of(self.plan.identity)
            # An output that began without a row never loaded a model: its `auto` is still open.
            now = {key: value for key, value in resolved.items() if stored.get(key, "auto") != "auto"}
            refuse_differences(differences({key: stored[key] for key in now}, now), self.ledger.paths.root)

    def begin(self, engine_resolved: Mapping[str, Any]) -> PlanRecord:
        """Start the output with what this run's engine resolved, if it has one; returns its plan."""
        seed = secrets.randbelow(MAX_SEED) if self.job.sampling.seed is None else self.job.sampling.seed
        resolved = {**engine_resolved, "sampling.seed": seed}
        identity = identity_of(self.job, self.scan, self.model.hashes, resolved)
        self.plan = PlanRecord(
            fingerprint=fingerprint_of(identity),
            identity=identity,
            scan=self.scan.to_json(),
            job=self.job.model_dump(mode="json", by_alias=True),
            base_dir=str(self.job.base_dir.absolute()),
            started=self.started.isoformat(timespec="seconds"),
            recorded=recorded_facts(),
            hashes=self.model.hashes,
        )
        self.ledger.begin(self.plan)
        self.job = resolved_job(self.job, resolved)
        return self.plan

    def make_feeder(
        self, ranges: Iterable[RowRange], max_model_len: int, check: PromptCheck | None = None
    ) -> FeederLike:
        """Start to prepare the rows of these ranges; with a check, by what it has started."""
        make = self.services.make_feeder if check is None else check.make_feeder
        return make(FeedRequest(self.job, self.scan, ranges, self.model.directory, max_model_len, self.started))

    def open_journal(self, scope: str) -> Journal:
        """The journal of this output, with the rows that earlier runs noted in the same scope."""
        assert self.plan is not None
        header = {"fingerprint": self.plan.fingerprint, "scope": scope}
        return Journal(self.services.files, self.ledger.paths.journal, self.ledger.attempt, header)

    def make_builder(self, stack: ExitStack) -> ShardBuilder:
        """A builder of shards that reads source columns from the inputs."""
        assert self.plan is not None
        reader = stack.enter_context(closing(BoundedReader(self.scan, self.job.input, columns=[])))
        writer = ParquetShardWriter(self.services.files, self.schema)
        return ShardBuilder(
            self.ledger, writer, self.layout, self.plan.fingerprint, reader.read_columns, lambda: self.kv_tokens
        )

    def write_job(self) -> None:
        """Keep the job as it runs now; JSON, which is YAML too."""
        text = json.dumps(self.job.model_dump(mode="json", by_alias=True), indent=2, ensure_ascii=False)
        self.services.files.replace(self.ledger.paths.job, (text + "\n").encode(), self.ledger.temporary("job.yaml"))


class OpenOptions(NamedTuple):
    """What the command line says about an output that is there already."""

    wait_seconds: float = 0.0
    """How long to wait for the lock."""
    overwrite: bool = False
    """Begin anew where the output belongs to another job or is damaged; one of this very job is gone on with."""
    repair: bool = False
    """Put up with damage, and note the files that must be made anew."""


def open_session(
    job: JobConfig, services: Services, watcher: Watcher, stack: ExitStack, options: OpenOptions
) -> Session:
    """Open the output of a job, for as long as `stack` is open.

    Raises JobError, OutputLocked, FingerprintMismatch, OutputDamaged and OutputUnavailable.
    """
    watcher.phase("reading inputs")
    found = find_inputs(job.input, job.base_dir, own=OutputPaths(job.output_dir).data)
    ledger = stack.enter_context(
        closing(Ledger.acquire(services.files, job.output_dir.absolute(), wait_seconds=options.wait_seconds))
    )
    plan = _stored_plan(ledger, options)
    known = None if plan is None else InputScan.from_json(plan.scan)
    scan = scan_inputs(found.files, job.input, known, decoding=DecodingInChildren())
    watcher.messages(input_notes(found.passed_over, scan))
    layout = output_layout(scan.schema, job.output, job.sampling)
    model = services.find_model(job, {} if plan is None else plan.hashes)
    session = Session(
        job=job if plan is None else resolved_job(job, plan.identity),
        services=services,
        watcher=watcher,
        scan=scan,
        layout=layout,
        schema=output_schema(layout),
        model=model,
        ledger=ledger,
        plan=plan,
    )
    if plan is not None:
        try:
            _go_on(session, job, plan, options.repair)
        except (FingerprintMismatch, OutputDamaged):
            if not options.overwrite:
                raise
            ledger.overwrite()
            session.plan, session.job = None, job
    return session


def _stored_plan(ledger: Ledger, options: OpenOptions) -> PlanRecord | None:
    try:
        return read_plan(ledger.files, ledger.paths)
    except OutputDamaged:
        if not options.overwrite:
            raise
        ledger.overwrite()
        return None


def _go_on(session: Session, job: JobConfig, plan: PlanRecord, repair: bool) -> None:
    """Compare an output with the job that it shall belong to, and recover it."""
    known = InputScan.from_json(plan.scan)
    scanned = session.scan.source_schema.names
    inputs = reconcile(known, session.scan, job.input)
    now = identity_of(job, session.scan, session.model.hashes, resolved_of(plan.identity))
    # An output of an older release lacks the keys that came later.
    then = {**identity_defaults(), **plan.identity}
    root = session.ledger.paths.root
    refuse_differences(differences(without_inputs(then), without_inputs(now)) + inputs.problems, root)
    session.watcher.messages(warnings_of(plan.recorded, recorded_facts()))
    if inputs.num_new_rows:
        # The declared columns stay as they are.
        layout = output_layout(known.schema, job.output, job.sampling)
        session.scan, session.layout, session.schema = inputs.scan, layout, output_schema(layout)
    session.damaged = session.ledger.recover(plan, session.inspect, repair=repair)
    session.watcher.messages(session.ledger.notes)
    if inputs.num_new_rows:
        session.watcher.messages([_grown(inputs.num_new_rows, known.source_schema.names, scanned)])
        session.plan = replace(plan, scan=inputs.scan.to_json())
        session.ledger.write_plan(session.plan)


def _grown(num_rows: int, declared: list[str], found: list[str]) -> str:
    new = [repr(name) for name in found if name not in declared]
    left_out = f"; the output has no column {', '.join(new)}, so these are left out" if new else ""
    return f"the inputs grew: {plural(num_rows, 'row')} {'is' if num_rows == 1 else 'are'} appended{left_out}"


def refuse_differences(lines: list[str], root: Path) -> None:
    """Raise FingerprintMismatch with one line for each field that differs; does nothing where none does."""
    if lines:
        raise FingerprintMismatch(
            f"{root}: was begun by another job; it differs in\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nchange the job back, choose another output.path, or use --overwrite"
        )


def resolved_job(job: JobConfig, resolved: Mapping[str, Any]) -> JobConfig:
    """The job with what it leaves open filled in."""
    model = {}
    for name in ("dtype", "max_model_len"):
        if getattr(job.model, name) == "auto" and f"model.{name}" in resolved:
            model[name] = resolved[f"model.{name}"]
    sampling = {"seed": resolved["sampling.seed"]} if job.sampling.seed is None and "sampling.seed" in resolved else {}
    return job.model_copy(
        update={"model": job.model.model_copy(update=model), "sampling": job.sampling.model_copy(update=sampling)}
    )
