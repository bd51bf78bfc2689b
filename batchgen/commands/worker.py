"""`batchgen worker`: workers of this machine for the jobs of a dask cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer
from pydantic import TypeAdapter, ValidationError

from batchgen.config import EngineConfig, TlsConfig
from batchgen.config_values import AutoProcesses
from batchgen.pipeline.cluster.joining import serve_cluster

_DEVICES = "must be auto, cpu, cuda or cuda:N"


def worker(
    scheduler: str, *, workers: str, device: str, ca_file: Path | None, cert: Path | None, key: Path | None
) -> None:
    """Run until a signal; raises BatchgenErrors with the exit code."""
    count = _checked(AutoProcesses, int(workers) if workers.isdecimal() else workers, "--workers")
    engine = _checked(EngineConfig, {"device": device}, "--device")
    given = {"ca_file": ca_file, "cert": cert, "key": key}
    missing = [name for name, path in given.items() if path is None]
    if missing and len(missing) < len(given):
        raise typer.BadParameter("certificates need all three: --tls-ca-file, --tls-cert, --tls-key")
    tls = None if missing else TlsConfig(ca_file=str(ca_file), cert=str(cert), key=str(key))
    serve_cluster(scheduler, count, engine, tls, lambda line: print(line, file=sys.stderr, flush=True))


def _checked(kind: Any, value: Any, option: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        reason = _DEVICES if first["type"] == "string_pattern_mismatch" else first["msg"].removeprefix("Value error, ")
        raise typer.BadParameter(reason, param_hint=option) from error
