"""Names that a terminal, a page or a spreadsheet would obey, and a trace in which everything is called so."""

from __future__ import annotations

import pandas as pd

from nsightkit.trace.model import Gpu, Trace, TraceMeta

P = 7
MAIN = P << 24 | 1
NAMES = (
    "<svg onload=alert(1)>",
    "<img src=https://example.invalid/x onerror=alert(2)>",
    "<meta http-equiv=refresh content='0;url=https://example.invalid/'>",
    "</pre></td></script><script>alert(3)</script><!--",
    "<style>@import 'https://example.invalid/x';</style>",
    "'\"><iframe srcdoc='<script>alert(4)</script>'>",
    "&lt;script&gt;alert(5)&lt;/script&gt; {{x}} ${title}",
    r"$\href{javascript:alert(6)}{x}$ $x^{$",
    'font-family: x data:image/png;base64,AAAA" id="main',
    "\x1b]52;c;cm0gLXJm\x07\x1b[2J\x9b31m",
    "\u202eevil\u202c \u2066x\u2069 \u200b\u200e\u061c\ufeff",
    "two\r\nlines\u2028and\x85more\x7f",
    "[red]markup[/red] :boom:",
    '=HYPERLINK("https://example.invalid")',
    "+1+cmd|' /C calc'!A0",
    "-2+3",
    "@SUM(1)",
    "\t=1+1",
    "\uff1d1+1",
)


def trace() -> Trace:
    """A step of each name: a range and an operator that launch a kernel and a copy, with nothing after them."""
    n = len(NAMES)
    at = pd.Series(range(n)) * 1_000_000
    names = pd.Categorical(NAMES, categories=list(NAMES))
    on_cpu = {"process": P, "thread": MAIN, "name": names}
    steps = pd.DataFrame(
        {"start_ns": at, "end_ns": at + 900_000, "name": pd.Categorical([f"step {i}" for i in range(n)])}
    )
    steps = steps.assign(process=P, thread=MAIN, kind="pushpop", domain="")
    inner = pd.DataFrame(
        {"start_ns": at + 1_000, "end_ns": at + 800_000, **on_cpu, "kind": "pushpop", "domain": NAMES[0]}
    )
    calls = pd.DataFrame({"start_ns": at + 10_000, "end_ns": at + 15_000, "process": P, "thread": MAIN})
    kernels = pd.DataFrame({"start_ns": at + 20_000, "end_ns": at + 60_000 + at // 100, "process": P, "name": names})
    copies = {"start_ns": at + 700_000, "end_ns": at + 705_000, "process": P, "kind": names, "src_kind": names}
    frames = {
        "ranges": pd.concat([steps, inner], ignore_index=True).astype({"name": "category"}),
        "ops": pd.DataFrame({"start_ns": at + 2_000, "end_ns": at + 50_000, **on_cpu}),
        "os_calls": pd.DataFrame({"start_ns": at + 100_000, "end_ns": at + 600_000, **on_cpu}),
        "calls": calls.assign(name=pd.Categorical(["cudaLaunchKernel"] * n), correlation=range(1, n + 1)),
        "kernels": kernels.assign(short_name=names, correlation=range(1, n + 1), stream=7),
        "memops": pd.DataFrame({**copies, "dst_kind": names, "bytes": 1000, "stream": 8}),
    }
    meta = TraceMeta(
        tool=NAMES[0],
        tool_version=NAMES[9],
        gpus=[Gpu(0, NAMES[3])],
        notes=[NAMES[1] + NAMES[10]],
        thread_names={MAIN: NAMES[5] + NAMES[9]},
    )
    return Trace.from_frames(frames, meta, path=f"{NAMES[9]}{NAMES[10]}<b>.json")
