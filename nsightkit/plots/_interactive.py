"""The timeline that zooms, with the static figure that shows where scripts do not run."""

from __future__ import annotations

import base64
import html
import io
import re
from collections.abc import Mapping
from typing import Any, Literal

import matplotlib as mpl
import matplotlib.pyplot as plt
from PIL import Image

from nsightkit.errors import UsageError
from nsightkit.plots._packing import InteractiveTimeline, pack
from nsightkit.plots._timeline import timeline
from nsightkit.trace.model import Trace

#: With more traces than this only the first has a static figure.
_MOST_FALLBACKS = 6
#: A stand-in for the page's own text colour, which matplotlib cannot name.
_INK = "#010203"


def interactive_timeline(
    traces: Trace | Mapping[str, Trace],
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    levels: int = 3,
    most_streams: int = 8,
    most_threads: int = 3,
    view: Literal["raw", "rolled"] = "raw",
    layout: Literal["switch", "stacked"] = "switch",
    title: str = "Timeline",
    most_bytes: int = 250_000,
) -> InteractiveTimeline:
    """GPU streams and CPU ranges over time, to zoom and pan in a page without any network.

    A reader switches between two views. *Raw* has each event as it was recorded, a row a stream and a row a nesting
    level of a thread. *Rolled up* has a row a category of work (:mod:`nsightkit.analysis.core.categories`) of each
    device, as the share of time it covers, and above them the share of time in which the device was busy; where streams
    overlap, time counts once. A trace without GPU work is rolled up by the names of its framework ops, else of its
    CPU ranges.

    Everything is packed ahead, with coarser levels for long windows, so that a page draws a few marks a pixel
    whatever the number of events. Where the events do not fit in `most_bytes`, the shortest neighbours are merged;
    the page says so, and counts and sums of durations stay exact. Without scripts the page shows the figures
    that :func:`timeline` draws.

    Parameters
    ----------
    traces : Trace or mapping of str to Trace
        What to show, by the label a reader chooses it with.
    start_ns, end_ns : int, optional
        The window, nanoseconds on each trace's clock; all of it when omitted.
    levels : int, default 3
        How many nesting levels of CPU ranges (or framework ops, in a trace without ranges) to show a thread.
    most_streams, most_threads : int
        How many GPU streams and CPU threads to show, the ones with most time; 8 and 3 by default.
    view : {"raw", "rolled"}, default "raw"
        The view to begin with.
    layout : {"switch", "stacked"}, default "switch"
        Several traces: one at a time, or all above each other on one time axis, each from its own window's start.
    title : str, default "Timeline"
    most_bytes : int, default 250_000
        Size of the packed events in the page. Many traces of many differently named ranges can need more.

    Returns
    -------
    InteractiveTimeline

    Raises
    ------
    UsageError
        No trace, or a `view` or `layout` that is none of the above.
    """
    several = {"": traces} if isinstance(traces, Trace) else dict(traces)
    if not several:
        raise UsageError("an interactive timeline needs a trace")
    if view not in {"raw", "rolled"} or layout not in {"switch", "stacked"}:
        raise UsageError(f"view {view!r}, layout {layout!r}: expected raw or rolled, switch or stacked")
    most = {"levels": levels, "most_streams": most_streams, "most_threads": most_threads}
    fallback, said = [], []
    for number, (label, trace) in enumerate(several.items()):
        heading = f"{title}: {label}" if label else title
        svg, sentence = _static(trace, heading, start_ns=start_ns, end_ns=end_ns, **most)
        said.append(sentence)
        if number and len(several) > _MOST_FALLBACKS:
            continue  # its sentence is there; pictures of ten traces weigh as much as a page
        if len(several) > 1:
            svg = (
                f"<details{' open' if number == 0 else ''}><summary>{html.escape(str(label))}</summary>{svg}</details>"
            )
        fallback.append(svg)
    return pack(
        several,
        fallback="".join(fallback),
        said=said,
        title=title,
        view=view,
        layout=layout,
        most_bytes=most_bytes,
        window=(start_ns, end_ns),
        levels=levels,
        most_streams=most_streams,
        most_threads=most_threads,
    )


def _static(trace: Trace, title: str, **options: Any) -> tuple[str, str]:
    """Draw the static figure as SVG in the page's own text colour, with its marks as one picture; and its sentence."""
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": title, "savefig.dpi": 144}
    style |= dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK)
    with mpl.rc_context(style):
        figure = timeline(trace, title=title, **options)
        # Tens of thousands of corners would weigh more than all of the page; below 1.2 lies what is filled.
        figure.axes[0].set_rasterization_zorder(1.2)
        sentence = str(figure.get_label())
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(?<=data:image/png;base64,)[^\"]*", lambda m: _few_colours(m[0]), svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;]*;", "font-family: 'DejaVu Sans', Verdana, sans-serif;", svg)
    # Names of groups would be there once a figure; only the ids that something refers to are needed.
    used = set(re.findall(r"(?:#|url\(#)([\w-]+)", svg))
    svg = re.sub(r' id="([\w-]+)"', lambda m: m[0] if m[1] in used else "", svg)
    svg = svg.replace(_INK, "currentColor")
    said = html.escape(sentence, quote=True)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{said}" style="min-width: 34rem; max-width: 100%" ', 1)
    # On a narrow screen the figure scrolls inside itself, which the keyboard must reach.
    name = html.escape(title, quote=True)
    return f'<div role="group" aria-label="{name}" tabindex="0" style="overflow-x: auto">{svg}</div>', sentence


def _few_colours(png: str) -> str:
    """Encode a picture of flat marks with a palette: a quarter of the size."""
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    out = io.BytesIO()
    image.quantize(48, Image.Quantize.FASTOCTREE).save(out, format="png", optimize=True)
    return base64.b64encode(out.getvalue()).decode()
