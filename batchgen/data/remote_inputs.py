"""Inputs on web servers and object stores: fetched once into the cache, then read as the local files they are.

A copy is used again as long as the store gives the file the same size and the same ETag, version or time; a store
that gives none of these is asked for the file in every run. Only what the job file names is ever fetched.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec

from batchgen.config import InputConfig
from batchgen.config_secrets import with_secrets, without_secrets
from batchgen.data.input_names import is_passed_over, suffix_format
from batchgen.errors import InputError, InputUnavailable
from batchgen.printable import printable
from batchgen.resources import cache_directory

EXTRAS = {"http": "http", "https": "http", "s3": "s3", "gs": "gs"}
"""Schemes that are read, and the extra of this package that each needs."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_VERSION_KEYS = ("ETag", "etag", "generation", "VersionId", "Content-MD5", "Digest", "Last-Modified", "LastModified")
_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.5
_COPY_BYTES = 2**20


def is_url(pattern: str) -> bool:
    """Whether an `input.path` is a URL and no path."""
    return _SCHEME.match(pattern) is not None


def fetch_urls(pattern: str, config: InputConfig, skipped: set[str]) -> list[tuple[str, Path]]:
    """(name without query, local copy) of each file that a URL names: a file, a pattern, or all below a prefix.

    InputError where there is none or it is refused, InputUnavailable where the store cannot be reached.
    """
    url = _checked_url(pattern)
    with _explained(pattern):
        file_system, path = _file_system(url, pattern)
        found = _listed(file_system, path, url)
    base = url.split("://")[0] + "://"
    names = {_shown(file, base, pattern): file for file in found}
    if found != [path]:
        kept = {}
        for name, file in names.items():
            if is_passed_over(PurePosixPath(name).name) or not _is_claimed(name, config):
                skipped.add(PurePosixPath(name).name)
            else:
                kept[name] = file
        names = kept
    if not names:
        raise InputError(f"input.path: {pattern}: holds no input files")
    return [(name, _fetched(file_system, file, pattern)) for name, file in sorted(names.items())]


def _checked_url(pattern: str) -> str:
    scheme = pattern.split("://")[0].lower()
    if scheme not in EXTRAS:
        known = ", ".join(f"{each}://" for each in (*EXTRAS, "hf"))
        raise InputError(f"input.path: {printable(scheme)}:// is not read; known are {known}")
    try:
        url = with_secrets(pattern)
    except KeyError as error:
        raise InputError(f"input.path: {pattern}: the environment has no variable {error.args[0]}") from error
    if scheme in ("http", "https") and "@" in urlsplit(pattern).netloc:
        raise InputError("input.path: a URL with a password in it would be stored; put it into ~/.netrc")
    return url


def _file_system(url: str, pattern: str) -> tuple[Any, str]:
    """The store and the path in it; listings are never taken from an earlier look."""
    scheme = url.split("://")[0].lower()
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if scheme in ("http", "https"):
        options["client_kwargs"] = {"trust_env": True}  # Proxies and ~/.netrc.
    try:
        file_system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = EXTRAS[scheme]
        raise InputError(
            f"input.path: {pattern}: {scheme}:// needs another package; pip install 'batchgen[{extra}]'"
        ) from error
    return file_system, str(path)


def _listed(file_system: Any, path: str, url: str) -> list[str]:
    """Files in the store; a web server has no listings, so there a URL is one file, whatever is in it."""
    if url.startswith(("http://", "https://")):
        return [path]
    if any(char in path for char in "*?["):
        return sorted(file for file, info in file_system.glob(path, detail=True).items() if info["type"] == "file")
    if file_system.isfile(path):
        return [path]
    return sorted(file_system.find(path)) or [path]


def _is_claimed(name: str, config: InputConfig) -> bool:
    return config.format != "auto" or suffix_format(PurePosixPath(name)) is not None


def _shown(file: str, base: str, pattern: str) -> str:
    whole = file if is_url(file) else base + file
    return without_secrets(whole.split("?")[0].split("#")[0], pattern)


def _fetched(file_system: Any, file: str, pattern: str) -> Path:
    """The local copy of a file, whole."""
    folder = cache_directory() / "inputs" / hashlib.sha256(f"{file_system.protocol}\0{file}".encode()).hexdigest()[:32]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The name is the store's: only its end is used, and nothing of it that is a path.
    name = PurePosixPath(file.split("?")[0]).name
    target = folder / (re.sub(r"[^\w.-]", "_", name)[-100:].lstrip(".") or "data")
    note = folder / ".version"
    with _explained(pattern):
        for attempt in range(_ATTEMPTS):
            try:
                info = file_system.info(file)
                version = {key: str(info[key]) for key in _VERSION_KEYS if info.get(key)}
                if _is_current(target, note, info, version):
                    return target
                _copy(file_system, file, target, info.get("size"))
                _write_note(note, version, target)
                return target
            except Exception as error:
                if attempt == _ATTEMPTS - 1 or not _is_passing(_actual(error)):
                    raise
            time.sleep(_FIRST_PAUSE_SECONDS * 2**attempt)
    raise AssertionError("unreachable")


def _is_current(target: Path, note: Path, info: Mapping[str, Any], version: Mapping[str, str]) -> bool:
    try:
        known = json.loads(note.read_text())
        size = target.stat().st_size
    except (OSError, ValueError):
        return False
    return bool(version) and known == {**version, "size": size} and info.get("size") in (None, size)


def _write_note(note: Path, version: Mapping[str, str], target: Path) -> None:
    temporary = note.with_name(f".version-{os.getpid()}")
    temporary.write_text(json.dumps({**version, "size": target.stat().st_size}))
    temporary.rename(note)


def _copy(file_system: Any, file: str, target: Path, size: int | None) -> None:
    """Write the file under another name, and rename it when it is whole."""
    temporary = target.with_name(f".part-{os.getpid()}")
    try:
        num_bytes = 0
        # A web server's file is one stream: its default reader asks for ranges, which not every server has.
        options = {"block_size": 0} if is_url(file) else {}
        with file_system.open(file, "rb", **options) as source, temporary.open("wb") as copy:
            while data := source.read(_COPY_BYTES):
                num_bytes += len(data)
                copy.write(data)
        if size is not None and num_bytes != size:
            raise ConnectionError(f"{num_bytes} of {size} bytes came")
        temporary.rename(target)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _is_passing(error: BaseException) -> bool:
    """Whether it may go better in a moment."""
    return not isinstance(error, (FileNotFoundError, PermissionError, InputError)) and not (
        isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    )


@contextmanager
def _explained(pattern: str) -> Iterator[None]:
    """Raise InputError or InputUnavailable, without secrets, for whatever a store's library raises."""
    try:
        yield
    except (InputError, InputUnavailable):
        raise
    except Exception as error:  # noqa: BLE001  Each store's library has errors of its own.
        # Nor as the cause: it may show what the environment holds.
        raise _as_ours(_actual(error), pattern) from None


def _as_ours(error: BaseException, pattern: str) -> InputError | InputUnavailable:
    if isinstance(error, FileNotFoundError):
        return InputError(f"input.path: {_plain(pattern)}: there is no such file")
    if isinstance(error, PermissionError):
        return InputError(
            f"input.path: {_plain(pattern)}: access is refused; set the credentials of the store in the environment"
        )
    reason = printable(without_secrets(f"{type(error).__name__}: {error}", pattern))[:300].split("?")[0]
    return InputUnavailable(f"input.path: {_plain(pattern)}: cannot be fetched: {reason}; mend it and run again")


def _actual(error: BaseException) -> BaseException:
    """What happened: for whatever answer of a web server fsspec says that there is no such file."""
    if isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(error, "status", None)
    if status in (404, 410):
        return FileNotFoundError(str(error))
    return PermissionError(str(error)) if status in (401, 403) else error


def _plain(pattern: str) -> str:
    return printable(pattern.split("?")[0])
