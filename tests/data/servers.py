"""Servers on the loopback for tests: files over HTTP, and a Hub with one data set."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Served:
    """What a server has, and what it was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By path, without the first slash."""
    has_etags: bool = True
    failures: int = 0
    """So many requests that follow fail with status 503."""
    cut: bool = False
    """Send only half of each file."""
    asked: list[str] = field(default_factory=list)
    """Method and path, with the query, of each request."""
    url: str = ""

    def respond(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        content = self.files.get(path)
        if content is None:
            return 404, {}, b"nothing here"
        return 200, {"ETag": _etag(content)} if self.has_etags else {}, content


@dataclass
class ServedHub(Served):
    """A Hub with one data set, whose files of each revision are `REVISION/NAME`."""

    token: str | None = None
    """What a request must show."""

    def respond(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.split("/")
        if parts[:2] == ["api", "datasets"]:
            revision = self._revision(parts[5] if len(parts) > 5 else "main")
            names = sorted(name.removeprefix(f"{revision}/") for name in self.files if name.startswith(f"{revision}/"))
            if "/".join(parts[2:4]) != "owner/name" or not names:
                code = "RepoNotFound" if "/".join(parts[2:4]) != "owner/name" else "RevisionNotFound"
                return 404, {"X-Error-Code": code}, b"{}"
            if len(parts) > 4 and parts[4] == "tree":
                tree = [self._entry(revision, name) for name in names]
                return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
            info = {"id": "owner/name", "sha": _sha(revision), "siblings": [{"rfilename": name} for name in names]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        if parts[0] == "datasets" and parts[3] == "resolve":
            revision = self._revision(parts[4])
            content = self.files.get(f"{revision}/{unquote('/'.join(parts[5:]))}")
            if content is None:
                return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
            return 200, {"ETag": _etag(content), "X-Repo-Commit": _sha(revision)}, content
        return 404, {}, b"{}"

    def _revision(self, asked: str) -> str:
        """The name of a revision that may be asked for by its commit; empty where there is none."""
        return next((each for each in _revisions(self.files) if unquote(asked) in (each, _sha(each))), "")

    def _entry(self, revision: str, name: str) -> dict[str, object]:
        content = self.files[f"{revision}/{name}"]
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _revisions(names: dict[str, bytes]) -> set[str]:
    return {"refs/convert/parquet" if name.startswith("refs/") else name.split("/")[0] for name in names}


def _sha(revision: str) -> str:
    """A revision that is a commit is itself."""
    return revision if len(revision) == 40 else hashlib.sha1(revision.encode()).hexdigest()


def _etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()}"'


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    """Serve on a free port of the loopback; `served.url` is there meanwhile."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            served.asked.append(f"{self.command} {self.path}")
            status, headers, body = served.respond(urlsplit(self.path).path.removeprefix("/"))
            if served.failures > 0:
                served.failures -= 1
                status, headers, body = 503, {}, b""
            token = getattr(served, "token", None)
            if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
                status, headers, body = 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[: len(body) // 2] if served.cut else body)

        def log_message(self, format: str, *args: object) -> None:
            """Tests are quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
