from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen.config import InputConfig
from batchgen.data import remote_inputs
from batchgen.data.inputs import find_inputs
from batchgen.errors import ExitCode, InputError, InputUnavailable
from tests.data.reading import read_all
from tests.data.servers import Served, serving

ROWS = b'{"prompt": "a"}\n{"prompt": "b"}\n'


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote_inputs, "_FIRST_PAUSE_SECONDS", 0.001)
    with serving(Served({"d/in.jsonl": ROWS})) as server:
        yield server


def refused(path: str, **config: Any) -> str:
    with pytest.raises(InputError) as raised:
        find_inputs(InputConfig.model_validate({"path": path, **config}), Path())
    return str(raised.value)


def test_rows_of_a_url_are_those_of_the_file(served: Served, tmp_path: Path) -> None:
    served.files["d/in.jsonl.gz"] = gzip.compress(ROWS)
    for name in ("d/in.jsonl", "d/in.jsonl.gz"):
        read = read_all(tmp_path, f"{served.url}/{name}")
        assert [row["prompt"] for row in read.values] == ["a", "b"]
        assert read.scan.files[0].name == f"{served.url}/{name}"


def test_a_copy_is_kept_until_the_store_has_another_file(served: Served, tmp_path: Path) -> None:
    url = f"{served.url}/d/in.jsonl"
    first = read_all(tmp_path, url)
    num_asked = sum(each.startswith("GET") for each in served.asked)
    assert read_all(tmp_path, url).scan == first.scan
    assert sum(each.startswith("GET") for each in served.asked) == num_asked, "it was fetched again"
    served.files["d/in.jsonl"] = ROWS.replace(b"a", b"c")
    again = read_all(tmp_path, url)
    assert [row["prompt"] for row in again.values] == ["c", "b"]
    assert again.scan.files[0].path == first.scan.files[0].path


def test_a_server_without_etags_is_asked_in_every_run(served: Served, tmp_path: Path) -> None:
    served.has_etags = False
    read_all(tmp_path, f"{served.url}/d/in.jsonl")
    served.files["d/in.jsonl"] = ROWS.replace(b"a", b"c")
    assert read_all(tmp_path, f"{served.url}/d/in.jsonl").values[0] == {"prompt": "c"}


def test_a_failure_that_passes_is_tried_again(served: Served, tmp_path: Path) -> None:
    served.failures = 2
    assert len(read_all(tmp_path, f"{served.url}/d/in.jsonl").rows) == 2


def test_a_store_that_cannot_be_reached_ends_with_the_code_to_run_again(served: Served, tmp_path: Path) -> None:
    served.cut = True
    with pytest.raises(InputUnavailable, match=r"d/in\.jsonl: cannot be fetched: .*; mend it and run again"):
        read_all(tmp_path, f"{served.url}/d/in.jsonl")
    assert InputUnavailable.exit_code is ExitCode.IO_ERROR
    # Half a file is never taken for the whole.
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    served.cut = False
    assert len(read_all(tmp_path, f"{served.url}/d/in.jsonl").rows) == 2


def test_secrets_of_a_url_come_from_the_environment_and_reach_neither_names_nor_messages(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIGNATURE", "s3cr3t")
    url = f"{served.url}/d/in.jsonl?sig=${{env:SIGNATURE}}"
    read = read_all(tmp_path, url)
    assert any(each == "GET /d/in.jsonl?sig=s3cr3t" for each in served.asked)
    assert read.scan.files[0].name == f"{served.url}/d/in.jsonl"
    assert "s3cr3t" not in str(read.scan.to_json())
    message = refused(f"{served.url}/${{env:SIGNATURE}}/gone.jsonl")
    assert message == f"input.path: {served.url}/${{env:SIGNATURE}}/gone.jsonl: there is no such file"
    served.failures = 99
    with pytest.raises(InputUnavailable) as raised:
        read_all(tmp_path, url.replace("d/in", "${env:SIGNATURE}/in"))
    assert "s3cr3t" not in str(raised.value)
    assert raised.value.__cause__ is None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("ftp://host/x.jsonl", "ftp:// is not read; known are http://, https://, s3://, gs://, hf://"),
        ("file:///etc/passwd", "file:// is not read"),
        ("https://user:word@host/x.jsonl", "a URL with a password in it would be stored; put it into ~/.netrc"),
        ("https://host/${env:NOT_SET_HERE}", "the environment has no variable NOT_SET_HERE"),
    ],
)
def test_a_url_that_is_not_read_is_refused(path: str, message: str) -> None:
    assert message in refused(path)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(remote_inputs.fsspec.core, "url_to_fs", missing)
    assert "s3:// needs another package; pip install 'batchgen[s3]'" in refused("s3://bucket/x.jsonl")


def test_a_name_from_a_store_is_no_path_in_the_cache(served: Served, tmp_path: Path) -> None:
    served.files["d/..%2F..%2Fevil.jsonl"] = ROWS
    read = read_all(tmp_path, f"{served.url}/d/..%2F..%2Fevil.jsonl")
    assert Path(read.scan.files[0].path).is_relative_to(tmp_path / "cache/batchgen/inputs")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket of a simulated S3."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("s3fs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = server_module.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    yield client
    client.close()
    server.stop()


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_files_patterns_and_prefixes_of_s3_are_read(bucket: Any, tmp_path: Path) -> None:
    for name in ("in/1.jsonl", "in/2.jsonl", "in/_SUCCESS", "in/deep/3.jsonl", "in/.hidden.jsonl", "other.jsonl"):
        bucket.put_object(Bucket="bucket", Key=name, Body=ROWS)

    def names(path: str) -> list[str]:
        found = find_inputs(InputConfig(path=path), tmp_path)
        return [file.name.removeprefix("s3://bucket/") for file in found.files]

    assert names("s3://bucket/in/1.jsonl") == ["in/1.jsonl"]
    assert names("s3://bucket/in/*.jsonl") == ["in/1.jsonl", "in/2.jsonl"]
    assert names("s3://bucket/in/") == ["in/1.jsonl", "in/2.jsonl", "in/deep/3.jsonl"]
    assert find_inputs(InputConfig(path="s3://bucket/in"), tmp_path).passed_over == [".hidden.jsonl", "_SUCCESS"]
    assert len(read_all(tmp_path, "s3://bucket/in/*.jsonl").rows) == 4
    assert refused("s3://bucket/gone.jsonl") == "input.path: s3://bucket/gone.jsonl: there is no such file"
    assert refused("s3://bucket/gone*.jsonl") == "input.path: s3://bucket/gone*.jsonl: holds no input files"
    # What the bucket has now counts, not what it had.
    bucket.put_object(Bucket="bucket", Key="in/1.jsonl", Body=ROWS.replace(b"a", b"c"))
    bucket.put_object(Bucket="bucket", Key="in/4.jsonl", Body=ROWS)
    read = read_all(tmp_path, "s3://bucket/in/*.jsonl")
    assert (read.values[0], len(read.rows)) == ({"prompt": "c"}, 6)
