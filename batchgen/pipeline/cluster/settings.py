"""How dask is set: for tasks of minutes that wait for an engine, not for millions of short ones."""

from __future__ import annotations

import json
import logging
import os
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import dask
from distributed import Security

from batchgen.config import TlsConfig
from batchgen.errors import JobError

LOOPBACK = "127.0.0.1"


def configure(*, with_pages: bool = False) -> None:
    """Set what a scheduler and a worker of ours read when they start; `with_pages`: the dashboard's."""
    for name in ("distributed", "distributed.client", "tornado"):
        # What its loggers tell of is expected here, or told in our own words.
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    if not with_pages:
        dask.config.set({"distributed.scheduler.http.routes": [], "distributed.worker.http.routes": []})
    dask.config.set(
        {
            "distributed.scheduler.work-stealing": False,
            # Deaths are counted here, by row: dask must not try again behind our back.
            "distributed.scheduler.allowed-failures": 0,
            # Whether an engine hangs is for its own signs of life to say; a busy one may keep dask waiting.
            "distributed.scheduler.worker-ttl": "30 minutes",
            "distributed.scheduler.active-memory-manager.start": False,
            "distributed.worker.profile.enabled": False,
            "distributed.worker.memory.target": False,
            "distributed.worker.memory.spill": False,
            "distributed.worker.memory.pause": False,
            "distributed.worker.memory.terminate": False,
            "distributed.admin.system-monitor.gil.enabled": False,
            "distributed.admin.system-monitor.interval": "5 s",
            "distributed.comm.timeouts.connect": "30 s",
            "distributed.comm.timeouts.tcp": "60 s",
        }
    )


def scheduler_address(scheduler: str, base_dir: Path) -> str:
    """An address as it is, or that of a scheduler file; JobError where it is neither."""
    if "://" in scheduler:
        return scheduler
    path = base_dir / Path(os.path.expanduser(scheduler))
    try:
        address = json.loads(path.read_text(encoding="utf-8"))["address"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"run.scheduler: {scheduler} is no address (tls://host:8786) and {path} is no scheduler file"
        ) from error
    return str(address)


def is_loopback(address: str) -> bool:
    """Whether an address leads nowhere but to this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def security_for(address: str, tls: TlsConfig | None, base_dir: Path) -> Security | None:
    """Certificates for an address; JobError where it is not on loopback and there are none."""
    scheme = urlsplit(address).scheme
    if tls is None:
        if scheme == "tls":
            raise JobError(f"{address}: needs certificates; give run.tls with ca_file, cert and key")
        if not is_loopback(address):
            raise JobError(
                f"{address}: is not on this machine, and anyone who reaches it could run code here; use a tls:// "
                "address, and give run.tls with ca_file, cert and key"
            )
        return None
    if scheme != "tls":
        raise JobError(f"{address}: there are certificates for it, but it is not encrypted; use tls://")
    files = {name: str(base_dir / Path(os.path.expanduser(value))) for name, value in tls.model_dump().items()}
    for name, path in files.items():
        if not Path(path).is_file():
            raise JobError(f"run.tls.{name}: {path} is not there")
    return Security(
        require_encryption=True,
        tls_ca_file=files["ca_file"],
        tls_client_cert=files["cert"],
        tls_client_key=files["key"],
        tls_worker_cert=files["cert"],
        tls_worker_key=files["key"],
        tls_scheduler_cert=files["cert"],
        tls_scheduler_key=files["key"],
    )
