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

pytestmark = pytest.mark.site


def as_svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg")
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def test_nothing_in_it_runs_or_loads(browser: Any, tmp_path: Path):
    trace = api.Trace.of(hostile.trace())
    name = hostile.NAMES[0]
    named = pd.DataFrame({name: [name, [name, name]]})
    answers = [trace.where(by="op"), trace.gaps(each=True), trace.kernels(), trace.summary(), trace.verdict()]
    answers += [nsightkit.diff(trace, trace), plots.table(named), plots.table(named, {name: "<b>{}</b>"}, missing=name)]
    answers.append(plots.interactive_timeline(dict.fromkeys(hostile.NAMES[:2], trace), title=name))
    parts = [str(answer._repr_html_()) for answer in answers]
    parts.append(as_svg(plots.bars(trace.kernels(), title=name)))
    parts.append(as_svg(plots.timeline(trace, title=hostile.NAMES[7])))
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><link rel=icon href=data:,>{''.join(parts)}", "utf-8")
    with WatchedPage(browser, page) as opened:
        opened.page.wait_for_timeout(500)
        assert opened.page.url == page.as_uri()
        harmful = "img, iframe, object, embed, base, form, meta[http-equiv], [onload], [onerror], a[href^='javascript']"
        assert opened.page.locator(harmful).count() == 0
        words = opened.page.locator("body").inner_text()
        assert name in words
        assert not set(words) & set("\x1b\x07\x9b\u202e\u2066\u200b")
    report = trace.report(tmp_path / "report.html")
    with WatchedPage(browser, report) as opened:
        opened.page.wait_for_timeout(500)
        assert opened.page.locator(harmful.replace("meta[http-equiv], ", "")).count() == 0
