"""The largest numbers that a job file and the Python interface take: more is a slip of the finger."""

from __future__ import annotations

MAX_COUNT = 2**31 - 1
"""Of tokens and sequences, and token ids: what columns of 32 bits hold."""
MAX_PROCESSES = 4096
"""Of workers, and of threads: a number with too many digits must not start them."""
