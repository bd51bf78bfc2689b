"""pyarrow does without pandas until someone asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_arrays_and_files_are_made_without_pandas_and_converted_when_asked() -> None:
    pytest.importorskip("pandas")
    script = (
        "import sys, pyarrow as pa, pyarrow.parquet as pq\n"
        "from batchgen.data.without_pandas import leave_pandas_out\n"
        "leave_pandas_out()\n"
        "table = pa.table({'a': pa.array([1, None])})\n"
        "pq.write_table(table, pa.BufferOutputStream())\n"
        "assert 'pandas' not in sys.modules\n"
        "frame = table.to_pandas()\n"
        "assert frame['a'].tolist()[0] == 1.0\n"
        "assert pa.Table.from_pandas(frame).num_rows == 2 and len(pa.array(frame['a'])) == 2\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
