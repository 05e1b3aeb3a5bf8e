"""How answers that are one object are printed for people."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsightkit import show

if TYPE_CHECKING:
    from rich.console import Console

    from nsightkit.analysis.ranks.job import Job
    from nsightkit.verbs import Answer

__all__ = [
    "changed",
    "check",
    "counters",
    "diff",
    "diff_rows",
    "failure",
    "memory",
    "print_answer",
    "ranks",
    "summary",
    "text",
    "undecided",
    "verdict",
]

#: Metrics that a table of a check lists beside those that can fail.
_MOST = 10


def text(answer: Answer) -> str:
    """Print an answer into a text.

    Parameters
    ----------
    answer : Answer
    """
    from rich.console import Console

    out = io.StringIO()
    # In a notebook rich would display what it prints, whatever the file. IPython asks for colours (FORCE_COLOR), which
    # a page would show as escape codes.
    console = Console(
        file=out, width=88, force_jupyter=False, force_terminal=False, highlight=False, markup=False, emoji=False
    )
    print_answer(console, answer.title, answer)
    return out.getvalue().rstrip()


def print_answer(console: Console, title: str, answer: Answer) -> None:
    """Print an answer."""
    {"summary": summary, "verdict": verdict, "diff": diff, "memory": memory}[answer.printed_as](console, title, answer)


def summary(console: Console, title: str, result: Mapping[str, Any]) -> None:
    """The figures to look at first."""
    span = result["span_ns"]
    lacking = "not recorded" if {"kernels", "memops", "graphs"}.intersection(result["missing"]) else "none"

    def of_span(value: float | None) -> float | None:
        return value / span if value is not None and span else None

    def amount(value: int | None) -> str:
        return lacking if value is None else show.time_text(value)

    devices, count, overhead = (result[key] for key in ("devices", "kernel_count", "memory_overhead"))
    facts = [
        ("GPU busy", amount(result["busy_ns"]), of_span(result["busy_ns"])),
        ("GPU idle", amount(result["idle_ns"]), of_span(result["idle_ns"])),
        ("kernels and graphs running (density)", "", result["density"]),
        (f"span of GPU work{f' of {len(devices)} devices' if len(devices) > 1 else ''}", amount(span), None),
        *(
            [
                ("all steps", amount(result["window_ns"]), None),
                ("GPU idle in the steps", amount(result["window_idle_ns"]), None),
            ]
            if result["window_ns"] is not None
            else []
        ),
        ("wall, first start to last end", amount(result["wall_ns"]), None),
        ("captured before / after", f"{amount(result['lead_ns'])} / {amount(result['tail_ns'])}", None),
        ("kernels" if count is None else f"{count:,} kernels, summed", amount(result["kernel_ns"]), None),
        ("copies and memsets, summed", amount(result["memop_ns"]), None),
        ("CUDA graphs, summed", amount(result["graph_ns"]), None),
        ("copy time to kernel time", "-" if overhead is None else f"{overhead:.3f}", None),
    ]
    show.print_facts(console, facts, title=title)
    if len(devices) > 1:
        columns = ["device", "name", "span_ns", "busy_ns", "idle_ns", "density", "kernel_count"]
        console.print()
        show.print_rows(console, columns, [d | {"name": d["name"] or "not named"} for d in devices])
    if result["missing"]:
        console.print(f"not recorded: {', '.join(result['missing'])}", style="dim")
    show.print_lines(console, getattr(result, "notes", ()))


def verdict(console: Console, title: str, result: Mapping[str, Any]) -> None:
    """What holds the run back, and why."""
    from rich.table import Table
    from rich.text import Text

    share = result["share_of_span"]
    of_span = "" if share is None else f", {100 * share:.1f} % of the time"
    console.print(show.plain(title), style="bold", soft_wrap=True)
    console.print(f"{result['bottleneck']}{of_span} (confidence: {result['confidence']})", style="bold")
    lines = Table.grid(padding=(0, 2, 0, 0))
    for heading, key in (("evidence", "evidence"), ("against", "against"), ("next", "next_steps")):
        for number, text in enumerate(result[key]):
            style = "dim" if key == "against" else ""
            lines.add_row("" if number else heading, Text(show.plain(text), style=style, overflow="fold"))
    console.print(lines)


def memory(console: Console, title: str, result: Mapping[str, Any], top: int | None = None) -> None:
    """What memory was made of."""
    lost, moment = result["fragmentation"], result["moment"]
    when = {"peak": "at the peak", "oom": "at the out-of-memory error", "end": "at the end", "start": "at the start"}
    reserved, looked_at = lost["reserved_bytes"], when.get(str(moment), f"after event {moment}")
    amounts: list[tuple[str, int, int | None]] = [  # what it is, its bytes, and of how many it is a part
        *([] if moment == "peak" else [("highest allocated", result["peak_bytes"], None)]),
        (f"allocated {looked_at}", lost["allocated_bytes"], None),
        ("reserved from CUDA", reserved, None),
        ("free between live blocks", lost["inactive_split_bytes"], reserved),
        ("free in whole segments", lost["releasable_bytes"], reserved),
        ("freed, waiting for a stream", lost["pending_bytes"], reserved),
        ("largest free block", lost["largest_free_block_bytes"], None),
        ("rounding, in active blocks", lost["rounding_bytes"], None),
    ]
    facts = [(label, show.bytes_text(amount), amount / of if of else None) for label, amount, of in amounts]
    devices = len(result["devices"])
    of = f" · device {result['device']} of {devices}" if devices > 1 else ""
    show.print_facts(console, facts, title=f"{title}{of} · {show.count_text(result['events'], 'event')}")
    console.print()
    show.print_rows(console, ["category", "bytes", "count", "share"], result["by_category"], empty="nothing was live")
    console.print()
    sites, columns = result["top_sites"], ["site", "category", "bytes", "count", "share"]
    shown = sites if top is not None else sites[: show.TABLE_ROWS]
    show.print_rows(console, columns, shown, total=len(sites), empty="no sites")
    if (oom := result["oom"]) is not None:
        keys = ("requested_bytes", "device_free_bytes", "cached_free_bytes", "largest_free_block_bytes")
        asked, free, cached, largest = (show.bytes_text(oom[key]) for key in keys)
        text = (
            f"out of memory: {oom['site']} asked for {asked}; CUDA had {free} free, the cache {cached}, the largest "
            f"block of it {largest}"
        )
        console.print(show.plain(text), style="yellow")
    show.print_lines(console, result["notes"])


def diff(console: Console, title: str, result: Mapping[str, Any], top: int = 8) -> None:
    """What changed."""
    from nsightkit.analysis.compare import diff_words

    console.print(show.plain(title), style="bold", soft_wrap=True)
    console.print(show.plain(result["headline"]))
    if result.get("where"):
        console.print(show.plain(result["where"]))
    show.print_lines(console, result["warnings"], "yellow")
    if "bottleneck" in result:
        console.print(show.plain(result["bottleneck"]["text"]))
    for table, (name, chosen, changed) in diff_words.sections(result, top).items():
        if not chosen:
            continue
        console.print()
        cells = diff_words.rows(table, chosen)
        show.print_rows(console, list(cells[0]), cells, title=name, total=max(changed, len(chosen)))


def diff_rows(result: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Columns and all rows of a comparison, for CSV."""
    from nsightkit.analysis.compare import diff, diff_words

    memory = "sites" in result
    tables = ("figures", "categories", "sites") if memory else tuple(diff.TABLES)
    figures = ("before_bytes", "after_bytes", "delta_bytes", "change") if memory else diff.COLUMNS
    columns = ["table", "name", "match", *figures] if memory else ["table", "name", "clock", "match", *figures]
    return columns, [
        {"clock": None, "match": None, **row, "table": table, "name": diff_words.name_of(table, row)}
        for table in tables
        for row in result[table]
    ]


def counters(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    total: int,
    top: int | None = None,
) -> None:
    """What bounds each kernel, and why."""
    figures = [c for c in columns if c not in ("evidence", "next_steps")]
    rows = rows if top is not None else rows[: show.TABLE_ROWS]
    show.print_rows(console, figures, rows, total=total, title=title, empty="no kernels")
    for row in rows:
        console.print()
        console.print(show.plain(f"{row['kernel']}: {row['classification']}"), style="bold")
        for sign, key in (("-", "evidence"), ("→", "next_steps")):
            show.print_lines(console, [f"{sign} {text}" for text in row[key]], "dim" if key == "evidence" else "")


def check(console: Console, result: Mapping[str, Any]) -> None:
    """What a check found, row by row."""
    words = {"regression": "FAILS", "changed": "FAILS", "missing": "MISSING"}

    def amount(row: Mapping[str, Any], key: str) -> str:
        value, unit = row.get(key), row["unit"]
        if value is None:
            return "-"
        if unit == "ns":
            return show.time_text(value)
        if unit in ("bytes", "per_s"):
            return f"{show.bytes_text(value)}{'/s' if unit == 'per_s' else ''}"
        return f"{value:,.5g}{' %' if unit == '%' else ''}"

    def line(row: Mapping[str, Any]) -> dict[str, Any]:
        status = row["status"] if not row["gate"] else words.get(row["status"], row["status"])
        return {
            "status": status,
            "name": row["metric"],
            "baseline": amount(row, "before"),
            "now": amount(row, "after"),
            "change": changed(row) or "-",
            "limit": changed(row, "limit") or "-",
        }

    runs = f"{result['baseline_runs']} and {result['runs']} runs"
    title = f"{Path(result['baseline']).name} · {runs} · tolerance {100 * result['tolerance']:g} %"
    failing = [*result["regressions"], *result["missing"], *result["undecided"]]
    others = [row for row in result["gates"] if row not in failing]
    columns = ["status", "name", "baseline", "now", "change", "limit"]
    show.print_rows(console, columns, [line(row) for row in (*failing, *others)], title=title)
    if told := result["informing"]:
        console.print()
        shown = [line(row) for row in told[:_MOST]]
        show.print_rows(console, columns, shown, total=len(told), title="what else changed, and does not fail")
    if result["new"]:
        names = ", ".join(row["metric"] for row in result["new"][:_MOST])
        console.print(show.plain(f"not in the baseline: {names}"), style="dim")
    show.print_lines(console, result["notes"])


def changed(row: Mapping[str, Any], key: str = "ratio") -> str:
    """How much a metric changed, in percent."""
    return "" if row.get(key) is None else f"{100 * (row[key] - 1):+.1f} %"


def failure(result: Mapping[str, Any]) -> str:
    """Why a check failed; nothing if it did not."""
    failed = [*result["regressions"], *result["missing"]]
    listed = ", ".join(f"{row['metric']} ({changed(row) or row['status']})" for row in failed[:3])
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    alone = result["runs"] == result["baseline_runs"] == 1 and any(row["unit"] == "ns" for row in result["regressions"])
    # A clock or a neighbour can make one run slower as well.
    unsaid = "; one run on each side, so differences between runs are not known" if alone else ""
    return f"{listed}{more}{unsaid}"


def undecided(row: Mapping[str, Any]) -> str:
    """Why a check cannot say."""
    before, after = row["samples"]
    why = row["reason"] or f"noise explains up to {changed(row, 'limit')}"
    return (
        f"inconclusive: {row['metric']} seems worse, {changed(row) or 'from 0'} in {before} and {after} "
        f"samples, and {why}; record more steps (30 are of use), give several runs, or allow more with --tolerance"
    )


def ranks(console: Console, traces: Sequence[Path], job: Job, each: bool) -> None:
    """Who is late among ranks, and what was lost."""
    where = traces[0].name if len(traces) == 1 else f"{len(traces)} traces"
    tools = " and ".join(dict.fromkeys(job.ranks["tool"]))
    title = f"{show.count_text(len(job.ranks), 'rank')} · {tools} · {where}"
    console.print(show.plain(title), style="bold", soft_wrap=True)
    show.print_lines(console, job.findings(), "")
    # Sums over a whole trace: a step's length beside them would be on another basis.
    spent = ["rank", "span_ns", "compute_ns", "communication_ns", "exposed_ns", "waited_ns", "late_ns"]
    kinds = ["group", "kind", "bytes", "count", "total_ns", "wait_ns", "exposed_ns", "last_rank", "bus_gb_per_s"]
    times = ["group", "kind", "step", "bytes", "start_ns", "skew_ns", "last_rank", "transfer_ns", "exposed_ns"]
    compared = (job.collectives, times) if each else (job.kinds(), kinds)
    titles = {"ranks": "each rank's whole trace", "collectives": ""}
    for name, (table, columns) in {"ranks": (job.ranks, spent), "collectives": compared}.items():
        console.print()
        shown = [c for c in columns if c in table and table[c].notna().any()]
        rows = list(show.rows_of(table[shown].head(show.TABLE_ROWS)))
        show.print_rows(console, shown, rows, total=len(table), title=titles[name], empty=f"no {name} to compare")
    for one in job.lost:
        count, file = len(one["ranks"]), "" if one["file"] is None else Path(one["file"]).name
        rank = f"rank {one['ranks'][0]}" if count == 1 else f"{count:,} ranks"
        who = f"{rank} ({file})" if count and file else file or rank
        console.print(show.plain(f"lost: {who}: {one['reason']}"), style="yellow")
    show.print_lines(console, job.notes)
