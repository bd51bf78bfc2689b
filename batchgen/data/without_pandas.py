"""pyarrow by itself."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pyarrow as pa


def leave_pandas_out() -> None:
    """Keep pyarrow from importing pandas with its first array, which takes longer than the rows of a small job.

    pyarrow looks only once whether values may be those of pandas, and ours never are. Whoever asks for a conversion to
    pandas still gets one.
    """
    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        pa.array([])
    finally:
        sys.meta_path.remove(hidden)


class _Hidden(MetaPathFinder):
    """As if pandas were not installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """None leaves a module to others."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is left out", name=fullname)
