"""Where the time of each device went: every moment once, lost to a cause or filled by a kind of work."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.categories import CATEGORIES, categorize
from nsightkit.analysis.core.intervals import Coverage
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.ranks.alignment import Meetings
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.timeline import gaps, steps
from nsightkit.analysis.timeline.gaps import in_window
from nsightkit.trace.model import GPU_TABLES, Trace

__all__ = ["BOTTLENECKS", "BUSY", "CODE", "ENDS", "IDLE", "Account", "of", "ranked"]

Int = npt.NDArray[np.int64]

_FILLS = ("compute-bound", "memory-bound", "not-enough-data", "communication", "imbalance")
#: Every answer there is: the causes of idle time, then what fills busy time.
BOTTLENECKS = (*gaps.CAUSES, *_FILLS)
CODE = {name: code for code, name in enumerate(BOTTLENECKS)}
#: One column more than answers: what a device lay idle before its span or after it, while others worked.
ENDS = len(BOTTLENECKS)
IDLE = range(len(gaps.CAUSES))
BUSY = range(len(gaps.CAUSES), ENDS)
_COMPUTE, _MEMORY, _UNDECIDED, _COMMUNICATION, _IMBALANCE = (CODE[name] for name in _FILLS)

#: What a kernel's category says of its bound, where no shape does.
_OF_CATEGORY = {
    **dict.fromkeys(("GEMM", "attention"), _COMPUTE),
    **dict.fromkeys(("softmax", "normalization", "reduction", "elementwise"), _MEMORY),
    **dict.fromkeys(("optimizer", "memory-like", "Triton-fused"), _MEMORY),
    "communication": _COMMUNICATION,
    "other": _UNDECIDED,
}
#: Products of a matrix with a few rows read the matrix for next to no arithmetic; their names often say so.
_FEW_ROWS = re.compile(r"gemv|decode|split_?kv|paged", re.IGNORECASE)
#: A server that decodes fewer sequences at once than this multiplies its weights by fewer rows than any card needs to
#: be bound by arithmetic: in 16 bits a product with m rows does about m FLOPs a byte, and cards have 140 to 300.
_FEW_SEQUENCES = 128
#: Fewer steps say nothing about what is usual; then tenths of the time stand in for them.
FEW_STEPS, PARTS = 3, 10


class Account:
    """The time of each device, in all and in each step.

    Parameters
    ----------
    trace : Trace
    gpu : str, optional
        Name of the card, where shapes are known and the trace does not name it.

    Attributes
    ----------
    steps : DataFrame
        As :func:`nsightkit.analysis.timeline.steps.windows` has them.
    begin, end : int
        What is judged: the steps or, without them, the time from the first operation to the last.
    edges : ndarray of int64, shape (parts + 1,)
        Of the parts of that time: steps, or tenths of it where there are fewer than three.
    amounts : ndarray of int64, shape (parts, devices, answers + 1)
        Nanoseconds; the last column is :data:`ENDS`.
    span_ns : int
        What `amounts` sum to but for :data:`ENDS`: the sum over devices of the window or, without steps, of their
        spans.
    lost : dict of str to int
        Time that was lost, in ns by answer: idle, or in copies and collectives that nothing else ran beside.
    decodes : bool
        Whether the time is mostly a server's that decodes few sequences at once.
    """

    def __init__(self, trace: Trace, gpu: str | None) -> None:
        self.trace, self.gpu = trace, gpu
        self.steps = steps.windows(trace)
        self.spans = intervals.busy(trace).set_index("device")
        self.devices: list[int] = self.spans.index.tolist()
        self.collectives = Meetings(trace)
        related = self._related()
        if len(self.steps):
            if not related:
                used = steps.devices(trace, int(self.steps["process"].iloc[0]))
                self.devices = [device for device in self.devices if device in used]
            self.begin, self.end = int(self.steps["begin_ns"].iloc[0]), int(self.steps["end_ns"].iloc[-1])
            self.span_ns = (self.end - self.begin) * len(self.devices)
        else:
            self.begin, self.end = int(self.spans["span_start_ns"].min()), int(self.spans["span_end_ns"].max())
            self.span_ns = int(self.spans["span_ns"].sum())
        #: how long what is judged lasted
        self.wall_ns = self.end - self.begin
        self.are_steps = len(self.steps) >= FEW_STEPS
        step_edges = np.append(self.begin, self.steps["end_ns"].to_numpy())
        tenths = np.linspace(self.begin, self.end, PARTS + 1).astype(np.int64)
        self.edges = step_edges if self.are_steps else tenths
        found = in_window(trace)
        self.gaps = found[found["device"].isin(self.devices)].reset_index(drop=True)
        self.cause = pd.Categorical(self.gaps["cause"], categories=gaps.CAUSES).codes.astype(np.int64)
        self.decodes = self._decodes()
        self.kernels = self._kernels()
        self.fills = self.kernels["fills"].to_numpy()
        self.amounts = np.stack([self._device(device) for device in self.devices], axis=1)
        if not related:
            self.amounts[..., ENDS] = 0
        #: by part and answer, over all devices; and over all parts
        self.by_part = self.amounts.sum(axis=1)
        self.total = self.by_part.sum(axis=0)
        losses = (*IDLE, _COMMUNICATION, _IMBALANCE)
        self.lost = {BOTTLENECKS[code]: int(of(self.total, code)) for code in losses}

    def _decodes(self) -> bool:
        said = steps.phases(self.trace)
        few = (said["phase"] == "decode") & (said["sequences"].fillna(_FEW_SEQUENCES) < _FEW_SEQUENCES)
        return bool(2 * said.loc[few, "share"].sum() >= 1)

    def _kernels(self) -> pd.DataFrame:
        """Every kernel with the answer it speaks for, and whether its operator's shape said so."""
        table = self.trace.table("kernels", ["device", "start_ns", "end_ns", "name", "collective"])
        category = categorize(table["name"])
        fills = np.array([_OF_CATEGORY[name] for name in CATEGORIES], np.int8)[category.codes]
        few_rows = self.decodes | matching(table["name"], _FEW_ROWS)
        fills[(fills == _COMPUTE) & few_rows] = _MEMORY
        bound = sol.kernel_bounds(self.trace, self.gpu).codes
        fills = np.where(bound > 0, np.array([_UNDECIDED, _COMPUTE, _MEMORY], np.int8)[bound], fills)
        # What a collective's kernel reduces on the way is not an operator of the model.
        talks = (category == "communication") | (table["collective"] != "").to_numpy()
        return table.drop(columns="collective").assign(
            fills=np.where(talks, _COMMUNICATION, fills), by_shape=(bound > 0) & ~talks
        )

    def _related(self) -> bool:
        """Whether devices work together: they are one process's, or all of them run collectives."""
        owners = [self.trace.table(table, ["process"])["process"].unique() for table in GPU_TABLES]
        return len(np.unique(np.concatenate(owners))) == 1 or len(self.collectives.devices) == len(self.devices)

    def _device(self, device: int) -> Int:
        start, end = self.edges[:-1], self.edges[1:]
        amounts = np.zeros((len(start), ENDS + 1), np.int64)
        if not len(self.steps):
            span = self.spans.loc[device]
            low, high = (np.array([span[f"span_{side}_ns"]], np.int64) for side in ("start", "end"))
            amounts[:, ENDS] = end - start - Coverage(low, high).of(start, end)
        mine = (self.gaps["device"] == device).to_numpy()
        for code in IDLE:
            of_cause = self.gaps[mine & (self.cause == code)]
            amounts[:, code] = Coverage(of_cause["start_ns"], of_cause["end_ns"]).of(start, end)
        on_device = (self.kernels["device"] == device).to_numpy()
        running = {code: self.kernels[on_device & (self.fills == code)] for code in BUSY}
        (copies, memsets), filtered = self.memops(device), self.trace is not self.trace.whole
        layers: list[tuple[int | None, list[pd.DataFrame]]] = [
            (_COMPUTE, [running[_COMPUTE]]),
            (_MEMORY, [running[_MEMORY]]),
            (_UNDECIDED, [running[_UNDECIDED], _on(self.trace, "graphs", device)]),
            (_IMBALANCE, [self.collectives.waiting(device)]),
            (_COMMUNICATION, [running[_COMMUNICATION]]),
            # What a filter left out hides a copy all the same.
            (None, [_on(self.trace.whole, table, device) for table in ("kernels", "graphs") if filtered]),
            (CODE["memory-transfer"], [copies]),
            (_MEMORY, [memsets]),
        ]
        covered, before = Coverage([], []), np.zeros(len(start), np.int64)
        for answer, tables in layers:
            parts = ((table["start_ns"], table["end_ns"]) for table in tables)
            covered = Coverage(*intervals.union((covered.start, covered.end), *parts))
            now = covered.of(start, end)
            if answer is not None:
                amounts[:, answer] += now - before
            before = now
        return amounts

    def memops(self, device: int) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Copies of a device, and memsets: those write its memory at its full rate."""
        moved = _on(self.trace, "memops", device, "kind", "src_kind", "dst_kind")
        memset = (moved["kind"] == "memset").to_numpy()
        return moved[~memset], moved[memset]

    @functools.cached_property
    def exposed_copies(self) -> pd.DataFrame:
        """Copies that run for most of their time without a kernel beside them, with their rows as index."""
        parts = []
        for device in self.devices:
            copies, _ = self.memops(device)
            over = pd.concat([_on(self.trace.whole, table, device) for table in ("kernels", "graphs")])
            hidden = Coverage(over["start_ns"], over["end_ns"]).of(copies["start_ns"], copies["end_ns"])
            parts.append(copies[2 * hidden < (copies["end_ns"] - copies["start_ns"]).to_numpy()])
        return pd.concat(parts)

    @functools.cached_property
    def exposed_copies_ns(self) -> int:
        """Time of copies that no kernel ran beside: of ``memory-transfer`` the part that is not idle."""
        waited = self.gaps[self.cause == CODE["memory-transfer"]]
        return int(self.total[CODE["memory-transfer"]] - (waited["end_ns"] - waited["start_ns"]).sum())

    def moments(self, name: str) -> pd.DataFrame:
        """When an answer took its time.

        Parameters
        ----------
        name : str
            One of :data:`BOTTLENECKS`.

        Returns
        -------
        DataFrame
            ``device, start_ns, end_ns, kind, name, row, duration_ns``; the row is that in the table of its kind.
        """
        code, columns = CODE[name], ["device", "start_ns", "end_ns", "kind", "name", "row"]
        waited, ran = self.gaps[self.cause == code], self.kernels[self.fills == code]
        # A copy that was waited for is a row of the whole trace, and ran on another device.
        waited = waited.assign(row=waited["row"].where(waited["kind"] != "copy", -1))
        parts = [waited, ran.assign(kind="kernel", row=ran.index)]
        if name == "imbalance":
            waits = pd.concat([self.collectives.waiting(device) for device in self.devices])
            waits = pd.concat([waits.assign(name="waiting in " + waits["kind"]), self.ends()])
            parts.append(waits.assign(kind="none", row=-1))
        if name == "not-enough-data":
            parts.append(self.trace.table("graphs").assign(kind="graph", name="graph replay", row=-1))
        if name in ("memory-transfer", "memory-bound"):
            moved = self.exposed_copies if name == "memory-transfer" else self.trace.table("memops")
            moved = moved[(moved["kind"] == "memset") == (name == "memory-bound")]
            called = moved["kind"].astype(str).map(gaps.memop_name)
            parts.append(moved.assign(name=called, kind="copy", row=moved.index))
        found: pd.DataFrame = pd.concat([part[columns].astype({"kind": object, "name": object}) for part in parts])
        found = found[(found["end_ns"] > self.begin) & (found["start_ns"] < self.end)].reset_index(drop=True)
        return found.assign(duration_ns=found["end_ns"] - found["start_ns"])

    def ends(self) -> pd.DataFrame:
        """When a device had nothing to do before its first operation or after its last, while others worked."""
        before = self.spans.assign(start_ns=self.begin, end_ns=self.spans["span_start_ns"], name="no work yet")
        after = self.spans.assign(start_ns=self.spans["span_end_ns"], end_ns=self.end, name="no more work")
        both = pd.concat([before, after]).reset_index()
        return both[both["end_ns"] > both["start_ns"]] if not len(self.steps) else both.head(0)


def _on(trace: Trace, table: str, device: int, *more: str) -> pd.DataFrame:
    frame = trace.table(table, ["device", "start_ns", "end_ns", *more])
    return frame[frame["device"] == device]


def of(amounts: npt.NDArray[Any], code: int) -> Any:
    """One answer's time; lying idle at the ends is imbalance as well.

    Parameters
    ----------
    amounts : ndarray
        Answers and :data:`ENDS` along the last axis.
    code : int
    """
    return amounts[..., code] + (amounts[..., ENDS] if code == _IMBALANCE else 0)


def ranked(account: Account, codes: range) -> list[dict[str, Any]]:
    """Rank answers by time.

    Parameters
    ----------
    account : Account
    codes : range

    Returns
    -------
    list of dict
        ``bottleneck, total_ns, share_of_span``, by falling time.
    """
    times = {BOTTLENECKS[code]: int(of(account.total, code)) for code in codes}
    rows = [
        {"bottleneck": name, "total_ns": ns, "share_of_span": min(ns / max(account.span_ns, 1), 1.0)}
        for name, ns in times.items()
        if ns > 0
    ]
    return sorted(rows, key=lambda row: -row["total_ns"])
