"""No address that is not on loopback is used without certificates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.config import TlsConfig
from batchgen.errors import JobError
from batchgen.pipeline.cluster.settings import is_loopback, scheduler_address, security_for

TLS = TlsConfig(ca_file="ca.pem", cert="cert.pem", key="key.pem")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://127.8.8.8:1", "tcp://[::1]:1", "tcp://localhost:1"])
def test_loopback_needs_no_certificates(address: str, tmp_path: Path) -> None:
    assert is_loopback(address)
    assert security_for(address, None, tmp_path) is None


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8786", "tcp://head:8786", "tcp://0.0.0.0:8786", "ws://head:1"])
def test_other_addresses_are_refused_without(address: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="not on this machine"):
        security_for(address, None, tmp_path)


def test_certificates_and_encryption_belong_together(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="needs certificates"):
        security_for("tls://head:8786", None, tmp_path)
    with pytest.raises(JobError, match="use tls://"):
        security_for("tcp://head:8786", TLS, tmp_path)
    with pytest.raises(JobError, match=r"run\.tls\.ca_file: .* is not there"):
        security_for("tls://head:8786", TLS, tmp_path)
    for name in ("ca.pem", "cert.pem", "key.pem"):
        (tmp_path / name).write_text("")
    security = security_for("tls://head:8786", TLS, tmp_path)
    assert security is not None
    assert security.require_encryption
    assert security.tls_worker_key == str(tmp_path / "key.pem")


def test_a_scheduler_is_named_by_address_or_by_file(tmp_path: Path) -> None:
    assert scheduler_address("tls://head:8786", tmp_path) == "tls://head:8786"
    (tmp_path / "scheduler.json").write_text(json.dumps({"address": "tcp://127.0.0.1:99", "id": "Scheduler-1"}))
    assert scheduler_address("scheduler.json", tmp_path) == "tcp://127.0.0.1:99"
    with pytest.raises(JobError, match="no scheduler file"):
        scheduler_address("head:8786", tmp_path)
