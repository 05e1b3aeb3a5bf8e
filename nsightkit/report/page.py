"""The page of a report: what it opens with, what lies around its tables, and how it becomes a file."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from nsightkit import __version__
from nsightkit.analysis import verdict
from nsightkit.analysis.core.text import bytes_text, time_text
from nsightkit.analysis.timeline import gaps, overview, steps
from nsightkit.errors import UsageError
from nsightkit.plots.lanes import Most, all_lanes
from nsightkit.plots.looks import CATEGORY_COLOURS, CAUSE_COLOURS, DARK_GREY
from nsightkit.plots.packing import pack, program
from nsightkit.report.elements import Markup, scrolled, section, shown, tag
from nsightkit.report.tables import SECTIONS, draw, letters, source_line
from nsightkit.trace.clean import clean, clean_text
from nsightkit.trace.files import replacing
from nsightkit.trace.model import GPU_TABLES, Trace
from nsightkit.trace.output import require_free

#: What a mail server lets through unasked, and a browser opens at once.
_MOST_BYTES = 4_900_000
#: However much the tables take, a timeline has this.
_LEAST_TIMELINE = 1_000_000
#: Rows of the timeline, of all traces together.
_MOST = Most(levels=12, streams=32, threads=24)
#: Gaps that the timeline draws, the longest ones; each launch of a kernel leaves a short one.
_MOST_GAPS = 20_000
_NOT_ENOUGH = "not-enough-data"
_ENDINGS = re.compile(r"(\.pt)?(\.trace)?(\.json(\.gz)?|\.sqlite|\.nsys-rep|\.parquet|_pqtdir)$")

#: What an answer says, before its evidence.
SAID = {
    "profiler": "The profiler itself took the time",
    "start-up": "Work that happens once held the GPU up: loading code, compiling, capturing graphs",
    "queued": "The GPU had work in its queue and did not start it, and the trace does not say why",
    "input-pipeline": "The GPU waited for data",
    "synchronization": "The CPU waited for the GPU instead of giving it more work",
    "memory-transfer": "Kernels waited for copies",
    "launch-overhead": "The GPU waited for the next launch",
    "cpu-work": "Other work on the CPU kept the GPU waiting",
    "unknown": "The GPU was idle, and the trace does not say why",
    "compute-bound": "The GPU was busy with arithmetic",
    "memory-bound": "The GPU was busy moving data in its memory",
    _NOT_ENOUGH: "The trace does not say what held the run back",
    "communication": "The GPUs were busy exchanging data",
    "imbalance": "GPUs waited for slower ones",
}
_FOOT = "This file needs no network. Paths, hosts, users and tokens in names were replaced."
_GAINS = "What a change would gain"
#: What a part of the bar is called where it is not a bottleneck's name.
_PARTS = {
    "compute-bound": "busy: arithmetic",
    "memory-bound": "busy: memory",
    _NOT_ENOUGH: "busy: other kernels",
    "communication": "busy: communication",
    "imbalance": "waiting for slower GPUs",
    "memory-transfer": "copies that nothing overlaps",
}
COLOURS = {
    **CAUSE_COLOURS,
    "compute-bound": "#1d5c93",
    "memory-bound": "#5f8596",
    _NOT_ENOUGH: DARK_GREY,
    "communication": CATEGORY_COLOURS["communication"],
    "imbalance": "#7a6fd0",
}


def labelled(traces: Iterable[Trace]) -> dict[str, Trace]:
    """Call each trace by its file, without the endings that say what kind of file it is.

    Parameters
    ----------
    traces : iterable of Trace

    Returns
    -------
    dict of str to Trace
    """
    return _distinct([(_ENDINGS.sub("", Path(trace.path or "trace").name), trace) for trace in traces])


def write(
    traces: Trace | Mapping[str, Trace],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    selection: str = "",
    overwrite: bool = False,
) -> int:
    """Write a report.

    Parameters
    ----------
    traces : Trace or mapping of str to Trace
        What to show, by label.
    path : path-like
        The file appears only when it is whole.
    title, selection : str, optional
        As in :func:`html`.
    overwrite : bool
        Replace an existing file, unless it is one of the traces.

    Returns
    -------
    int
        Size of the file in bytes.

    Raises
    ------
    UsageError
        No trace, or `path` is one of the traces, or is there already, or cannot be written.
    """
    path = Path(path)
    several = _by_label(traces)
    others = [Path(trace.path) for trace in several.values() if trace.path is not None]
    if path.exists() and any(other.exists() and path.samefile(other) for other in others):
        raise UsageError(f"{path} is a trace itself; give another name for the report")
    require_free(path, overwrite=overwrite)
    page = html(several, title=title, selection=selection).encode("utf-8", "replace")
    with replacing(path) as file:
        file.write(page)
    return len(page)


def html(traces: Trace | Mapping[str, Trace], *, title: str | None = None, selection: str = "") -> str:
    """Make a report of one or more traces.

    Parameters
    ----------
    traces : Trace or mapping of str to Trace
        What to show, by label; several lie side by side.
    title : str, optional
        Default: the label.
    selection : str, optional
        What was chosen of the traces, for a reader.

    Returns
    -------
    str
        A whole HTML document. It holds no secret that the traces hold (:func:`nsightkit.trace.clean.clean`).

    Raises
    ------
    UsageError
        No trace.
    """
    several = [(clean_text(trace, label), clean(trace)) for label, trace in _by_label(traces).items()]
    return _Page(_distinct(several), title, selection).document()


def _by_label(traces: Trace | Mapping[str, Trace]) -> dict[str, Trace]:
    several = labelled([traces]) if isinstance(traces, Trace) else dict(traces)
    if not several:
        raise UsageError("a report needs a trace")
    return several


def _distinct(traces: Sequence[tuple[str, Trace]]) -> dict[str, Trace]:
    """Number the labels that are the same."""
    names = [shown(label, 80) or f"trace {number}" for number, (label, _) in enumerate(traces, 1)]
    nth = [names[: i + 1].count(name) for i, name in enumerate(names)]
    labels = [name if n == 1 else f"{name} ({n})" for name, n in zip(names, nth, strict=True)]
    return {label: trace for label, (_, trace) in zip(labels, traces, strict=True)}


class _Page:
    """One report on its way."""

    def __init__(self, traces: Mapping[str, Trace], title: str | None, selection: str) -> None:
        self.selection = shown(selection)
        self.traces = traces
        self.several = len(traces) > 1
        default = f"s: {len(traces)} traces side by side" if self.several else f": {next(iter(traces))}"
        self.title = shown(title, 160) if title else f"GPU profile{default}"
        self.letters = letters(traces)
        self.sources = {label: _source(trace) for label, trace in self.traces.items()}
        self.figures = {label: overview.summary(trace) for label, trace in self.traces.items()}

    def document(self) -> str:
        """The page as text."""
        cards = tag("div", [self._answer(label, trace) for label, trace in self.traces.items()], class_="cards")
        sections = [("answer", "Answer", section("answer", "Answer", cards)), ("summary", "Summary", self._summary())]
        asked = [(each, {label: each.ask(trace) for label, trace in self.traces.items()}) for each in SECTIONS]
        drawn = [(each.name, each.title, draw(each, answers, self.sources)) for each, answers in asked]
        tables = [(name, title, table) for name, title, table in drawn if table is not None]
        rest = sum(len(part.encode("utf-8", "replace")) for _, _, part in (*sections, *tables))
        room = max(_MOST_BYTES - rest - 120_000, _LEAST_TIMELINE)
        sections += [("timeline", "Timeline", self._timeline(room)), *tables]
        style, script, viewer = (_resource("report.css"), _resource("report.js"), program())
        return Template(_resource("page.html")).substitute(
            policy=_policy(style, (viewer, script)),
            title=tag("title", self.title),
            style=style,
            head=tag("h1", self.title) + self._origins(),
            links="".join(tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in sections),
            main="".join(part for _, _, part in sections),
            foot=tag("p", f"Made by nsightkit {__version__}. {_FOOT}"),
            viewer=viewer,
            script=script,
        )  # fmt: skip

    # --- what it opens with ---

    def _origins(self) -> Markup:
        lines = [tag("li", self._lettered(label, tag("strong", label)), f" · {self.sources[label]}")
                 for label in self.traces]  # fmt: skip
        part = tag("li", "Only a part of what was recorded: ", tag("code", self.selection)) if self.selection else None
        return tag("ul", lines, part, class_="origins")

    def _lettered(self, label: str, text: str) -> list[str]:
        return [tag("span", self.letters[label], class_="letter"), text] if self.several else [text]

    def _answer(self, label: str, trace: Trace) -> Markup:
        found = verdict.summary(trace)
        name, share = str(found["bottleneck"]), found["share_of_span"]
        amount = "" if share is None else f", {_percent(share)} of the time"
        gain = {row["change"]: row["speedup"] for row in found["changes"]}.get(verdict.CHANGE_OF.get(name))
        faster = f" · {gain:.2f}x as fast without it, predicted by replay" if gain else ""
        lists = [
            (title, found[key])
            for title, key in (("Evidence", "evidence"), ("What speaks against it", "against"),
                               ("What to do next", "next_steps"))
            if found[key]
        ]  # fmt: skip
        level = "h4" if self.several else "h3"
        return tag(
            "article",
            tag("h3", self._lettered(label, label)) if self.several else None,
            tag("p", SAID.get(name, name) + amount, class_="headline"),
            tag("p", tag("span", name, class_="chip"), f" confidence: {found['confidence']}{faster}", class_="facts"),
            self._bar([*found["busy"], *found["candidates"]], label),
            [[tag(level, title), tag("ul", [tag("li", shown(text, 600)) for text in texts])] for title, texts in lists],
            self._gains(found, level, label),
        )

    def _gains(self, found: Mapping[str, Any], level: str, label: str) -> list[Markup]:
        """What each change would gain by the replay, and how far the replay itself is off."""
        if not found["changes"]:
            return []
        rows = [
            tag("tr", tag("th", shown(row["change"]), scope="row", class_="name"),
                tag("td", time_text(row["predicted_ns"]) if row["speedup"] else "not predicted", class_="number"),
                tag("td", f"{row['speedup']:.2f}x" if row["speedup"] else "-", class_="number"))
            for row in found["changes"]
        ]  # fmt: skip
        numbers = [tag("th", name, scope="col", class_="number") for name in ("Predicted time", "Gain")]
        table = scrolled(_GAINS, tag("tr", tag("th", "Change", scope="col"), numbers), rows)
        text = (
            f"The trace played again with each change, instead of {time_text(found['changes'][0]['wall_ns'])}. Played "
            f"again without a change it is {100 * found['replay_error']:.1f} % off. {self.sources[label]}"
        )
        return [tag(level, _GAINS), table, tag("p", text, class_="source")]

    def _bar(self, parts: Sequence[Mapping[str, Any]], label: str) -> Markup | None:
        """Where the time went, as one bar; each moment of each device counts once."""
        if not parts:
            return None
        rects, legend, at = [], [], 0.0
        for part in parts:
            name, share = str(part["bottleneck"]), float(part["share_of_span"])
            filled = {"height": "100%", "fill": COLOURS.get(name, DARK_GREY)}
            rects.append(tag("rect", x=f"{100 * at:.3f}%", width=f"{100 * share:.3f}%", **filled))
            patch = tag(
                "svg", tag("rect", width="100%", **filled), class_="patch", aria_hidden="true", focusable="false"
            )
            legend.append(tag("li", patch, f"{_PARTS.get(name, f'idle: {name}')} ", tag("b", _percent(share))))
            at += share
        drawn = tag("svg", rects, class_="span", role="img", aria_label="Shares of the time; the list below names them",
                    preserveAspectRatio="none")  # fmt: skip
        between = "between the first and the last GPU operation"
        what = between if self.figures[label]["window_ns"] is None else "of the steps"
        said = tag("figcaption", f"Where the time {what} went. {self.sources[label]}")
        return tag("figure", drawn, tag("ul", legend, class_="legend"), said)

    def _summary(self) -> Markup:
        rows = [
            tag("tr", tag("th", title, scope="row"),
                [tag("td", shown(of(trace, self.figures[label]), 600)) for label, trace in self.traces.items()])
            for title, of in _FIGURES
        ]  # fmt: skip
        head = tag("tr", tag("td"), [tag("th", self._lettered(label, label), scope="col") for label in self.traces])
        table = scrolled("Summary", head if self.several else None, rows, class_="facts-table")
        return section("summary", "Summary", table, source_line(self.sources, self.letters))

    # --- the timeline ---

    def _timeline(self, most_bytes: int) -> Markup:
        said = []
        for label, trace in self.traces.items():
            tables = [table for table in (*GPU_TABLES, "ranges", "ops", "calls") if trace.size(table)]
            counts = ", ".join(f"{trace.size(table):,} {table}" for table in tables) or "no events"
            said.append(f"Timeline of {label}: {counts}. The tables say the same in numbers.")
        most = Most(*(max(most // len(self.traces), least) for most, least in zip(_MOST, (3, 4, 3), strict=True)))
        timeline = pack(
            {label: all_lanes(trace, most, _drawn_gaps(trace)) for label, trace in self.traces.items()},
            said=said,
            fallback=tag("p", "The timeline needs scripts; the tables do not."),
            title="Timeline",
            layout="stacked",
            most_bytes=most_bytes,
        )
        lead = ("Everything the trace holds, above each other on one axis" if not self.several else
                "The traces above each other on one axis, each from its own start") + (
                ": CPU threads with their ranges, operators and CUDA calls, GPU streams, and the GPU's idle time by "
                "its cause. Rolled up, each kind of work has a row with its share of the time shown.")  # fmt: skip
        below = source_line(self.sources, self.letters, "figcaption")
        figure = tag("figure", Markup(timeline.html(script=False)), below)
        return section("timeline", "Timeline", tag("p", lead, class_="lead"), figure)


def _drawn_gaps(trace: Trace) -> pd.DataFrame:
    found = gaps.causes(trace)
    return found.loc[(found["end_ns"] - found["start_ns"]).nlargest(_MOST_GAPS).index.sort_values()]


def _source(trace: Trace) -> str:
    """Say where a trace is from, and what is not in it: what each figure carries."""
    names = list(dict.fromkeys(gpu.name for gpu in trace.meta.gpus if gpu.name))
    devices = len({gpu.device for gpu in trace.meta.gpus})
    card = " and ".join(names) or "GPU not named"
    cards = f"{devices} x {card}" if devices > 1 and len(names) == 1 else card
    missing = f"not recorded: {_missing(trace)}" if trace.meta.missing else _missing(trace)
    return shown(f"{cards} · {_tool(trace)} · {missing}", 300)


def _tool(trace: Trace, *_: Any) -> str:
    return f"{trace.meta.tool} {trace.meta.tool_version or ''}".strip()


def _missing(trace: Trace, *_: Any) -> str:
    return ", ".join(trace.meta.missing) or "all kinds of events were recorded"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.001 else "< 0.1 %"


def _amount(key: str, of: str | None, _: Trace, figures: Mapping[str, Any]) -> str:
    if figures[key] is None:
        return "not recorded"
    whole = figures[of] if of else None
    return time_text(figures[key]) + (f" ({100 * figures[key] / whole:.1f} %)" if whole else "")


def _counted(_: Trace, figures: Mapping[str, Any]) -> str:
    count = figures["kernel_count"]
    return "not recorded" if count is None else f"{count:,}, together {time_text(figures['kernel_ns'])}"


def _steps_idle(trace: Trace, figures: Mapping[str, Any]) -> str:
    window, idle = figures["window_ns"], figures["window_idle_ns"]
    if window is None or idle is None:
        return "no steps are named" if window is None else "not recorded"
    devices = len(steps.devices(trace, int(steps.find(trace)["process"].iloc[0])))
    return f"{time_text(idle)} ({100 * idle / max(window * devices, 1):.1f} %)"


def _gpus(trace: Trace, _: Mapping[str, Any]) -> str:
    cards = Counter(
        (gpu.name or "not named")
        + (f", {bytes_text(gpu.memory_bytes)}" if gpu.memory_bytes else "")
        + (f", {gpu.sm_count} SMs" if gpu.sm_count else "")
        for gpu in trace.meta.gpus
    )
    return "; ".join(card if count == 1 else f"{count} x {card}" for card, count in cards.items()) or "not named"


_FIGURES: tuple[tuple[str, Any], ...] = (
    ("GPU", _gpus),
    ("recorded by", _tool),
    ("span of GPU work", partial(_amount, "span_ns", None)),
    ("GPU busy", partial(_amount, "busy_ns", "span_ns")),
    ("GPU idle", partial(_amount, "idle_ns", "span_ns")),
    ("GPU idle in the steps", _steps_idle),
    ("kernels", _counted),
    ("copies and memsets, summed", partial(_amount, "memop_ns", None)),
    ("CUDA graphs, summed", partial(_amount, "graph_ns", None)),
    ("captured before / after", lambda _, f: "-" if f["lead_ns"] is None else
     f"{time_text(f['lead_ns'])} / {time_text(f['tail_ns'])}"),
    ("not recorded", _missing),
    ("remarks", lambda trace, _: " ".join(trace.meta.notes) or "none"),
)  # fmt: skip


def _resource(name: str) -> str:
    return (files("nsightkit.report") / name).read_text(encoding="utf-8")


def _policy(style: str, scripts: Sequence[str]) -> str:
    """Let the page run what it was made with, and nothing that a trace might smuggle in."""
    scripts_of, styles_of = (
        " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
        for texts in (scripts, [style])
    )
    return (
        f"default-src 'none'; script-src {scripts_of}; style-src {styles_of}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
