"""Events packed ahead for the timeline that zooms; `timeline.js` only unpacks and draws. Needs no matplotlib."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.plots.lanes import IDLE, Lane, Lanes
from nsightkit.plots.looks import (
    BLUE,
    CATEGORY_COLOURS,
    CAUSE_COLOURS,
    DARK_GREY,
    GREEN,
    GREY,
    OCHRE,
    PURPLE,
    RED,
    VERMILION,
)
from nsightkit.safe import plain
from nsightkit.trace.model import GPU_TABLES

_Ints = npt.NDArray[np.int64]

COLOURS = {
    **CATEGORY_COLOURS,
    "copy": "#9c6b45",
    "memset": DARK_GREY,
    "CUDA graph": "#8e5bb5",
    "CUDA call": "#5f8596",
    **{f"idle: {cause}": colour for cause, colour in CAUSE_COLOURS.items()},
}
#: What CPU ranges are called decides their colours where no GPU work does.
CPU_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, RED, "#0f8fa8", "#748522", "#7a6fd0", "#d0527f")

#: Tables whose events are all of one kind.
_NAMED = {"graphs": "CUDA graph", "calls": "CUDA call"}

#: Longest name that a page carries; kernels fused by a compiler have been seen with 3,000 characters.
_LONGEST_NAME = 400
#: A lane with more items than this gets a coarser level, and each coarser level has cells eight times as long. The
#: coarsest has 4,096 cells to the window: two a pixel of a wide screen.
_FEW_ITEMS = 20_000
_COARSEST, _FINEST, _STEP = 12, 30, 3
#: What must fit may be merged as far as cells of two pixels on a wide screen.
_LEAST = 10
_ALL = 99  # so many cells that nothing is merged
#: The group of CPU ranges.
_CPU = 0


def items(start: _Ints, length: _Ints, **more: Any) -> pd.DataFrame:
    """Make a table of events, or of runs of events drawn as one, in the order of their starts.

    Parameters
    ----------
    start, length : array of int64
        Nanoseconds, since the window's start.
    **more
        ``busy``, the sum of the events' durations (default: the length); ``number`` of events (1); ``name``, of the
        longest event; and ``group``: only events of one group are drawn as one.
    """
    return pd.DataFrame({"start": start, "length": length, "busy": length, "number": 1, "name": 0, "group": 0} | more)


def merged(events: pd.DataFrame, cell_ns: int) -> pd.DataFrame:
    """Draw runs of short events as one item: those of a group that are shorter than a cell and begin in the same one.

    Counts and sums of durations are kept exactly, and no item is two cells long unless its one event is. A cell of up
    to 1 ns changes nothing.

    Parameters
    ----------
    events : DataFrame
        As :func:`items` makes it.
    cell_ns : int
    """
    short = events["length"] < cell_ns
    if cell_ns <= 1 or not short.any():
        return events
    ended = events.assign(end=events["start"] + events["length"])
    runs = ended[short].groupby(_run_key(events, cell_ns)[short])
    joined = ended.loc[runs["length"].idxmax()]  # the longest of each gives the name
    sums = {"start": "min", "end": "max", "busy": "sum", "number": "sum"}
    joined[list(sums)] = runs.agg(sums).to_numpy()
    joined["length"] = joined["end"] - joined["start"]
    return pd.concat([joined, ended[~short]]).sort_values("start", kind="stable")[list(events)]


def _run_key(events: pd.DataFrame, cell_ns: int) -> _Ints:
    """Which events merge: equal numbers do."""
    start, group = events["start"].to_numpy(), events["group"].to_numpy()
    key: _Ints = (start - start.min(initial=0)) // cell_ns * (int(group.max(initial=0)) + 1) + group
    return key


def excess(start: _Ints, length: _Ints) -> pd.DataFrame:
    """What must be taken off the sum of the intervals' lengths to get the length of their union, and where.

    Wherever k > 1 intervals lie over each other, k - 1 of them are too many.

    Parameters
    ----------
    start, length : array of int64
    """
    time = np.concatenate((start, start + length))
    order = np.argsort(time, kind="stable")
    time, depth = time[order], np.cumsum(np.repeat([1, -1], len(start))[order])
    over = np.flatnonzero((depth[:-1] > 1) & (np.diff(time) > 0))
    long = np.diff(time)[over]
    return items(time[over], long, busy=(depth[over] - 1) * long)


class _Names:
    """One dictionary of names for all traces of a page; a name has a group, which decides its colour and its row."""

    def __init__(self) -> None:
        # A range may be called like a category: the two differ in colour. The viewer knows that 0 is the CPU.
        self.groups: dict[tuple[str, str], int] = {("CPU", GREY): _CPU}
        self.names: dict[tuple[int, str], int] = {}
        #: groups of ranges with a row of their own, the same in all traces
        self.own: dict[str, int] = {}

    def group(self, label: str, colour: str) -> int:
        return self.groups.setdefault((label, colour), len(self.groups))

    def add(self, text: str, group: int) -> int:
        return self.names.setdefault((group, text), len(self.names))


class _Prepared:
    """One trace's lanes and the rows that its two views show."""

    def __init__(self, found: Lanes, label: str, names: _Names) -> None:
        lanes, self.label, self.left_out = found.lanes, _shown(label), found.left_out
        self.first = min((int(lane.start.min()) for lane in lanes), default=0)
        self.span = max(max((int(lane.end.max()) for lane in lanes), default=0) - self.first, 1)
        tables = {lane.table for lane in lanes}
        on_gpu = bool(tables & set(GPU_TABLES))
        # What is rolled up: GPU work, else framework ops, else ranges.
        work = set(GPU_TABLES) if on_gpu else {"ops"} if "ops" in tables else {"ranges"}
        own_groups = {} if on_gpu else _cpu_groups([lane for lane in lanes if lane.table in work], names)
        self.lanes = [_events(lane, self.first, names, own_groups) for lane in lanes]
        #: lanes of recorded events; those after them hold what overlaps, to be taken off a sum
        self.recorded = len(lanes)
        rows: dict[float, dict[str, Any]] = {}
        devices: dict[int, list[int]] = {}
        for here, lane in enumerate(lanes):
            kind = "events" if lane.device >= 0 else "ranges"
            rows.setdefault(lane.row, {"label": lane.label, "kind": kind, "of": []})["of"].append([here, -1, 1])
            if lane.table in work:
                devices.setdefault(lane.device, []).append(here)
        self.raw = list(rows.values())
        # The outermost ranges (the steps, usually) stay in view above the work rolled up.
        above = {"ranges", IDLE} - work
        self.rolled = [row for row in self.raw if lanes[row["of"][0][0]].table in above and row["label"]]
        titles = [text for text, _ in names.groups]
        for device, of in devices.items():
            prefix = f"GPU {device} " if len(devices) > 1 else ""
            if on_gpu:
                self._share(f"{prefix or 'GPU '}busy", of)
            time = pd.concat([self.lanes[i] for i in of]).groupby("group")["length"].sum()
            for number in time.drop(_CPU, errors="ignore").sort_values(ascending=False).index:
                self._share(f"{prefix}{titles[number]}", of, int(number))
        # The strip that shows the whole window: each device's work, or the outermost of the busiest thread's.
        busy = [row["of"] for row in self.rolled if row["kind"] == "share" and row["of"][0][1] < 0]
        self.strip = busy or [row["of"] for row in self.raw if lanes[row["of"][0][0]].table in work][:1]

    def _share(self, label: str, of: list[int], group: int = -1) -> None:
        """Add a row of time shares: sums of some lanes (of one group in them), less what overlaps."""
        chosen = {i: self.lanes[i][(self.lanes[i]["group"] == group) | (group < 0)] for i in of}
        summed = [[i, group, 1] for i, lane in chosen.items() if len(lane)]
        both = pd.concat(chosen.values())
        over = excess(both["start"].to_numpy(), both["length"].to_numpy())
        if len(over):
            summed.append([len(self.lanes), -1, -1])
            self.lanes.append(over)
        self.rolled.append({"label": label, "kind": "share", "of": summed})

    def cell(self, cells: int) -> int:
        """Length of a cell in nanoseconds, when the window has 2**cells; 0 where it is too short to merge anything."""
        cell = self.span >> cells
        return cell if cell > 1 else 0

    def count(self, cells: int) -> int:
        """How many recorded items the finest levels would have."""
        found, cell = 0, self.cell(cells)
        for lane in self.lanes[: self.recorded]:
            short = (lane["length"] < cell).to_numpy()
            found += len(np.unique(_run_key(lane, cell or 1)[short])) + int((~short).sum())
        return found

    def levels(self, lane: pd.DataFrame, cells: int) -> list[tuple[int, pd.DataFrame]]:
        """A lane's levels, finest first, as pairs of cell length in nanoseconds and items.

        Parameters
        ----------
        lane : DataFrame
        cells : int
            Events shorter than 1 / 2**cells of the window are merged in the finest level already.
        """
        levels = [(self.cell(cells), merged(lane, self.cell(cells)))]
        for exponent in range(_FINEST, _COARSEST - 1, -_STEP):
            cell, finer = self.cell(exponent), len(levels[-1][1])
            if finer <= _FEW_ITEMS:
                break
            if exponent < cells and cell:
                coarser = merged(lane, cell)
                # A level that is not much smaller is not worth its bytes.
                if len(coarser) <= finer // 2:
                    levels.append((cell, coarser))
        return levels


def _events(lane: Lane, first: int, names: _Names, own_groups: dict[str, int]) -> pd.DataFrame:
    """A lane's events as they were recorded."""
    order = np.argsort(lane.start, kind="stable")
    start = lane.start[order].astype(np.int64) - first
    # A dictionary can name much that this lane lacks.
    used, at = np.unique(lane.names.codes[order], return_inverse=True)
    texts = [str(lane.names.categories[c]) if c >= 0 else "" for c in used]
    groups = _groups(lane.table, texts, names, own_groups)
    index = [names.add(_shown(t), g) for t, g in zip(texts, groups, strict=True)]
    name, group = (np.array(each, np.int64)[at] for each in (index, groups))
    return items(start, lane.end[order].astype(np.int64) - first - start, name=name, group=group)


def _shown(text: str) -> str:
    text = plain(text[: 4 * _LONGEST_NAME])
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"


def _groups(table: str, texts: list[str], names: _Names, own_groups: dict[str, int]) -> list[int]:
    """The group of each name: what a device did goes by its kind, ranges by what has a row of its own."""
    if table in ("ranges", "ops"):
        return [own_groups.get(text, _CPU) for text in texts]
    if table == "memops":  # each kind of copy is a group; they share a colour
        return [names.group(text, COLOURS[text.partition(" ")[0]]) for text in texts]
    kinds = [_NAMED.get(table, f"{table}: {text}") for text in texts]
    if table == "kernels":
        kinds = [CATEGORIES[code] for code in categorize(pd.Index(texts, dtype="str")).codes]
    return [names.group(kind, COLOURS.get(kind, GREY)) for kind in kinds]


def _cpu_groups(lanes: list[Lane], names: _Names) -> dict[str, int]:
    """Give the ranges with most time a group each: what is rolled up in a trace without GPU work."""
    each = [pd.Series(lane.end - lane.start, index=np.asarray(lane.names, dtype=object)) for lane in lanes]
    time = pd.concat([pd.Series(dtype="int64"), *each]).groupby(level=0).sum()
    own: dict[str, int] = {}
    for text in time.nlargest(len(CPU_COLOURS)).index:
        colour = CPU_COLOURS[len(names.own) % len(CPU_COLOURS)]
        own[text] = names.own[text] = names.own.get(text, names.group(_shown(text), colour))
    return own


class _Packed(NamedTuple):
    """One trace's items as columns of bytes, before they are deflated."""

    levels: list[list[tuple[int, int]]]  # of each lane: cell length and items
    columns: list[tuple[bytes, int]]  # gap, length, excess of busy time, further events: as :func:`_planes` has them
    name: _Ints  # of each item
    items: int  # of the finest levels


def _pack(trace: _Prepared, cells: int) -> _Packed:
    lanes = [trace.levels(lane, cells) for lane in trace.lanes]
    # The gap to the item before is a smaller number than a time, and often the same one.
    gaps = [
        level["start"] - (level["start"] + level["length"]).shift(fill_value=0) for lane in lanes for _, level in lane
    ]
    nought = np.empty(0, np.int64)
    every = pd.concat([items(nought, nought), *(level for lane in lanes for _, level in lane)])
    columns = [
        _unsigned(np.concatenate([nought, *gaps])),
        every["length"].to_numpy(),
        _unsigned((every["busy"] - every["length"]).to_numpy()),
        (every["number"] - 1).to_numpy(),
    ]
    sizes = [[(cell, len(level)) for cell, level in lane] for lane in lanes]
    finest = sum(lane[0][1] for lane in sizes[: trace.recorded])
    return _Packed(sizes, [_planes(column) for column in columns], every["name"].to_numpy(), finest)


def _fitted(traces: list[_Prepared], names: _Names, common: dict[str, Any], most_bytes: int) -> tuple[str, int]:
    """Pack as many details as fit: the resolution of the traces with most items is halved until all fit.

    Returns
    -------
    text : str
        A JSON header and columns of integers, deflated, in base64.
    items : int
    """
    # No item of a real trace takes less than two characters: what is more than that many need not be tried.
    most: float = most_bytes // 2
    cells, packed = [_ALL] * len(traces), dict[tuple[int, int], _Packed]()
    while True:
        for i, trace in enumerate(traces):
            # Counting is cheaper than packing.
            resolutions = (c for c in (_ALL, *range(_FINEST, _LEAST, -1)) if c <= cells[i])
            cells[i] = next((c for c in resolutions if trace.count(c) <= most), _LEAST)
            if (i, cells[i]) not in packed:
                packed[i, cells[i]] = _pack(trace, cells[i])
        chosen = [packed[key] for key in enumerate(cells)]
        data = _joined(traces, chosen, names, common)
        if len(data) <= most_bytes or max(cells) == _LEAST:
            return data, sum(p.items for p in chosen)
        most = min(0.9, most_bytes / len(data)) * max(p.items for p in chosen)


def _joined(traces: list[_Prepared], packed: list[_Packed], names: _Names, common: dict[str, Any]) -> str:
    # What was merged away needs no name.
    used, name = np.unique(np.concatenate([p.name for p in packed]), return_inverse=True)
    described, body = [], []
    for trace, p in zip(traces, packed, strict=True):
        columns = [*p.columns, _planes(name[: len(p.name)])]
        name = name[len(p.name) :]
        described.append(
            {
                "label": trace.label,
                "left_out": trace.left_out,
                "first": trace.first,
                "span": trace.span,
                "merged": max((lane[0][0] for lane in p.levels), default=0),
                "strip": trace.strip,
                "views": {"raw": trace.raw, "rolled": trace.rolled},
                "lanes": p.levels,
                "widths": [width for _, width in columns],
            }
        )
        body += [data for data, _ in columns]
    texts = list(names.names)
    head = json.dumps(
        {
            **common,
            "traces": described,
            "groups": list(names.groups),
            "names": [[texts[i][1], texts[i][0]] for i in used],
        },
        separators=(",", ":"),
    ).encode()
    everything = b"".join([len(head).to_bytes(4, "little"), head, *body])
    return base64.b64encode(zlib.compress(everything, 9 if len(everything) < 1 << 23 else 6)).decode()


def _unsigned(values: _Ints) -> _Ints:
    """Fold the sign into the lowest bit, so that small numbers of either sign stay small (zigzag)."""
    return (values << 1) ^ (values >> 63)


def _planes(values: _Ints) -> tuple[bytes, int]:
    """All lowest bytes, then all second bytes, …: what deflate compresses well. As many as the largest value needs."""
    width = (int(values.max(initial=0)).bit_length() + 7) // 8
    return values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes(), width


def pack(
    found: Mapping[str, Lanes],
    *,
    said: Sequence[str],
    fallback: str,
    title: str,
    layout: Literal["switch", "stacked"],
    most_bytes: int,
) -> InteractiveTimeline:
    """Pack a timeline.

    Parameters
    ----------
    found : mapping of str to Lanes
        The rows of each trace, by label.
    said : sequence of str
        A sentence for each, for those who cannot see it.
    fallback : str
        HTML to show where scripts do not run.
    title : str
    layout : {"switch", "stacked"}
        Several traces: one at a time, or all above each other on one time axis, each from its own start.
    most_bytes : int
        As in :func:`nsightkit.plots.interactive_timeline`.

    Returns
    -------
    InteractiveTimeline
    """
    names = _Names()
    prepared = [_Prepared(lanes, label, names) for label, lanes in found.items()]
    data, items = _fitted(prepared, names, {"title": title, "layout": layout, "said": list(said)}, most_bytes)
    events = sum(len(lane) for trace in prepared for lane in trace.lanes[: trace.recorded])
    return InteractiveTimeline(data, fallback, " ".join(said), (len(prepared), events, items))


class InteractiveTimeline:
    """A timeline that zooms and pans in a page; shown by notebooks and by the gallery.

    Attributes
    ----------
    data_bytes : int
        Size of the packed events in the page.
    events, items : int
        Events in all traces, and the marks they are drawn as at the closest zoom: fewer where short neighbours had
        to be merged to keep within the size asked for.
    label : str
        What the picture shows, in a sentence.
    """

    def __init__(self, data: str, fallback: str, label: str, counts: tuple[int, int, int]) -> None:
        self._data = data
        self._fallback = fallback
        self.label = label
        self.traces, self.events, self.items = counts
        self.data_bytes = len(data)

    def __repr__(self) -> str:
        some = "1 trace" if self.traces == 1 else f"{self.traces} traces"
        return f"<InteractiveTimeline of {some}: {self.events:,} events, {self.data_bytes / 1000:,.0f} kB>"

    def html(self, *, script: bool = True) -> str:
        """The element as HTML.

        Parameters
        ----------
        script : bool, default True
            With the program that makes it interactive. A page needs it once; more do no harm.

        Returns
        -------
        str
            Without scripts it shows the static figures, which are part of it.
        """
        viewer = f"<script>\n{program()}</script>" if script else ""
        return (
            f"<nsightkit-timeline>{self._fallback}"
            f'<script type="text/plain">{self._data}</script></nsightkit-timeline>{viewer}'
        )

    def _repr_html_(self) -> str:
        return self.html()


def program() -> str:
    """Read the viewer, without what only a reader of its source needs."""
    # Comments and indentation are for those who read the source, not for every page that carries it.
    lines = map(str.strip, (files("nsightkit.plots") / "timeline.js").read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"
