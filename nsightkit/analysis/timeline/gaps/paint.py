"""A thread's time, painted: disjoint pieces, each with one label and the event that gave it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nsightkit.analysis.core.intervals import Coverage, common, merge
from nsightkit.analysis.timeline.gaps.facts import EVIDENCE
from nsightkit.trace.nesting import nesting

__all__ = ["LABELS", "Layer", "Paint", "Track", "outside", "paint", "together"]

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
#: Start and end of disjoint intervals.
Union = tuple[Int, Int]

#: What a thread's time is; where two hold as much of a wait, the first names it. ``around`` is time without a record of
#: its own, longer than dispatch takes, in a range or an operator, or while samples saw the thread run.
LABELS = ("profiler", "once", "data", "staging", "work", "dispatch", "around", "silence")
_DISPATCH = LABELS.index("dispatch")
_AROUND = LABELS.index("around")


@dataclasses.dataclass(eq=False)
class Track:
    """Some events of one thread.

    Parameters
    ----------
    start, end : ndarray of int
        Nanoseconds, ordered by start.
    row : ndarray of int
        In the table they are from.
    """

    start: Int
    end: Int
    row: Int

    def __len__(self) -> int:
        return len(self.start)

    def subset(self, keep: Bool) -> Track:
        """Those of the events that a mask keeps."""
        at = np.flatnonzero(keep)  # they are few, as a rule
        return self if len(at) == len(self) else Track(self.start[at], self.end[at], self.row[at])

    @functools.cached_property
    def coverage(self) -> Coverage:
        """The union of the events."""
        return Coverage(self.start, self.end)

    def covered(self, start: Int, end: Int) -> Int:
        """How much of each window the events cover, in ns."""
        return self.coverage.of(start, end)

    @functools.cached_property
    def _longest(self) -> Int:
        """Position of the event that lasts longest among those up to each."""
        reach = np.maximum.accumulate(self.end)
        return np.asarray(np.maximum.accumulate(np.where(self.end == reach, np.arange(len(reach)), 0)))

    def open_at(self, at: Int) -> Int:
        """Position of an event open at each time (the one that lasts longest), -1 where there is not any."""
        i = np.searchsorted(self.start, at, side="right") - 1
        begun = np.flatnonzero(i >= 0)
        longest = self._longest[i[begun]]
        i[begun] = np.where(self.end[longest] > at[begun], longest, -1)
        return i

    @functools.cached_property
    def parent(self) -> Int:
        """Position of the event around each event, -1 where there is not any."""
        return nesting(np.zeros(len(self), np.int64), self.start, self.end)[1]

    def innermost_at(self, at: Int) -> Int:
        """Position of the event that began last among those open at each time, -1 where there is not any."""
        i = np.searchsorted(self.start, at, side="right") - 1
        begun = np.flatnonzero(i >= 0)
        while len(begun):  # climbs one level a round, all times at once
            over = begun[self.end[i[begun]] <= at[begun]]
            i[over] = self.parent[i[over]]
            begun = over[i[over] >= 0]
        return i


def together(*tracks: Track) -> Track:
    """The events of several tracks; their rows mean something only if all are from one table."""
    start = np.concatenate([track.start for track in tracks])
    order = np.argsort(start, kind="stable")
    end = np.concatenate([track.end for track in tracks])
    row = np.concatenate([track.row for track in tracks])
    return Track(start[order], end[order], row[order])


def outside(track: Track, other: Track) -> Union:
    """The union of some events without that of others."""
    return common((track.start, track.end), (other.start, other.end), outside=True)


class Layer(NamedTuple):
    """Events that paint a label.

    Parameters
    ----------
    label : str
        Of `LABELS`.
    kind : str
        Of `EVIDENCE`: the table that the events are from.
    track : Track
    """

    label: str
    kind: str
    track: Track


@dataclasses.dataclass(frozen=True, eq=False)
class Paint:
    """The pieces of a thread's time, in order; what no piece covers is dispatch.

    Parameters
    ----------
    start, end : ndarray of int
        Nanoseconds.
    label, kind : ndarray of int
        Positions in `LABELS` and `EVIDENCE`.
    row : ndarray of int
        Of the event, in the table of its kind.
    """

    start: Int
    end: Int
    label: Int
    kind: Int
    row: Int

    @functools.cached_property
    def _coverage(self) -> dict[int, Coverage]:
        coverage = {}
        for label in np.unique(self.label).tolist():
            of_label = self.label == label
            coverage[label] = Coverage(self.start[of_label], self.end[of_label])
        return coverage

    def shares(self, start: Int, end: Int) -> Int:
        """How much of each window each label holds, in ns: a row a label."""
        held = np.zeros((len(LABELS), len(start)), np.int64)
        for label, coverage in self._coverage.items():
            held[label] = coverage.of(start, end)
        held[_DISPATCH] = np.maximum(end - start, 0) - held.sum(axis=0)
        return held

    def union(self, *labels: str, kinds: Sequence[str] = EVIDENCE) -> Union:
        """When a thread's time had one of some labels, by events of some kinds."""
        chosen = np.isin(self.label, [LABELS.index(label) for label in labels])
        chosen &= np.isin(self.kind, [EVIDENCE.index(kind) for kind in kinds])
        return merge(self.start[chosen], self.end[chosen])

    def overlaps(self, start: Int, end: Int, label: Int) -> tuple[Int, Int, Int]:
        """Find the pieces that hold some of each window with the label asked for.

        Parameters
        ----------
        start, end, label : ndarray of int
            The windows, and a label for each.

        Returns
        -------
        window, piece, overlap_ns : ndarray of int
            Positions, and how long they overlap.
        """
        first = np.searchsorted(self.end, start, side="right")
        count = np.maximum(np.searchsorted(self.start, end) - first, 0)
        window = np.repeat(np.arange(len(start)), count)
        piece = np.arange(len(window)) + np.repeat(first - np.cumsum(count) + count, count)
        same = self.label[piece] == label[window]
        window, piece = window[same], piece[same]
        return window, piece, np.minimum(self.end[piece], end[window]) - np.maximum(self.start[piece], start[window])


def paint(layers: Sequence[Layer]) -> Paint:
    """Paint a thread's time.

    Parameters
    ----------
    layers : sequence of Layer
        The last covers all before it. Of one layer's events the innermost is seen. What surrounds silences covers
        nothing else.
    """
    edges = np.unique(np.concatenate([edge for layer in layers for edge in (layer.track.start, layer.track.end)]))
    begun = edges[:-1]
    label = np.full(len(begun), _DISPATCH, np.int8)
    kind = np.zeros(len(begun), np.int8)
    row = np.full(len(begun), -1, np.int32)
    for layer in layers:
        if not len(layer.track):
            continue
        event = layer.track.innermost_at(begun)
        at = np.flatnonzero(event >= 0)
        if layer.label == "around":
            at = at[label[at] >= _AROUND]
        label[at] = LABELS.index(layer.label)
        kind[at] = EVIDENCE.index(layer.kind)
        row[at] = layer.track.row[event[at]]
    pieces = np.flatnonzero(label != _DISPATCH)
    return Paint(begun[pieces], edges[1:][pieces], label[pieces], kind[pieces], row[pieces])
