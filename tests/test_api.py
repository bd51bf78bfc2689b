from __future__ import annotations

import inspect

import pytest

import batchgen
from batchgen import config, errors


def test_all_is_sorted_and_every_name_exists() -> None:
    public = [name for name in batchgen.__all__ if not name.startswith("__")]
    assert public == sorted(public)
    assert all(getattr(batchgen, name) is not None for name in batchgen.__all__)


@pytest.mark.parametrize("name", [name for name in batchgen.__all__ if not name.startswith("__")])
def test_public_name_has_a_docstring_of_its_own(name: str) -> None:
    assert (inspect.getdoc(getattr(batchgen, name)) or "").strip()


@pytest.mark.parametrize("name", ["generate", "add", "step", "abort", "close"])
def test_public_engine_method_has_a_docstring(name: str) -> None:
    assert inspect.getdoc(getattr(batchgen.Engine, name))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Enginee'"):
        batchgen.Enginee  # noqa: B018


def test_job_classes_are_documented() -> None:
    assert all(inspect.getdoc(getattr(config, name)) for name in config.__all__ if name != "JSON")


def test_every_error_has_a_docstring_and_stands_in_the_tree_at_the_top_of_its_file() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.BatchgenError)]
    lines = (errors.__doc__ or "").splitlines()
    for kind in kinds:
        assert kind.__doc__
        (line,) = [line for line in lines if f" {kind.__name__} " in f" {line} "]
        assert str(int(kind.exit_code)) in line
