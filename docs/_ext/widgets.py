"""Questions with sliders, answered from grids that the package computes when the site is built.

A grid holds the answer to every setting of its axes: the words of a sentence, and items with a text and the length of a
bar. ``widgets.js`` looks an answer up and shows it; it computes nothing. Without JavaScript the page shows the first
answer.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from _lib import ledger
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from nsightkit import configurations
from nsightkit.analysis.roofline import sol
from nsightkit.analysis.roofline.costs import Operation, attention_cost, gemm_cost, layer_costs
from nsightkit.hardware import GPUS, Gpu
from nsightkit.text import bytes_text, time_text

#: Share of a card's memory that a model may take; the CUDA context, libraries and fragmentation take the rest.
USABLE = 0.9
#: Width, heads, MLP width and vocabulary of the layer whose operations are shown, and its cached tokens in decoding.
WIDTH, HEADS, MLP, VOCABULARY, CACHED = 4096, 32, 14_336, 128_256, 4096
_PRECISIONS = {"bf16 autocast": "bf16", "fp32": "fp32"}
_ATTENTION = {"fused": "sdpa", "unfused": "naive"}
_MOMENTS = {"forward": "in the forward pass", "backward": "in the backward pass", "optimizer": "in the optimizer step"}


@dataclasses.dataclass(frozen=True)
class Axis:
    """One setting: its name, its choices, where it starts, and whether the choices form a scale to slide along."""

    label: str
    choices: Sequence[str]
    start: int = 0
    slides: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to one setting: words for the sentence; a text and a length for each item."""

    words: Sequence[str]
    items: Mapping[str, tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class Grid:
    """The answers to all settings, those of the last axis fastest."""

    title: str
    axes: Sequence[Axis]
    sentence: str
    caption: str
    answers: Sequence[Answer]

    def as_json(self) -> str:
        """Write the grid as the page carries it: each text once, bars in percent of the longest of their setting."""
        texts: dict[str, int] = {}
        rows = []
        for answer in self.answers:
            longest = max(length for _, length in answer.items.values()) or 1
            row = [texts.setdefault(word, len(texts)) for word in answer.words]
            for text, length in answer.items.values():
                row += [texts.setdefault(text, len(texts)), round(100 * length / longest)]
            rows.append(row)
        document = {
            "axes": [dataclasses.asdict(axis) for axis in self.axes],
            "sentence": self.sentence,
            "items": self.caption,
            "names": list(self.answers[0].items),
            "texts": list(texts),
            "rows": rows,
        }
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False)

    def as_html(self, name: str) -> str:
        """Write the grid for the script, and the first answer for readers without one."""
        title, first = html.escape(self.title), html.escape(self.sentence.format(*self.answers[0].words))
        data = self.as_json().replace("</", "<\\/")  # nothing in a script may look like its end
        return (
            f'<div class="nsightkit-widget" id="widget-{name}" role="group" aria-label="{title}">'
            f'<p class="nsightkit-title">{title} <span class="nsightkit-badge">predicted</span></p>'
            f"<div>{first} The settings need JavaScript.</div>"
            f'<script type="application/json">{data}</script></div>'
        )


def _settings(axes: Iterable[Axis]) -> Iterable[tuple[int, ...]]:
    return itertools.product(*(range(len(axis.choices)) for axis in axes))


# ---------------------------------------------------------------- memory


def ledger_grid() -> Grid:
    """Compute what a training step holds at its peak, item by item."""
    models = [model for model in configurations.SIZES if model is not configurations.SMOKE]
    contexts, batches = (1024, 2048, 4096, 8192, 16_384), (1, 2, 4, 8)
    precisions, attentions = list(_PRECISIONS.values()), list(_ATTENTION.values())
    axes = (
        Axis("Model", [f"{model.name}: {model.layers} layers of {model.d_model:,}" for model in models], 2),
        Axis("Tokens per sequence", [f"{n:,}" for n in contexts], 1, slides=True),
        Axis("Sequences", [str(n) for n in batches], 2, slides=True),
        Axis("Precision", list(_PRECISIONS)),
        Axis("Attention", list(_ATTENTION)),
    )
    answers = []
    for model, context, batch, precision, attention in _settings(axes):
        sized = dataclasses.replace(models[model], context=contexts[context], batch=batches[batch])
        table = ledger.moments(sized, precision=precisions[precision], attention=attentions[attention])
        peak = table.loc[table["total_bytes"].idxmax()]
        words = (bytes_text(peak["total_bytes"]), _MOMENTS[peak["moment"].split()[0]], _card(peak["total_bytes"]))
        items = {}
        for item in ledger.ITEMS:
            items[item] = (bytes_text(peak[item]) if peak[item] else "", peak[item])
        answers.append(Answer(words, items))
    return Grid("What a training step holds", axes, "{0} at the peak, {1}; {2}.", "Held at the peak", answers)


def _card(total_bytes: float) -> str:
    """Name the smallest memory that is enough, and the cards that have it."""
    for size in sorted({size for gpu in GPUS for size in gpu.memory_gb}):
        if total_bytes <= USABLE * size * 1e9:
            cards = ", ".join(gpu.name for gpu in GPUS if size in gpu.memory_gb)
            return f"{size} GB are enough ({cards})"
    return "no card here has enough memory"


# ---------------------------------------------------------------- time


def operations(tokens: int, precision: str) -> dict[str, Operation]:
    """List the operations of a layer of a language model for `tokens` tokens, and of the output head."""
    layer = {operation.name: operation for operation in layer_costs(1, tokens, WIDTH, HEADS, MLP, precision)}
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


def rated_cards() -> list[Gpu]:
    """List the cards whose rates differ from those before them."""
    cards: dict[tuple[float, ...], Gpu] = {}
    for gpu in GPUS:
        rates = sol.datasheet(gpu).tflops
        cards.setdefault((rates["fp32"], rates["fp16"], gpu.gb_per_s), gpu)
    return list(cards.values())


def roofline_grid() -> Grid:
    """Compute what bounds each operation on each card, and the least time it takes."""
    cards, counts = rated_cards(), (1, 4, 16, 64, 256, 1024, 4096, 16_384)
    names = list(operations(1, "fp32"))
    axes = (
        Axis("Card", [gpu.name for gpu in cards], [gpu.name for gpu in cards].index("H200 SXM")),
        Axis("Operation", names, names.index("gate and up projections")),
        Axis("Tokens at once", [f"{n:,}" for n in counts], 4, slides=True),
        Axis("Precision", ["bf16 or fp16", "fp32"]),
    )
    answers = []
    for card, name, count, is_fp32 in _settings(axes):
        gpu = cards[card]
        half = "bf16" if gpu.supports("bf16") else "fp16"
        answers.append(_bound(operations(counts[count], "fp32" if is_fp32 else half)[names[name]], gpu))
    sentence = "{0}: at least {1}. Its intensity is {2} FLOP/B; this card's ridge is at {3} FLOP/B."
    return Grid("What bounds an operation", axes, sentence, "Least time", answers)


def _bound(operation: Operation, gpu: Gpu) -> Answer:
    rates = sol.datasheet(gpu)
    compute_ns, memory_ns = rates.compute_ns(operation), rates.memory_ns(operation)
    bound = sol.bounds([operation], rates)["bound"].iloc[0]
    ridge = gpu.ridge(operation.unit) or 0.0
    least, intensity = time_text(rates.bound_ns(operation)), _rounded(operation.intensity)
    words = (f"{bound.capitalize()}-bound", least, intensity, _rounded(ridge))
    items = {"computing": (time_text(compute_ns), compute_ns), "moving bytes": (time_text(memory_ns), memory_ns)}
    return Answer(words, items)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


GRIDS: Mapping[str, Callable[[], Grid]] = {"ledger": ledger_grid, "roofline": roofline_grid}


class Widget(SphinxDirective):
    """``{widget} NAME``: a grid to look things up in."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """See :class:`docutils.parsers.rst.Directive`."""
        name = self.arguments[0]
        return [nodes.raw("", GRIDS[name]().as_html(name), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("widget", Widget)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
