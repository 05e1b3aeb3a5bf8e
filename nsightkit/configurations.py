"""Language models by name: their sizes, and what each was chosen to show (``configurations.toml``).

Pure data. The workloads build these models, the benchmark names them and the analysis computes their cost; analysis
imports neither of the other two, so the data is outside all three packages.

A recording's key covers the code of workloads and capture, not this file: what is recorded takes sizes as
parameters, never their name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from nsightkit.errors import UsageError
from nsightkit.text import read_toml


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
        sizes = (self.batch, self.context, self.d_model, self.layers, self.d_ff, self.heads, self.vocabulary)
        if min(sizes) < 1:
            raise UsageError(f"{self.name}: every size must be at least 1")
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


_TABLES = read_toml(__file__, "configurations")
#: Ten configurations, each meant to have a different bottleneck.
MATRIX = tuple(Configuration(**row) for row in _TABLES["matrix"])
#: Controls for those of the ten that differ from the others in more than what they were chosen to show.
VARIANTS = tuple(Configuration(**row) for row in _TABLES["variants"])
#: A model for machines without a GPU, and models by size.
SIZES = tuple(Configuration(**row) for row in _TABLES["sizes"])
#: The model for machines without a GPU.
SMOKE = SIZES[0]


def find(name: str, among: Sequence[Configuration] = MATRIX + VARIANTS + SIZES) -> Configuration:
    """Look up a configuration by name.

    Parameters
    ----------
    name : str
    among : sequence of Configuration
        The configurations to search, by default all.

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
