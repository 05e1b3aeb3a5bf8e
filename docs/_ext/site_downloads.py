"""What a visitor downloads from the site: the package as a wheel, and a report on the landing page's two runs."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder
from sphinx.application import Sphinx

from nsightkit.guide import cases

#: What pages install: the downloaded file, and what of the package comes with it.
_INSTALLED = re.compile(r"\./(nsightkit-[\d.]+-py3-none-any\.whl)(\[[\w,]+\])?")


def _install_from_site(app: Sphinx, _name: str, source: list[str]) -> None:
    """Let visitors of a site whose address is known install from it, without a download first."""

    def address(match: re.Match[str]) -> str:
        wheel, extras = match.groups()
        link = f"{app.config.html_baseurl.rstrip('/')}/{wheel}"
        if extras:
            return f"nsightkit{extras} @ {link}"
        return link

    if app.config.html_baseurl:
        source[0] = _INSTALLED.sub(address, source[0])


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or "case_files" not in app.env.found_docs:
        return
    from nsightkit import report

    traces = {which: cases.case(cases.DEMO, which).trace for which in cases.names()[cases.DEMO]}
    report.write(traces, Path(app.outdir, "demo-report.html"), overwrite=True)
    builder = WheelBuilder(str(app.confdir))
    for _ in builder.build(directory=str(app.outdir), versions=["standard"]):
        pass  # it builds while it is iterated over


def setup(app: Sphinx) -> dict[str, bool]:
    """See the extension API of Sphinx."""
    app.connect("source-read", _install_from_site)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
