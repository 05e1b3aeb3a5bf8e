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
from nsightkit.plots._base import (
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
from nsightkit.plots._lanes import IDLE, Lane, Lanes
from nsightkit.trace.model import GPU_TABLES

_Ints = npt.NDArray[np.int64]

COLOURS = {**CATEGORY_COLOURS, "copy": "#9c6b45", "memset": DARK_GREY, "CUDA graph": "#8e5bb5", "CUDA call": "#5f8596"}
#: What CPU ranges are called decides their colours where no GPU work does.
_CPU_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, OCHRE, RED, "#0f8fa8", "#748522", "#7a6fd0", "#d0527f")

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


class _Items(NamedTuple):
    """Events, or runs of events drawn as one, sorted by start; times in nanoseconds since the window's start."""

    start: _Ints
    length: _Ints
    busy: _Ints  # sum of the events' durations: equals `length` for one event
    number: _Ints  # of events
    name: _Ints  # of the longest event
    group: _Ints  # only events of one group are drawn as one


def _merged(events: _Items, cell_ns: int) -> _Items:
    """Draw runs of short events as one item: those of a group that are shorter than a cell and begin in the same one.

    Counts and sums of durations are kept exactly, and no item is two cells long unless its one event is. A cell of up
    to 1 ns changes nothing.
    """
    short = events.length < cell_ns
    if cell_ns <= 1 or not short.any():
        return events
    frame = pd.DataFrame(events._asdict())
    frame["end"] = frame["start"] + frame["length"]
    runs = frame[short].groupby(_run_key(events, cell_ns)[short])
    merged = frame.loc[runs["length"].idxmax()]  # the longest of each gives the name
    for column, how in (("start", "min"), ("end", "max"), ("busy", "sum"), ("number", "sum")):
        merged[column] = runs[column].agg(how).to_numpy()
    merged["length"] = merged["end"] - merged["start"]
    together = pd.concat([merged, frame[~short]]).sort_values("start", kind="stable")
    return _Items(*(together[column].to_numpy() for column in _Items._fields))


def _run_key(events: _Items, cell_ns: int) -> _Ints:
    """Which events merge: equal numbers do."""
    cell: _Ints = (events.start - events.start.min(initial=0)) // cell_ns
    return cell * (int(events.group.max(initial=0)) + 1) + events.group


def _excess(start: _Ints, length: _Ints) -> _Items:
    """What must be taken off the sum of the intervals' lengths to get the length of their union, and where.

    Wherever k > 1 intervals lie over each other, k - 1 of them are too many.
    """
    time = np.concatenate((start, start + length))
    order = np.argsort(time, kind="stable")
    time, depth = time[order], np.cumsum(np.repeat([1, -1], len(start))[order])
    over = np.flatnonzero((depth[:-1] > 1) & (np.diff(time) > 0))
    at, long = time[over], np.diff(time)[over]
    nought = np.zeros_like(at)
    return _Items(at, long, (depth[over] - 1) * long, nought + 1, nought, nought)


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
        lanes, self.label, self.left_out = found.lanes, label, found.left_out
        self.first = min((int(lane.start.min()) for lane in lanes), default=0)
        self.span = max(max((int(lane.end.max()) for lane in lanes), default=0) - self.first, 1)
        tables = {lane.table for lane in lanes}
        on_gpu = bool(tables & set(GPU_TABLES))
        # What is rolled up: GPU work, else framework ops, else ranges.
        work = set(GPU_TABLES) if on_gpu else {"ops"} if "ops" in tables else {"ranges"}
        own_groups = {} if on_gpu else _cpu_groups([lane for lane in lanes if lane.table in work], names)
        self.lanes: list[_Items] = []
        rows: dict[float, dict[str, Any]] = {}
        devices: dict[int, list[int]] = {}
        above: set[int] = set()
        for lane in lanes:
            here = len(self.lanes)
            self.lanes.append(_items(lane, self.first, names, own_groups))
            kind = "events" if lane.device >= 0 else "ranges"
            row = rows.setdefault(lane.row, {"label": lane.label, "kind": kind, "of": []})
            row["of"].append([here, -1, 1])
            if lane.table in work:
                devices.setdefault(lane.device, []).append(here)
            elif lane.label and lane.table in {"ranges", IDLE}:
                above.add(here)
        #: lanes of recorded events; those after them hold what overlaps, to be taken off a sum
        self.recorded = len(self.lanes)
        self.raw = list(rows.values())
        # The outermost ranges (the steps, usually) stay in view above the work rolled up.
        self.rolled = [row for row in self.raw if row["of"][0][0] in above]
        for device, of in devices.items():
            prefix = f"GPU {device} " if len(devices) > 1 else "GPU " if on_gpu else ""
            if on_gpu:
                self._share(f"{prefix}busy", of)
            events = [self.lanes[i] for i in of]
            group = np.concatenate([lane.group for lane in events])
            time = pd.Series(np.concatenate([lane.length for lane in events])).groupby(group).sum()
            titles = {number: text for (text, _), number in names.groups.items()}
            for number in time.drop(_CPU, errors="ignore").sort_values(ascending=False).index:
                self._share(f"{prefix if len(devices) > 1 else ''}{titles[number]}", of, int(number))
        # The strip that shows the whole window: each device's work, or the outermost of the busiest thread's.
        self.strip = [row["of"] for row in self.rolled if row["kind"] == "share" and row["of"][0][1] < 0]
        if not self.strip:
            done = {lane for of in devices.values() for lane in of}
            self.strip = [row["of"] for row in self.raw if row["of"][0][0] in done][:1]

    def _share(self, label: str, lanes: list[int], group: int = -1) -> None:
        """Add a row of time shares: sums of some lanes (of one group in them), less what overlaps."""
        having = [i for i in lanes if group < 0 or (self.lanes[i].group == group).any()]
        chosen = [[column[(each.group == group) | (group < 0)] for column in each[:2]]
                  for each in (self.lanes[i] for i in having)]  # fmt: skip
        of = [[i, group, 1] for i in having]
        excess = _excess(*(np.concatenate(column) for column in zip(*chosen, strict=True)))
        if len(excess.start):
            of.append([len(self.lanes), -1, -1])
            self.lanes.append(excess)
        self.rolled.append({"label": label, "kind": "share", "of": of})

    def cell(self, cells: int) -> int:
        """Length of a cell in nanoseconds, when the window has 2**cells; 0 where it is too short to merge anything."""
        cell = self.span >> cells
        return cell if cell > 1 else 0

    def count(self, cells: int) -> int:
        """How many recorded items the finest levels would have."""
        items, cell = 0, self.cell(cells)
        for lane in self.lanes[: self.recorded]:
            short = lane.length < cell
            runs = np.sort(_run_key(lane, cell)[short], kind="stable") if short.any() else ()
            items += int((~short).sum() + np.count_nonzero(np.diff(runs, prepend=-1)))
        return items

    def levels(self, lane: _Items, cells: int) -> list[tuple[int, _Items]]:
        """A lane's levels, finest first, as pairs of cell length in nanoseconds and items.

        Parameters
        ----------
        lane : _Items
        cells : int
            Events shorter than 1 / 2**cells of the window are merged in the finest level already.
        """
        levels = [(self.cell(cells), _merged(lane, self.cell(cells)))]
        for exponent in range(_FINEST, _COARSEST - 1, -_STEP):
            cell = self.cell(exponent)
            if len(levels[-1][1].start) <= _FEW_ITEMS:
                break
            if exponent < cells and cell:
                coarser = _merged(lane, cell)
                # A level that is not much smaller is not worth its bytes.
                if len(coarser.start) <= len(levels[-1][1].start) // 2:
                    levels.append((cell, coarser))
        return levels


def _items(lane: Lane, first: int, names: _Names, own_groups: dict[str, int]) -> _Items:
    """A lane's events as they were recorded."""
    order = np.argsort(lane.start, kind="stable")
    start = lane.start[order].astype(np.int64) - first
    length = lane.end[order].astype(np.int64) - first - start
    # A dictionary can name much that this lane lacks.
    used, at = np.unique(lane.names.codes[order], return_inverse=True)
    texts = [str(lane.names.categories[c]) if c >= 0 else "" for c in used]
    groups = _groups(lane.table, texts, names, own_groups)
    index = np.array([names.add(_shown(t), g) for t, g in zip(texts, groups, strict=True)], np.int64)
    return _Items(start, length, length, np.ones_like(start), index[at], np.array(groups, np.int64)[at])


def _shown(text: str) -> str:
    text = " ".join(text[: 4 * _LONGEST_NAME].split())
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 1]}…"


def _groups(table: str, texts: list[str], names: _Names, own_groups: dict[str, int]) -> list[int]:
    if table == "kernels":
        categories = [CATEGORIES[code] for code in categorize(pd.Index(texts, dtype="str")).codes]
        return [names.group(c, COLOURS[c]) for c in categories]
    if table == "memops":
        return [names.group(t, COLOURS["memset" if t == "memset" else "copy"]) for t in texts]
    if table in _NAMED:
        label = _NAMED[table]
        return [names.group(label, COLOURS[label])] * len(texts)
    if table == IDLE:
        return [names.group(f"idle: {cause}", CAUSE_COLOURS.get(cause, GREY)) for cause in texts]
    return [own_groups.get(text, _CPU) for text in texts]


def _cpu_groups(lanes: list[Lane], names: _Names) -> dict[str, int]:
    """Give the ranges with most time a group each: what is rolled up in a trace without GPU work."""
    time: pd.Series[int] = pd.Series(dtype="int64")
    for lane in lanes:
        here = pd.Series(lane.end - lane.start).groupby(np.asarray(lane.names, dtype=object)).sum()
        time = time.add(here, fill_value=0)
    own: dict[str, int] = {}
    for text in time.nlargest(len(_CPU_COLOURS)).index:
        colour = _CPU_COLOURS[len(names.own) % len(_CPU_COLOURS)]
        own[text] = names.own[text] = names.own.get(text, names.group(_shown(text), colour))
    return own


class _Packed(NamedTuple):
    """One trace's items as columns of bytes, before they are deflated."""

    lanes: list[list[tuple[int, int]]]  # cell length and items of each level
    columns: list[tuple[bytes, int]]  # gap, length, excess of busy time, further events: as :func:`_planes` has them
    name: _Ints  # of each item
    items: int  # of the finest levels
    size: int  # to compare with other packings


def _pack(trace: _Prepared, names: list[tuple[int, str]], cells: int) -> _Packed:
    lanes = [trace.levels(lane, cells) for lane in trace.lanes]
    levels = [level for lane in lanes for _, level in lane]
    columns = [
        np.concatenate([np.empty(0, np.int64), *column])
        for column in (
            # The gap to the item before is a smaller number than a time, and often the same one.
            [_unsigned(level.start - np.concatenate(([0], (level.start + level.length)[:-1]))) for level in levels],
            [level.length for level in levels],
            [_unsigned(level.busy - level.length) for level in levels],
            [level.number - 1 for level in levels],
            [level.name for level in levels],
        )
    ]
    texts = json.dumps([names[i][1] for i in np.unique(columns[-1])]).encode()
    planes = [_planes(column) for column in columns]
    data = b"".join([*(plane for plane, _ in planes), texts])
    sizes = [[(cell, len(level.start)) for cell, level in lane] for lane in lanes]
    items = sum(lane[0][1] for lane in sizes[: trace.recorded])
    return _Packed(sizes, planes[:-1], columns[-1], items, len(zlib.compress(data, 1)))


def _fitted(traces: list[_Prepared], names: _Names, common: dict[str, Any], most_bytes: int) -> tuple[str, int]:
    """Pack as many details as fit: the largest trace has its resolution halved until all fit.

    Returns
    -------
    text : str
        A JSON header and columns of integers, deflated, in base64.
    items : int
    """
    texts = list(names.names)
    # No item of a real trace takes less than two characters: what is more than that many need not be tried.
    cells = [_cells(trace, _ALL, most_bytes // 2) for trace in traces]
    packed = [_pack(trace, texts, c) for trace, c in zip(traces, cells, strict=True)]
    data = _joined(traces, packed, names, common)
    while len(data) > most_bytes and max(cells) > _LEAST:
        # Each trace's size is an estimate of its share of the whole.
        room = sum(p.size for p in packed) * most_bytes / len(data)
        while sum(p.size for p in packed) > room and max(cells) > _LEAST:
            *rest, i = sorted((i for i in range(len(traces)) if cells[i] > _LEAST), key=lambda i: packed[i].size)
            others = sum(p.size for p in packed) - packed[i].size
            # It gives way until all fit, or until another one is the largest.
            mine = max(room - others, packed[rest[-1]].size if rest else 0)
            cells[i] = _cells(traces[i], cells[i] - 1, min(0.9, mine / packed[i].size) * packed[i].items)
            packed[i] = _pack(traces[i], texts, cells[i])
        data = _joined(traces, packed, names, common)
    return data, sum(p.items for p in packed)


def _cells(trace: _Prepared, cells: int, most: float) -> int:
    """Halve a trace's resolution, from 2**cells cells, until it has no more items; counting is cheaper than packing."""
    if trace.count(_ALL) <= most:
        return cells
    return next((c for c in range(min(cells, _FINEST), _LEAST, -1) if trace.count(c) <= most), _LEAST)


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
                "merged": max((lane[0][0] for lane in p.lanes), default=0),
                "strip": trace.strip,
                "views": {"raw": trace.raw, "rolled": trace.rolled},
                "lanes": p.lanes,
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
    common = {"title": title, "layout": layout, "said": list(said)}
    data, items = _fitted(prepared, names, common, most_bytes)
    events = sum(len(lane.start) for trace in prepared for lane in trace.lanes[: trace.recorded])
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
    lines = (files("nsightkit.plots") / "timeline.js").read_text(encoding="utf-8").splitlines()
    # Comments and indentation are for those who read the source, not for every page that carries it.
    bare = (line.strip() for line in lines)
    return "\n".join(line for line in bare if line and not line.startswith("//")) + "\n"
