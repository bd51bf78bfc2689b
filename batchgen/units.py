"""Sizes and times as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

_BYTE_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|[smhd])\s*)+")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhd])")


def plural(count: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def parse_bytes(text: str) -> int:
    """`256MiB` -> 268435456; also kB, MB, GB, TB (powers of 1000) and KiB, GiB, TiB. Raises ValueError."""
    match = _BYTES.fullmatch(text.strip())
    unit = _BYTE_UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f'must be a number of bytes such as 256MiB or 2GB, got the text "{text}"')
    return int(Fraction(match.group(1)) * unit)


def parse_duration(text: str) -> float:
    """`30m` -> 1800.0 seconds; also ms, s, h, d and sums such as `1h30m`. Raises ValueError."""
    if not _DURATION.fullmatch(text.strip()):
        raise ValueError(f'must be seconds or a time such as 90s, 30m or 1h30m, got the text "{text}"')
    return sum(float(number) * _DURATION_UNITS[unit] for number, unit in _DURATION_PART.findall(text))


def duration(seconds: float) -> str:
    """`3.2 s`, `1 min 20 s`, `2 h 05 min`; a whole number stays one."""
    if seconds < 10:
        return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left:02} min" if hours else f"{minutes} min {rest:02} s"
