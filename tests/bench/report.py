"""What a report costs: to make, to send and to look at, beside the file for a viewer that one would send instead.

``nox -s bench`` does not run it; ``python tests/bench/report.py`` does. Sizes and CPU seconds are of whole processes.
Frames are counted while real wheel, mouse and key events move the timeline in Debian's Chromium without a GPU; as
other programs on the machine take their part of those, the CPU time that a frame takes is measured, too.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "report")]

import run  # noqa: E402 # beside this file
import test_report  # noqa: E402 # has the trace and the page

from nsightkit.trace import store  # noqa: E402

_MOVE = """(share) => new Promise((done) => {
  const e = document.querySelector('nsightkit-timeline');
  let i = 0;
  const step = () => {
    const start = e.span * (0.1 + 0.002 * i * share);
    e.show(start, start + e.span * share * 0.6);
    requestAnimationFrame(++i < 30 ? step : done);
  };
  requestAnimationFrame(step);
})"""


def frames_per_second(shown: test_report.Opened) -> dict[str, tuple[float, int]]:
    """Frames that the browser shows, and redraws among them, while wheel, mouse and keys move the timeline."""
    page = shown.page
    page.evaluate("document.querySelector('nsightkit-timeline').scrollIntoView({block: 'start', behavior: 'instant'})")
    page.locator("nsightkit-timeline .rows").focus()
    box = page.locator("nsightkit-timeline .rows").bounding_box()
    x, y = box["x"] + box["width"] * 0.6, min(box["y"] + 200, 800)
    page.mouse.move(x, y)
    page.evaluate(
        """() => {
          const e = document.querySelector('nsightkit-timeline'), draw = e.draw.bind(e);
          window.seen = { frames: [], draws: 0 };
          e.draw = () => { draw(); seen.draws++; };
          const tick = (now) => { seen.frames.push(now); requestAnimationFrame(tick); };
          requestAnimationFrame(tick);
          e.show(0, e.span / 3);
        }"""
    )

    def during(act):
        page.evaluate("[seen.frames.length, seen.draws] = [0, 0]")
        act()
        frames, draws = page.evaluate("[seen.frames, seen.draws]")
        return round((len(frames) - 1) / (frames[-1] - frames[0]) * 1000, 1), draws

    def wheel():
        for i in range(60):
            page.mouse.wheel(0, -60 if i < 30 else 60)

    def drag():
        page.mouse.down()
        for i in range(60):
            page.mouse.move(x + (i % 30) * 8, y)
        page.mouse.up()

    def keys():
        for key in ("+", "ArrowRight", "ArrowLeft", "-", "ArrowRight", "+", "-", "Home"):
            page.keyboard.press(key)
            page.wait_for_timeout(150)

    return {"wheel": during(wheel), "drag": during(drag), "keys": during(keys)}


def made(folder: Path, kernels: int, repeat: int) -> Path:
    """Make the report and its rival; says what each took."""
    trace = folder / f"report-{kernels}.parquet"
    if not trace.exists():
        store.write(test_report.many(kernels, streams=(7, 13, 20)), trace)
    page, rival = folder / f"report-{kernels}.html", folder / f"report-{kernels}.json.gz"
    contenders = [
        run.Contender("report", [[*run.NSIGHTKIT, "report", str(trace), "-o", str(page), "--overwrite"]]),
        run.Contender("convert, for Perfetto", [[*run.NSIGHTKIT, "convert", str(trace), str(rival), "--overwrite"]]),
    ]
    costs = {c.name: [run.measured(c) for _ in range(repeat)] for c in contenders}
    for out, (name, of) in zip((page, rival), costs.items(), strict=True):
        cpu, peak = statistics.median(c.cpu_s for c in of), max(c.peak_mb for c in of)
        print(
            f"{kernels:9,} kernels  {name:22} {cpu:7.2f} CPU s {peak:6.0f} MB {out.stat().st_size / 1e6:7.2f} MB file"
        )
    return page


def looked_at(page: Path) -> None:
    """Count frames; says how many a second, and what one costs."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        shown = test_report.Opened(browser, page.resolve())
        print(f"frames a second, and redraws: {frames_per_second(shown)}; load {os.getloadavg()[0]:.1f}")
        session = shown.context.new_cdp_session(shown.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})

        def spent() -> dict[str, Any]:
            return {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}

        for share in (1, 0.1, 0.001):
            before = spent()
            shown.page.evaluate(_MOVE, share)
            after = spent()
            ms = {k: (after[k] - before[k]) / 30 * 1000 for k in ("ScriptDuration", "TaskDuration")}
            print(
                f"{share:7.1%} of the span: {ms['TaskDuration']:5.1f} ms CPU a frame on the main thread, "
                f"{ms['ScriptDuration']:.1f} of it in scripts"
            )
        browser.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(".bench"))
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; medians of {options.repeat}"
    )
    for kernels in (100_000, 520_000):
        page = made(options.folder, kernels, options.repeat)
    looked_at(page)


if __name__ == "__main__":
    main()
