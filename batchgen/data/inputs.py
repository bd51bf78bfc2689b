"""Which files a job reads: explicit paths, patterns and directories made one frozen, sorted list."""

from __future__ import annotations

import difflib
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from batchgen.config import InputConfig
from batchgen.data.hub_inputs import HUB_SCHEME, fetch_dataset, saved_split
from batchgen.data.input_names import FORMAT_SUFFIXES, is_passed_over, suffix_format
from batchgen.data.input_rows import FormatName, InputFile
from batchgen.data.remote_inputs import fetch_urls, is_url
from batchgen.errors import InputError


class FoundInputs(NamedTuple):
    """The frozen list of input files, and what was not taken into it."""

    files: list[InputFile]
    passed_over: list[str]
    """Names that patterns and directories passed over, sorted, each once."""


def list_inputs(config: InputConfig, base_dir: Path) -> list[InputFile]:
    """The files of `find_inputs`."""
    return find_inputs(config, base_dir).files


def find_inputs(config: InputConfig, base_dir: Path, own: Path | None = None) -> FoundInputs:
    """All files of `input.path`, sorted by name; relative paths start at `base_dir`, and those of URLs are fetched.

    Patterns and directories pass over hidden names, names with a leading underscore, what lies in `own`, where the
    job's own rows go, and, in directories, names that no format claims; a path that is written out is taken as it is.
    InputError where nothing matches, where a file is named twice, or where a file's format cannot be told.
    """
    patterns = [config.path] if isinstance(config.path, str) else list(config.path)
    base_dir = base_dir.absolute()
    skipped: set[str] = set()
    named = [each for pattern in patterns for each in _named(pattern, base_dir, config, skipped, own)]
    _refuse_twice(named)
    named.sort()
    files = [InputFile(source, path, name, _format_of(path, config)) for source, (name, path) in enumerate(named)]
    return FoundInputs(files, sorted(skipped))


def _named(
    pattern: str, base_dir: Path, config: InputConfig, skipped: set[str], own: Path | None
) -> list[tuple[str, Path]]:
    """Name and place of each file of one pattern."""
    if pattern.startswith(HUB_SCHEME):
        return fetch_dataset(pattern, config, skipped)
    if is_url(pattern):
        return fetch_urls(pattern, config, skipped)
    try:
        return [(_name(path, base_dir), path) for path in _expand(pattern, base_dir, config, skipped, own)]
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise InputError(f"input.path: {pattern}: cannot be read: {error.strerror}{where}") from error


def _expand(pattern: str, base_dir: Path, config: InputConfig, skipped: set[str], own: Path | None) -> list[Path]:
    own_directory = None if own is None else os.path.realpath(own)
    path = base_dir / Path(os.path.expanduser(pattern))
    if path.is_dir():
        path = saved_split(path, config)
        found = sorted(_files_below(path, config, skipped, own_directory))
        if not found:
            raise InputError(f"input.path: {pattern}: the directory {path} holds no input files")
        return found
    if path.exists():
        if not path.is_file():
            raise InputError(f"input.path: {pattern}: is no regular file; inputs are read more than once")
        return [path]
    if not glob.has_magic(pattern):
        raise InputError(f"input.path: {pattern}: no such file ({path}){_near(path)}")
    # In a name that is looked up, base_dir stands for itself.
    expanded = Path(os.path.expanduser(pattern))
    matches = glob.glob(os.path.join(glob.escape(str(base_dir)), expanded), recursive=True)
    files = []
    for match in sorted(map(Path, matches)):
        is_own = os.path.realpath(match.parent) == own_directory
        if match.is_file() and not is_own and not _passes_over(expanded, match, base_dir):
            files.append(match)
        else:
            skipped.add(match.name)
    if not files:
        raise InputError(f"input.path: {pattern}: matches no file (looked in {base_dir})")
    return files


def _passes_over(pattern: Path, match: Path, base_dir: Path) -> bool:
    """Whether a match has a name that is passed over; not where the pattern asks for names that begin so."""
    asked = {part[0] for part in pattern.parts if part.startswith(("_", "."))}
    below = match.relative_to(base_dir) if match.is_relative_to(base_dir) else match
    return any(is_passed_over(part) and part[0] not in asked for part in below.parts)


def _files_below(directory: Path, config: InputConfig, skipped: set[str], own: str | None) -> Iterator[Path]:
    seen: set[str] = set()
    for folder, folders, names in os.walk(directory, onerror=_raise, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen or real == own:
            folders.clear()
            continue
        seen.add(real)
        skipped.update(name for name in folders if is_passed_over(name))
        folders[:] = sorted(name for name in folders if not is_passed_over(name))
        for name in names:
            path = Path(folder, name)
            is_claimed = config.format != "auto" or suffix_format(path) is not None
            if is_passed_over(name) or not is_claimed or not path.is_file():
                skipped.add(name)
            else:
                yield path


def _raise(error: OSError) -> None:
    """A folder that cannot be looked into may hold rows: it is not passed over."""
    raise error


def _refuse_twice(named: Sequence[tuple[str, Path]]) -> None:
    seen: dict[str, str] = {}
    for name, path in named:
        # Copies of what lies elsewhere may share one file, where their content is the same.
        real = name if is_url(name) else os.path.realpath(path)
        shown = name if is_url(name) else str(path)
        if real in seen:
            same = f" (as {seen[real]})" if seen[real] != shown else ""
            raise InputError(f"input.path: {shown} is named twice{same}; its rows would be answered twice")
        seen[real] = shown


def _name(path: Path, base_dir: Path) -> str:
    clean = Path(os.path.normpath(path))
    return (clean.relative_to(base_dir) if clean.is_relative_to(base_dir) else clean).as_posix()


def _format_of(path: Path, config: InputConfig) -> FormatName:
    if config.format != "auto":
        return config.format
    name = suffix_format(path)
    if name is None:
        known = ", ".join(FORMAT_SUFFIXES)
        raise InputError(f"{path}: its name tells no format (known: {known}); set input.format")
    return name


def _near(path: Path) -> str:
    if not path.parent.is_dir():
        return f"; there is no directory {path.parent}"
    near = difflib.get_close_matches(path.name, os.listdir(path.parent), n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
