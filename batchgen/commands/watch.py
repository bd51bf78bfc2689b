"""`batchgen watch`: a run as it goes, in a terminal, from the files of its output."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live as LiveDisplay
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from batchgen.data.files import OutputFiles
from batchgen.pipeline.progress import ProgressSnapshot
from batchgen.pipeline.stored import read_output
from batchgen.pipeline.whole_file import whole_file
from batchgen.report.live import Live, look
from batchgen.report.prometheus import prometheus_text
from batchgen.report.series import series_of
from batchgen.units import duration, plural

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 48
_MAX_SHARE = 0.1
"""Of the time that looking may take: where an output has very many files, it is looked at less often."""


def watch(output: Path, *, interval: float, once: bool, as_json: bool, prometheus: Path | None) -> None:
    """Show the output until it is done or the user has seen enough; raises JobError where there is none."""
    looks = _looks(output, interval, once, prometheus)
    console = Console(highlight=False)
    try:
        if as_json:
            for live in looks:
                print(json.dumps(live.to_json()), flush=True)
        elif once or not console.is_terminal:
            for live in looks:
                console.print(panel(live) if once else Text(line(live)))
        else:
            with LiveDisplay(console=console, auto_refresh=False) as display:
                for live in looks:
                    display.update(panel(live), refresh=True)
    except KeyboardInterrupt:
        return


def _looks(
    output: Path, interval: float, once: bool, prometheus: Path | None, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Live]:
    """One look after another, until every row is committed and no run is at work."""
    while True:
        began = time.monotonic()
        live = look(read_output(OutputFiles(), output))
        if prometheus is not None:
            # Whole or not at all: a collector may read it at any moment.
            with whole_file(prometheus) as file:
                file.write(prometheus_text(live))
        yield live
        if once or (live.status.is_done and live.status.holder is None):
            return
        sleep(max(interval, (time.monotonic() - began) / _MAX_SHARE))


def state(live: Live) -> str:
    """`at work on a`, `done`, `not at work`, or what is damaged."""
    if live.status.problems:
        return f"damaged: {live.status.problems[0]}"
    if live.is_at_work:
        silent = live.silent_seconds
        late = f", silent for {duration(round(silent))}" if silent is not None and silent >= 10 else ""
        return f"at work on {live.host}{late}" if live.host else f"at work{late}"
    return "done" if live.status.is_done else "not at work; run the job again to go on"


def line(live: Live) -> str:
    """Where there is no terminal."""
    parts = [f"{live.num_done:,}/{live.status.num_rows:,} rows", state(live)]
    if live.is_at_work and live.tokens_per_second is not None:
        parts.append(f"{live.tokens_per_second:,.0f} tok/s")
        if live.seconds_left is not None:
            parts.append(f"{duration(max(1, round(live.seconds_left)))} left")
    if live.status.num_errors:
        parts.append(plural(live.status.num_errors, "error"))
    return ", ".join(parts)


def panel(live: Live) -> RenderableType:
    """What the terminal shows."""
    found, snapshot = live.status, live.snapshot
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("rows", ProgressBar(total=max(1, found.num_rows), completed=live.num_done, width=_WIDTH))
    counts = f"{live.num_done:,} of {found.num_rows:,} done, {found.num_committed:,} committed"
    table.add_row("", counts)
    if found.num_errors:
        codes = ", ".join(f"{count:,} {code}" for code, count in sorted(found.errors.items()))
        table.add_row("errors", Text(codes, style="red"))
    if snapshot is not None and live.run is not None:
        if live.is_at_work:
            table.add_row("speed", _speed(live))
        if spark := _spark(live):
            table.add_row("", Text(spark, style="blue"))
        if live.is_at_work:
            # What a run held last says nothing once it has ended.
            _add_engine(table, snapshot)
    title = Text(f"{Path(found.output).name}: {state(live)}", style="bold")
    return Panel(Group(table), title=title, title_align="left")


def _add_engine(table: Table, snapshot: ProgressSnapshot) -> None:
    table.add_row("batch", f"{snapshot.num_running:,} running, {snapshot.num_waiting:,} waiting")
    table.add_row("KV cache", ProgressBar(total=1.0, completed=snapshot.kv_use, width=_WIDTH))
    table.add_row(
        "",
        f"{snapshot.kv_use:.0%} in use, {1 - snapshot.kv_useful:.1%} of it empty; prefix hits "
        f"{snapshot.cached_share:.0%}; {snapshot.num_preemptions:,} preemptions, {snapshot.num_copies:,} copies",
    )


def _speed(live: Live) -> str:
    parts = [f"{live.tokens_per_second or 0:,.0f} tok/s"]
    if live.prompt_tokens_per_second >= 1:
        parts.append(f"{live.prompt_tokens_per_second:,.0f} prompt tok/s")
    if live.seconds_left is not None and live.num_done < live.status.num_rows:
        parts.append(f"about {duration(max(1, round(live.seconds_left)))} left")
    return ", ".join(parts)


def _spark(live: Live) -> str:
    """Generated tokens a second over the whole run, as a row of small bars."""
    assert live.run is not None
    rates = [rate or 0.0 for _, rate in series_of([live.run]).throughput]
    if len(rates) > _WIDTH:
        size = len(rates) / _WIDTH
        parts = [rates[int(n * size) : max(int(n * size) + 1, int((n + 1) * size))] for n in range(_WIDTH)]
        rates = [sum(part) / len(part) for part in parts]
    top = max(rates, default=0.0)
    return "".join(_BARS[min(7, int(8 * rate / top))] for rate in rates) if top > 0 else ""
