"""Events packed for the timeline that zooms: `timeline.js` unpacks and draws them. Needs no matplotlib.

What is packed is JSON, deflated, in base64. A lane has columns, an item each: ``gap`` to the end of the item before,
``length``, ``name`` (its number), and where items stand for several events ``busy``, the sum of their durations, and
``number``. Times are nanoseconds since the trace's first event.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import zlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.plots.lanes import IDLE, Lane, Lanes
from nsightkit.plots.looks import CATEGORY_COLOURS, CAUSE_COLOURS, DARK_GREY, GREY, duration, spoken
from nsightkit.safe import plain
from nsightkit.trace.model import GPU_TABLES

COLOURS = {
    **CATEGORY_COLOURS,
    "copy": "#9c6b45",
    "memset": DARK_GREY,
    "CUDA graph": "#8e5bb5",
    "CUDA call": "#5f8596",
    **{f"idle: {cause}": colour for cause, colour in CAUSE_COLOURS.items()},
}
#: Tables whose events are all of one kind.
_KIND_OF_TABLE = {"ranges": "CPU", "ops": "CPU", "calls": "CUDA call", "graphs": "CUDA graph"}

#: Longest name that a page carries; kernels fused by a compiler have been seen with 3,000 characters.
_LONGEST_NAME = 400
#: The first cell in which short neighbours are merged.
_FIRST_CELL_NS = 1000
#: Fewer items than a wide screen has pixels would show.
_LEAST_ITEMS = 1000
#: No item takes fewer characters.
_LEAST_CHARACTERS = 4

#: The static figure, in its own units.
_STATIC_ROWS, _STATIC_COLUMNS, _STATIC_LEFT, _STATIC_RIGHT, _ROW_HEIGHT = 16, 400, 180, 800, 24


class _Row(NamedTuple):
    label: str
    is_gpu: bool
    lanes: list[pd.DataFrame]


class _Prepared(NamedTuple):
    """One trace, before its events are merged."""

    label: str
    left_out: str
    first_ns: int
    span_ns: int
    rows: list[_Row]


#: Names with their kinds, which decide their colours, numbered; one list for all traces of a page.
_Names = dict[tuple[str, str], int]


def colour_of(kind: str) -> str:
    """Colour a kind of event; all copies have one colour.

    Parameters
    ----------
    kind : str
    """
    return COLOURS["copy"] if kind.startswith("copy ") else COLOURS.get(kind, GREY)


# ---------------------------------------------------------------- events


def _prepared(label: str, found: Lanes, names: _Names) -> _Prepared:
    first_ns = min((int(lane.start.min()) for lane in found.lanes), default=0)
    last_ns = max((int(lane.end.max()) for lane in found.lanes), default=0)
    rows: dict[int, _Row] = {}
    for lane in found.lanes:
        row = rows.setdefault(lane.row, _Row(lane.label, lane.table in GPU_TABLES, []))
        row.lanes.append(_events(lane, first_ns, names))
    return _Prepared(_short(label), found.left_out, first_ns, max(last_ns - first_ns, 1), list(rows.values()))


def _events(lane: Lane, first_ns: int, names: _Names) -> pd.DataFrame:
    """A lane's events as they were recorded."""
    categories = lane.names.remove_unused_categories()
    texts = [str(text) for text in categories.categories]
    if (categories.codes < 0).any():
        texts.append("")  # events without a name have code -1: the last
    numbers = []
    for text, kind in zip(texts, _kinds(lane.table, texts), strict=True):
        numbers.append(names.setdefault((_short(text), kind), len(names)))
    start = lane.start.astype(np.int64) - first_ns
    length = (lane.end - lane.start).astype(np.int64)
    return items(start, length, np.array(numbers)[categories.codes])


def _short(text: str) -> str:
    line = plain(text[: 4 * _LONGEST_NAME])
    return line if len(line) <= _LONGEST_NAME else f"{line[: _LONGEST_NAME - 1]}…"


def _kinds(table: str, texts: list[str]) -> list[str]:
    if table == "kernels":
        return [CATEGORIES[code] for code in categorize(pd.Index(texts, dtype="str")).codes]
    if table == IDLE:
        return [f"idle: {text}" for text in texts]
    return [_KIND_OF_TABLE.get(table, text) for text in texts]


def items(start: np.ndarray, length: np.ndarray, name: np.ndarray) -> pd.DataFrame:
    """Make a table of what is drawn: events, or runs of events drawn as one.

    Parameters
    ----------
    start, length : array of int64
        Nanoseconds, since the trace's first event.
    name : array of int
        The name of a run is that of its longest event.

    Returns
    -------
    DataFrame
        Also with ``busy``, the sum of the events' durations, and ``number``, how many there are; by start.
    """
    table = pd.DataFrame({"start": start, "length": length, "busy": length, "number": 1, "name": name})
    return table.sort_values("start", kind="stable", ignore_index=True)


def merged(events: pd.DataFrame, cell_ns: int) -> pd.DataFrame:
    """Draw runs of short events as one item: those that are shorter than a cell and begin in the same one.

    Counts and sums of durations are kept exactly, and no item is two cells long unless its one event is.

    Parameters
    ----------
    events : DataFrame
        As :func:`items` makes it.
    cell_ns : int
    """
    ended = events.assign(end=events["start"] + events["length"])
    is_short = events["length"] < cell_ns
    runs = ended[is_short].groupby(events["start"] // cell_ns)
    joined = runs.agg({"start": "min", "end": "max", "busy": "sum", "number": "sum"})
    joined["length"] = joined["end"] - joined["start"]
    joined["name"] = events["name"].loc[runs["length"].idxmax()].to_numpy()
    together = pd.concat([joined, ended[~is_short]])[list(events)]
    return together.sort_values("start", kind="stable", ignore_index=True)


def thinned(events: pd.DataFrame, most: int) -> tuple[pd.DataFrame, int]:
    """Merge short neighbours until a lane has few items.

    Parameters
    ----------
    events : DataFrame
        As :func:`items` makes it.
    most : int
        Items.

    Returns
    -------
    events : DataFrame
    cell_ns : int
        0 where nothing had to be merged.
    """
    cell_ns = 0
    while len(events) > most:
        cell_ns = max(2 * cell_ns, _FIRST_CELL_NS)
        events = merged(events, cell_ns)
    return events, cell_ns


# ---------------------------------------------------------------- the page's data


def _encoded(traces: list[_Prepared], names: _Names, title: str, most_items: int) -> tuple[str, int]:
    """Pack traces with at most so many items a lane; also say how many items there are."""
    described = []
    used: dict[int, int] = {}  # what was merged away needs no name
    count = 0
    for trace in traces:
        rows = []
        merged_ns = 0
        for row in trace.rows:
            lanes = []
            for events in row.lanes:
                drawn, cell_ns = thinned(events, most_items)
                lanes.append(_columns(drawn, used))
                merged_ns = max(merged_ns, cell_ns)
                count += len(drawn)
            rows.append({"label": row.label, "gpu": row.is_gpu, "lanes": lanes})
        facts = {"label": trace.label, "leftOut": trace.left_out, "first": trace.first_ns, "span": trace.span_ns}
        described.append({**facts, "merged": merged_ns, "rows": rows})
    every = list(names)
    shown = [every[number] for number in used]
    kinds = list(dict.fromkeys(["CPU", *(kind for _, kind in shown)]))  # the viewer draws the first in two greys
    page = {
        "title": title,
        "traces": described,
        "kinds": [[kind, colour_of(kind)] for kind in kinds],
        "names": [[text, kinds.index(kind)] for text, kind in shown],
    }
    text = json.dumps(page, separators=(",", ":")).encode()
    return base64.b64encode(zlib.compress(text)).decode(), count


def _columns(events: pd.DataFrame, used: dict[int, int]) -> dict[str, list[int]]:
    """A lane as lists; names get the numbers they have among those used."""
    end = events["start"] + events["length"]
    gap = events["start"] - end.shift(fill_value=0)  # a smaller number than a time, and often the same one
    names = [used.setdefault(number, len(used)) for number in events["name"].tolist()]
    columns = {"gap": gap.tolist(), "length": events["length"].tolist(), "name": names}
    if (events["number"] > 1).any():
        columns["busy"] = events["busy"].tolist()
        columns["number"] = events["number"].tolist()
    return columns


def pack(traces: Mapping[str, Lanes], *, title: str, most_bytes: int) -> InteractiveTimeline:
    """Pack a timeline: the traces above each other on one time axis, each from its own start.

    Parameters
    ----------
    traces : mapping of str to Lanes
        The rows of each trace, by label.
    title : str
    most_bytes : int
        Size of the packed events. Where more do not fit, short neighbours in the lanes with most events are merged.

    Returns
    -------
    InteractiveTimeline
    """
    names: _Names = {}
    prepared = [_prepared(label, lanes, names) for label, lanes in traces.items()]
    sizes = [len(lane.start) for lanes in traces.values() for lane in lanes.lanes]
    most_items = min(max(sizes, default=0), most_bytes // _LEAST_CHARACTERS)
    data, count = _encoded(prepared, names, title, max(most_items, _LEAST_ITEMS))
    while len(data) > most_bytes and most_items > _LEAST_ITEMS:
        most_items = int(most_items * min(0.9, most_bytes / len(data)))
        data, count = _encoded(prepared, names, title, max(most_items, _LEAST_ITEMS))
    colours = [colour_of(kind) for _, kind in names]
    figures = ""
    sentences = []
    for trace in prepared:
        sentences.append(_sentence(trace, f"{title}: {trace.label}" if trace.label else title))
        if len(prepared) > 1:
            figures += f"<p>{html.escape(trace.label)}</p>"
        figures += _figure(trace, colours, sentences[-1])
    return InteractiveTimeline(data, figures, " ".join(sentences), sum(sizes), count)


# ---------------------------------------------------------------- without scripts


def _sentence(trace: _Prepared, title: str) -> str:
    if not trace.rows:
        return f"{title}: no events to draw."
    sizes = [(row.label, f"{sum(map(len, row.lanes)):,} events") for row in trace.rows if row.label]
    return f"{title}, lanes over {duration(trace.span_ns)}: {spoken(sizes)}."


def _figure(trace: _Prepared, colours: list[str], sentence: str) -> str:
    """Draw the first rows as SVG in the page's own text colour."""
    bottom = 0
    parts = ""
    for row in trace.rows[:_STATIC_ROWS]:
        bottom += _ROW_HEIGHT
        parts += f'<text x="0" y="{bottom - 8}">{html.escape(row.label[:28])}</text>'
        for events in row.lanes:
            parts += _marks(events, trace.span_ns, bottom - 2, colours)
    axis = duration(trace.span_ns) if trace.rows else "no events to draw"
    return (
        f'<svg role="img" aria-label="{html.escape(sentence)}" viewBox="0 0 {_STATIC_RIGHT} {bottom + 20}" '
        f'width="100%" fill="currentColor" font-family="sans-serif" font-size="12">{parts}'
        f'<text x="{_STATIC_RIGHT}" y="{bottom + 14}" text-anchor="end">{axis}</text></svg>'
    )


def _marks(events: pd.DataFrame, span_ns: int, bottom: int, colours: list[str]) -> str:
    """A path for each colour, of rectangles as high as the share of time covered."""
    scale = (_STATIC_RIGHT - _STATIC_LEFT) / span_ns
    paths: dict[str, str] = {}
    item: Any
    for item in merged(events, max(span_ns // _STATIC_COLUMNS, 1)).itertuples():
        share = item.busy / max(item.length, 1)
        # Never less than a column: two microseconds in ten seconds must not vanish.
        width, height = max(item.length * scale, 1.5), max((_ROW_HEIGHT - 4) * min(share, 1), 2)
        mark = f"M{_STATIC_LEFT + item.start * scale:.1f} {bottom}v-{height:.0f}h{width:.1f}v{height:.0f}z"
        colour = colours[item.name]
        paths[colour] = paths.get(colour, "") + mark
    return "".join(f'<path fill="{colour}" d="{marks}"/>' for colour, marks in paths.items())


@dataclasses.dataclass(frozen=True, repr=False)
class InteractiveTimeline:
    """A timeline that zooms and pans in a page; shown by notebooks and by the gallery.

    Attributes
    ----------
    data, fallback : str
        The packed events, and the static figures as HTML.
    label : str
        What the picture shows, in a sentence.
    events, items : int
        Events in all traces, and the marks they are drawn as at the closest zoom: fewer where short neighbours had
        to be merged to keep within the size asked for.
    """

    data: str
    fallback: str
    label: str
    events: int
    items: int

    def __repr__(self) -> str:
        return f"<InteractiveTimeline of {self.events:,} events, {len(self.data) / 1000:,.0f} kB>"

    def html(self, *, script: bool = True) -> str:
        """The element as HTML.

        Parameters
        ----------
        script : bool, default True
            With the program that makes it interactive. A page needs it once; more do no harm.

        Returns
        -------
        str
            Without scripts it shows static figures, which are part of it.
        """
        data = f'<script type="text/plain">{self.data}</script>'
        viewer = f"<script>\n{program()}</script>" if script else ""
        return f"<nsightkit-timeline>{self.fallback}{data}</nsightkit-timeline>{viewer}"

    def _repr_html_(self) -> str:
        return self.html()


def program() -> str:
    """Read the viewer, without comments and indentation: they are for those who read the source."""
    source = (files("nsightkit.plots") / "timeline.js").read_text(encoding="utf-8")
    lines = [line.strip() for line in source.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"
