"""Events packed for the timeline that zooms: `timeline.js` unpacks and draws them. Needs no matplotlib.

What is packed is JSON, deflated, in base64. A lane has columns, an item each: ``gap`` to the end of the item before,
``length``, ``name`` (its number), ``busy``, the sum of the durations of its events, and their ``number``. Times are
nanoseconds since the trace's first event. Rows refer to their lanes by number.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from importlib.resources import files

import numpy as np
import pandas as pd

from nsightkit.analysis.core.categories import categorize
from nsightkit.errors import plain
from nsightkit.plots.lanes import IDLE, Lane, Rows, alternative_text
from nsightkit.plots.looks import CATEGORY_COLOURS, CAUSE_COLOURS, DARK_GREY, GREY
from nsightkit.text import Json
from nsightkit.trace.model import GPU_TABLES

#: Of each kind of event; the viewer draws those of CPU threads in two greys.
COLOURS = {
    "CPU": GREY,
    **CATEGORY_COLOURS,
    "copy": "#9c6b45",
    "memset": DARK_GREY,
    "CUDA graph": "#8e5bb5",
    "CUDA call": "#5f8596",
    **{f"idle: {cause}": colour for cause, colour in CAUSE_COLOURS.items()},
}

#: Characters of a text from a trace; kernels fused by a compiler have been seen with 3,000.
_LONGEST_TEXT = 400
#: The first width of the cells in which short neighbours are merged; it doubles until all fits.
_FIRST_CELL_NS = 1000
#: No item takes fewer bytes, however well it is packed.
_LEAST_ITEM_BYTES = 4

#: The number of each name with its kind, which decides its colour; one numbering for all traces of a page.
_NameNumbers = dict[tuple[str, str], int]


# ---------------------------------------------------------------- events


def _items_of_lane(lane: Lane, first_ns: int, number_of_name: _NameNumbers) -> pd.DataFrame:
    """A lane's events as :func:`items`, still without merging; new names are added to `number_of_name`."""
    codes, texts = pd.factorize(lane.events["name"])
    numbers = []
    # Events without a name have code -1, which takes the appended "".
    for text, kind in _shown_names_and_kinds(lane.table, [*map(str, texts), ""]):
        numbers.append(number_of_name.setdefault((short(text), kind), len(number_of_name)))
    start = lane.events["start_ns"].to_numpy(np.int64)
    end = lane.events["end_ns"].to_numpy(np.int64)
    return items(start - first_ns, length=end - start, name=np.array(numbers)[codes])


def _shown_names_and_kinds(table: str, names: list[str]) -> Iterable[tuple[str, str]]:
    """The names of a table's events as they are shown, each with its kind, a key of :data:`COLOURS`."""
    if table == "kernels":
        return zip(names, categorize(pd.Index(names, dtype="str")), strict=True)
    if table == "memops":
        return [(name, name) if name == "memset" else (f"copy {name}", "copy") for name in names]
    if table == "graphs":
        return [(f"CUDA graph {name}", "CUDA graph") for name in names]
    if table == IDLE:
        return [(name, f"idle: {name}") for name in names]
    return [(name, "CUDA call" if table == "calls" else "CPU") for name in names]


def short(text: str) -> str:
    """Write text from a trace on one line, cut to 400 characters.

    Parameters
    ----------
    text : str
    """
    line = plain(text[: _LONGEST_TEXT + 1])  # `plain` never shortens: one more shows an excess
    if len(line) <= _LONGEST_TEXT:
        return line
    return f"{line[: _LONGEST_TEXT - 1]}…"


def items(start: np.ndarray, length: np.ndarray, name: np.ndarray) -> pd.DataFrame:
    """Make a table of what is drawn: events, or runs of events drawn as one.

    Parameters
    ----------
    start, length : array of int64
        Nanoseconds, since the trace's first event.
    name : array of int
        The number of each one's name; a run has that of its longest event.

    Returns
    -------
    DataFrame
        Also with ``busy``, the sum of the events' durations, here `length`; ``number``, how many there are, here 1; and
        ``lane``, here 0, for the caller to set. By start.
    """
    columns = {"lane": 0, "start": start, "length": length, "busy": length, "number": 1, "name": name}
    return pd.DataFrame(columns).sort_values("start", kind="stable", ignore_index=True)


def merged(events: pd.DataFrame, cell_ns: int) -> pd.DataFrame:
    """Make one item of the events of a lane that are shorter than a cell of time and begin in the same cell.

    Counts and sums of durations are kept exactly, and no item is two cells long unless its one event is.

    Parameters
    ----------
    events : DataFrame
        As :func:`items` makes it, each row with its own index; of any number of lanes.
    cell_ns : int
        Length of the cells, which divide the time from 0.

    Returns
    -------
    DataFrame
        With the columns of `events`, by lane and start.
    """
    with_end = events.assign(end=events["start"] + events["length"])
    # A run: all short events of a lane in one cell.
    is_short = events["length"] < cell_ns
    runs = with_end[is_short].groupby([events["lane"], events["start"] // cell_ns])
    joined = runs.agg({"lane": "first", "start": "min", "end": "max", "busy": "sum", "number": "sum"})
    joined["length"] = joined["end"] - joined["start"]
    longest_event = runs["length"].idxmax()
    joined["name"] = events["name"].loc[longest_event].to_numpy()
    all_items = pd.concat([joined, with_end[~is_short]])[list(events)]
    return all_items.sort_values(["lane", "start"], kind="stable", ignore_index=True)


# ---------------------------------------------------------------- the page's data


def pack(traces: Mapping[str, Rows], *, title: str, most_bytes: int) -> InteractiveTimeline:
    """Pack a timeline: the traces above each other on one time axis, each from its own start.

    Parameters
    ----------
    traces : mapping of str to Rows
        The rows of each trace, by label.
    title : str
    most_bytes : int
        Size of the packed events. Where more do not fit, short neighbours are merged.

    Returns
    -------
    InteractiveTimeline
    """
    number_of_name: _NameNumbers = {}
    lanes: list[pd.DataFrame] = []  # the items of each lane; a lane's number is its place here
    charts: list[Json] = []
    sentences = []
    for label, (rows, left_out) in traces.items():
        events_of_lanes = [lane.events for row in rows for lane in row.lanes]
        first_ns = min((int(events["start_ns"].min()) for events in events_of_lanes), default=0)
        last_ns = max((int(events["end_ns"].max()) for events in events_of_lanes), default=0)
        span_ns = max(last_ns - first_ns, 1)
        chart_rows = []
        for row in rows:
            lane_numbers = []
            for lane in row.lanes:
                lane_numbers.append(len(lanes))
                lanes.append(_items_of_lane(lane, first_ns, number_of_name).assign(lane=len(lanes)))
            chart_rows.append({"label": row.label, "gpu": row.lanes[0].table in GPU_TABLES, "lanes": lane_numbers})
        chart = {"label": short(label), "leftOut": left_out, "rows": chart_rows, "first": first_ns, "span": span_ns}
        charts.append(chart)
        heading = title
        if label:
            heading = f"{title}: {short(label)}"
        sentences.append(alternative_text(rows, heading, span_ns))
    nothing = np.zeros(0, np.int64)
    all_items = pd.concat(lanes, ignore_index=True) if lanes else items(nothing, nothing, nothing)
    data = _pack_to_fit({"title": title, "traces": charts}, all_items, list(number_of_name), most_bytes)
    return InteractiveTimeline(data, " ".join(sentences))


def _pack_to_fit(page: Json, events: pd.DataFrame, names: list[tuple[str, str]], most_bytes: int) -> str:
    """Pack a page's events, merged in ever wider cells until they take no more than `most_bytes`.

    Where even one item in each lane takes more, it is packed all the same.
    """
    cell_ns = 0  # nothing is merged
    longest_ns = max(trace["span"] for trace in page["traces"])
    while True:
        is_last = cell_ns > longest_ns  # each lane is one item
        # Packing takes long: not tried where it cannot fit.
        if is_last or len(events) * _LEAST_ITEM_BYTES <= most_bytes:
            text = json.dumps({**page, "merged": cell_ns, **_packed_lanes(events, names)}, separators=(",", ":"))
            data = base64.b64encode(zlib.compress(text.encode())).decode()
            if is_last or len(data) <= most_bytes:
                return data
        cell_ns = max(2 * cell_ns, _FIRST_CELL_NS)
        events = merged(events, cell_ns)


def _packed_lanes(events: pd.DataFrame, names: list[tuple[str, str]]) -> Json:
    """Turn items into what `timeline.js` reads: the columns of each lane, and the names and kinds that they use.

    Names are numbered anew, from 0: merging leaves some unused. For the columns see the top of this module. Every lane
    has events, so its place in the list is its number.
    """
    codes, used_names = pd.factorize(events["name"])
    end = events["start"] + events["length"]
    previous_end = end.groupby(events["lane"]).shift(fill_value=0)
    # A gap is a smaller number than a time and often the same one, so it deflates better.
    columns = events.assign(gap=events["start"] - previous_end, name=codes)
    lanes = []
    for _, lane in columns.groupby("lane"):
        lanes.append(lane[["gap", "length", "name", "busy", "number"]].to_dict("list"))
    number_of_kind = {"CPU": 0}  # always the first kind, which the viewer draws in two greys in turn
    names_with_kinds = []
    for number in used_names:
        text, kind = names[number]
        names_with_kinds.append([text, number_of_kind.setdefault(kind, len(number_of_kind))])
    return {
        "lanes": lanes,
        "kinds": [[kind, COLOURS[kind]] for kind in number_of_kind],
        "names": names_with_kinds,
    }


@dataclasses.dataclass(frozen=True)
class InteractiveTimeline:
    """A timeline that zooms and pans in a page; shown by notebooks and by the gallery.

    Attributes
    ----------
    data : str
        The packed events.
    label : str
        What the picture shows, in a sentence: all that a page without scripts shows.
    """

    data: str
    label: str

    def html(self, *, script: bool = True) -> str:
        """Write the timeline as an HTML element.

        Parameters
        ----------
        script : bool, default True
            With the viewer, the program that makes it interactive. A page needs it once; more do no harm.
        """
        data = f'<script type="text/plain">{self.data}</script>'
        element = f"<nsightkit-timeline><p>{html.escape(self.label)}</p>{data}</nsightkit-timeline>"
        if script:
            element += f"<script>\n{program()}</script>"
        return element

    def _repr_html_(self) -> str:
        return self.html()


def program() -> str:
    """Read the viewer, a script; comments and indentation are left out, to make pages smaller."""
    source = (files("nsightkit.plots") / "timeline.js").read_text(encoding="utf-8")
    return re.sub(r"^\s*(//.*)?\n|^\s+", "", source, flags=re.MULTILINE)
