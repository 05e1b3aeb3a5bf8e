"""The timeline: streams and threads over time, as a figure, and as a page's element that zooms."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from PIL import Image

from nsightkit.analysis.core import intervals
from nsightkit.errors import UsageError
from nsightkit.plots import style
from nsightkit.plots.lanes import Lanes, Most, find_lanes
from nsightkit.plots.looks import BLUE, DARK_GREY, GREEN, GREY, PURPLE, duration, spoken, time_unit
from nsightkit.plots.packing import InteractiveTimeline, pack
from nsightkit.plots.style import new_figure, nothing, plain, rectangles
from nsightkit.trace.model import Trace

_KINDS = {"kernels": ("kernel", BLUE), "memops": ("copy or memset", GREEN), "graphs": ("CUDA graph", PURPLE)}

#: Horizontal resolution; a lane with more events than this is drawn by its coverage of these columns.
_COLUMNS = 1600
#: With more traces than this only the first has a static figure.
_MOST_FALLBACKS = 6
#: A stand-in for the page's own text colour, which matplotlib cannot name.
_INK = "#010203"


def timeline(
    trace: Trace,
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    levels: int = 3,
    title: str = "Timeline",
) -> Figure:
    """GPU streams and CPU ranges over time.

    A lane that holds more events than the figure has columns is drawn by the share of each column that events
    cover, so millions of kernels cost one histogram and a stream that is half idle looks half idle. The eight streams
    and the three CPU threads with most time are drawn.

    Parameters
    ----------
    trace : Trace
    start_ns, end_ns : int, optional
        The window to draw, nanoseconds on the trace's clock; all of it when omitted.
    levels : int, default 3
        How many nesting levels of CPU ranges (or framework ops, in a trace without ranges) to draw a thread.
    title : str, default "Timeline"

    Returns
    -------
    matplotlib.figure.Figure
    """
    filled = find_lanes(trace, Most(levels=levels))
    if not filled:
        return nothing(*new_figure(1.6, title), title, "no events to draw")
    first = int(min(lane.start.min() for lane in filled)) if start_ns is None else start_ns
    last = int(max(lane.end.max() for lane in filled)) if end_ns is None else end_ns
    last = max(last, first + 1)
    rows = {lane.row: plain(lane.label, 30) for lane in filled}
    place = {row: i for i, row in enumerate(sorted(rows))}
    figure, axes = new_figure(1.3 + 0.34 * max(len(place), 2), title)
    scale, unit = time_unit(last - first)
    width = (last - first) / scale
    used: dict[str, str] = {}
    for lane in filled:
        inside = (lane.end > first) & (lane.start < last)
        start, end = (np.clip(side[inside], first, last) - first for side in (lane.start, lane.end))
        kind, colour = _KINDS.get(lane.table, ("", GREY))
        _draw(axes, start, end, place[lane.row], colour, last - first, scale)
        if kind and inside.any():
            used[kind] = colour
        elif not kind:
            _write_names(axes, start / scale, end / scale, lane.names[inside], place[lane.row], width)
    axes.set_yticks(list(place.values()), labels=[rows[row] for row in place], fontsize=9)
    axes.tick_params(axis="y", length=0)
    for kind, colour in used.items():
        axes.plot([], [], "s", color=colour, markersize=9, label=kind)  # for the legend alone
    late = first > 0.01 * (last - first)  # else it cannot be seen
    axes.set(xlim=(0, width), ylim=(len(place) - 0.4, -0.6))
    axes.set_xlabel(f"time since {duration(first)} ({unit})" if late else f"time ({unit})")
    style.legend(figure, len(used))
    sizes = [(lane.label, f"{len(lane.start):,} events") for lane in filled if lane.label]
    return style.described(figure, f"{title}, lanes over {duration(last - first)}: {spoken(sizes)}.")


def _draw(axes: Any, start: np.ndarray, end: np.ndarray, row: int, colour: str, length_ns: int, scale: float) -> None:
    low, high = row + 0.36, row - 0.36
    if len(start) > _COLUMNS:
        edges = np.linspace(0, length_ns, _COLUMNS + 1).astype(np.int64)
        share = intervals.Coverage(start, end).of(edges[:-1], edges[1:]) / np.maximum(np.diff(edges), 1)
        sides = np.repeat(edges, 2)[1:-1] / scale
        axes.fill_between(sides, low, low - 0.72 * np.repeat(share, 2), color=colour, linewidth=0)
    elif len(start):
        # At least one column wide: a 2 µs kernel in a 10 s window must not vanish.
        shapes = rectangles(start / scale, np.maximum(end, start + length_ns / _COLUMNS) / scale, high, low)
        # Two shades of grey in turn: adjacent ranges must not read as one.
        shades = [colour, DARK_GREY] if colour == GREY else [colour]
        axes.add_collection(PolyCollection(shapes, facecolors=shades, edgecolors="none"))


def _write_names(axes: Any, start: np.ndarray, end: np.ndarray, names: Any, row: int, width: float) -> None:
    room = (end - start) / width * 78  # characters of size 8 that fit across the axes
    widest = np.argsort(room)[::-1][:40]
    for i in widest[room[widest] >= 4]:
        axes.text(
            (start[i] + end[i]) / 2, row, plain(names[i], max(int(room[i]), 2)), ha="center", va="center", fontsize=8,
            color="white", clip_on=True,
        )  # fmt: skip


def interactive_timeline(
    traces: Trace | Mapping[str, Trace],
    *,
    levels: int = 3,
    title: str = "Timeline",
    most_bytes: int = 250_000,
) -> InteractiveTimeline:
    """GPU streams and CPU ranges over time, to zoom and pan in a page without any network.

    A reader switches between two views, and between the traces where there are several. *Raw* has each event as it was
    recorded, a row a stream and a row a nesting level of a thread. *Rolled up* has a row a category of work
    (:mod:`nsightkit.analysis.core.categories`) of each device, as the share of time it covers, and above them the share
    of time in which the device was busy; where streams overlap, time counts once. A trace without GPU work is rolled up
    by the names of its framework ops, else of its CPU ranges.

    Everything is packed ahead, with coarser levels for long windows, so that a page draws a few marks a pixel
    whatever the number of events. Where the events do not fit in `most_bytes`, the shortest neighbours are merged;
    the page says so, and counts and sums of durations stay exact. Without scripts the page shows the figures
    that :func:`timeline` draws.

    Parameters
    ----------
    traces : Trace or mapping of str to Trace
        What to show, by the label a reader chooses it with.
    levels : int, default 3
        How many nesting levels of CPU ranges (or framework ops, in a trace without ranges) to show a thread.
    title : str, default "Timeline"
    most_bytes : int, default 250_000
        Size of the packed events in the page. Many traces of many differently named ranges can need more.

    Returns
    -------
    InteractiveTimeline

    Raises
    ------
    UsageError
        No trace.
    """
    several = {"": traces} if isinstance(traces, Trace) else dict(traces)
    if not several:
        raise UsageError("an interactive timeline needs a trace")
    drawn = {label: _static(trace, f"{title}: {label}" if label else title, levels) for label, trace in several.items()}
    # Pictures of ten traces weigh as much as a page; their sentences are there.
    pictures = [svg for svg, _ in drawn.values()][: 1 if len(drawn) > _MOST_FALLBACKS else None]
    if len(drawn) > 1:
        pictures = [
            f"<details{'' if number else ' open'}><summary>{html.escape(label)}</summary>{svg}</details>"
            for number, (label, svg) in enumerate(zip(drawn, pictures, strict=False))
        ]
    return pack(
        {label: Lanes(find_lanes(trace, Most(levels=levels), detailed=True)) for label, trace in several.items()},
        fallback="".join(pictures),
        said=[sentence for _, sentence in drawn.values()],
        title=title,
        layout="switch",
        most_bytes=most_bytes,
    )


def _static(trace: Trace, title: str, levels: int) -> tuple[str, str]:
    """Draw the static figure as SVG in the page's own text colour, with its marks as one picture; and its sentence."""
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": title, "savefig.dpi": 144}
    style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    with mpl.rc_context(style):
        figure = timeline(trace, title=title, levels=levels)
        # Tens of thousands of corners would weigh more than all of the page; below 1.2 lies what is filled.
        figure.axes[0].set_rasterization_zorder(1.2)
        sentence = str(figure.get_label())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    svg = out.getvalue()
    opening = f'<svg role="img" aria-label="{html.escape(sentence)}" style="min-width: 34rem; max-width: 100%" '
    # Names of groups would be there once a figure; only the ids that something refers to are needed.
    used = set(re.findall(r"(?:#|url\(#)([\w-]+)", svg))
    for pattern, new in (
        (r"^.*?<svg ", lambda _: opening),
        # Of an element: a name can hold the rest.
        (r"(<image [^<>]*base64,)([^\"]*)", lambda found: found[1] + _few_colours(found[2])),
        (r"<metadata>.*?</metadata>", lambda _: ""),
        (r"font-family: [^;<>]*;", lambda _: "font-family: 'DejaVu Sans', Verdana, sans-serif;"),
        (r' id="([\w-]+)"', lambda found: found[0] if found[1] in used else ""),
        (_INK, lambda _: "currentColor"),
    ):
        svg = re.sub(pattern, new, svg, flags=re.DOTALL)
    # On a narrow screen the figure scrolls inside itself, which the keyboard must reach.
    name = html.escape(title)
    return f'<div role="group" aria-label="{name}" tabindex="0" style="overflow-x: auto">{svg}</div>', sentence


def _few_colours(png: str) -> str:
    """Encode a picture of flat marks with a palette: a quarter of the size."""
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    out = io.BytesIO()
    image.quantize(48, Image.Quantize.FASTOCTREE).save(out, format="png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()
