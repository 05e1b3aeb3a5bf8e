"""Answers, tables and figures of a hostile trace as a notebook shows them, in a real browser."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import hostile
import pandas as pd
import pytest
from watched_page import WatchedPage

import nsightkit
from nsightkit import api, plots
from nsightkit.trace import store

pytestmark = pytest.mark.site


def shown(answer: Any) -> str:
    """What a notebook takes of an answer."""
    return str(answer._repr_html_())


def as_svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg")
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def test_nothing_in_it_runs_or_loads(browser: Any, tmp_path: Path) -> None:
    trace = api.Trace.of(hostile.trace())
    tables = {
        "where": trace.where(by="op"),
        "gaps": trace.gaps(each=True),
        "kernels": trace.kernels(),
        "ranges": trace.ranges(),
        "memops": trace.memops(),
        "os_calls": trace.calls(os=True),
        "steps": trace.steps(),
    }
    name = hostile.NAMES[0]
    named = pd.DataFrame({name: [name, [name, {name: (name,)}]]}, index=[name, name])
    named.columns.name = named.index.name = name
    tables["columns"] = named
    parts = [shown(plots.table(table)) for table in tables.values()]
    parts.append(shown(plots.table(named, {name: lambda value: f"<b>{value}</b>"}, missing=name)))
    parts += [shown(table) for table in tables.values()]
    parts += [shown(answer) for answer in (trace.summary(), trace.verdict(), nsightkit.diff(trace, trace))]
    parts.append(shown(plots.interactive_timeline(dict.fromkeys(hostile.NAMES[:2], trace), title=name)))
    parts.append(as_svg(plots.bars(tables["kernels"], title=name)))
    parts.append(as_svg(plots.timeline(trace, title=hostile.NAMES[7])))
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,>{''.join(parts)}", "utf-8")
    with WatchedPage(browser, page, width=1200, theme="light", ready=True) as opened:
        opened.page.wait_for_timeout(500)
        assert opened.page.url == page.as_uri()
        harmful = "img, iframe, object, embed, base, form, meta[http-equiv], [onload], [onerror], a[href^='javascript']"
        assert opened.page.locator(harmful).count() == 0
        # pandas' own tables are escaped, but show controls as they are.
        opened.page.evaluate("document.querySelectorAll('table.dataframe').forEach((table) => table.remove())")
        words = opened.page.locator("body").inner_text()
        assert name in words
        assert not set(words) & set("\x1b\x07\x9b\u202e\u2066\u200b")
    report = trace.report(tmp_path / "report.html")
    with WatchedPage(browser, report, width=1200, theme="light", ready=True) as opened:
        opened.page.wait_for_timeout(500)
        assert opened.page.locator(harmful.replace("meta[http-equiv], ", "")).count() == 0
    store.write(trace, tmp_path / "t")  # the same names as a file has them
    assert set(api.load(tmp_path / "t")["kernels"]["name"]) == set(hostile.NAMES)
