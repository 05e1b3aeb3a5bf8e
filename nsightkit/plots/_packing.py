"""Events packed ahead for the timeline that zooms; `timeline.js` only unpacks and draws. Needs no matplotlib."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

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
from nsightkit.plots._lanes import IDLE, Lane, Lanes, all_lanes, find_lanes
from nsightkit.trace.model import GPU_TABLES, Trace

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


def _merged(events: _Items, group: _Ints, cell_ns: int) -> _Items:
    """Draw runs of short events as one item: those shorter than a cell that begin in the same one.

    Counts and sums of durations are kept exactly, and no item is two cells long unless its one event is.

    Parameters
    ----------
    events : _Items
    group : ndarray of int, shape (n,)
        Only events of one group merge.
    cell_ns : int
        Length of a cell; up to 1 changes nothing.
    """
    short = events.length < cell_ns
    if cell_ns <= 1 or not short.any():
        return events
    key = _run_key(events, group, cell_ns)[short]
    by_key = np.argsort(key, kind="stable")  # nearly in order already: events are sorted by start
    order = np.flatnonzero(short)[by_key]
    head = np.flatnonzero(np.diff(key[by_key], prepend=-1))
    run = np.repeat(np.arange(len(head)), np.diff(head, append=len(order)))
    longest = np.flatnonzero(events.length[order] == np.maximum.reduceat(events.length[order], head)[run])
    first_longest = longest[np.flatnonzero(np.diff(run[longest], prepend=-1))]
    start = np.minimum.reduceat(events.start[order], head)
    end = np.maximum.reduceat((events.start + events.length)[order], head)
    runs = _Items(
        start,
        end - start,
        np.add.reduceat(events.busy[order], head),
        np.add.reduceat(events.number[order], head),
        events.name[order][first_longest],
    )
    together = [np.concatenate((run, alone[~short])) for run, alone in zip(runs, events, strict=True)]
    by_start = np.argsort(together[0], kind="stable")
    return _Items(*(column[by_start] for column in together))


def _run_key(events: _Items, group: _Ints, cell_ns: int) -> _Ints:
    """Which events merge: equal numbers do."""
    cell: _Ints = (events.start - events.start.min(initial=0)) // cell_ns
    return cell * (int(group.max(initial=0)) + 1) + group


def _excess(start: _Ints, length: _Ints) -> _Items:
    """What must be taken off the sum of the intervals' lengths to get the length of their union, and where.

    Wherever k > 1 intervals lie over each other, k - 1 of them are too many.
    """
    end = start + length
    order = np.argsort(start, kind="stable")
    if not (start[order][1:] < np.maximum.accumulate(end[order])[:-1]).any():
        none = np.empty(0, np.int64)
        return _Items(none, none, none, none, none)
    time = np.concatenate((start, end))
    change = np.concatenate((np.ones(len(start), np.int64), -np.ones(len(end), np.int64)))
    order = np.argsort(time, kind="stable")
    time, depth = time[order], np.cumsum(change[order])
    over = np.flatnonzero((depth[:-1] > 1) & (np.diff(time) > 0))
    at, long = time[over], np.diff(time)[over]
    return _Items(at, long, (depth[over] - 1) * long, np.ones_like(at), np.zeros_like(at))


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


@dataclass
class _Lane:
    """A row's events as they were recorded, with what the viewer may merge."""

    events: _Items
    group: _Ints
    recorded: bool = True  # and not what overlaps, which is to be taken off a sum


class _Prepared:
    """One trace's lanes and the rows that its two views show."""

    def __init__(self, found: Lanes, label: str, window: tuple[int | None, int | None], names: _Names) -> None:
        lanes = found.lanes
        start_ns, end_ns = window
        self.label = label
        self.left_out = found.left_out
        self.first = min((int(lane.start.min()) for lane in lanes), default=0) if start_ns is None else int(start_ns)
        last = max((int(lane.end.max()) for lane in lanes), default=0) if end_ns is None else int(end_ns)
        self.span = max(last - self.first, 1)
        self.lanes: list[_Lane] = []
        self.raw: list[dict[str, Any]] = []
        self.rolled: list[dict[str, Any]] = []
        tables = {lane.table for lane in lanes}
        on_gpu = bool(tables & set(GPU_TABLES))
        # What is rolled up: GPU work, else framework ops, else ranges.
        work = set(GPU_TABLES) if on_gpu else {"ops"} if "ops" in tables else {"ranges"}
        own_groups = {} if on_gpu else _cpu_groups([lane for lane in lanes if lane.table in work], names)
        rows: dict[int, dict[str, Any]] = {}
        devices: dict[int, list[int]] = {}
        above: set[int] = set()
        for lane in lanes:
            inside = (lane.end > self.first) & (lane.start < last)
            if not inside.any():
                continue
            self._add(lane, inside, names, own_groups)
            here = len(self.lanes) - 1
            row = rows.setdefault(
                lane.row, {"label": lane.label, "kind": "events" if lane.device >= 0 else "ranges", "of": []}
            )
            row["of"].append([here, -1, 1])
            if lane.table in work:
                devices.setdefault(lane.device, []).append(here)
            elif lane.label and lane.table in {"ranges", IDLE}:
                above.add(here)
        self.raw = list(rows.values())
        self.events = sum(len(lane.events.start) for lane in self.lanes)
        # The outermost ranges (the steps, usually) stay in view above the work rolled up.
        self.rolled = [row for row in self.raw if row["of"][0][0] in above]
        for device, of in devices.items():
            self._roll_up(of, f"GPU {device}" if len(devices) > 1 else "GPU", names, all_work=on_gpu)
        # The strip that shows the whole window: each device's work, or the outermost of the busiest thread's.
        self.strip = [row["of"] for row in self.rolled if row["kind"] == "share" and row["of"][0][1] < 0]
        if not self.strip:
            rolled = {lane for of in devices.values() for lane in of}
            self.strip = [row["of"] for row in self.raw if row["of"][0][0] in rolled][:1]

    def _add(self, lane: Lane, inside: npt.NDArray[np.bool_], names: _Names, own_groups: dict[str, int]) -> None:
        assert lane.names is not None
        start = lane.start[inside].astype(np.int64) - self.first
        length = lane.end[inside].astype(np.int64) - self.first - start
        order = np.argsort(start, kind="stable")
        start, length = start[order], length[order]
        codes = lane.names.codes[inside][order].astype(np.int64)
        # A dictionary can name much that this window lacks.
        used = np.unique(codes)
        texts = [str(lane.names.categories[c]) if c >= 0 else "" for c in used]
        groups = _groups(lane, texts, names, own_groups)
        index = np.array([names.add(_shown(t), g) for t, g in zip(texts, groups, strict=True)], np.int64)
        at = np.searchsorted(used, codes)
        one = np.ones_like(start)
        self.lanes.append(_Lane(_Items(start, length, length, one, index[at]), np.asarray(groups, np.int64)[at]))

    def _roll_up(self, lanes: list[int], label: str, names: _Names, *, all_work: bool) -> None:
        group = np.concatenate([self.lanes[i].group for i in lanes])
        start = np.concatenate([self.lanes[i].events.start for i in lanes])
        length = np.concatenate([self.lanes[i].events.length for i in lanes])
        time = pd.Series(length).groupby(group).sum().sort_values(ascending=False)
        title = {number: text for (text, _), number in names.groups.items()}
        if all_work:
            self.rolled.append(self._share(label + " busy", lanes, -1, (start, length)))
        for number in time.index:
            if number == _CPU:
                continue  # all the ranges that have no row of their own
            mine = group == number
            having = [i for i in lanes if (self.lanes[i].group == number).any()]
            several = label != "GPU" and all_work
            name = f"{label} {title[number]}" if several else title[number]
            self.rolled.append(self._share(name, having, int(number), (start[mine], length[mine])))

    def _share(self, label: str, lanes: list[int], group: int, spans: tuple[_Ints, _Ints]) -> dict[str, Any]:
        """Describe a row of time shares: sums of some lanes, less what overlaps."""
        of = [[i, group, 1] for i in lanes]
        excess = _excess(*spans)
        if len(excess.start):
            of.append([len(self.lanes), -1, -1])
            self.lanes.append(_Lane(excess, np.zeros_like(excess.start), recorded=False))
        return {"label": label, "kind": "share", "of": of}

    def cell(self, cells: int) -> int:
        """Length of a cell in nanoseconds, when the window has 2**cells; 0 where it is too short to merge anything."""
        cell = self.span >> cells
        return cell if cell > 1 else 0

    def items(self, cells: int) -> list[list[tuple[int, _Items]]]:
        """Each lane's levels, finest first, as pairs of cell length in nanoseconds and items.

        Parameters
        ----------
        cells : int
            Events shorter than 1 / 2**cells of the window are merged in the finest level already.
        """
        return [self._levels(lane, cells) for lane in self.lanes]

    def _levels(self, lane: _Lane, cells: int) -> list[tuple[int, _Items]]:
        finest = self.cell(cells)
        levels = [(finest, _merged(lane.events, lane.group, finest))]
        for exponent in range(_FINEST, _COARSEST - 1, -_STEP):
            cell = self.cell(exponent)
            if len(levels[-1][1].start) <= _FEW_ITEMS:
                break
            if exponent < cells and cell:
                coarser = _merged(lane.events, lane.group, cell)
                # A level that is not much smaller is not worth its bytes.
                if len(coarser.start) <= len(levels[-1][1].start) // 2:
                    levels.append((cell, coarser))
        return levels


def _shown(text: str) -> str:
    text = " ".join(text[: 4 * _LONGEST_NAME].split())
    if len(text) <= _LONGEST_NAME:
        return text
    return f"{text[: _LONGEST_NAME - 1]}…"


def _groups(lane: Lane, texts: list[str], names: _Names, own_groups: dict[str, int]) -> list[int]:
    if lane.table == "kernels":
        categories = [CATEGORIES[code] for code in categorize(pd.Index(texts, dtype="str")).codes]
        return [names.group(c, COLOURS[c]) for c in categories]
    if lane.table == "memops":
        return [names.group(t, COLOURS["memset" if t == "memset" else "copy"]) for t in texts]
    if lane.table in _NAMED:
        label = _NAMED[lane.table]
        return [names.group(label, COLOURS[label])] * len(texts)
    if lane.table == IDLE:
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
    lanes = trace.items(cells)
    levels = [level for lane in lanes for _, level in lane]
    name = np.concatenate([np.empty(0, np.int64), *(level.name for level in levels)])
    columns = [
        _planes(np.concatenate([np.empty(0, np.int64), *column]))
        for column in (
            # The gap to the item before is a smaller number than a time, and often the same one.
            [_unsigned(level.start - np.concatenate(([0], (level.start + level.length)[:-1]))) for level in levels],
            [level.length for level in levels],
            [_unsigned(level.busy - level.length) for level in levels],
            [level.number - 1 for level in levels],
        )
    ]
    texts = json.dumps([names[i][1] for i in np.unique(name)]).encode()
    data = b"".join([*(column for column, _ in columns), _planes(name)[0], texts])
    sizes = [[(cell, len(level.start)) for cell, level in lane] for lane in lanes]
    items = sum(lane[0][1] for lane, of in zip(sizes, trace.lanes, strict=True) if of.recorded)
    return _Packed(sizes, columns, name, items, len(zlib.compress(data, 1)))


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
    if sum(len(lane.events.start) for lane in trace.lanes if lane.recorded) <= most:
        return cells
    cells = min(cells, _FINEST)
    while cells > _LEAST and _count(trace, cells) > most:
        cells -= 1
    return cells


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


def _count(trace: _Prepared, cells: int) -> int:
    """How many items the finest levels would have."""
    cell, items = trace.cell(cells), 0
    for lane in (lane for lane in trace.lanes if lane.recorded):
        short = lane.events.length < cell
        items += int((~short).sum())
        if short.any():
            items += (
                int((np.diff(np.sort(_run_key(lane.events, lane.group, cell)[short], kind="stable")) != 0).sum()) + 1
            )
    return items


def _unsigned(values: _Ints) -> _Ints:
    """Fold the sign into the lowest bit, so that small numbers of either sign stay small (zigzag)."""
    return (values << 1) ^ (values >> 63)


def _planes(values: _Ints) -> tuple[bytes, int]:
    """All lowest bytes, then all second bytes, …: what deflate compresses well. As many as the largest value needs."""
    width = (int(values.max(initial=0)).bit_length() + 7) // 8
    return values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes(), width


def pack(
    traces: Mapping[str, Trace],
    *,
    said: Sequence[str],
    fallback: str,
    title: str,
    view: str,
    layout: str,
    most_bytes: int,
    levels: int,
    most_streams: int,
    most_threads: int,
    window: tuple[int | None, int | None] = (None, None),
    idle: Mapping[str, pd.DataFrame] | None = None,
) -> InteractiveTimeline:
    """Pack a timeline.

    Parameters
    ----------
    traces : mapping of str to Trace
    said : sequence of str
        A sentence for each, for those who cannot see it.
    fallback : str
        HTML to show where scripts do not run.
    title, view, layout, most_bytes, levels, most_streams, most_threads
        As in :func:`nsightkit.plots.interactive_timeline`.
    window : tuple of int or None
        Nanoseconds on each trace's clock.
    idle : mapping of str to DataFrame, optional
        Gaps of each trace, as :func:`nsightkit.analysis.timeline.gaps.find` has them. With it, all there is of each
        thread has rows: framework ops and CUDA calls beside the ranges, and a device's idle time by cause.

    Returns
    -------
    InteractiveTimeline
    """
    names, most = _Names(), (levels, most_streams, most_threads)
    prepared = []
    for label, trace in traces.items():
        found = Lanes(find_lanes(trace, *most, detailed=True)) if idle is None else all_lanes(trace, *most, idle[label])
        prepared.append(_Prepared(found, label, window, names))
    common = {"title": title, "view": view, "layout": layout, "said": list(said)}
    data, items = _fitted(prepared, names, common, most_bytes)
    counts = (len(prepared), sum(trace.events for trace in prepared), items)
    return InteractiveTimeline(data, fallback, " ".join(said), counts)


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
