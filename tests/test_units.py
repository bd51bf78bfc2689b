from __future__ import annotations

import pytest

from batchgen.units import parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("10b", 10),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("256MiB", 256 << 20),
        ("1.5 GiB", 3 << 29),
        ("9" * 400 + ".5kB", int("9" * 400) * 1000 + 500),
        ("1tb", 10**12),
    ],
)
def test_bytes_are_read_with_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "MiB", "1 parsec", "-1", "1,5GB", "1e3"])
def test_other_texts_are_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400), ("2d 1s", 172801)],
)
def test_durations_are_sums_of_parts(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "1", "30 minutes", "1h30", "-1s"])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="must be seconds or a time"):
        parse_duration(text)
