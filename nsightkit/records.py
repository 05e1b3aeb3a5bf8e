"""Answers that are one object, each with the text that people read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pandas as pd

from nsightkit.analysis.core.causes import CAUSES, confidence_text
from nsightkit.errors import plain
from nsightkit.table import About, Fact, Part, Record, Table, plain_value
from nsightkit.text import Json, bytes_text, count_text, share_text, short_name, time_text
from nsightkit.trace.model import table_words

if TYPE_CHECKING:
    from nsightkit.analysis.ranks.job import Job

#: Parts of the time below this share are left out: text has a tenth of a percent as its last digit.
_SMALLEST_SHARE = 0.001
#: Speedups below this factor would print as 1.00x.
_SMALLEST_SPEEDUP = 1.005
#: Words for the named moments of a memory snapshot.
_MOMENT_TEXT = {
    "peak": "at the peak",
    "oom": "at the out-of-memory error",
    "end": "at the end",
    "start": "at the start",
}
#: Memory that is reserved from CUDA and holds nothing: labels and their keys in ``fragmentation``.
_UNUSED_MEMORY = {
    "free between live blocks": "inactive_split_bytes",
    "free in whole segments": "releasable_bytes",
    "freed, waiting for a stream": "pending_bytes",
}
#: Columns of a benchmark that people see.
_BENCH_COLUMNS = [
    "config",
    "mode",
    "precision",
    "status",
    "median_ns",
    "std_ns",
    "tokens_per_s",
    "peak_allocated_bytes",
    "mfu_datasheet",
]
#: Units of peak rates, in the order of their columns.
_PEAK_UNITS = ["fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "memory"]
#: Kernels with the same evidence that are named; of more, their number is given.
_MOST_KERNELS_NAMED = 3
#: New metrics that a check lists below the gates.
_MOST_NEW_METRICS = 10
#: Words for the statuses that a check must make seen; the others stand as they are.
_STATUS_TEXT = {"regression": "FAILS", "missing": "MISSING"}


def _table_parts(rows: Any, columns: Iterable[Any], **about: Any) -> Iterator[Part]:
    """Give the parts of a table below an empty line, without the columns that have no value; `about` as Table.of."""
    frame = pd.DataFrame(rows, columns=list(columns), dtype=object)
    if len(frame):  # else every column would go
        frame = frame.dropna(axis="columns", how="all")
    yield ""
    yield from Table.of(frame, **about).parts()


class Summary(Record):
    """The figures to look at first."""

    def parts(self) -> Iterator[Part]:
        """Give the figures, and a row for each device."""
        devices = self["devices"]
        yield self.about.title
        yield self.facts()
        if len(devices) > 1:
            columns = ("device", "name", "span_ns", "busy_ns", "idle_ns", "density", "kernel_count")
            yield from _table_parts(devices, columns, top=len(devices))
        if self["missing"]:
            yield f"not recorded: {', '.join(table_words(self['missing']))}"
        yield from self.about.notes

    def facts(self) -> list[Fact]:
        """Give the figures with their labels."""
        if not self["span_ns"]:  # 0 or None: no GPU work was recorded, or the filters leave none
            return [Fact("GPU work", "none recorded")]
        device_count = len(self["devices"])
        span_ns = self["span_ns"]
        facts = [
            self._time_fact("GPU busy", "busy_ns", span_ns),
            self._time_fact("GPU idle", "idle_ns", span_ns),
            Fact("kernels or graphs running (density)", share=self["density"]),
        ]
        # Labels of the other times, in the order in which they are shown.
        labels = {"span_ns": "first to last GPU operation (span)"}
        if device_count > 1:
            labels["span_ns"] += f", sum of {device_count} devices"
            labels["wall_ns"] = "first to last GPU operation, all devices"
        if self["window_ns"] is not None:
            labels |= {"window_ns": "all steps", "window_idle_ns": "GPU idle in the steps"}
        labels["lead_ns"] = "capture time before the first GPU operation"
        labels["tail_ns"] = "capture time after the last GPU operation"
        kernels = "kernels" if self["kernel_count"] is None else count_text(self["kernel_count"], "kernel")
        labels["kernel_ns"] = f"{kernels}, summed"
        labels["memop_ns"] = "copies and memsets, summed"
        if self["graph_ns"]:
            labels["graph_ns"] = "CUDA graphs, summed"
        for key, label in labels.items():
            facts.append(self._time_fact(label, key))
        return facts

    def _time_fact(self, label: str, key: str, whole_ns: int | None = None) -> Fact:
        """Label one of the figures that are times, with its share of `whole_ns` if that is given."""
        value = self[key]
        if value is None:
            return Fact(label, "not recorded")
        return Fact(label, time_text(value), value / whole_ns if whole_ns else None)


class Verdict(Record):
    """The bottleneck of a run."""

    def parts(self) -> Iterator[Part]:
        """Give one sentence, where the time went, what to try, the evidence and the doubts."""
        yield self["headline"]
        confidence = confidence_text(self["confidence"], self["ties"])
        yield f"{self['bottleneck']}, {confidence}"
        yield self.about.title
        facts = []
        for part in sorted([*self["busy"], *self["candidates"]], key=lambda part: -part["share_of_span"]):
            if part["share_of_span"] >= _SMALLEST_SHARE:
                label = CAUSES[part["bottleneck"]].name
                facts.append(Fact(f"  {label}", time_text(part["total_ns"]), part["share_of_span"]))
        if facts:
            yield ""
            yield facts
        top = self.about.top  # None with --all
        yield from self._sentences("Try", self["next_steps"], top)
        if top is None:
            # Gains that remain when the replay's error, a share of the time, is taken off the speedup.
            gains = [row for row in self["changes"] if row["speedup"] * (1 - row["replay_error"]) >= _SMALLEST_SPEEDUP]
            if gains:
                yield from _table_parts(gains, ("change", "predicted_ns", "speedup"), title="All predicted changes")
        yield from self._sentences("Why", self["evidence"], top)
        yield from self._sentences("Doubts", self["against"], top)

    def _repr_html_(self) -> str:
        from nsightkit import card

        return f"<style>{card.css()}</style>{card.html(self, self.about.title)}"

    def _sentences(self, heading: str, sentences: list[str], top: int | None) -> Iterator[str]:
        """List sentences below a heading, the first ones or all."""
        if sentences:
            yield ""
            yield heading
        for text in sentences[:top]:
            yield f"- {text}"
        if top is not None and len(sentences) > top:
            yield f"  and {len(sentences) - top} more with --all"


class Memory(Record):
    """What memory was made of."""

    def parts(self) -> Iterator[Part]:
        """Give the amounts, the categories and the places that allocated."""
        categories = self["by_category"]
        amounts = self["fragmentation"]
        when = _MOMENT_TEXT.get(str(self["moment"]), f"after event {self['moment']}")
        headline = f"The program held {bytes_text(amounts['allocated_bytes'])} {when}"
        if categories:
            headline += f", {share_text(categories[0]['share'])} of it {categories[0]['category']}"
        yield f"{headline}."
        line = [self.about.title]
        if self["devices"] > 1:
            line.append(f"device {self['device']} of {self['devices']}")
        yield " · ".join(line)
        reserved_bytes = amounts["reserved_bytes"]
        facts = [Fact("reserved from CUDA", bytes_text(reserved_bytes), 1.0 if reserved_bytes else None)]
        if self["moment"] != "peak":
            facts.insert(0, Fact("highest allocated", bytes_text(self["peak_bytes"])))
        for label, key in {f"allocated {when}": "allocated_bytes", **_UNUSED_MEMORY}.items():
            share = amounts[key] / reserved_bytes if reserved_bytes else None
            facts.append(Fact(label, bytes_text(amounts[key]), share))
        facts.append(Fact("largest free block", bytes_text(amounts["largest_free_block_bytes"])))
        yield facts
        columns = ("category", "bytes", "count", "share")
        yield from _table_parts(categories, columns, empty="nothing was live")
        yield from _table_parts(self["top_sites"], ("site", *columns), top=self.about.top, empty="no sites")
        if self["oom"] is not None:
            yield self._out_of_memory_text()
        yield from self["notes"]

    def _out_of_memory_text(self) -> str:
        """Describe the out-of-memory error: who asked for how much, and what was free."""
        oom = self["oom"]
        text = f"out of memory: {oom['site']} asked for {bytes_text(oom['requested_bytes'])}"
        text += f"; CUDA had {bytes_text(oom['device_free_bytes'])} free"
        text += f", the cache {bytes_text(oom['cached_free_bytes'])}"
        return f"{text}, its largest block {bytes_text(oom['largest_free_block_bytes'])}"


class Diff(Record):
    """What changed between two captures."""

    def parts(self) -> Iterator[Part]:
        """Give the headline, warnings, and the rows of each table that changed most."""
        from nsightkit.analysis.compare import diff_words

        yield self["headline"]
        yield self.about.title
        yield from self["warnings"]
        yield self["bottleneck"]["text"]
        top = 8 if self.about.top is None else self.about.top
        for title, rows, total in diff_words.sections(self, top):  # each table's first rows, and how many it has
            if rows:
                yield from _table_parts(rows, list(rows[0]), title=title, top=len(rows), total=total)


class Check(Record):
    """How runs compare with a baseline."""

    @classmethod
    def of(cls, comparison: Json) -> Self:
        """Make the answer: exit code 1 and a remark where a metric failed, 2 where one is inconclusive.

        Parameters
        ----------
        comparison : mapping
            Of :func:`nsightkit.analysis.compare.check.compare`, with the path of the ``baseline``.
        """
        answer = cls(comparison, About())
        failed = answer["regressions"] + answer["missing"]
        if failed:
            names = [f"{row['metric']} ({_change_text(row, 'ratio') or row['status']})" for row in failed[:3]]
            if len(failed) > 3:
                names.append("and more")
            answer.about.exit_code = 1
            answer.about.remarks = [f"the check against {answer['baseline']} failed: {', '.join(names)}"]
        elif answer["undecided"]:
            answer.about.exit_code = 2
            answer.about.remarks = [_inconclusive_text(answer["undecided"][0])]
        return answer

    def parts(self) -> Iterator[Part]:
        """Give failures first, then passes; of a baseline that was just written, how many runs it holds."""
        if self["written"]:
            yield f"{self['baseline']}: written, {count_text(self['baseline_runs'], 'run')}"
            return
        columns = ("status", "metric", "baseline", "now", "change", "limit")
        failing = self["regressions"] + self["missing"] + self["undecided"]
        passing = [row for row in self["gates"] if row not in failing]
        rows = [_check_row(row) for row in failing + passing]
        runs = f"{count_text(self['baseline_runs'], 'run')} in the baseline, {self['runs']} now"
        title = (
            f"{Path(self['baseline']).name} · {runs} · limit: {100 * self['tolerance']:g}% or larger noise; "
            "medians leave outliers out"
        )
        yield from _table_parts(rows, columns, top=len(rows), title=title)
        if self["new"]:
            yield f"not in the baseline: {', '.join(self['new'][:_MOST_NEW_METRICS])}"
        yield from self["notes"]


def _inconclusive_text(row: Json) -> str:
    """Explain why a check cannot decide about a metric, given its row of :func:`compare.check.compare`."""
    before, after = row["samples"]
    change = _change_text(row, "ratio") or "more than 0"  # no ratio to a baseline of 0
    reason = "in too few samples"
    if row["limit"]:
        reason = f"within the noise, of up to {_change_text(row, 'limit')}"
    return (
        f"inconclusive: {row['metric']} seems worse ({change}), {reason} ({before} and {after} samples); record more "
        "steps (30 or more), give several runs, or raise --tolerance"
    )


def _check_row(row: Json) -> dict[str, str]:
    """Write one metric of a check as a row of text."""
    status = _STATUS_TEXT.get(row["status"], row["status"])
    if status == "ok" and row["ratio"] and not row["limit"]:
        status = "too few samples"  # for a limit, so that no change could fail
    return {
        "status": status,
        "metric": row["metric"],
        "baseline": _metric_text(row.get("before"), row["unit"]),
        "now": _metric_text(row.get("after"), row["unit"]),
        "change": _change_text(row, "ratio") or "-",
        "limit": _change_text(row, "limit") or "-",
    }


def _metric_text(value: float | None, unit: str) -> str:
    """Write a metric in its unit."""
    if value is None:
        return "-"
    if unit == "ns":
        return time_text(value)
    if unit == "bytes":
        return bytes_text(value)
    return f"{value:,.5g}"


def _change_text(row: Json, key: str) -> str:
    """Write a ratio of a metric's row as a change in percent (1.05 is +5.0%); empty where the row has none."""
    if row.get(key) is None:
        return ""
    return f"{100 * (row[key] - 1):+z.1f}%"


class Ranks(Record):
    """Who is late among the ranks of a job."""

    findings: list[str]
    tables: Mapping[str, pd.DataFrame]

    @classmethod
    def of(cls, job: Job, source: str, top: int | None) -> Self:
        """Make the answer about a job.

        Parameters
        ----------
        job : Job
        source : str
            Where its traces come from, for the title.
        top : int, optional
            Rows of each table in text.
        """
        tools = " and ".join(dict.fromkeys(job.ranks["tool"]))
        title = f"{count_text(len(job.ranks), 'rank')} · {tools} · {source}"
        answer = cls(job.summary(), About(title, top=top))
        answer.findings = job.findings()
        answer.tables = {"ranks": job.ranks, "collectives": job.kinds()}
        return answer

    def parts(self) -> Iterator[Part]:
        """Give the findings, the ranks, their collectives and what was lost."""
        top = self.about.top
        yield from self.findings
        yield self.about.title
        # All of these are sums over a rank's whole trace: a time per step beside them would be taken for one, too.
        columns = ("rank", "span_ns", "compute_ns", "communication_ns", "exposed_ns", "waited_ns", "late_ns")
        kinds = self.tables["collectives"]
        yield from _table_parts(self.tables["ranks"], columns, top=top, title="each rank's whole trace")
        if len(kinds):
            yield "exposed: no computation overlaps it; waited: for later ranks; late: behind the middle rank"
            yield from _table_parts(kinds, kinds.columns, top=top, title="collectives, mean over ranks")
        for trace in self["lost"]:
            yield f"{_lost_trace_name(trace)}: {trace['reason']}"
        yield from self["notes"]

    def csv(self) -> str:
        """Write the table of ranks."""
        return Table.of(self.tables["ranks"]).csv()


def _lost_trace_name(trace: Json) -> str:
    """Name the file or, where there is none, the ranks of a trace that could not be used."""
    if trace["file"] is not None:
        return Path(trace["file"]).name
    if len(trace["ranks"]) == 1:
        return f"rank {trace['ranks'][0]}"
    return f"{len(trace['ranks']):,} ranks"


class Bench(Record):
    """What a benchmark measured."""

    @classmethod
    def of(cls, document: Json) -> Self:
        """Make the answer: exit code 2 and a remark where a measurement failed.

        Parameters
        ----------
        document : mapping
            Of :func:`nsightkit.capture.bench.bench`.
        """
        answer = cls(document, About())
        failed = [f"{cell_name(row)} ({row['detail']})" for row in document["rows"] if row["status"] == "failed"]
        if failed:
            answer.about.remarks = [f"not measured: {'; '.join(failed)}"]
            answer.about.exit_code = 2
        return answer

    def parts(self) -> Iterator[Part]:
        """Give a row for each measurement."""
        where = self["gpu"] or "CPU (a GPU's times will differ)"
        title = f"{where} · {self['warmup']} warm-up and {self['steps']} timed steps"
        rows = plain_value(self["rows"])  # a copy, in which the status says where memory ran out
        for row in rows:
            if row["where"]:
                row["status"] += f" in {row['where']}"
        yield from _table_parts(rows, _BENCH_COLUMNS, title=title, top=len(rows))
        for row in rows:
            if row["detail"]:
                yield f"{cell_name(row)}: {row['detail']}"


def cell_name(row: Json) -> str:
    """Name one measurement of a benchmark.

    Parameters
    ----------
    row : mapping
    """
    return f"{row['config']} {row['mode']} {row['precision']}"


class Written(Record):
    """A file that a command wrote; people read its path."""

    def text(self, width: int = 0) -> str:  # noqa: ARG002
        """Give the path on one line, however long."""
        return f"{plain(self.about.title)}\n"


class Counters(Table):
    """What bounds each kernel, with the counters that show it."""

    def parts(self) -> Iterator[Part]:
        """Give the figures, then evidence and next steps, once for all kernels that share them."""
        yield from super().parts()
        kernels_by_lines: dict[tuple[str, ...], list[str]] = {}
        for row in self.shown_rows():
            lines = [row["classification"]]
            lines += [f"- {text}" for text in row["evidence"]]
            lines += [f"→ {text}" for text in row["next_steps"]]
            kernels_by_lines.setdefault(tuple(lines), []).append(short_name(row["kernel"]))
        for (classification, *lines), kernels in kernels_by_lines.items():
            named = ", ".join(kernels)
            if len(kernels) > _MOST_KERNELS_NAMED:
                named = count_text(len(kernels), "kernel")
            yield ""
            yield f"{named}: {classification}"
            yield from lines


class Peaks(Table):
    """Peaks of several GPUs; people see one row for each."""

    def parts(self) -> Iterator[Part]:
        """Give the rates and the bandwidth of each GPU."""
        rates = self.assign(rate=self["tflops"].fillna(self["gb_per_s"]))
        # Some GPUs have a second rate for fp16 or fp8, with fp16 accumulation. The first of a unit accumulates in fp32.
        cards = rates.pivot_table("rate", "gpu", "unit", "first", sort=False)[_PEAK_UNITS].reset_index()
        return Table.of(cards, notes=["TFLOP/s, dense; memory: GB/s. Clocks and sources: nsightkit peaks GPU"]).parts()


class Envelope(Table):
    """What models cost, with a line for each remark."""

    def parts(self) -> Iterator[Part]:
        """Give the table, then the remarks on each model."""
        yield from super().parts()
        for row in self.shown_rows():
            for text in row["notes"] or ():
                yield f"{row['config']}: {text}"
