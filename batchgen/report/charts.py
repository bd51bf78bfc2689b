"""Charts as SVG within the page: no script, no network; colours are the page's, so they follow dark and light."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pygal
from pygal.style import Style

from batchgen.report.series import Line

# pygal's import hook for plugins, of which none is used, makes every later import warn on Python 3.11.
sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, pygal.PluginImportFixer)]

WIDTH, HEIGHT = 480, 260
"""Of the view box; the page scales it."""
COLOURS = ("var(--one)", "var(--two)", "var(--three)")

_STYLE = Style(
    background="transparent",
    plot_background="transparent",
    foreground="var(--text)",
    foreground_strong="var(--text)",
    foreground_subtle="var(--line)",
    guide_stroke_color="var(--line)",
    major_guide_stroke_color="var(--line)",
    colors=COLOURS,
    value_colors=("var(--text)",) * len(COLOURS),
    font_family="inherit",
    label_font_size=13,
    major_label_font_size=13,
    legend_font_size=14,
    no_data_font_size=18,
    transition="0s",
    opacity=".75",
)


def lines(named: Mapping[str, Line], unit: str) -> str:
    """A chart of one or more lines over time at work."""
    seconds = max((at for line in named.values() for at, _ in line), default=0.0)
    size, name = _time_unit(seconds)
    chart = _chart(
        pygal.XY,
        show_dots=False,
        fill=len(named) == 1 and all(value is not None for line in named.values() for _, value in line),
        stroke_style={"width": 2},
        show_x_guides=False,
        show_legend=len(named) > 1,
        allow_interruptions=True,
        x_value_formatter=lambda value: f"{value:g} {name}",
        value_formatter=lambda value: f"{value:,.4g}{unit}",
        range=None if any(value for line in named.values() for _, value in line) else (0, 1),
    )
    chart.include_x_axis = True
    for title, line in named.items():
        chart.add(title, [(at / size, value) for at, value in line])
    return _svg(chart)


def histogram(bins: Sequence[tuple[int, int, int]], title: str) -> str:
    """How many values lie in each bin of lengths in tokens."""
    chart = _chart(
        pygal.Histogram,
        show_legend=False,
        x_value_formatter=lambda value: f"{value:,.0f}",
        value_formatter=lambda value: f"{value:,.0f}",
    )
    chart.add(title, [(count, first, last + 1) for first, last, count in bins])
    return _svg(chart)


def bars(values: Mapping[str, float], unit: str) -> str:
    """One horizontal bar for each name."""
    chart = _chart(
        pygal.HorizontalBar,
        height=70 + 45 * max(1, len(values)),
        print_values=True,
        print_values_position="center",
        show_legend=False,
        show_y_guides=False,
        x_labels=list(values),
        include_x_axis=True,
        value_formatter=lambda value: f"{value:,.1f}{unit}".replace(".0", ""),
    )
    chart.add("", list(values.values()))
    return _svg(chart)


def _chart(kind: Any, **options: Any) -> Any:
    settings = {
        "style": _STYLE,
        "js": [],
        "width": WIDTH,
        "height": HEIGHT,
        "margin": 6,
        "spacing": 8,
        "legend_at_bottom": True,
        "legend_box_size": 12,
        "show_minor_x_labels": False,
        "x_labels_major_count": 5,
        "y_labels_major_count": 5,
        "show_minor_y_labels": False,
        "no_data_text": "no data",
        "truncate_label": -1,
        "disable_xml_declaration": True,
        **options,
    }
    return kind(**{name: value for name, value in settings.items() if value is not None})


def _svg(chart: Any) -> str:
    chart.add_xml_filter(_without_scripts)
    text: str = chart.render(is_unicode=True)
    return text


def _without_scripts(root: Any) -> Any:
    """pygal leaves its settings behind for a script of its own, which is not used."""
    for parent in [*root.iter()]:
        for child in [child for child in parent if str(child.tag).endswith("script")]:
            parent.remove(child)
    return root


def _time_unit(seconds: float) -> tuple[float, str]:
    if seconds < 180:
        return 1.0, "s"
    return (60.0, "min") if seconds < 3 * 3600 else (3600.0, "h")
