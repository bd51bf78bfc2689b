"""Workers of a cluster that is there already: cut off and back again, and reached over a network with certificates."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from batchgen.pipeline.cluster.crew import Crew
from batchgen.pipeline.cluster.generation import ManyWorkers
from batchgen.pipeline.cluster.messages import Done
from batchgen.pipeline.cluster.processes import end_process
from batchgen.pipeline.cluster.settings import LOOPBACK
from batchgen.pipeline.runner import run_job
from tests.pipeline.cluster.remote import joined, remote
from tests.pipeline.cluster.running import (
    Watching,
    calm,
    check,
    children,
    job_of,
    kill,
    listening,
    wait_until,
)
from tests.pipeline.worker_fakes import services
from tests.program import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("importable")]


class Pausing(Watching):
    """Stops a process once the workers are at work, and lets it go on when the run has given somebody up."""

    def __init__(self) -> None:
        super().__init__(self.act)
        self.target = 0
        self.signals: list[int] = []

    def act(self, snapshot: Any) -> None:
        if not self.signals and len(snapshot.workers) == 2 and snapshot.num_running:
            self.send(signal.SIGSTOP)
        elif len(self.signals) == 1 and any("no step for too long" in line for line in self.messages):
            self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        self.signals.append(number)
        kill(self.target, number)


def test_a_worker_that_stops_and_goes_on_doubles_nothing(tmp_path: Path) -> None:
    expected = calm(tmp_path, num_rows=200)
    with remote(tmp_path, step_seconds=0.05) as cluster:
        job = job_of(tmp_path, "out", 2, num_rows=200, scheduler=cluster.address, worker_timeout=3.0)
        wait_until(lambda: len(cluster.workers) == 2)
        watching = Pausing()
        watching.target = cluster.workers[0]
        run_job(job, services=services(), progress=watching)
        assert watching.signals == [signal.SIGSTOP, signal.SIGCONT]
        check(job, expected)


@pytest.mark.case(54)
def test_workers_that_were_cut_off_come_back_and_their_late_results_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late: list[Done] = []
    take_done = ManyWorkers._take_done

    def spy(self: ManyWorkers, done: Done, cluster: Any) -> None:
        crew: Crew = self._crew
        if crew.members[done.worker].is_lost:
            late.append(done)
        take_done(self, done, cluster)

    monkeypatch.setattr(ManyWorkers, "_take_done", spy)
    expected = calm(tmp_path, num_rows=200)
    with remote(tmp_path, step_seconds=0.05) as cluster:
        job = job_of(tmp_path, "out", 2, num_rows=200, scheduler=cluster.address, worker_timeout=3.0)
        watching = Pausing()
        # Workers go on with what they have, and what they say is heard when it is too late.
        watching.target = cluster.scheduler
        run_job(job, services=services(), progress=watching)
        assert watching.signals == [signal.SIGSTOP, signal.SIGCONT]
        assert late
        check(job, expected)


def own_address() -> str:
    """An address of this machine that is not on loopback; skips the test where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: the system only says which of its addresses it would use.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("needs a network")
        address: str = probe.getsockname()[0]
    if address.startswith("127."):
        pytest.skip("needs a network")
    return address


def make_certificates(directory: Path) -> dict[str, str]:
    """As docs/workers.md says."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    for command in (
        "req -x509 -newkey rsa:3072 -nodes -days 30 -subj /CN=batchgen -keyout ca.key -out ca.pem",
        "req -newkey rsa:3072 -nodes -subj /CN=worker -keyout key.pem -out cert.csr",
        "x509 -req -in cert.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 30 -out cert.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=directory, check=True, capture_output=True)
    return {"ca_file": "ca.pem", "cert": "cert.pem", "key": "key.pem"}


DASK_SCHEDULER = (
    "dask scheduler --protocol tls --port 0 --no-dashboard --dashboard-address 127.0.0.1:0 "
    "--scheduler-file scheduler.json"
)


@contextmanager
def tls_scheduler(root: Path, tls: dict[str, str]) -> Iterator[int]:
    """`dask scheduler` as docs/workers.md starts it; yields its process id."""
    environ = {
        **os.environ,
        "DASK_DISTRIBUTED__COMM__TLS__CA_FILE": str(root / tls["ca_file"]),
        "DASK_DISTRIBUTED__COMM__TLS__SCHEDULER__CERT": str(root / tls["cert"]),
        "DASK_DISTRIBUTED__COMM__TLS__SCHEDULER__KEY": str(root / tls["key"]),
    }
    with (root / "scheduler.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *DASK_SCHEDULER.split()], cwd=root, env=environ, stdout=log, stderr=log
        )
    try:
        wait_until((root / "scheduler.json").is_file)
        yield process.pid
    finally:
        end_process(process)


def speaks_tls(host: str, port: int, root: Path, tls: dict[str, str]) -> bool:
    """Whether a listener shows a certificate of ours."""
    context = ssl.create_default_context(cafile=root / tls["ca_file"])
    context.check_hostname = False
    context.load_cert_chain(root / tls["cert"], root / tls["key"])
    try:
        with socket.create_connection((host, port), timeout=5) as plain, context.wrap_socket(plain):
            return True
    except OSError:  # An ssl.SSLError, or nothing said at all.
        return False


def test_a_cluster_with_certificates_is_reached_over_the_network(tmp_path: Path) -> None:
    assert f"\n{DASK_SCHEDULER} &\n" in (ROOT / "docs" / "workers.md").read_text()
    host, tls = own_address(), make_certificates(tmp_path)
    expected = calm(tmp_path)
    options = ("--tls-ca-file", "ca.pem", "--tls-cert", "cert.pem", "--tls-key", "key.pem")
    absolute = tuple(str(tmp_path / each) if each.endswith(".pem") else each for each in options)
    with tls_scheduler(tmp_path, tls) as scheduler:
        with joined(tmp_path, str(tmp_path / "scheduler.json"), 2, 0.02, absolute) as workers:
            job = job_of(tmp_path, "out", 2, scheduler="scheduler.json", tls=tls)
            seen: dict[str, bool] = {}

            def on_update(snapshot: Any) -> None:
                if len(snapshot.workers) == 2 and not seen:
                    for each in listening([scheduler, *children(workers.pid), os.getpid()]):
                        if not each.startswith(f"{LOOPBACK}:"):
                            seen[each] = speaks_tls(host, int(each.rpartition(":")[2]), tmp_path, tls)

            run_job(job, services=services(), progress=Watching(on_update))
        check(job, expected)
    # Of the scheduler and of two workers, each for IPv4 and IPv6.
    assert len({each.rpartition(":")[2] for each in seen}) == 3
    assert all(seen.values()), seen
