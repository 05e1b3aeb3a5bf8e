#!/usr/bin/env python3
"""Draw the guide's schematics: ``python tools/schematics.py`` writes ``docs/_static/schematics/*.svg``.

Text takes the colour of the page it is on, and boxes are tinted, so one drawing works on light and on dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from nsightkit import hardware
from nsightkit.plots.looks import BLUE, CATEGORY_COLOURS, GREEN, GREY, OCHRE, PURPLE, RED, VERMILION

FOLDER = Path(__file__).parents[1] / "docs" / "_static" / "schematics"
PINK = CATEGORY_COLOURS["communication"]
WIDTH = 760


class Drawing:
    """An SVG of boxes, texts and arrows."""

    def __init__(self, name: str, height: int, description: str, width: int = WIDTH) -> None:
        self.name = name
        self.height = height
        self.width = width
        self.description = description
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, anchor: str = "start", size: int = 13, bold: bool = False) -> None:
        """Write one line; `y` is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, label: str = "", tint: float = 0.25
    ) -> None:
        """Draw a tinted box with its label in the middle, one line per line of text."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{colour}" '
            f'fill-opacity="{tint}" stroke="{colour}" stroke-width="1.2"/>'
        )
        lines = label.splitlines()
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + 16 * number, line, "middle")

    def gap(self, x: float, y: float, width: float, height: float, label: str = "") -> None:
        """Draw idle time: a dashed outline without a fill."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="none" stroke="{RED}" '
            'stroke-width="1.4" stroke-dasharray="4 3"/>'
        )
        self.text(x + width / 2, y + height / 2 + 4, label, "middle", 11)

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = GREY) -> None:
        """Draw an arrow from the first point to the second."""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{colour}" stroke-width="1.3" '
            f'marker-end="url(#{self.name}-head)"/>'
        )

    def link(self, x: float, y: float, width: float, height: float, colour: str, label: str, target: str) -> None:
        """Draw a box that leads to a page."""
        self.parts.append(f'<a href="{target}">')
        self.box(x, y, width, height, colour, label)
        self.parts.append("</a>")

    def save(self) -> None:
        """Write the file."""
        head = (
            f'<marker id="{self.name}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 Z" fill="{GREY}"/></marker>'
        )
        start = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 0 {self.width + 2} {self.height}" '
            f'fill="currentColor" font-family="inherit" aria-label="{escape(self.description)}"'
        )
        role = "group" if any(part.startswith("<a ") for part in self.parts) else "img"
        body = "\n".join(self.parts)
        svg = f'{start} role="{role}">\n<defs>{head}</defs>\n{body}\n</svg>\n'
        (FOLDER / f"{self.name}.svg").write_text(svg, encoding="utf-8")


def queue() -> Drawing:
    """Two programs: the CPU is ahead in one and late in the other."""
    drawing = Drawing(
        "queue",
        300,
        "Above, a CPU that launches quickly: kernels wait in the queue and the GPU is never idle. Below, a CPU that "
        "launches slowly: the queue is empty and the GPU is idle between kernels.",
    )
    cases = (
        ("The CPU is ahead: kernels wait in the queue, the GPU is never idle", 34, 100, 0),
        ("The CPU is late: the queue is empty, the GPU waits for each launch", 104, 40, 150),
    )
    for title, launch, kernel, top in cases:
        drawing.text(0, top + 14, title, bold=True)
        drawing.text(0, top + 43, "CPU")
        drawing.text(0, top + 113, "GPU")
        end = 0.0
        for number in range(6):
            start = 60 + launch * number
            drawing.box(start, top + 26, launch - 4, 26, PURPLE, str(number + 1))
            ready = start + launch
            begin = max(ready, end)
            if end and begin > end + 8:
                drawing.gap(end, top + 96, begin - end, 26, "idle")
            if begin + kernel > WIDTH:
                continue
            drawing.box(begin, top + 96, kernel - 2, 26, BLUE, str(number + 1))
            drawing.arrow(start + launch / 2, top + 54, begin + 6, top + 93)
            end = begin + kernel
    drawing.text(420, 66, "launch to start = time in the queue", size=12)
    return drawing


def memory() -> Drawing:
    """The levels of an H100's memory: what they hold and how fast they are."""
    card = hardware.find("NVIDIA H100 SXM5")
    assert card is not None
    fp32 = card.peak("fp32")
    assert fp32 is not None
    assert fp32.clock_mhz is not None
    # Each multiprocessor has 65,536 registers of 4 bytes, and reads 32 banks of 4 bytes of shared memory per clock.
    registers_mb = card.multiprocessors * 65_536 * 4 / 1e6
    shared_mb = card.multiprocessors * 228 * 1024 / 1e6
    shared_tb_per_s = card.multiprocessors * 32 * 4 * fp32.clock_mhz / 1e6
    levels = (
        ("Registers", f"{registers_mb:.0f} MB in all, 256 KiB per SM", "operands of each instruction", BLUE),
        (
            "Shared memory",
            f"up to {shared_mb:.0f} MB in all, 228 KiB per SM",
            f"{shared_tb_per_s:.0f} TB/s: 128 B per clock and SM",
            GREEN,
        ),
        ("L2 cache", f"{card.l2_mb:.0f} MB, shared by {card.multiprocessors} SMs", "rate not in the datasheet", OCHRE),
        ("HBM", f"{card.memory_gb[0]} GB", f"{card.gb_per_s / 1e3:.2f} TB/s", VERMILION),
        ("Host memory", "over PCIe 5.0 x16", "about 63 GB/s per direction", GREY),
    )
    drawing = Drawing(
        "memory",
        330,
        "Memory of an H100 from near and fast to far and slow: "
        + "; ".join(f"{name}, {size}, {rate}" for name, size, rate, _ in levels),
    )
    drawing.text(0, 16, f"{card.name}: near and fast at the top, far and slow at the bottom", bold=True)
    for number, (name, size, rate, colour) in enumerate(levels):
        top = 30 + 60 * number
        width = 150 + 60 * number
        drawing.box(0, top, width, 44, colour, name)
        drawing.text(420, top + 19, size)
        drawing.text(420, top + 37, rate)
        if number:
            drawing.arrow(75, top - 2, 75, top - 14)
            drawing.arrow(90, top - 14, 90, top - 2)
    return drawing


def coalescing() -> Drawing:
    """The same 128 bytes for a warp, from 4 sectors and from 32."""
    drawing = Drawing(
        "coalescing",
        250,
        "Above, 32 threads of a warp read 32 neighbouring floats: 4 sectors of 32 bytes move. Below, each thread reads "
        "a float from another row: 32 sectors move, and one eighth of the bytes is used.",
    )
    cell = 20
    titles = (
        "Coalesced: thread i reads x[i]. 4 sectors of 32 B move, all 128 B are used",
        "Strided: thread i reads x[1024 i]. 32 sectors move, 128 of 1,024 B are used",
    )
    for row, title in enumerate(titles):
        top = 125 * row
        drawing.text(0, top + 14, title, bold=True)
        drawing.text(0, top + 41, "threads")
        drawing.text(0, top + 101, "sectors")
        for thread in range(32):
            left = 70 + cell * thread
            drawing.box(left, top + 26, cell - 3, 20, PURPLE)
            if row == 0:
                drawing.arrow(left + 8, top + 48, left + 8, top + 82)
            else:
                drawing.box(left, top + 86, cell - 3, 22, GREY, tint=0.12)
                drawing.box(left, top + 86, 4, 22, BLUE, tint=0.8)
                drawing.arrow(left + 8, top + 48, left + 3, top + 82)
        if row == 0:
            for sector in range(4):
                drawing.box(70 + 8 * cell * sector, top + 86, 8 * cell - 3, 22, BLUE, "32 B")
    return drawing


def tiling() -> Drawing:
    """One tile of C, and the tiles of A and B that pass through shared memory for it."""
    drawing = Drawing(
        "tiling",
        300,
        "One tile of C is the sum over tiles of a row of A times tiles of a column of B. The block copies a pair "
        "of tiles into shared memory, uses every value T times, and goes on to the next pair.",
    )
    side, tile = 180, 45
    left_a, left_b, left_c, top = 0, 250, 500, 60
    for name, left in (("A", left_a), ("B", left_b), ("C", left_c)):
        drawing.box(left, top, side, side, GREY, tint=0.06)
        drawing.text(left + side / 2, top - 12, name, "middle", bold=True)
    drawing.text(215, top + 95, "\u00d7", "middle", 20)
    drawing.text(465, top + 95, "=", "middle", 20)
    for step in range(4):
        strong = 0.55 if step == 1 else 0.18
        drawing.box(left_a + tile * step, top + tile, tile, tile, BLUE, "now" if step == 1 else "", tint=strong)
        drawing.box(left_b + 2 * tile, top + tile * step, tile, tile, GREEN, "now" if step == 1 else "", tint=strong)
    drawing.box(left_c + 2 * tile, top + tile, tile, tile, VERMILION, "sum", tint=0.45)
    drawing.arrow(left_a + 8, top + tile - 8, left_a + side - 8, top + tile - 8)
    drawing.arrow(left_b + 2 * tile - 8, top + 8, left_b + 2 * tile - 8, top + side - 8)
    drawing.text(0, 18, "One block computes one tile of C, T by T values, in registers", bold=True)
    drawing.text(0, 272, "For each pair of tiles: copy both to shared memory, then use every value T times.")
    drawing.text(0, 292, "Reads of A and B from HBM fall by a factor of T against one value per thread without reuse.")
    return drawing


def overlap() -> Drawing:
    """DDP with several buckets and with one."""
    drawing = Drawing(
        "overlap",
        330,
        "Above, DDP with four buckets: each all-reduce runs while earlier layers are still in the backward pass, and "
        "only the last one is exposed. Below, one bucket: the all-reduce starts after backward and is exposed.",
    )
    layer, first, bucket = 84, 120, 60
    drawing.text(0, 14, "Good: four buckets. Only the last all-reduce is exposed", bold=True)
    drawing.text(0, 174, "Bad: one bucket. The whole all-reduce is exposed", bold=True)
    for top in (0, 160):
        drawing.text(0, top + 46, "compute stream")
        drawing.text(0, top + 96, "NCCL stream")
        for number in range(4):
            drawing.box(first + layer * number, top + 28, layer - 4, 28, BLUE, f"backward {4 - number}")
    for number in range(4):
        left = first + layer * (number + 1)
        drawing.box(left, 78, bucket, 28, PINK, f"bucket {number + 1}")
        drawing.arrow(left - 6, 58, left + 4, 76)
    end = first + 4 * layer
    for top, exposed in ((28, bucket), (188, 4 * bucket)):
        drawing.gap(end, top, exposed, 28, "exposed")
        drawing.box(end + exposed + 4, top, 60, 28, OCHRE, "step")
    drawing.box(end, 238, 4 * bucket, 28, PINK, "all gradients")
    drawing.arrow(end - 6, 218, end + 4, 236)
    drawing.arrow(first, 300, WIDTH - 10, 300)
    drawing.text(first, 320, "time", size=12)
    return drawing


#: Waits of the GPU and what fills its time, with the pages that deal with them. Links are relative to the landing page.
WAITS = (
    (VERMILION, "data", "gallery/02_starved_input_pipeline.html"),
    (PURPLE, "launches", "gallery/04_tiny_kernels.html"),
    (BLUE, "a sync, .item()", "gallery/03_hidden_synchronisation.html"),
    (GREEN, "a copy", "guide/timeline.html#a-gap-before-a-copy-pageable-memory"),
    (OCHRE, "other CPU work", "guide/timeline.html#work-between-launches-the-cpu-s-own"),
    (RED, "start-up, compiling", "guide/timeline.html#one-call-as-long-as-a-step-start-up"),
    (PINK, "other ranks", "guide/many_gpus.html#which-rank-is-late"),
)
WORK = (
    (BLUE, "matmul and attention: how close to peak?", "guide/speed_of_light.html"),
    (GREEN, "small memory-bound kernels: fuse them", "guide/kernels.html"),
    (PINK, "collectives: which rank is late?", "guide/many_gpus.html"),
    (GREEN, "copies: pin, overlap, drop", "guide/kernels.html#are-the-copies-fast"),
    (RED, "one kernel: read its counters", "guide/inside_one_kernel.html"),
)
FLOWCHART = "A flowchart from a slow job to the pages that deal with it"
FIRST_QUESTION = "nsightkit verdict my.sqlite\nDoes it say that something waits?"


def symptoms() -> Drawing:
    """From a slow job to the page that deals with it."""
    drawing = Drawing("symptoms", 482, FLOWCHART)
    drawing.box(280, 4, 200, 34, GREY, "The job is slow")
    drawing.arrow(380, 38, 380, 60)
    drawing.box(230, 62, 300, 50, GREY, FIRST_QUESTION)
    drawing.text(196, 82, "yes", "end")
    drawing.text(564, 82, "no")
    drawing.arrow(230, 87, 150, 128)
    drawing.arrow(530, 87, 585, 128)
    drawing.box(40, 130, 220, 34, GREY, "What does it wait for?")
    drawing.box(420, 130, 330, 34, GREY, "What fills the busy time?")
    branch(drawing, 80, 164, 180, WAITS)
    branch(drawing, 460, 164, 290, WORK)
    return drawing


def symptoms_narrow() -> Drawing:
    """The same for a phone: one branch below the other."""
    drawing = Drawing("symptoms_narrow", 770, FLOWCHART, 360)
    drawing.box(20, 4, 320, 34, GREY, "The job is slow")
    drawing.arrow(180, 38, 180, 60)
    drawing.box(20, 62, 320, 50, GREY, FIRST_QUESTION)
    drawing.arrow(180, 112, 180, 138)
    drawing.box(20, 140, 320, 34, GREY, "yes: what does it wait for?")
    branch(drawing, 48, 174, 304, WAITS)
    below = 174 + 42 * len(WAITS) + 20
    # From the question down the left edge to the other answer.
    drawing.parts.append(f'<path d="M20 87H4V{below + 17}" stroke="{GREY}" stroke-width="1.3" fill="none"/>')
    drawing.arrow(4, below + 17, 20, below + 17)
    drawing.box(20, below, 320, 34, GREY, "no: what fills the busy time?")
    branch(drawing, 48, below + 34, 304, WORK)
    return drawing


def branch(drawing: Drawing, x: float, y: float, width: float, leaves: tuple[tuple[str, str, str], ...]) -> None:
    """Hang boxes that lead to pages below a question whose box ends at `y`."""
    stem = x - 24
    drawing.parts.append(
        f'<path d="M{stem} {y}V{y + 32 + 42 * (len(leaves) - 1)}" stroke="{GREY}" stroke-width="1.3"/>'
    )
    for number, (colour, label, target) in enumerate(leaves):
        middle = y + 32 + 42 * number
        drawing.arrow(stem, middle, x, middle)
        drawing.link(x, middle - 16, width, 32, colour, label, target)


def main() -> None:
    """Write all drawings."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for draw in (queue, memory, coalescing, tiling, overlap, symptoms, symptoms_narrow):
        draw().save()


if __name__ == "__main__":
    main()
