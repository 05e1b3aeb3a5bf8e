"""Language models by name: their sizes, and what each was chosen to show.

Pure data. The workloads build these models, the benchmark names them and the analysis computes their cost; analysis
imports neither of the other two, so the data is outside all three packages.

A recording's key covers the code of workloads and capture, not this file: what is recorded takes sizes as
parameters, never their name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsightkit.errors import UsageError

__all__ = ["MATRIX", "SIZES", "SMOKE", "VARIANTS", "Configuration", "find"]


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A decoder-only language model and the batch it is given.

    Parameters
    ----------
    name : str
    batch : int
        Sequences a step.
    context : int
        Tokens a sequence.
    d_model : int
        Width of the residual stream.
    layers : int
    d_ff : int
        Width inside the gated MLP.
    heads : int
        Attention heads; `d_model` is a multiple of it.
    vocabulary : int
    intent : str
        What the configuration was chosen to show.
    control_of : str
        The configuration this one is the control of: all else is the same, or as near as the sizes allow.
    """

    name: str
    batch: int
    context: int
    d_model: int
    layers: int
    d_ff: int
    heads: int
    vocabulary: int
    intent: str
    control_of: str = ""

    def __post_init__(self) -> None:
        for field in ("batch", "context", "d_model", "layers", "d_ff", "heads", "vocabulary"):
            if getattr(self, field) < 1:
                raise UsageError(f"{self.name}: {field} must be at least 1, not {getattr(self, field)}")
        if self.d_model % self.heads:
            raise UsageError(f"{self.name}: d_model {self.d_model} is not a multiple of {self.heads} heads")

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.context

    @property
    def d_head(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.heads

    @property
    def rotated(self) -> int:
        """Channels of a head that rotary embedding turns: it turns pairs, so an odd head keeps one as it is."""
        return self.d_head // 2 * 2


#: Ten configurations, each meant to have a different bottleneck.
MATRIX: tuple[Configuration, ...] = (
    Configuration("model_a", 32, 256, 768, 2, 2048, 12, 10_000, "wide and shallow: the baseline"),
    Configuration("model_b", 32, 256, 384, 12, 1024, 12, 10_000, "narrow and deep, with about as many parameters"),
    Configuration(
        "latency_bound",
        *(1, 128, 512, 12, 1536, 8, 10_000),
        "one short sequence: launching costs more than running",
    ),
    Configuration(
        "misaligned_dims",
        *(34, 257, 514, 6, 1538, 2, 10_000),
        "widths and token counts that are not multiples of 8",
    ),
    Configuration("bad_head_size", 32, 256, 672, 6, 1792, 12, 10_000, "heads of 56: aligned, but attention pads them"),
    Configuration("vocab_bottleneck", 64, 256, 512, 4, 1536, 8, 50_257, "most of the work in the output head"),
    Configuration("wide_ffn", 32, 256, 768, 6, 4096, 12, 10_000, "an MLP twice as wide as usual"),
    Configuration(
        "bandwidth_bound",
        *(256, 256, 384, 4, 1024, 6, 10_000),
        "a huge batch of a small model: norms, softmax and loss move much data",
    ),
    Configuration("compute_bound", 32, 256, 1536, 8, 4096, 24, 10_000, "GEMMs large enough to fill the GPU"),
    Configuration(
        "deep_sequential",
        *(32, 256, 512, 32, 1536, 8, 10_000),
        "32 layers one after the other: launches times depth",
    ),
)

#: Controls for those of the ten that change more than they say.
VARIANTS: tuple[Configuration, ...] = (
    Configuration(
        "misaligned_dims_even",
        *(34, 257, 516, 6, 1538, 6, 10_000),
        "unaligned still, but heads of 86, which flash attention takes",
        control_of="misaligned_dims",
    ),
    Configuration(
        "misaligned_dims_258",
        *(34, 257, 516, 6, 1538, 2, 10_000),
        "an even head size, so that all of a head is rotated; still too wide for flash attention",
        control_of="misaligned_dims",
    ),
    Configuration(
        "aligned_dims",
        *(32, 256, 512, 6, 1536, 4, 10_000),
        "the nearest sizes that are aligned in all: to be compared by FLOP/s, not by time",
        control_of="misaligned_dims",
    ),
    Configuration(
        "head_size_96",
        *(32, 256, 672, 6, 1792, 7, 10_000),
        "bad_head_size in heads of 96, which attention does not pad",
        control_of="bad_head_size",
    ),
    Configuration(
        "vocab_aligned",
        *(64, 256, 512, 4, 1536, 8, 50_304),
        "vocab_bottleneck with a vocabulary that is a multiple of 128: size without misalignment",
        control_of="vocab_bottleneck",
    ),
)

#: A model for machines without a GPU.
SMOKE = Configuration("smoke", 4, 64, 64, 2, 192, 4, 512, "ends in seconds on a CPU")

#: GPT-2's widths with a gated MLP at d_ff = 4 d_model, which has three matrices instead of two: hence 3.4 G for "2.7B".
SIZES: tuple[Configuration, ...] = (
    SMOKE,
    Configuration("small", 4, 512, 768, 12, 3072, 12, 10_000, "129 M parameters"),
    Configuration("medium", 4, 512, 1024, 24, 4096, 16, 10_000, "423 M parameters"),
    Configuration("large", 4, 512, 1280, 36, 5120, 20, 10_000, "969 M parameters"),
    Configuration("xl", 4, 512, 1600, 48, 6400, 25, 10_000, "2.0 G parameters"),
    Configuration("2.7B", 4, 512, 2560, 32, 10_240, 32, 10_000, "3.4 G parameters, in spite of its name"),
    Configuration("10B", 4, 512, 4608, 50, 12_288, 36, 10_000, "12.8 G parameters: too large for one GPU with AdamW"),
)


def find(name: str, among: Sequence[Configuration] = (*MATRIX, *VARIANTS, *SIZES)) -> Configuration:
    """Give the configuration of a name.

    Parameters
    ----------
    name : str
    among : sequence of Configuration
        By default all there are.

    Returns
    -------
    Configuration

    Raises
    ------
    UsageError
        No configuration has that name; the message lists all names.
    """
    for configuration in among:
        if configuration.name == name:
            return configuration
    raise UsageError(f"no configuration is called {name!r}; there are {', '.join(c.name for c in among)}")
