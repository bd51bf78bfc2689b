"""The real outside world of a run: models from disk or the hub, the engine, the feeder with its child process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import batchgen
from batchgen.config import JobConfig
from batchgen.pipeline.bounded_filter import BoundedFilter
from batchgen.pipeline.feeder import PromptFeeder, preparer_spec
from batchgen.pipeline.grammar_check import check_grammar
from batchgen.pipeline.identity import hash_model_files
from batchgen.pipeline.ports import EngineLike, FeederLike, FeedRequest, ModelFiles, PromptCheck, Services
from batchgen.pipeline.prompts import PreparerSpec
from batchgen.resources import locate_model


def default_services() -> Services:
    """What `batchgen run` uses."""
    return Services(
        find_model=find_model,
        make_engine=make_engine,
        make_feeder=make_feeder,
        check_prompts=CheckInChildren,
        import_engine=batchgen.import_engine,
        make_filter=BoundedFilter,
        make_for_worker=default_services,
    )


def find_model(job: JobConfig, known: Mapping[str, list[Any]]) -> ModelFiles:
    """Locate, and convert or fetch where needed; raises ModelError."""
    directory = locate_model(job.model_source, job.model.revision)
    return ModelFiles(directory, hash_model_files(directory, known))


def make_engine(job: JobConfig, directory: Path) -> EngineLike:
    """Load the model; raises ModelError and JobError."""
    # Here and not before, and so not at all for "nothing to do".
    for _ in batchgen.import_engine():
        pass
    engine = batchgen.Engine(
        str(directory),
        dtype=job.model.dtype,
        quantization=job.model.quantization,
        kv_dtype=job.model.kv_dtype,
        max_model_len=job.model.max_model_len,
        device=job.engine.device,
        block_size=job.engine.block_size,
        kv_cache_memory=job.engine.kv_cache_memory,
        max_batch_tokens=job.engine.max_batch_tokens,
        max_sequences=job.engine.max_sequences,
        threads=job.engine.threads,
    )
    forms = job.sampling.response_format
    for form in [forms] if forms is None else forms.forms.values():
        engine.check_params(job.sampling.model_copy(update={"response_format": form}))
    return engine


def make_feeder(request: FeedRequest) -> FeederLike:
    """Start the child that renders and tokenizes; raises JobError for what is wrong with every row."""
    return PromptFeeder(_spec(request), request.ranges)


class CheckInChildren(PromptCheck):
    """Compiles and tries templates and grammar, each in a child; the first one then prepares the rows."""

    def __init__(self, request: FeedRequest) -> None:
        """Start with the templates."""
        self._request = request
        self._feeder = PromptFeeder(_spec(request))

    @property
    def is_done(self) -> bool:
        """Whether the templates are tried."""
        return self._feeder.is_checked

    def wait(self) -> None:
        """Raises JobError for what is wrong with every row."""
        self._feeder.wait()
        form = self._request.job.sampling.response_format
        if form is not None:
            check_grammar(form, self._request.model_directory)

    def make_feeder(self, request: FeedRequest) -> FeederLike:
        """The child goes on with these rows."""
        self._feeder.begin(_spec(request), request.ranges)
        return self._feeder

    def close(self) -> None:
        """End thread and child."""
        self._feeder.close()


def _spec(request: FeedRequest) -> PreparerSpec:
    return preparer_spec(
        request.job, request.scan, request.model_directory, request.max_model_len, started=request.started
    )
