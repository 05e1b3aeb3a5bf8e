"""Questions with sliders, answered from grids that the package works out when the site is built.

A grid holds the answer to every setting of its axes as texts and lengths of bars. ``widgets.js`` looks one up and shows
it; it computes nothing. Without JavaScript a page shows a table of a few settings.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nsightkit import configurations
from nsightkit.analysis.core.text import bytes_text, time_text
from nsightkit.analysis.memory import ledger
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.costs import Operation, attention_cost, gemm_cost, layer_costs
from nsightkit.configurations import Configuration
from nsightkit.hardware import GPUS, Gpu

#: What a model may take of a card's memory; the rest is for the CUDA context, libraries and fragmentation.
USABLE = 0.9
_PRECISIONS = {"16-bit autocast": "bf16", "FP32": "fp32"}
_ATTENTION = {"fused": "sdpa", "scores written out": "naive"}
#: Width, heads and width of the MLP of the layer whose operations are judged; its vocabulary; tokens it remembers.
WIDTH, HEADS, MLP, VOCABULARY, CACHED = 4096, 32, 14_336, 128_256, 4096


@dataclasses.dataclass(frozen=True)
class Axis:
    """One setting: its name, what it can be, where it begins, and whether the choices are a scale to slide along."""

    label: str
    choices: Sequence[str]
    start: int = 0
    slides: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a grid says of one setting: words for the gaps in its sentence; items with a text and a bar's length.

    Every answer of a grid has the same items; one without a text is not shown.
    """

    words: Sequence[str]
    items: Mapping[str, tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """All answers; `typical` are settings that the table without JavaScript shows."""

    name: str
    title: str
    axes: Sequence[Axis]
    sentence: str
    items: str
    answers: Mapping[tuple[int, ...], Answer]
    typical: Sequence[tuple[int, ...]]

    def said(self, at: tuple[int, ...]) -> str:
        """Give the sentence for one setting."""
        return self.sentence.format(*self.answers[at].words)

    def as_json(self) -> str:
        """Give the grid as the page carries it: each text once, and bars in percent of the longest of their setting."""
        texts: dict[str, int] = {}
        names = [name for name in next(iter(self.answers.values())).items if self._ever(name)]
        rows = []
        for at in _settings(self.axes):
            answer = self.answers[at]
            longest = max(size for _, size in answer.items.values()) or 1
            row = [texts.setdefault(word, len(texts)) for word in answer.words]
            for name in names:
                text, size = answer.items[name]
                row += [texts.setdefault(text, len(texts)), round(100 * size / longest)]
            rows.append(row)
        found = {
            "axes": [dataclasses.asdict(axis) for axis in self.axes],
            "sentence": self.sentence,
            "items": self.items,
            "names": names,
            "texts": list(texts),
            "rows": rows,
        }
        return json.dumps(found, separators=(",", ":"), ensure_ascii=False)

    def _ever(self, name: str) -> bool:
        return any(answer.items[name][1] for answer in self.answers.values())

    def as_html(self) -> str:
        """Give the widget: a grid for the script, and a table for whoever runs none."""
        head = [*(axis.label for axis in self.axes), "Answer"]
        body = [
            [*(axis.choices[i] for axis, i in zip(self.axes, at, strict=True)), self.said(at)] for at in self.typical
        ]
        rows = "".join(f"<tr>{_cells(row, 'td')}</tr>" for row in body)
        data = self.as_json().replace("</", "<\\/")  # nothing within a script may look like its end
        return (
            f'<div class="nsightkit-widget" id="widget-{self.name}" role="group" '
            f'aria-label="{html.escape(self.title)}">'
            f'<p class="nsightkit-title">{html.escape(self.title)} <span class="nsightkit-badge">predicted</span></p>'
            f'<div class="pst-scrollable-table-container" tabindex="0"><table class="table">'
            f"<thead><tr>{_cells(head, 'th')}</tr></thead><tbody>{rows}</tbody></table></div>"
            f'<script type="application/json">{data}</script></div>'
        )


def _cells(texts: Iterable[str], tag: str) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)


def _settings(axes: Iterable[Axis]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(len(axis.choices)) for axis in axes))


# ---------------------------------------------------------------- memory

MODELS = tuple(model for model in configurations.SIZES if model is not configurations.SMOKE)
#: Cards by the memory they are sold with, in GB, the smallest first.
CARDS = {
    size: ", ".join(gpu.name for gpu in GPUS if size in gpu.memory_gb)
    for size in sorted({size for gpu in GPUS for size in gpu.memory_gb})
}
_MOMENTS = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer's step",
}


def _named(model: Configuration) -> str:
    return f"{model.name}: {model.layers} layers of {model.d_model:,}"


def ledger_grid() -> Grid:
    """What a training step holds at its highest moment, item by item."""
    contexts, batches = (1024, 2048, 4096, 8192, 16_384), (1, 2, 4, 8)
    axes = (
        Axis("Model", [_named(model) for model in MODELS], 2),
        Axis("Tokens a sequence", [f"{n:,}" for n in contexts], 1, slides=True),
        Axis("Sequences", [str(n) for n in batches], 2, slides=True),
        Axis("Precision", list(_PRECISIONS)),
        Axis("Attention", list(_ATTENTION)),
    )
    precisions, attentions = list(_PRECISIONS.values()), list(_ATTENTION.values())
    answers = {}
    for at in _settings(axes):
        sized = dataclasses.replace(MODELS[at[0]], context=contexts[at[1]], batch=batches[at[2]])
        table = ledger.moments(sized, precision=precisions[at[3]], attention=attentions[at[4]])
        peak = table.loc[table["total_bytes"].idxmax()]
        total = peak["total_bytes"]
        fits = [f"{size} GB are enough ({cards})" for size, cards in CARDS.items() if total <= USABLE * size * 1e9]
        card = fits[0] if fits else "no card here has enough memory"
        words = (bytes_text(total), _MOMENTS[peak["moment"].split()[0]], card)
        answers[at] = Answer(
            words, {item: (bytes_text(peak[item]) if peak[item] else "", peak[item]) for item in ledger.ITEMS}
        )
    return Grid(
        "ledger",
        "What a training step holds",
        axes,
        "{0} at the peak, {1}; {2}.",
        "Held at the peak",
        answers,
        [(0, 1, 2, 0, 0), (2, 1, 2, 0, 0), (2, 1, 2, 1, 0), (2, 1, 2, 0, 1), (4, 1, 0, 0, 0)],
    )


def forecast_grid() -> Grid:
    """The longest context whose training step fits, by memory, model and batch."""
    models = [model for model in MODELS if model.name != "10B"]  # its parameters alone are too many for any card here
    batches = (1, 4, 16)
    axes = (
        Axis("Memory of the card", [f"{size} GB: {cards}" for size, cards in CARDS.items()], list(CARDS).index(80)),
        Axis("Model", [_named(model) for model in models], 2),
        Axis("Sequences", [str(n) for n in batches], 1, slides=True),
    )
    rooms = [USABLE * size * 1e9 for size in CARDS]
    how = {"multiple": 512, "precision": "bf16"}
    longest = {
        (m, b, label): ledger.largest_contexts(
            dataclasses.replace(model, batch=batch), rooms, attention=attention, **how
        )
        for (m, model), (b, batch) in itertools.product(enumerate(models), enumerate(batches))
        for label, attention in _ATTENTION.items()
    }
    answers = {}
    for card, m, b in _settings(axes):
        found = {label: longest[m, b, label][card] for label in _ATTENTION}
        items = {f"attention {label}": (_tokens(count), count) for label, count in found.items()}
        answers[card, m, b] = Answer([_tokens(found["fused"])], items)
    eighty = list(CARDS).index(80)
    return Grid(
        "forecast",
        "The longest context that fits",
        axes,
        "Longest context of a training step with fused attention: {0}.",
        "Longest context, in 16-bit autocast",
        answers,
        [(2, 2, 1), (eighty, 0, 1), (eighty, 2, 1), (eighty, 4, 0), (len(CARDS) - 1, 4, 0)],
    )


def _tokens(count: int) -> str:
    return f"{count:,} tokens" if count else "none fits"


# ---------------------------------------------------------------- time

#: Cards with other rates than those before them.
RATED = tuple(
    {(sol.datasheet(g).tflops["fp32"], sol.datasheet(g).tflops["fp16"], g.gb_per_s): g for g in GPUS[::-1]}.values()
)[::-1]


def operations(tokens: int, precision: str) -> dict[str, Operation]:
    """List what a layer of a language model does for `tokens` tokens, and what is around it."""
    layer = {one.name: one for one in layer_costs(1, tokens, WIDTH, HEADS, MLP, precision)}
    decoding = attention_cost(tokens, HEADS, 1, WIDTH // HEADS, precision, keys=CACHED)
    return {
        "RMSNorm": layer["RMSNorm 1"],
        "Q, K and V projections": layer["QKV"],
        "attention of one sequence": layer["attention"],
        f"attention while decoding, {CACHED:,} tokens each": decoding,
        "gate and up projections": layer["gate and up"],
        "SwiGLU": layer["SwiGLU"],
        "down projection": layer["down"],
        "output head": gemm_cost(tokens, VOCABULARY, WIDTH, precision),
    }


def sixteen_bits(gpu: Gpu) -> str:
    """Name the 16-bit precision of a card: BF16 where it has units for it."""
    return "bf16" if gpu.supports("bf16") else "fp16"


def roofline_grid() -> Grid:
    """What bounds each operation on each card, and the least time it takes."""
    counts = (1, 4, 16, 64, 256, 1024, 4096, 16_384)
    names = list(operations(1, "fp32"))
    axes = (
        Axis("Card", [gpu.name for gpu in RATED], [gpu.name for gpu in RATED].index("H200 SXM")),
        Axis("Operation", names, names.index("gate and up projections")),
        Axis("Tokens at once", [f"{n:,}" for n in counts], 4, slides=True),
        Axis("Precision", ["16 bits", "FP32"]),
    )
    answers = {}
    for (c, gpu), (t, count), p in itertools.product(enumerate(RATED), enumerate(counts), (0, 1)):
        rates, precision = sol.datasheet(gpu), "fp32" if p else sixteen_bits(gpu)
        listed = operations(count, precision)
        for o, (operation, bound) in enumerate(
            zip(listed.values(), sol.bounds(listed.values(), rates)["bound"], strict=True)
        ):
            least = {"computing": rates.compute_ns(operation), "moving bytes": rates.memory_ns(operation)}
            turn = gpu.ridge(operation.unit) or 0.0
            words = (
                f"{bound.capitalize()}-bound",
                time_text(rates.bound_ns(operation)),
                _rounded(operation.intensity),
                _rounded(turn),
            )
            answers[c, o, t, p] = Answer(words, {name: (time_text(ns), ns) for name, ns in least.items()})
    typical = [
        (axes[0].start, names.index(name), t, 0) for name in ("RMSNorm", "gate and up projections") for t in (0, 4, 6)
    ]
    return Grid(
        "roofline",
        "What bounds an operation",
        axes,
        "{0}: at least {1}. Its intensity is {2} FLOP/B; this card's ridge lies at {3} FLOP/B.",
        "Least time",
        answers,
        typical,
    )


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


GRIDS: Mapping[str, Callable[[], Grid]] = {
    "ledger": functools.cache(ledger_grid),
    "forecast": functools.cache(forecast_grid),
    "roofline": functools.cache(roofline_grid),
}


class WidgetNode(nodes.raw):
    """A widget, so that a page with one can be told."""


class Widget(SphinxDirective):
    """``{widget} NAME``: a grid to look things up in."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        return [WidgetNode("", GRIDS[self.arguments[0]]().as_html(), format="html")]


def _load(
    app: Sphinx, pagename: str, template: str, context: dict[str, object], doctree: nodes.document | None
) -> None:
    if doctree is not None and next(doctree.findall(WidgetNode), None) is not None:
        app.add_js_file("widgets.js")
        app.add_css_file("widgets.css")


def setup(app: Sphinx) -> dict[str, bool]:
    """See the extension API of Sphinx."""
    app.add_directive("widget", Widget)
    # As docutils' own raw nodes, in every format.
    app.add_node(WidgetNode)
    app.connect("html-page-context", _load)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
