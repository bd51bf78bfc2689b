"""Data sets of the Hugging Face Hub, and those that `datasets` saved: which files are a configuration's split.

`hf://datasets/OWNER/NAME[@REVISION][/PATH]`, PATH a file, a folder or a pattern. Without one the files are those that
the data set's card names for `input.config` and `input.split`, else those whose folders or names have the split's name;
where no file is of a format that is read, the Hub's own conversion to Parquet is taken. Nothing of a data set is run.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import unquote

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.repocard import metadata_load

from batchgen.config import InputConfig
from batchgen.data.input_names import is_passed_over, suffix_format
from batchgen.data.names import near_names
from batchgen.errors import InputError, InputUnavailable
from batchgen.printable import printable

HUB_SCHEME = "hf://"

_URL = re.compile(r"hf://datasets/(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^/]+))?(/(?P<path>.+))?")
_CONVERTED = "refs/convert/parquet"
_CARD = "README.md"
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "eval"),
}
"""Splits, and the words in the names of files and folders that mean them."""

Splits = dict[str, list[str]]
"""Files of each split."""


class _Repository(NamedTuple):
    """A data set at one commit."""

    id: str
    commit: str | None
    """None where the Hub cannot be asked, and what is in the cache is all there is."""
    revision: str | None
    files: list[str]


def fetch_dataset(url: str, config: InputConfig, skipped: set[str]) -> list[tuple[str, Path]]:
    """(name, local copy) of each file of a data set; InputError, InputUnavailable as in `remote_inputs`."""
    match = _URL.fullmatch(url)
    if match is None:
        raise InputError(f"input.path: {printable(url)}: write hf://datasets/OWNER/NAME[@REVISION][/PATH]")
    revision = None if match["revision"] is None else unquote(match["revision"])
    repository = _look_up(match["id"], revision)
    if match["path"]:
        chosen = _below(repository.files, match["path"])
        skipped.update(PurePosixPath(file).name for file in chosen if not _is_input(file, config))
        files = [file for file in chosen if file == match["path"] or _is_input(file, config)]
        if not files:
            raise InputError(f"input.path: {url}: the data set has no such input file")
    else:
        repository, files = _files_of_split(repository, config)
    folder = _download(repository, files)
    return [(f"hf://datasets/{repository.id}/{file}", folder / file) for file in sorted(files)]


def saved_split(directory: Path, config: InputConfig) -> Path:
    """Where the rows of a directory lie: of a `DatasetDict` that was saved, the folder of `input.split`."""
    try:
        names = json.loads((directory / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
    except (OSError, ValueError, KeyError, TypeError):
        return directory
    splits = {str(name): [str(name)] for name in names} if isinstance(names, list) else {}
    name = _choice("split", splits, config.split, str(directory))
    if PurePosixPath(name).name != name:
        raise InputError(f"{directory}: dataset_dict.json names the split {name!r}, which is no folder")
    return directory / name


def _look_up(name: str, revision: str | None) -> _Repository:
    try:
        info = HfApi().dataset_info(name, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = "revision" if isinstance(error, RevisionNotFoundError) else "data set"
        raise InputError(
            f"input.path: hf://datasets/{name}: the Hub has no such {what}, or it is private: set HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise InputError(f"input.path: hf://datasets/{name}: is no name of a data set") from error
    except (HfHubHTTPError, HTTPError, OfflineModeIsEnabled, OSError) as error:
        return _in_cache(name, revision, error)
    return _Repository(name, info.sha, revision, [file.rfilename for file in info.siblings or ()])


def _in_cache(name: str, revision: str | None, why: Exception) -> _Repository:
    try:
        # A pattern that no file has: what is there is wanted, whether or not it is all.
        found = snapshot_download(
            name, repo_type="dataset", revision=revision, local_files_only=True, allow_patterns=["/"]
        )
        folder = Path(found)
    except (LocalEntryNotFoundError, OSError, ValueError):
        raise InputUnavailable(
            f"input.path: hf://datasets/{name}: the Hub cannot be reached ({printable(str(why))[:200]}), and the data "
            "set is not in its cache; fetch it where there is a network"
        ) from why
    files = [Path(base, file).relative_to(folder).as_posix() for base, _, names in os.walk(folder) for file in names]
    return _Repository(name, None, revision, sorted(files))


def _download(repository: _Repository, files: Sequence[str]) -> Path:
    """The folder of the commit, with at least these files."""
    try:
        folder = Path(
            snapshot_download(
                repository.id,
                repo_type="dataset",
                # By its name and not by the commit: only so will the cache know it without a network.
                revision=repository.revision,
                allow_patterns=[_literal(file) for file in files],
                local_files_only=repository.commit is None,
            )
        )
    except (HfHubHTTPError, HTTPError, LocalEntryNotFoundError, OSError) as error:
        raise InputUnavailable(
            f"input.path: hf://datasets/{repository.id}: cannot be fetched: {printable(str(error))[:200]}"
        ) from error
    if repository.commit not in (None, folder.name):
        raise InputUnavailable(f"input.path: hf://datasets/{repository.id}: has changed just now; run again")
    return folder


def _literal(file: str) -> str:
    """A pattern that matches this name alone."""
    return re.sub(r"([*?[])", r"[\1]", file)


def _below(files: Sequence[str], pattern: str) -> list[str]:
    if pattern in files:
        return [pattern]
    folder = pattern.rstrip("/") + "/"
    return [file for file in files if file.startswith(folder) or fnmatch.fnmatchcase(file, pattern)]


def _is_input(file: str, config: InputConfig) -> bool:
    parts = PurePosixPath(file).parts
    return not any(map(is_passed_over, parts)) and (
        config.format != "auto" or suffix_format(PurePosixPath(file)) is not None
    )


def _files_of_split(repository: _Repository, config: InputConfig) -> tuple[_Repository, list[str]]:
    configs = _configs_of_card(repository)
    if not configs:
        files = [file for file in repository.files if _is_input(file, config)]
        if not files and repository.revision is None:
            repository = _look_up(repository.id, _CONVERTED)
            configs = _converted_configs(repository.files)
        else:
            configs = {"default": _splits_by_name(files)}
    where = f"hf://datasets/{repository.id}"
    name = _choice("config", configs, config.config, where)
    splits = {split: [file for file in files if _is_input(file, config)] for split, files in configs[name].items()}
    split = _choice("split", splits, config.split, where)
    if not splits[split]:
        raise InputError(f"input.path: {where}: the split {split!r} has no file of a format that is read")
    return repository, splits[split]


def _choice(key: str, choices: Mapping[str, Any], asked: str | None, where: str) -> str:
    """The one asked for, or the only one, or the one named `default`."""
    if asked is not None:
        if asked not in choices:
            raise InputError(f"input.{key}: {where} has no {asked!r}{near_names(asked, choices)}")
        return asked
    if len(choices) == 1:
        return next(iter(choices))
    if "default" in choices:
        return "default"
    if not choices:
        raise InputError(f"input.path: {where}: has no input files")
    raise InputError(f"input.path: {where} has several; set input.{key} to one of {', '.join(map(repr, choices))}")


def _configs_of_card(repository: _Repository) -> dict[str, Splits]:
    """What the head of README.md says in `configs`; empty where it says nothing."""
    if _CARD not in repository.files:
        return {}
    try:
        metadata = metadata_load(_download(repository, [_CARD]) / _CARD) or {}
    except (ValueError, OSError) as error:
        raise InputError(f"input.path: hf://datasets/{repository.id}: its README.md cannot be read: {error}") from error
    configs: dict[str, Splits] = {}
    entries = metadata.get("configs")
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or "data_files" not in entry:
            continue
        folder = str(entry.get("data_dir") or "")
        splits: Splits = {}
        for split, patterns in _data_files(entry["data_files"]):
            wanted = [str(PurePosixPath(folder, pattern)) for pattern in patterns]
            found = [file for pattern in wanted for file in _below(repository.files, pattern)]
            splits.setdefault(split, []).extend(dict.fromkeys(found))
        configs[str(entry.get("config_name", "default"))] = splits
        if entry.get("default"):
            configs["default"] = splits
    return configs


def _data_files(value: Any) -> list[tuple[str, list[str]]]:
    """Split and patterns, from the forms that a card may have."""
    if isinstance(value, str):
        return [("train", [value])]
    if isinstance(value, dict):
        return [(str(split), _texts(patterns)) for split, patterns in value.items()]
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return [(str(each.get("split", "train")), _texts(each.get("path"))) for each in value]
    return [("train", _texts(value))]


def _texts(value: Any) -> list[str]:
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def _splits_by_name(files: Sequence[str]) -> Splits:
    """By the words of folders and names; `train` for all where none has one."""
    splits: Splits = {}
    for file in files:
        words = set(re.split(r"[^a-z]+", file.lower()))
        split = next((name for name, known in _SPLITS.items() if not words.isdisjoint(known)), None)
        if split is not None:
            splits.setdefault(split, []).append(file)
    return splits or {"train": list(files)}


def _converted_configs(files: Sequence[str]) -> dict[str, Splits]:
    """CONFIG/SPLIT/NNNN.parquet."""
    configs: dict[str, Splits] = {}
    for file in files:
        parts = PurePosixPath(file).parts
        if len(parts) == 3 and file.endswith(".parquet"):
            configs.setdefault(parts[0], {}).setdefault(parts[1], []).append(file)
    return configs
