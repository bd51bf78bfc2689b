"""Where a model is: `model.path` becomes one local directory with config.json, safetensors and a tokenizer.

`model.path` is a Hugging Face id, a directory, a GGUF file, or `package:NAME/FILE` inside an installed package. Only
safetensors, JSON and tokenizer files are ever fetched or read, never pickle. A GGUF file is converted once into a
private cache directory, `$XDG_CACHE_HOME/batchgen` or `~/.cache/batchgen`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError, LocalEntryNotFoundError  # type: ignore[attr-defined]

from batchgen.errors import ModelError
from batchgen.gguf.convert import CONVERTER_VERSION, convert_gguf
from batchgen.gguf.reader import MAGIC

PACKAGE_PREFIX = "package:"
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_WEIGHTS = "*.safetensors"
_FETCHED = ["*.json", "*.jinja", "tokenizer.model", "spiece.model"]
# Sub-folders hold other formats of the same weights (onnx/, original/), and so do consolidated*.safetensors.
_NOT_FETCHED = ["*/*", "consolidated*"]
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_HASH_CHARACTERS = 64
_REMEMBERED_BYTES = 2**20
"""Smaller files are hashed in no time."""
_SETTLING_NS = 2 * 10**9
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")


def locate_model(path: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """The local directory of a model, fetched or converted if it was not yet.

    `revision` is a branch, tag or commit and means something for a Hugging Face id alone. Without `weights`, those of
    a Hugging Face id are not fetched, and none need be there. Raises ModelError, which says what is missing and what
    to do.
    """
    if path.startswith(PACKAGE_PREFIX):
        local = _in_package(path)
    else:
        local = Path(os.path.expanduser(path))
        if not local.exists() and _HUB_ID.fullmatch(path):
            return _checked(_fetch(path, revision, weights), weights)
    if revision is not None:
        raise ModelError(f"model.revision is {revision!r}, but {path} is local: leave the revision out")
    if local.is_dir():
        return _checked(local, weights)
    if not local.is_file():
        raise ModelError(f"{path}: no such file or directory, and not a Hugging Face id (OWNER/NAME) either")
    with local.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ModelError(f"{path}: a model is a directory or a GGUF file, and this file is not GGUF")
    return _converted(local)


def cache_directory() -> Path:
    """Our private cache directory, made with mode 0700; ModelError if it is not ours alone to write."""
    # The XDG specification tells to ignore a relative path.
    base = os.environ.get("XDG_CACHE_HOME", "")
    home = os.path.expanduser("~")
    if not (os.path.isabs(base) or os.path.isabs(home)):
        raise ModelError("there is no home directory to keep converted models in; set HOME or XDG_CACHE_HOME")
    directory = (Path(base) if os.path.isabs(base) else Path(home, ".cache")) / "batchgen"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(
            f"{directory}: cannot be made ({error.strerror}); set XDG_CACHE_HOME to another place"
        ) from error
    status = directory.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ModelError(
            f"{directory}: others may write into this cache; give it to yourself with mode 0700, "
            "or set XDG_CACHE_HOME to another place"
        )
    return directory


def content_hash(file: Path) -> str:
    """sha256 of a file, remembered in our cache by path, size, time and inode: a large one is read once.

    A file that was changed a moment ago is not remembered, since it may change again within the same time stamp. A
    cache that cannot be used only costs time. Raises OSError where the file cannot be read.
    """
    status = file.stat()
    note = _hash_note(file, status)
    if note is not None:
        with suppress(OSError):
            known = note.read_text()
            if len(known) == _HASH_CHARACTERS:
                return known
    began = time.time_ns()
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    is_settled = status.st_mtime_ns < began - _SETTLING_NS
    if note is not None and is_settled and _status_text(file.stat()) == _status_text(status):
        with suppress(OSError):
            note.write_text(digest)
    return digest


def _hash_note(file: Path, status: os.stat_result) -> Path | None:
    """Where the hash of a file of this status is remembered; None for small files, and without a cache."""
    if status.st_size < _REMEMBERED_BYTES:
        return None
    with suppress(ModelError, OSError):
        directory = cache_directory() / "hashes"
        directory.mkdir(mode=0o700, exist_ok=True)
        identity = f"{file.resolve()}\0{_status_text(status)}"
        return directory / hashlib.sha256(identity.encode()).hexdigest()
    return None


def _status_text(status: os.stat_result) -> str:
    return f"{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}"


def _in_package(path: str) -> Path:
    name, _, file = path.removeprefix(PACKAGE_PREFIX).partition("/")
    if not name.isidentifier() or not file:
        raise ModelError(f"{path}: write {PACKAGE_PREFIX}NAME/FILE, the import name of a package and a file inside it")
    spec = importlib.util.find_spec(name)
    folders = [Path(folder).resolve() for folder in (spec.submodule_search_locations or [])] if spec else []
    if not folders:
        raise ModelError(f"{path}: the package {name} is not installed here; install it with pip")
    for folder in folders:
        found = (folder / file).resolve()
        if found.exists() and found.is_relative_to(folder):
            return found
    raise ModelError(f"{path}: the package {name} has no file {file}")


def context_length(directory: Path) -> int | None:
    """Tokens of prompt and completion that config.json says a model is made for; None where it does not."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text = config.get("text_config", config) if isinstance(config, dict) else {}
    return next((value for name in _CONTEXT_NAMES if isinstance(value := text.get(name), int)), None)


def _fetch(path: str, revision: str | None, weights: bool) -> Path:
    fetched = [_WEIGHTS, *_FETCHED] if weights else _FETCHED
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=fetched, ignore_patterns=_NOT_FETCHED))
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{path}: not a local directory, not in the Hugging Face cache, and the hub cannot be reached; "
            "give a local directory, or fetch it where there is a network"
        ) from error
    except (HTTPError, HFValidationError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        raise ModelError(
            f"{path}{at}: neither a local path nor a Hugging Face model that can be fetched: {error}"
        ) from error


def _checked(directory: Path, weights: bool) -> Path:
    if not (directory / "config.json").is_file():
        raise ModelError(f"{directory}: no config.json here, so this is no model directory")
    if weights and not any(directory.glob(_WEIGHTS)):
        pickles = [file.name for pattern in _PICKLES for file in directory.glob(pattern)]
        what = f"only {pickles[0]}, which is pickle and never read" if pickles else "no weights"
        raise ModelError(f"{directory}: {what}; save the model as safetensors (model.save_pretrained)")
    return directory


def _converted(gguf: Path) -> Path:
    """The converted form of a GGUF file, made under another name and renamed when it is whole."""
    cache = cache_directory() / "gguf"
    cache.mkdir(mode=0o700, exist_ok=True)
    directory = cache / f"{content_hash(gguf)}-v{CONVERTER_VERSION}"
    if _is_whole(directory):
        return directory
    _remove_abandoned(cache)
    try:
        with _attempt(cache) as attempt:
            convert_gguf(gguf, attempt)
            _seal(attempt)
            _publish(attempt, directory)
    except OSError as error:
        raise ModelError(
            f"{gguf}: cannot be converted into {cache}: {error.strerror}; free space there, or set XDG_CACHE_HOME"
        ) from error
    return directory


@contextmanager
def _attempt(cache: Path) -> Iterator[Path]:
    """A new directory to convert into, locked as long as its maker lives."""
    attempt = Path(tempfile.mkdtemp(prefix="tmp-", dir=cache))
    descriptor = os.open(attempt, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield attempt
    finally:
        shutil.rmtree(attempt, ignore_errors=True)
        os.close(descriptor)


def _remove_abandoned(cache: Path) -> None:
    """Remove the attempts of processes that died: nobody holds their locks."""
    for attempt in cache.glob("tmp-*"):
        try:
            descriptor = os.open(attempt, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(attempt, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


_SEAL = "conversion.json"


def _seal(attempt: Path) -> None:
    """Make every file durable and note its size."""
    sizes = {file.name: file.stat().st_size for file in sorted(attempt.iterdir())}
    (attempt / _SEAL).write_text(json.dumps(sizes))
    for path in (*attempt.iterdir(), attempt):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _is_whole(directory: Path) -> bool:
    try:
        sizes: dict[str, int] = json.loads((directory / _SEAL).read_text())
        return all((directory / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, json.JSONDecodeError):
        return False


def _publish(attempt: Path, directory: Path) -> None:
    if directory.exists() and not _is_whole(directory):
        shutil.rmtree(directory)
    try:
        attempt.rename(directory)
    except OSError:
        # Another process was first; its conversion of the same bytes is the same.
        if not _is_whole(directory):
            raise
