"""A page with a timeline, open in a browser that writes down what it complains of and what it asks for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Self


def until(page: Any, expression: str) -> None:
    """Wait, asking from outside: a page's own policy forbids what `wait_for_function` runs in it when it polls."""
    deadline = time.monotonic() + 20
    while not page.evaluate(f"Boolean({expression})"):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


class WatchedPage:
    """A page that must end without a complaint, and without a request for anything but itself."""

    def __init__(
        self, browser: Any, path: Path, *, width: int = 1280, theme: str = "light", ready: bool = True, **context: Any
    ):
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **context)
        self.page = self.context.new_page()
        self.page.on("console", lambda m: self.complaints.append(m.text))
        self.page.on("pageerror", lambda e: self.complaints.append(str(e)))
        self.page.on("dialog", lambda d: (self.complaints.append(f"alert {d.message}"), d.dismiss()))
        self.page.on("request", lambda r: self.requests.append(r.url))
        self.page.goto(path.as_uri())
        if ready:
            until(self.page, "document.querySelector('nsightkit-timeline').shadowRoot")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.context.close()
        if kind is None:
            assert not self.complaints
            outside = [url for url in self.requests if not url.startswith(("data:", "blob:"))]
            assert len(outside) == 1, "only the page itself"

    def get(self, expression: str) -> Any:
        """Evaluate an expression in which `e` is the timeline."""
        return self.page.evaluate(
            f"(() => {{ const e = document.querySelector('nsightkit-timeline'); return {expression}; }})()"
        )
