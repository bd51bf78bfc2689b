from __future__ import annotations

import pyarrow as pa
import pytest

from batchgen.config import EngineConfig, InputConfig, RunConfig
from batchgen.config_values import ARROW_TYPES, check_template, describe


@pytest.mark.parametrize("name", ARROW_TYPES)
def test_every_type_that_a_job_may_name_is_one_of_arrows(name: str) -> None:
    assert isinstance(pa.type_for_alias(name), pa.DataType)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, "nothing"), (True, "true"), (-1, "-1"), ("4", 'the text "4"'), ("ü", 'the text "ü"')),
        *(([], "an empty list"), ([1], "a list"), ({}, "a mapping"), ("x" * 50, f'the text "{"x" * 39}…"')),
    ],
)
def test_describe_ends_a_sentence(value: object, text: str) -> None:
    assert describe(value) == text


def test_a_template_is_parsed_but_never_rendered() -> None:
    source = "{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}{% break %}"
    with pytest.raises(ValueError, match="line 1 of it"):
        check_template(source + "{% endfor %}")
    assert check_template("{{ 1 / 0 }}") == "{{ 1 / 0 }}"


def test_the_template_error_names_the_line() -> None:
    with pytest.raises(ValueError, match="line 2 of it"):
        check_template("one\n{{ two }\nthree")


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "AUTO", "ten"])
def test_a_count_is_auto_or_a_whole_number_from_1(value: object) -> None:
    with pytest.raises(ValueError, match=r'must be "auto" or a whole number >= 1'):
        EngineConfig.model_validate({"max_sequences": value})


@pytest.mark.parametrize("value", [True, 0, 1.5, None, "12 apples"])
def test_memory_is_auto_or_a_number_of_bytes(value: object) -> None:
    with pytest.raises(ValueError, match="number of bytes such as 256MiB"):
        EngineConfig.model_validate({"kv_cache_memory": value})


@pytest.mark.parametrize("value", [True, -0.5, float("inf"), float("nan"), [], "soon"])
def test_a_time_is_finite_and_not_negative(value: object) -> None:
    with pytest.raises(ValueError, match="must be seconds or a time"):
        RunConfig.model_validate({"grace": value})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (EngineConfig, {"max_sequences": 2**31}, "whole number >= 1 and <= 2147483647, got"),
        (EngineConfig, {"threads": 100_000}, "whole number >= 1 and <= 4096, got"),
        (RunConfig, {"workers": 10**22}, "whole number >= 1 and <= 4096, got"),
        (EngineConfig, {"kv_cache_memory": 10**30}, "number of bytes such as 256MiB, got"),
        (InputConfig, {"path": "x", "max_row_bytes": 10**22}, "must be a number of bytes such as 256MiB, got"),
        (InputConfig, {"path": "x", "max_row_bytes": "auto"}, "must be a number of bytes such as 256MiB, got"),
        (RunConfig, {"max_runtime": 1e300}, "must be at most 1000000000 seconds, got"),
        (RunConfig, {"grace": "99999999d"}, "must be at most 1000000000 seconds, got"),
    ],
)
def test_a_number_with_too_many_digits_is_refused_before_anything_takes_it(
    section: type[EngineConfig] | type[RunConfig] | type[InputConfig], values: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        section.model_validate(values)


def test_max_runtime_may_be_left_open_but_grace_not() -> None:
    assert RunConfig.model_validate({"max_runtime": None}).max_runtime is None
    with pytest.raises(ValueError, match="got nothing"):
        RunConfig.model_validate({"grace": None})


def test_paths_are_one_or_several() -> None:
    assert InputConfig(path="a").path == "a"
    assert InputConfig.model_validate({"path": ("a", "b")}).path == ["a", "b"]
    with pytest.raises(ValueError, match="must be a path or pattern"):
        InputConfig.model_validate({"path": ["a", ""]})
