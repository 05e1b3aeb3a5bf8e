"""A thread's time, painted: disjoint pieces, each with one label and the event that gave it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core.intervals import Coverage, expand_runs, merge
from nsightkit.trace.nesting import nesting

Int = npt.NDArray[np.integer[Any]]
Bool = npt.NDArray[np.bool_]
#: Starts and ends of disjoint intervals, in order.
Intervals = tuple[Int, Int]

#: The table that each kind of evidence is from.
TABLE_OF = {
    "call": "calls",
    "range": "ranges",
    "op": "ops",
    "os_call": "os_calls",
    "copy": "memops",
    "overhead": "overhead",
    "sample": "samples",
}
#: Kinds of evidence, numbered by position.
EVIDENCE_KINDS = ("none", *TABLE_OF)
#: Labels of a thread's time, and the cause of a gap that each names; of two with equal time in a gap, the first counts.
#: ``enclosed`` is a silence longer than dispatch takes, with a range or an operator around it, or with samples of the
#: running thread.
CAUSE_OF_LABEL = {
    "profiler": "profiler",
    "once": "start-up",
    "compile": "recompilation",
    "faults": "memory-transfer",
    "data": "input-pipeline",
    "staging": "memory-transfer",
    "messages": "communication",
    "work": "cpu-work",
    "dispatch": "launch-overhead",
    "enclosed": "cpu-work",
    "silence": "unknown",
}
#: Labels, numbered by position.
LABELS = tuple(CAUSE_OF_LABEL)
_DISPATCH = LABELS.index("dispatch")
_ENCLOSED = LABELS.index("enclosed")


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

    @property
    def length(self) -> Int:
        """How long each event lasts."""
        return self.end - self.start

    def at(self, positions: Int | slice) -> Track:
        """Keep the events at some positions."""
        return Track(self.start[positions], self.end[positions], self.row[positions])

    def subset(self, keep: Bool) -> Track:
        """Keep the events that a mask selects."""
        if keep.all():
            return self
        return self.at(np.flatnonzero(keep))

    @functools.cached_property
    def coverage(self) -> Coverage:
        """The union of the events."""
        return Coverage(self.start, self.end)

    def covered(self, start: Int, end: Int) -> Int:
        """How much of each window the events cover, in ns."""
        if not len(start):
            return start
        return self.coverage.of(start, end)

    def count_inside(self, times: Int) -> Int:
        """Count the sorted times within each event: from its start on, before its end."""
        before = np.searchsorted(times, self.start)
        return np.searchsorted(times, self.end) - before

    @functools.cached_property
    def parent(self) -> Int:
        """Position of the event around each event, -1 for none."""
        _, parent = nesting(np.zeros(len(self), np.int64), self.start, self.end)
        return parent

    def innermost_at(self, at: Int) -> Int:
        """Position of the last event to begin among those open at each time, -1 for none."""
        event = np.searchsorted(self.start, at, side="right") - 1
        climbing = np.flatnonzero(event >= 0)
        # From an event that is over to the one around it, one level a round, all times at once.
        while len(climbing):
            over = climbing[self.end[event[climbing]] <= at[climbing]]
            event[over] = self.parent[event[over]]
            climbing = over[event[over] >= 0]
        return event


def together(*tracks: Track) -> Track:
    """Merge several tracks by start; rows stay meaningful only within one table."""
    start = np.concatenate([track.start for track in tracks])
    end = np.concatenate([track.end for track in tracks])
    row = np.concatenate([track.row for track in tracks])
    order = np.argsort(start, kind="stable")
    return Track(start, end, row).at(order)


class Layer(NamedTuple):
    """Events that paint a label of `LABELS`; `kind`, of `EVIDENCE_KINDS`, names their table.

    A quiet layer paints over the labels ``silence`` and ``enclosed`` only.
    """

    label: str
    kind: str
    track: Track
    is_quiet: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Paint:
    """The pieces of a thread's time, in order; time that no piece covers is dispatch.

    Parameters
    ----------
    start, end : ndarray of int
        Nanoseconds.
    label, kind : ndarray of int
        Positions in `LABELS` and `EVIDENCE_KINDS`.
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
        """When each label holds, by its position in `LABELS`; only labels that occur."""
        coverage = {}
        for label in np.unique(self.label).tolist():
            of_label = self.label == label
            coverage[label] = Coverage(self.start[of_label], self.end[of_label])
        return coverage

    def shares(self, start: Int, end: Int) -> Int:
        """How much of each window each label holds, in ns: one row per label, one column per window."""
        label_ns = np.zeros((len(LABELS), len(start)), np.int64)
        for label, coverage in self._coverage.items():
            label_ns[label] = coverage.of(start, end)
        # What no piece covers is dispatch.
        label_ns[_DISPATCH] = np.maximum(end - start, 0) - label_ns.sum(axis=0)
        return label_ns

    def intervals_labelled(self, labels: Sequence[str], kinds: Sequence[str] = EVIDENCE_KINDS) -> Intervals:
        """Merge the pieces that have one of `labels` from an event of one of `kinds`; by default of any kind."""
        chosen = np.isin(self.label, [LABELS.index(label) for label in labels])
        chosen &= np.isin(self.kind, [EVIDENCE_KINDS.index(kind) for kind in kinds])
        return merge(self.start[chosen], self.end[chosen])

    def overlaps(self, start: Int, end: Int, label: Int) -> pd.DataFrame:
        """Find the pieces that lie in each window and have its label: ``window, kind, row, overlap_ns``."""
        first = np.searchsorted(self.end, start, side="right")
        beyond = np.searchsorted(self.start, end)
        window, piece = expand_runs(first, np.maximum(beyond - first, 0))
        has_label = self.label[piece] == label[window]
        window = window[has_label]
        piece = piece[has_label]
        begun = np.maximum(self.start[piece], start[window])
        ended = np.minimum(self.end[piece], end[window])
        columns = {"window": window, "kind": self.kind[piece], "row": self.row[piece], "overlap_ns": ended - begun}
        return pd.DataFrame(columns)


def paint(layers: Sequence[Layer]) -> Paint:
    """Paint a thread's time, each layer over those before it; the innermost event of a layer shows."""
    # Between two edges that follow each other nothing begins or ends: one look at its begin labels a piece.
    edges = np.zeros(0, np.int64)
    for layer in layers:
        edges = np.concatenate([edges, layer.track.start, layer.track.end])
    edges = np.unique(edges)
    begun = edges[:-1]
    label = np.full(len(begun), _DISPATCH, np.int8)
    kind = np.zeros(len(begun), np.int8)
    row = np.full(len(begun), -1, np.int32)
    for layer in layers:
        event = layer.track.innermost_at(begun)
        covered = np.flatnonzero(event >= 0)
        if layer.is_quiet:
            covered = covered[label[covered] >= _ENCLOSED]  # the last labels: enclosed and silence
        label[covered] = LABELS.index(layer.label)
        kind[covered] = EVIDENCE_KINDS.index(layer.kind)
        row[covered] = layer.track.row[event[covered]]
    pieces = np.flatnonzero(label != _DISPATCH)
    return Paint(begun[pieces], edges[1:][pieces], label[pieces], kind[pieces], row[pieces])
