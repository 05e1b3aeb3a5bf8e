"""The report on both runs of the landing page's case file, as a page of its own."""

from __future__ import annotations

from pathlib import Path

from sphinx.application import Sphinx

from nsightkit.guide import cases


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None and "case_files" in app.env.found_docs:
        from nsightkit import report

        traces = {which: cases.case(cases.DEMO, which).trace for which in cases.names()[cases.DEMO]}
        report.write(traces, Path(app.outdir, "demo-report.html"), overwrite=True)


def setup(app: Sphinx) -> dict[str, bool]:
    """See the extension API of Sphinx."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
