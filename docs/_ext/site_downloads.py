"""What a visitor downloads from the site: the package as a wheel, and a report on the landing page's two runs."""

from __future__ import annotations

import re
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder
from sphinx.application import Sphinx

from nsightkit.guide import cases

_WHEEL = re.compile(r"nsightkit-[\d.]+-py3-none-any\.whl")
#: What pages install: the downloaded file, and what of the package comes with it.
_INSTALLED = re.compile(r"\./(nsightkit-\S+?\.whl)(\[[\w,]+\])?")


def _install_from_site(app: Sphinx, _name: str, source: list[str]) -> None:
    """Name the wheel of this version, and install from a site whose address is known without a download first."""

    def address(match: re.Match[str]) -> str:
        wheel, extras = match.groups()
        link = f"{app.config.html_baseurl.rstrip('/')}/{wheel}"
        if extras:
            return f"nsightkit{extras} @ {link}"
        return link

    text = _WHEEL.sub(f"nsightkit-{app.config.version}-py3-none-any.whl", source[0])
    if app.config.html_baseurl:
        text = _INSTALLED.sub(address, text)
    source[0] = text


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or "case_files" not in app.env.found_docs:
        return
    from nsightkit import report

    traces = {which: cases.case(cases.DEMO, which).trace for which in cases.names()[cases.DEMO]}
    report.write(traces, Path(app.outdir, "demo-report.html"), overwrite=True)
    builder = WheelBuilder(str(app.confdir))
    list(builder.build(directory=str(app.outdir), versions=["standard"]))  # builds while it is iterated over


def setup(app: Sphinx) -> dict[str, bool]:
    """See the extension API of Sphinx."""
    app.connect("source-read", _install_from_site)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
