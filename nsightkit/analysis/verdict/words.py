"""The sentences of a verdict: what, how much, where, what to do, what it gains, what speaks against it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from nsightkit import hardware
from nsightkit.analysis.core import intervals
from nsightkit.analysis.core.names import matching
from nsightkit.analysis.core.text import bytes_text, short_name, time_text
from nsightkit.analysis.replay.schedule import ALLOCATES
from nsightkit.analysis.replay.whatif import CHANGES, UNKNOWN, WhatIf, plain
from nsightkit.analysis.timeline import gaps, memops
from nsightkit.analysis.timeline.gaps.facts import TABLE_OF
from nsightkit.analysis.verdict.account import CODE, ENDS, IDLE, Account, of
from nsightkit.analysis.verdict.rules import CHANGE_OF, LOST, Decision, bounded, by_shape, rate
from nsightkit.errors import UsageError
from nsightkit.trace.model import GPU_TABLES

__all__ = ["CAPTURE", "Answer"]

#: How much of a list a sentence names, and the answer keeps.
_NAMED, _KEPT = 3, 10
#: Kernels that reach this share of the datasheet's rate are as fast as such kernels get.
_GOOD = 0.8
#: Kinds of events that a call launched, and the numbers of their tables.
_LAUNCHED = {"kernel": GPU_TABLES.index("kernels"), "copy": GPU_TABLES.index("memops")}
_KIND = {
    "op": "operator",
    "os_call": "OS call",
    "copy": "",
    "overhead": "recorded as overhead:",
    "none": "",
    "graph": "",
    "kernel": "",
    "sample": "CPU samples, mostly of",
}
#: What an answer's moments are called; those of idle time are gaps.
_MOMENTS = {"kernel": ("kernel", None), "copy": ("copy", "copies"), "graph": ("replay", None), "none": ("time", None)}
#: Names and moments that hold less than this of an answer's time say nothing.
_LITTLE = 0.01
#: What is named this often, and took this many times its median and this long at once, was held up.
_FEW, _HELD, _HELD_NS = 10, 50, 1_000_000
#: A program is compiled if compiled regions take this part of its time, or their kernels this part of the kernels'.
_COMPILES = 0.05

#: One change for each bottleneck.
_ADVICE = {
    "profiler": "profile less (fewer tables, no backtraces, a shorter window), and look again",
    "start-up": "warm up before you measure, and capture a later window; load and compile ahead of time",
    "queued": "find out what else holds the GPU or the stream: another process, or work launched before the capture",
    "input-pipeline": "have the next batch ready in time: more loader workers, prefetching, or cheaper decoding",
    "synchronization": "do not wait for the GPU in each step: read values back rarely, or a step later",
    "cpu-work": "move this work off the thread that launches, or make it shorter",
    "compute-bound": "do less or cheaper arithmetic",
    "memory-bound": "move fewer bytes: fuse operators, or use narrower types",
    "communication": "overlap collectives with the backward pass, or send less: narrower types, rarer reductions",
    "imbalance": "give the devices equal work: batches of equal cost, layers split by time",
    "unknown": "name what the launching thread does with NVTX ranges, and record OS calls",
    "launch-overhead": "launch less: torch.compile, fused operators, or CUDA graphs",
}
_ON_COPY = {
    "HtoD from pageable": (
        "copy from pinned memory without waiting (PyTorch: non_blocking=True), so that kernels can run beside it"
    ),
    "HtoD": "copy the next batch on a stream of its own while this one computes",
    "DtoH": "read back less, or into pinned memory on a stream of its own",
    "DtoD": "avoid clones and changes of layout between tensors of one device",
    "PtoP": "overlap copies between devices with kernels, or send less",
    "unified": "prefetch managed memory before it is needed (cudaMemPrefetchAsync), or copy it as a whole",
}
#: Products in FP32.
_FP32 = re.compile(r"(?<!tf32_)(?<!tf32)sgemm|simt|f32f32_f32f32", re.IGNORECASE)
#: What a kernel's name gives away, the precision that the advice needs, and the advice.
_GIVEN_AWAY = (
    (re.compile(r"(?<!tf32_)(?<!tf32)sgemm|simt", re.IGNORECASE), ("tf32", "bf16", "fp16"),
     "these products run in FP32 without tensor cores: {}"),
    (re.compile(r"align[12](?!\d)", re.IGNORECASE), (),
     "these products have sizes that are not multiples of 8: pad them"),
    (re.compile(r"soft_?max", re.IGNORECASE), (),
     ("if these softmaxes are those of attention, a fused attention (PyTorch: scaled_dot_product_attention) need not "
      "write them to memory")),
)  # fmt: skip
_NARROWER = {"tf32": "allow TF32", "bf16": "autocast to BF16", "fp16": "autocast to FP16 with a gradient scaler"}
#: The compute capability from which tensor cores multiply in them.
_SINCE = {"tf32": 8.0, "bf16": 8.0, "fp16": 7.0}
CAPTURE = {
    "nsys": "nsightkit capture nsys -o more -- COMMAND",
    "nodes": "nsightkit capture nsys --cuda-graph-trace=node -o nodes -- COMMAND",
    "torch": "nsightkit capture torch -o more -- COMMAND",
    "shapes": "nsightkit capture torch --record-shapes -o shapes -- COMMAND",
    "ncu": "nsightkit capture ncu --launch-count 20 -o kernels -- COMMAND",
}
#: Advice where copies or collectives fill the time, and running them beside other work would gain next to nothing.
_LESS = {
    "memory-transfer": "copy less: keep on the device what fits there, or send narrower types",
    "communication": "send less: narrower types, rarer reductions",
}
#: What a cause that names nothing means.
_SAID = {
    "unknown": "time for which nothing recorded says why (unknown)",
    "queued": "work that was launched and waited for something that is not in the trace (queued)",
}
_FILLED = {
    "compute-bound": "Kernels bound by arithmetic fill",
    "memory-bound": "Kernels bound by the memory fill",
    "not-enough-data": "Kernels and graph replays of which nothing says what bounds them fill",
    "communication": "Collectives that no other kernel runs beside take",
    "imbalance": "Waiting for the last device takes",
    "memory-transfer": "Copies that no kernel runs beside fill",
}
_OF_TORCH = re.compile(r"\bat::|\bc10::|^triton_")
#: Functions and ranges of MPI and what lies below it, waiting for messages.
_MESSAGES = re.compile(r"^P?MPIX?_|^MPI(R|D|C|DI)_|^(uc[pts]|uct|opal|ompi|mca|psm2|fi|ibv|mlx\d)_")
_BACKWARD = re.compile(r"(?i)backward|autograd|optimizer")
#: Ranges and kernels that a compiler made.
_COMPILED = re.compile(r"^triton_|Torch-Compiled Region|CompiledFxGraph|inductor")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _count(number: int, thing: str, several: str | None = None) -> str:
    return f"{number:,} {thing if number == 1 else several or thing + 's'}"


def _called(name: str, most: int = 100) -> str:
    """A name as a sentence can hold it; the machine formats have it whole, under ``named`` and ``longest``."""
    text = short_name(name)
    return text if len(text) <= most else f"{text[: most - 1]}…"


class Answer:
    """What is behind a decision, and the sentences about it.

    Parameters
    ----------
    account : Account
    played : WhatIf
    decision : Decision
    changes : list of dict
        As :func:`nsightkit.analysis.replay.whatif.summary` gives them.
    """

    def __init__(self, account: Account, played: WhatIf, decision: Decision, changes: list[dict[str, Any]]) -> None:
        self.account, self.played, self.decision, self.changes = account, played, decision, changes
        self.trace, self.name, self.code = account.trace, decision.name, CODE[decision.name]
        self.ns = int(of(account.total, self.code))
        self.share = min(self.ns / max(account.span_ns, 1), 1.0)
        self._whole = "the steps" if len(account.steps) else "the time"
        self._steps = set(account.steps["step"])
        self.sol = bounded(account, decision.name)
        self.events = account.moments(decision.name)
        self.events["name"] = _alike(self.events)
        self.named, self.longest = self._named(), self._longest()

    # -- what is behind it

    def _named(self) -> pd.DataFrame:
        each = self.events.groupby(["kind", "name"], sort=False)["duration_ns"]
        grouped = each.agg(count="size", total_ns="sum").reset_index()
        grouped = grouped.sort_values("total_ns", ascending=False, kind="stable", ignore_index=True).head(_KEPT)
        return grouped.assign(inside=pd.Series(self._inside(grouped), dtype=object))

    def _inside(self, named: pd.DataFrame) -> list[str | None]:
        """The operator, or else the range, around the calls behind most of each name's time; never a whole step."""
        keys = pd.MultiIndex.from_frame(named[["kind", "name"]])
        number = keys.get_indexer(pd.MultiIndex.from_frame(self.events[["kind", "name"]]))
        mine = self.events.assign(number=number)[(number >= 0) & (self.events["row"] >= 0).to_numpy()]
        launch = intervals.launches_of(self.trace, mine["kind"].map(_LAUNCHED).fillna(-1), mine["row"])
        call = mine["row"].where(mine["kind"] == "call", launch).to_numpy(np.int64)
        mine, call = mine[call >= 0], call[call >= 0]
        lasting, number = mine["duration_ns"].to_numpy(), mine["number"].to_numpy()
        calls = self.trace.whole.table("calls", ["start_ns", "end_ns", "thread"]).iloc[call]
        said: list[str | None] = [None] * len(named)
        for table in ("ranges", "ops"):  # what the latter say replaces what the former did
            outer = self.trace.whole.table(table, ["start_ns", "end_ns", "thread", "name"])
            if not len(outer) or not len(calls):
                continue
            at = intervals.enclosing(calls, outer)
            around = pd.DataFrame({"number": number, "name": outer["name"].to_numpy()[at], "ns": lasting})[at >= 0]
            times = around.groupby(["number", "name"])["ns"].sum()
            for one, name in times.groupby("number").idxmax():
                if 2 * times[one, name] > lasting[number == one].sum() and name not in self._steps:
                    said[one] = str(name)
        return said

    def _longest(self) -> pd.DataFrame:
        """Its longest moments, and what ended those that are gaps."""
        at = np.argsort(-self.events["duration_ns"].to_numpy(), kind="stable")[:_NAMED]
        longest = self.events.iloc[at].drop(columns="row").reset_index(drop=True)
        ended: dict[tuple[int, int], str | None] = {}
        if self.code in IDLE and len(longest):
            found = gaps.find(self.trace, min_ns=int(longest["duration_ns"].min()))
            places = zip(found["device"], found["start_ns"], found["evidence"], strict=True)
            ended = {(device, start): evidence.get("ended_by") for device, start, evidence in places}
        by = [ended.get(place) for place in zip(longest["device"], longest["start_ns"], strict=True)]
        return longest.drop(columns="duration_ns").assign(ended_by=pd.Series(by, dtype=object))

    # -- evidence

    def evidence(self) -> Iterator[str]:
        """What speaks for the answer."""
        yield from (*self._first(), *self._prediction(), *self._what())
        longest = self.longest[self.longest["end_ns"] - self.longest["start_ns"] > _LITTLE * self.ns]
        moments = [
            f"{time_text(row['end_ns'] - row['start_ns'])} at {row['start_ns'] / 1e6:,.3f} ms"
            + (f" on device {row['device']}" if len(self.account.devices) > 1 else "")
            + (f", before {_called(row['ended_by'], 40)}" if row["ended_by"] else "")
            for row in longest.to_dict("records")
        ]
        if moments:
            yield f"Longest: {'; '.join(moments)}"
        if self.name == "memory-transfer":
            yield from self._moved()
        if self.name == "imbalance":
            yield from self._late()
        if self.name == "memory-bound" and self.account.decodes:
            yield "The server decodes few sequences at once: each product reads its weights for a few rows"
        reached = rate(self.sol)
        if reached is not None:
            yield f"Operators with known shapes run at {_percent(reached)} of the datasheet's rate"

    def _what(self) -> Iterator[str]:
        """The names behind it."""
        gains = {row["change"]: row["speedup"] for row in self.changes}
        for row in self.named.head(_NAMED).to_dict("records"):
            if not row["name"] or row["total_ns"] <= _LITTLE * self.ns:
                continue
            one, several = ("gap", None) if self.code in IDLE and row["kind"] != "copy" else _MOMENTS[row["kind"]]
            text = f"{time_text(row['total_ns'])} in {_count(row['count'], one, several)}: "
            if row["kind"] == "range" and row["name"] in self._steps:
                text += f"nothing but the step's own range, {_called(row['name'])}, says what the thread did there"
            else:
                text += f"{_KIND.get(row['kind'], row['kind'])} {_called(row['name'])}".strip()
                text += f", mostly inside {_called(row['inside'])}" if row["inside"] else ""
            gain = gains.get(f"no-cpu-work:{plain(row['name'])}")
            yield f"{text}; without it {gain:.2f}x" if gain else text

    def _first(self) -> list[str]:
        account = self.account
        idle = _percent(int(account.total[list(IDLE)].sum() - account.exposed_copies_ns) / max(account.span_ns, 1))
        of_what = f"{_percent(self.share)} of {self._whole} ({time_text(self.ns)} of {time_text(account.span_ns)})"
        if self.code in IDLE and self.name != "memory-transfer":
            dry = account.gaps[account.cause == self.code]
            said = _SAID.get(self.name, self.name)
            return [
                f"The GPU was idle for {idle} of {self._whole}; {said} takes {of_what} in {_count(len(dry), 'gap')}"
            ]
        said = f"{_FILLED[self.name]} {of_what}"
        if self.name == "memory-transfer":
            waited = self.ns - account.exposed_copies_ns
            said += f", {time_text(waited)} of it waiting for copies" if waited else ""
        return [said] if self.decision.change else [said, f"The GPU was idle for {idle} of {self._whole}"]

    def _prediction(self) -> list[str]:
        if self.played.refused is not None:
            return []
        if self.decision.change is None:
            best = next(
                (row for row in self.changes if row["speedup"] and self.played.saved(row["change"]) >= _LITTLE), None
            )
            most = f"at most {best['speedup']:.2f}x as fast ({best['change']})" if best else "no faster"
            return [f"Replay with each change: the run gets {most}"]
        row = self.played.row(self.decision.change)
        what = f"{row['change']} ({CHANGES[row['change']].partition(';')[0]})"
        if row["speedup"] is None:
            return [f"Replay with {what}: {UNKNOWN}"]
        times = f"{time_text(row['predicted_ns'])} instead of {time_text(row['wall_ns'])}"
        said = [f"Replay with {what}: {times}, {row['speedup']:.2f}x as fast"]
        some, every = self.decision.gaining or (0, 0)
        if 2 * some > every and not any("steps would gain" in doubt for doubt in self.decision.doubts):
            said.append(f"{some:,} of {every:,} steps gain from that")
        return said

    def _moved(self) -> Iterator[str]:
        """What was copied in all, overlapped or not."""
        rows = memops.summary(self.trace)
        rows = rows[(rows["kind"] != "memset") & (rows["total_ns"] > _LITTLE * rows["total_ns"].sum())]
        for row in rows.head(_NAMED - 1).to_dict("records"):
            speed = f" at {row['gb_per_s']:.1f} GB/s" if np.isfinite(row["gb_per_s"]) else ""
            moved = "" if pd.isna(row["bytes"]) else f"{bytes_text(row['bytes'])} in "
            yield (
                f"In all {_count(row['count'], 'copy', 'copies')} {row['kind']}, {row['src_kind']} to "
                f"{row['dst_kind']}: {moved}{time_text(row['total_ns'])}{speed}"
            )

    def _late(self) -> Iterator[str]:
        collectives, totals = self.account.collectives, self.account.amounts.sum(axis=0)
        for number, device in enumerate(self.account.devices[:_KEPT]):
            waited, ends = (int(totals[number, code]) for code in (CODE["imbalance"], ENDS))
            parts = []
            if collectives.matched:
                waits = f"waited {time_text(waited)} in collectives" if waited else "did not wait in collectives"
                parts = [waits, f"arrived last in {collectives.last(device):,} of {collectives.matched:,}"]
            if ends:
                parts.append(f"had nothing to do for {time_text(ends)} at the ends")
            if parts:
                yield f"Device {device} {' and '.join(parts)}"

    # -- what speaks against it

    def against(self) -> Iterator[str]:
        """Doubts first, then remarks."""
        account = self.account
        yield from self.decision.doubts
        yield from self._held_up()
        yield from (
            f"{row['change']} alone would give {row['speedup']:.2f}x" for row in self._others() if row["speedup"]
        )
        if self.decision.name in ("communication", "imbalance"):
            filled = sum(
                int(account.total[CODE[name]]) for name in ("compute-bound", "memory-bound", "not-enough-data")
            )
            yield f"other kernels run for {_percent(filled / max(account.span_ns, 1))} of {self._whole}"
        if len(account.devices) > 1:
            busy = account.spans.loc[account.devices, "busy_ns"] / max(account.wall_ns, 1)
            if busy.max() - busy.min() > LOST:
                each = ", ".join(f"device {device} {_percent(share)}" for device, share in busy.head(_KEPT).items())
                yield f"the devices were not equally busy: {each} of the wall time"
        wrong = int(self.sol["impossible"].sum()) if len(self.sol) else 0
        if wrong:
            yield (f"{_count(wrong, 'operator')} seem quicker than physics allows and were left out (nsightkit sol)")
        if self.changes and self.played.schedule.inferred:
            waits = _count(self.played.schedule.inferred, "wait")
            yield f"the prediction rests on {waits} that the trace does not name"
        if self.code in IDLE and not self.trace.recorded("calls"):
            yield "the trace does not say which calls launched the GPU's work"
        yield from self.trace.meta.notes

    def _held_up(self) -> Iterator[str]:
        """Work that takes next to no time as a rule was not at work where it took long."""
        first = self.named.head(_NAMED)
        for kind, name in first.loc[first["kind"].isin(["op", "range"]), ["kind", "name"]].to_numpy():
            table = self.trace.table(TABLE_OF[kind], ["name", "duration_ns"])
            lasting = table.loc[table["name"] == name, "duration_ns"]
            if len(lasting) >= _FEW and lasting.max() >= max(_HELD * lasting.median(), _HELD_NS):
                usual, once = time_text(lasting.median()), time_text(lasting.max())
                yield (
                    f"{_called(name)} takes {usual} as a rule and took {once} once: something held the thread up there "
                    "(another process, a page fault, the profiler), or was done for the first time"
                )

    def _others(self) -> list[dict[str, Any]]:
        """Other changes that gain enough to speak of, but for parts of the one that decided."""
        rows = [row for row in self.changes if row["change"] != self.decision.change and ":" not in row["change"]]
        return [row for row in rows if self.played.saved(row["change"]) >= LOST]

    # -- what to do

    def next_steps(self) -> Iterator[str]:
        """What to change first, and what that would gain."""
        if self.name == "not-enough-data":
            yield self._more_data()
        elif self.name in ("compute-bound", "memory-bound"):
            yield from self._faster()
        elif self.decision.change is None and self.played.refused is None and self.name in _LESS:
            yield _LESS[self.name]
        else:
            first = self._gaining(self.advice(self.name), self.decision.change)
            yield f"{first} ({CAPTURE['nsys']})" if self.name == "unknown" else first
            causes = {change: name for name, change in CHANGE_OF.items()}
            second = next((causes[row["change"]] for row in self._others()), None)
            if second:
                yield self._gaining(f"then {second}: {self.advice(second)}", CHANGE_OF[second])

    def _gaining(self, advice: str, change: str | None) -> str:
        if change is None or self.played.refused is not None:
            return advice
        gain = self.played.row(change)["speedup"]
        return f"{advice}: predicted {gain:.2f}x" if gain else advice

    def advice(self, name: str) -> str:
        """One change that fits a bottleneck, this program and this card."""
        if name == "memory-transfer":
            copies = self.account.exposed_copies
            kinds = copies["kind"].astype(object) + " from " + copies["src_kind"].astype(object)
            lasting = (copies["end_ns"] - copies["start_ns"]).groupby(kinds).sum()
            kind = str(lasting.idxmax()) if len(lasting) else "HtoD from pageable"
            return _ON_COPY.get(kind) or _ON_COPY.get(kind.partition(" ")[0], _ON_COPY["HtoD"])
        fits = (advice for of_what, holds, advice in _WHERE if of_what == name and holds(self))
        return next(fits, None) or _ADVICE[name] + (self._narrower() if name == "compute-bound" else "")

    @property
    def names_a_step(self) -> bool:
        """Whether what most of the time lies in is a whole step, which names no work."""
        return len(self.named) > 0 and self.named["name"].iloc[0] in self._steps

    @property
    def allocates(self) -> bool:
        """Whether allocating or freeing memory takes most of the time."""
        first = self.named.head(1)
        return any(first["kind"] == "call") and any(map(ALLOCATES.search, first["name"]))

    @property
    def passes_messages(self) -> bool:
        """Whether most of the time is spent in a library that exchanges messages between processes."""
        return any(map(_MESSAGES.search, self.named["name"].head(1).astype(str)))

    @property
    def is_torch(self) -> bool:
        """Whether PyTorch launched the GPU's work."""
        return bool(self.trace.whole.size("ops")) or self._has("kernels", _OF_TORCH)

    @property
    def trains(self) -> bool:
        """Whether a backward pass was recorded."""
        return any(self._has(table, _BACKWARD) for table in ("ranges", "ops", "kernels"))

    def _has(self, table: str, pattern: re.Pattern[str]) -> bool:
        return bool(matching(self.trace.whole.table(table, ["name"])["name"], pattern).any())

    @property
    def has_graphs(self) -> bool:
        """Whether the program replays CUDA graphs."""
        return bool(self.trace.size("graphs")) or self._has("calls", re.compile("GraphLaunch"))

    @property
    def is_compiled(self) -> bool:
        """Whether a compiler made a part of the program that counts."""
        tables = [self.trace.table(table, ["name", "duration_ns"]) for table in ("kernels", "ranges", "ops")]
        kernels, *regions = (table.loc[matching(table["name"], _COMPILED), "duration_ns"].sum() for table in tables)
        least = _COMPILES * tables[0]["duration_ns"].sum()
        return bool(kernels > least or max(regions) > _COMPILES * self.account.wall_ns)

    def _precision(self, wanted: tuple[str, ...]) -> str | None:
        """The first of some precisions that this card multiplies in; of a card that is not known, the first."""
        named = next((gpu for gpu in self.trace.meta.gpus if gpu.name), None)
        name, since = self.account.gpu or (named.name if named else None), named.compute_capability if named else None
        try:
            card = hardware.find(name) if name else None
        except UsageError:
            card = None
        for precision in wanted:
            # Of a card that is not listed its generation tells.
            if card.supports(precision) if card else since is None or float(since) >= _SINCE[precision]:
                return precision
        return None

    def _multiply(self, precision: str) -> str:
        return _NARROWER[precision] if self.is_torch else f"multiply in {precision.upper()}"

    def _narrower(self) -> str:
        """The precision that this card multiplies faster, where the program still uses FP32."""
        fits = self._precision(("bf16", "fp16"))
        return f": {self._multiply(fits)}" if fits and self._is_named(_FP32) else ""

    def _is_named(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(str(name)) for name in self.named["name"])

    def _more_data(self) -> str:
        lasting = self.events["duration_ns"]
        replayed = lasting[self.events["kind"] == "graph"].sum()
        if 2 * replayed >= lasting.sum() > 0:
            return f"record the kernels inside the graphs: {CAPTURE['nodes']}"
        return f"let counters say what bounds the kernels named above: {CAPTURE['ncu']}"

    def _faster(self) -> Iterator[str]:
        advised = ""
        for pattern, wanted, advice in _GIVEN_AWAY:
            fits = self._precision(wanted)
            if self._is_named(pattern) and (fits or not wanted):
                yield advice.format(self._multiply(fits) if fits else "")
                advised = fits or advised
        reached = rate(self.sol)
        if reached is not None and reached >= _GOOD:
            yield (
                f"nothing cheap is left: these operators reach {_percent(reached)} of the datasheet's rate, and the "
                "largest products reach about 80 %"
            )
        else:
            yield (
                _ADVICE[self.name]
                if advised and self._narrower().endswith(self._multiply(advised))
                else self.advice(self.name)
            )
        if reached is None and not self.is_torch:
            yield self._more_data()
        elif reached is None and not (self.name == "memory-bound" and self.account.decodes):
            yield f"record shapes, to learn how far the operators are from their bound: {CAPTURE['shapes']}"
        elif by_shape(self.account, self.name) < 0.5:
            yield "most of these kernels have no known shape: what they could reach is not known"


#: Advice that fits better than the usual: the first whose condition holds.
_WHERE: tuple[tuple[str, Callable[[Answer], bool], str], ...] = (
    ("launch-overhead", lambda answer: answer.has_graphs,
     "the program replays graphs already: put what is still launched one by one into them"),
    ("launch-overhead", lambda answer: answer.is_compiled,
     "the program is compiled already: capture it into graphs (mode='reduce-overhead')"),
    ("launch-overhead", lambda answer: not answer.is_torch,
     "launch less: fuse kernels, or capture them into CUDA graphs"),
    ("unknown", lambda answer: not answer.trace.recorded("calls"), "record the calls that launch the GPU's work"),
    ("unknown", lambda answer: bool(answer.trace.whole.size("os_calls")),
     "sample the CPU (nsys profile --sample=process-tree), or name what the launching thread does with NVTX ranges"),
    ("cpu-work", lambda answer: answer.names_a_step and not answer.is_torch,
     "find out what this is: NVTX ranges around the parts of a step; then move it off the thread that launches"),
    ("cpu-work", lambda answer: answer.names_a_step,
     ("find out what this is: NVTX or record_function ranges around the parts of a step, or "
      "torch.profiler.profile(with_stack=True); then move it off the thread that launches")),
    ("cpu-work", lambda answer: answer.allocates and answer.is_torch,
     ("let PyTorch's caching allocator keep the memory: no PYTORCH_NO_CUDA_MEMORY_CACHING, no empty_cache() in the "
      "loop, and sizes that do not outgrow the last ones")),
    ("cpu-work", lambda answer: answer.passes_messages,
     ("the thread waits for messages of other processes here: overlap them with kernels, send less, or find the late "
      "rank (nsightkit ranks)")),
    ("cpu-work", lambda answer: answer.allocates,
     "allocate once and use the memory again, or take it from a pool (cudaMallocAsync)"),
    ("input-pipeline", lambda answer: not answer.is_torch,
     "have the next data ready in time: read ahead on another thread while the GPU works"),
    ("communication", lambda answer: not answer.trains,
     "overlap collectives with other kernels, or send less: narrower types, fewer of them"),
    ("memory-bound", lambda answer: answer.account.decodes,
     "decode more sequences at once, which share each reading of the weights; or use narrower weights"),
    ("memory-bound", lambda answer: answer.is_compiled,
     "the program is compiled already: narrower types, or larger batches, are what is left"),
)  # fmt: skip


def _alike(events: pd.DataFrame) -> pd.Series[Any]:
    """Names of moments: ranges and operators that differ in a number only have one."""
    work = events["kind"].isin(["range", "op"])
    shared = events["name"].where(~work, events["name"].map(plain))
    several = events.groupby(shared)["name"].transform("nunique") > 1
    return events["name"].where(~(work & several), shared)
