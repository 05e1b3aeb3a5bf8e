"""The investigations: which workload each part runs, at which size on a GPU and on a CPU.

Pure data. What watches a part, and where its figures come from when there is no GPU, is
:mod:`nsightkit.investigations.measurement`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

from nsightkit.configurations import MATRIX, VARIANTS, Configuration
from nsightkit.errors import UsageError

__all__ = ["INVESTIGATIONS", "Part", "Watch", "find", "parts"]

#: How a part is measured, which decides what its samples are.
Watch = Literal["timed", "observed", "swept", "remembered"]


@dataclasses.dataclass(frozen=True)
class Part:
    """One measurement of an investigation, run in a process of its own.

    Parameters
    ----------
    investigation, name : str
    workload : str
        ``module:function``; the function takes a device and `parameters`, and gives an object with
        ``step()``, ``losses()``, ``data_wait_ns``, ``parameters`` and the context-manager protocol.
    gpu, smoke : mapping
        Parameters of the workload on a GPU and, small, on a CPU.
    value : int
        Parts of higher value are recorded first when time is short.
    warmup, repetitions : int
        Steps before timing starts, and steps timed.
    active : int
        Steps kept in the trace.
    watch : {"timed", "observed", "swept", "remembered"}
        ``timed``: the samples are times of steps, waits for data and losses. ``observed``: times of steps and what
        the workload's ``observed()`` gives; its losses and waits are not asked for. ``swept``: the part is a column of
        cells; the workload makes cells, and `gpu` and `smoke` also say which. ``remembered``: the memory's history,
        from before the workload is built, is kept as a snapshot.
    utilization : bool
        Of a timed or observed part: read what NVML reports, too: utilisation, clock, power.
    shapes : bool
        Of an observed part: the profile keeps what operators are given, to reckon what they cost.
    second : {"nsys", "ncu"}, optional
        Run it once more, in another process, under Nsight Systems or Nsight Compute.

    Raises
    ------
    ValueError
        A switch that this way of measuring does not know.
    """

    investigation: str
    name: str
    workload: str
    gpu: Mapping[str, Any]
    smoke: Mapping[str, Any]
    value: int
    warmup: int = 10
    repetitions: int = 50
    active: int = 3
    watch: Watch = "timed"
    utilization: bool = False
    shapes: bool = False
    second: Literal["nsys", "ncu"] | None = None

    def __post_init__(self) -> None:
        if self.watch not in get_args(Watch):
            raise ValueError(f"{self.investigation}/{self.name}: nothing is measured as {self.watch!r}")
        if self.shapes and self.watch != "observed":
            raise ValueError(f"{self.investigation}/{self.name}: shapes are kept of observed parts only")
        if self.utilization and self.watch not in ("timed", "observed"):
            raise ValueError(f"{self.investigation}/{self.name}: utilization is read of timed and observed parts only")

    def parameters(self, mode: str) -> dict[str, Any]:
        """Give the workload's parameters.

        Parameters
        ----------
        mode : {"live", "replay", "smoke"}

        Returns
        -------
        dict
        """
        return dict(self.smoke if mode == "smoke" else self.gpu)

    def counts(self, mode: str) -> dict[str, int]:
        """Give the numbers of steps.

        Parameters
        ----------
        mode : {"live", "replay", "smoke"}

        Returns
        -------
        dict
            ``warmup``, ``repetitions``, ``active``.
        """
        if mode == "smoke":
            return {
                "warmup": min(self.warmup, 2),
                "repetitions": min(self.repetitions, 12),
                "active": min(self.active, 3),
            }
        return {"warmup": self.warmup, "repetitions": self.repetitions, "active": self.active}


_TRAINING = "nsightkit.workloads.training:start"
_LM = {"vocabulary": 32_000, "heads": 16, "precision": "bf16", "workers": 8}

# Sizes on a GPU, with what decides them:
# - an ordinary run: 16k tokens a step on 0.27 G parameters, long enough for its matmuls to count;
_ORDINARY = {**_LM, "hidden": 1024, "layers": 12, "context": 1024, "batch": 16}
# - starved: one process decodes a batch of 16 x 1 MB more slowly than a data-centre GPU learns from it,
#   a dozen processes faster;
_STARVED = {
    **_LM, "hidden": 1024, "layers": 8, "context": 512, "batch": 16, "workers": 12,
    "decode_bytes": 1_000_000, "read_ms": 1.0,
}  # fmt: skip
# - sync: a layer takes the GPU longer than it takes the CPU to launch it, so the CPU could run ahead;
_SYNC = {**_LM, "hidden": 2048, "layers": 12, "context": 1024, "batch": 4}
# - tiny: 1k tokens on narrow layers, where each kernel is over before the next is launched.
_TINY = {**_LM, "hidden": 512, "heads": 8, "layers": 12, "context": 256, "batch": 4, "precision": "fp32"}

# On a CPU: the same structure at a size where a step takes milliseconds. The machine has few cores, so its starved
# pipeline mostly waits, which processes can do side by side, and the other parts leave the cores to the step.
_SMOKE = {"workers": 0}
_SMOKE_STARVED = {"decode_bytes": 20_000, "read_ms": 5.0, "workers": 4}


def _pair(
    name: str, fault: str, gpu: dict[str, Any], smoke: dict[str, Any], value: int, *, workload: str = _TRAINING
) -> dict[str, Part]:
    """Build the two runs of an investigation that differ in one switch and nothing else."""
    return {
        part: Part(name, part, workload, MappingProxyType(gpu | switch), MappingProxyType(smoke | switch), value)
        for part, switch in (("before", {fault: True}), ("after", {fault: False}))
    }


# - training-step: a language model whose attention writes its scores out, with ranges for the parts of attention.
_STEP = {"vocabulary": 32_000, "d_model": 1024, "layers": 12, "d_ff": 4096, "heads": 16, "context": 1024, "batch": 8}
_STEP_SMOKE = {"vocabulary": 512, "d_model": 128, "layers": 2, "d_ff": 384, "heads": 4, "context": 256, "batch": 2}


def _attention(gpu: dict[str, Any], smoke: dict[str, Any]) -> dict[str, Part]:
    """Build the two runs of a training step, with attention written out and with PyTorch's fused one."""
    both = {"mode": "train", "annotate_mha": True}
    return {
        part: Part(
            "training-step",
            part,
            "nsightkit.workloads.lm:start",
            MappingProxyType(gpu | both | {"precision": "bf16", "attention": attention}),
            MappingProxyType(smoke | both | {"precision": "fp32", "attention": attention}),
            85,
            second="nsys",
        )
        for part, attention in (("before", "naive"), ("after", "sdpa"))
    }


# - autocast: the types are those of any size; the bytes should be those of layers that count, not of the vocabulary.
_CAST = {"vocabulary": 8_192, "hidden": 1024, "layers": 4, "heads": 16, "context": 512, "batch": 8}


def _looked_at(name: str, workload: str, gpu: dict[str, Any], switch: str, values: tuple[Any, Any]) -> dict[str, Part]:
    """Build the two runs of an investigation that looks at values or types: a few steps are enough."""
    return {
        part: Part(
            name,
            part,
            workload,
            MappingProxyType(gpu | {switch: value}),
            MappingProxyType({switch: value}),
            50,
            warmup=1,
            repetitions=3,
            active=1,
            watch="observed",
        )
        for part, value in zip(("before", "after"), values, strict=True)
    }


# - bench: GEMMs long enough for an H200; the second size has more than twice the parameters, the second context as
#   many tokens, so that it adds attention and nothing else.
_MEDIUM = {"batch": 16, "context": 512, "d_model": 1024, "layers": 24, "d_ff": 4096, "heads": 16, "vocabulary": 10_000}
_BENCH = {**_MEDIUM, "mode": "train", "precision": "bf16"}
_SMALL = {"batch": 4, "context": 64, "d_model": 128, "layers": 2, "d_ff": 384, "heads": 4, "vocabulary": 512}
_BENCH_SMOKE = {**_SMALL, "mode": "train", "precision": "bf16"}
_CELLS: Mapping[str, Mapping[str, Any]] = {
    "before": {},  # differs in its warm-up alone
    "after": {},
    "forward": {"mode": "fwd"},
    "no-optimizer": {"mode": "fwd_bwd"},
    "context": {"context": 2, "batch": 1 / 2},
    "size": {"d_model": 5 / 4, "d_ff": 5 / 4, "heads": 5 / 4, "layers": 3 / 2},
    "precision": {"precision": "fp32"},
}
# - precision: the same model in each; the last repeats "after" with other weights and tokens of the same sizes, to see
#   how far apart equals are.
_PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "before": {"precision": "fp32"},
    "tf32": {"precision": "tf32"},
    "after": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "again": {"precision": "bf16", "seed": 1},
}


def _cells(
    name: str, gpu: dict[str, Any], smoke: dict[str, Any], changes: Mapping[str, Mapping[str, Any]], value: int
) -> dict[str, Part]:
    """Build cells of the benchmark, each with what it changes: switches are replaced, sizes multiplied."""

    def changed(base: dict[str, Any], change: Mapping[str, Any]) -> Mapping[str, Any]:
        return MappingProxyType(
            base | {key: int(base[key] * new) if key in _MEDIUM else new for key, new in change.items()}
        )

    return {
        part: Part(
            name,
            part,
            "nsightkit.investigations.bench_steps:start",
            changed(gpu, change),
            changed(smoke, change),
            value,
            warmup=0 if (name, part) == ("bench", "before") else 10,
            repetitions=50 if name == "precision" else 30,  # to judge small differences by
            active=2,
            watch="observed",
        )
        for part, change in changes.items()
    }


# - matrix: ten models as they are, and small in every direction but depth and heads, which are their shape. Every batch
#   is copied from the host, for there to be copies to look at.
_MATRIX = {"mode": "train", "precision": "bf16", "attention": "sdpa", "feed": "host"}
_SMALLER = 16


def _sizes(model: Configuration, divisor: int = 1) -> dict[str, int]:
    """Give a configuration's sizes, each divided and rounded up, the width to a multiple of the heads."""
    sizes = {
        name: -(-getattr(model, name) // divisor) for name in ("batch", "context", "d_model", "d_ff", "vocabulary")
    }
    heads = model.heads
    return sizes | {"d_model": -(-sizes["d_model"] // heads) * heads, "heads": heads, "layers": model.layers}


def _matrix() -> dict[str, Part]:
    """Build a part for each configuration of the matrix and each of their controls."""
    return {
        model.name: Part(
            "matrix",
            model.name,
            "nsightkit.investigations.bench_steps:start",
            MappingProxyType(_sizes(model) | _MATRIX),
            MappingProxyType(_sizes(model, _SMALLER) | _MATRIX),
            value=75,
            warmup=10,
            repetitions=30,
            active=2,
            watch="observed",
        )
        for model in (*MATRIX, *VARIANTS)
    }


# - attention-sweep: a batch of 8 and one head, as in a much used course. Contexts double until nothing fits: at 32768
#   one matrix of scores in fp32 has 32 GiB, and at 40960 two of them fit an H200 and three do not. Time is shared out:
#   what is slow in fp32 gets more, and what is compiled anew for each size gets most, for fewer widths.
_WIDTHS, _CONTEXTS = [32, 64, 128, 256, 512], [64, 256, 1024, 4096, 8192, 16384, 32768, 40960, 65536, 131072]
_SWEEP = {"batch": 8, "heads": 1, "d_model": _WIDTHS, "context": _CONTEXTS, "traced": [64, 1024, 4096]}
# On a CPU the limit is one that the counter of tensors enforces: the fp32 columns meet it in both directions.
_SWEEP_SMOKE = {
    "batch": 2, "heads": 1, "d_model": [16, 32], "context": [16, 64, 128, 256, 512, 1024], "traced": [16, 256],
    "cell_s": 0.005, "limit_bytes": 5 * 2**20,
}  # fmt: skip
_SWEPT = {
    "fp32": ("naive", "naive-compiled", "math", "efficient"),
    "tf32": ("naive", "naive-compiled", "math", "efficient"),
    "bf16": ("naive", "naive-compiled", "math", "efficient", "flash", "cudnn"),
}


def _sweep() -> dict[str, Part]:
    """Build a part for each implementation in each precision that it can have."""
    found = {}
    for precision, implementations in _SWEPT.items():
        for implementation in implementations:
            gpu = {"implementation": implementation, "precision": precision, **_SWEEP}
            gpu["budget_s"] = 20.0 if precision == "fp32" else 10.0
            smoke = gpu | _SWEEP_SMOKE | {"budget_s": 60.0}
            if implementation == "naive-compiled":
                gpu |= {"d_model": [64, 512], "traced": [1024, 4096], "budget_s": 25.0}
                smoke |= {"compiler": "eager"}  # traced, but run as it is: inductor needs a C++ compiler
            if implementation in ("flash", "cudnn"):
                gpu["impossible"] = ["fp32", "tf32"]
            name = f"{implementation}-{precision}"
            found[name] = Part(
                "attention-sweep",
                name,
                "nsightkit.workloads.attention:start",
                MappingProxyType(gpu),
                MappingProxyType(smoke),
                value=65,
                warmup=5,
                repetitions=30,
                active=1,
                watch="swept",
            )
    return found


# - ledger: a model of which much is published, at the size it is published for; memory-context: the same at contexts
#   that double until nothing fits. On a CPU the limit is one that the counter of tensors enforces.
_LEDGER = _MEDIUM | {"batch": 4}
_LENGTHS = {name: size for name, size in _LEDGER.items() if name != "context"} | {
    "contexts": [128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]
}
_LENGTHS_SMOKE = {name: size for name, size in _SMALL.items() if name != "context"} | {
    "contexts": [32, 64, 128, 256, 512],
    "limit_bytes": 64 * 2**20,
}
_MEMORY: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "memory-context": {
        "before": {"mode": "train", "precision": "bf16", "attention": "naive"},
        "after": {"mode": "train", "precision": "bf16", "attention": "sdpa"},
        "fp32": {"mode": "train", "precision": "fp32", "attention": "sdpa"},
        "forward": {"mode": "fwd", "precision": "bf16", "attention": "sdpa"},
    },
    "ledger": {
        "before": {"mode": "train", "precision": "fp32", "attention": "sdpa"},
        "after": {"mode": "train", "precision": "bf16", "attention": "sdpa"},
        "naive": {"mode": "train", "precision": "bf16", "attention": "naive"},
        "forward": {"mode": "fwd", "precision": "bf16", "attention": "sdpa"},
    },
}


def _memory(name: str, start: str, gpu: dict[str, Any], smoke: dict[str, Any], value: int) -> dict[str, Part]:
    """Build parts whose memory is looked at: its bytes are the same in every step."""
    return {
        part: Part(
            name,
            part,
            f"nsightkit.workloads.memory_steps:{start}",
            MappingProxyType({**gpu, **switches}),
            MappingProxyType({**smoke, **switches}),
            value,
            warmup=1,
            repetitions=3,
            active=1,
            watch="observed",
        )
        for part, switches in _MEMORY[name].items()
    }


# - memory-snapshot: few layers, for a file of a megabyte; a vocabulary that makes what is kept by mistake as large as
#   everything that has to be kept. The limit leaves room for a step or two of it on a GPU of 24 GB.
_KEPT = _MEDIUM | {"batch": 8, "context": 1024, "layers": 4, "vocabulary": 32_000}
_KEPT_SMOKE = _SMALL | {"vocabulary": 2048}
_ENDS: Mapping[str, tuple[bool, int | None, int | None]] = {
    "before": (True, None, None),
    "after": (False, None, None),
    "full": (True, 16 * 10**9, 48 * 10**6),
}


def _remembered() -> dict[str, Part]:
    """Build parts whose memory is recorded: with the fault, without it, and with it until memory is full."""

    def run(base: dict[str, Any], keep_graph: bool, limit_bytes: int | None) -> Mapping[str, Any]:
        limit = {} if limit_bytes is None else {"limit_bytes": limit_bytes}
        return MappingProxyType({**base, "mode": "train", "precision": "bf16", "keep_graph": keep_graph, **limit})

    return {
        part: Part(
            "memory-snapshot",
            part,
            "nsightkit.workloads.leak:start",
            run(_KEPT, keep_graph, gpu),
            run(_KEPT_SMOKE, keep_graph, smoke),
            value=71,
            warmup=0,
            repetitions=0,
            active=3,
            watch="remembered",
        )
        for part, (keep_graph, gpu, smoke) in _ENDS.items()
    }


# - ceilings: a product large enough to fill any card, and tensors larger than any cache; warm for a second before it
#   counts, since clocks fall with the power that is drawn.
_CUBE = {"kind": "gemm", "m": 8192, "n": 8192, "k": 8192}
_CUBE_SMOKE = {"kind": "gemm", "m": 256, "n": 256, "k": 256}
_CEILINGS: Mapping[str, tuple[dict[str, Any], dict[str, Any], int]] = {  # on a GPU, on a CPU, warm-up
    "before": ({**_CUBE, "precision": "bf16"}, {**_CUBE_SMOKE, "precision": "bf16"}, 800),
    "after": ({**_CUBE, "precision": "bf16", "zeros": True}, {**_CUBE_SMOKE, "precision": "bf16", "zeros": True}, 800),
    "fp32": ({**_CUBE, "precision": "fp32"}, {**_CUBE_SMOKE, "precision": "fp32"}, 60),
    "tf32": ({**_CUBE, "precision": "tf32"}, {**_CUBE_SMOKE, "precision": "tf32"}, 400),
    "fp16": ({**_CUBE, "precision": "fp16"}, {**_CUBE_SMOKE, "precision": "fp16"}, 800),
    "fp8": ({**_CUBE, "precision": "fp8"}, {**_CUBE_SMOKE, "precision": "fp8"}, 1200),
    # Products of a transformer layer, which fill the last wave of tiles more or less well, and a larger square.
    "layer": ({**_CUBE, "m": 2048, "n": 22_016, "k": 4096, "precision": "bf16"}, {**_CUBE_SMOKE, "m": 64}, 2000),
    "qkv": ({**_CUBE, "m": 2048, "n": 12_288, "k": 4096, "precision": "bf16"}, {**_CUBE_SMOKE, "m": 64}, 3500),
    "out": ({**_CUBE, "m": 2048, "n": 4096, "k": 4096, "precision": "bf16"}, {**_CUBE_SMOKE, "n": 64}, 8000),
    "down": ({**_CUBE, "m": 2048, "n": 4096, "k": 11_008, "precision": "bf16"}, {**_CUBE_SMOKE, "k": 64}, 4000),
    "large": ({**_CUBE, "m": 16_384, "n": 16_384, "k": 16_384, "precision": "bf16"}, _CUBE_SMOKE, 100),
    "copy": ({"kind": "copy", "megabytes": 4_000}, {"kind": "copy", "megabytes": 16}, 300),
    "triad": ({"kind": "triad", "megabytes": 4_000}, {"kind": "triad", "megabytes": 16}, 300),
    "read": ({"kind": "read", "megabytes": 4_000}, {"kind": "read", "megabytes": 16}, 300),
}


def _ceilings() -> dict[str, Part]:
    return {
        name: Part(
            "ceilings",
            name,
            "nsightkit.workloads.ceilings:start",
            MappingProxyType(gpu),
            MappingProxyType(smoke),
            value=103,  # first of all, with the ladders that are held against them
            warmup=warmup,
            repetitions=200,
            active=3,
            utilization=True,
        )
        for name, (gpu, smoke, warmup) in _CEILINGS.items()
    }


# - roofline: the layer that has more intensity than its card has balance, first with its attention written out.
_LAYER = {"mode": "prefill", "batch": 1, "context": 2048, "hidden": 4096, "heads": 32, "d_ff": 11_008, "layers": 3}
_LAYER_SMOKE = {**_LAYER, "context": 128, "hidden": 256, "heads": 4, "d_ff": 704, "layers": 2}


def _roofline() -> dict[str, Part]:
    return {
        part: Part(
            "roofline",
            part,
            "nsightkit.workloads.layer:start",
            MappingProxyType(_LAYER | {"rung": rung}),
            MappingProxyType(_LAYER_SMOKE | {"rung": rung}),
            value=91,
            warmup=300,
            repetitions=50,
            active=3,
            watch="observed",
            shapes=True,
        )
        for part, rung in (("before", "naive"), ("after", "fused"))
    }


# - limiters: products that fill any card, tensors larger than any cache, and rows for the softmax fewer than any card
#   has multiprocessors, then many; blocks of walks for several rounds of them. Counting replays each launch dozens of
#   times, so a few steps of it are enough.
_LIMITERS = {
    "side": 8192, "side_fp32": 4096, "elements": 2**26, "stride": 8, "programs": 1024, "hops": 128, "table": 2**26,
}  # fmt: skip
_LIMITERS_SMOKE = {
    "side": 256, "side_fp32": 128, "elements": 2**18, "stride": 8, "programs": 16, "hops": 16, "table": 2**16,
}  # fmt: skip


def _limiters() -> dict[str, Part]:
    """Build the two runs of the operations: with a softmax over few rows, and over many."""
    return {
        part: Part(
            "limiters",
            part,
            "nsightkit.workloads.limiters:start",
            MappingProxyType(_LIMITERS | {"rows": rows}),
            MappingProxyType(_LIMITERS_SMOKE | {"rows": smoke}),
            value=90,
            warmup=20,
            repetitions=50,
            active=3,
            second="ncu",
        )
        for part, rows, smoke in (("before", 16, 4), ("after", 16_384, 256))
    }


# - ladder and decode: the same layer in every implementation. Warm for a second before it counts; on a CPU through a
#   compiler that needs none, and small. Decoding passes through more layers, each of which takes little.
_RUNGS: Mapping[str, tuple[str, tuple[str, ...], dict[str, Any], int]] = {
    "ladder": (
        "prefill",
        (
            *("naive", "sdpa", "fused", "compiled", "autotuned", "graphed", "two-streams", "graphed-eager"),
            *("flash", "cudnn", "triton", "epilogue", "fp8"),
        ),
        {},
        300,
    ),
    "decode": (
        "decode",
        (
            *("eager", "fused", "compiled", "graphed", "graphed-eager", "sums", "triton"),
            *("streamed", "overlapped", "one-mlp"),
        ),
        {"layers": 8},
        1500,
    ),
}


def _rungs(name: str, value: int) -> dict[str, Part]:
    """Build a part for each rung of a ladder."""
    mode, rungs, sizes, warmup = _RUNGS[name]
    gpu = _LAYER | sizes | {"mode": mode, "compiler": "inductor"}
    smoke = _LAYER_SMOKE | {"context": 64, "hidden": 128, "d_ff": 352}
    smoke |= {"mode": mode, "layers": 3, "compiler": "aot_eager"}
    return {
        rung: Part(
            name,
            rung,
            "nsightkit.workloads.layer:start",
            MappingProxyType(gpu | {"rung": rung}),
            MappingProxyType(smoke | {"rung": rung}),
            value,
            warmup=warmup,
            repetitions=100,
            active=2,
            utilization=True,
            watch="observed",
        )
        for rung in rungs
    }


# - gate: the same step in several processes, and once with a twelfth more layers: a slowdown of some percent that
#   nobody planned. On a CPU as deep, and narrow enough for milliseconds.
_GATED = _MEDIUM | {"mode": "train", "precision": "bf16"}
_GATED_SMOKE = _SMALL | {"context": 16, "d_model": 64, "d_ff": 192, "layers": 12, "mode": "train", "precision": "fp32"}


def _gate() -> dict[str, Part]:
    return {
        part: Part(
            "gate",
            part,
            "nsightkit.workloads.lm:start",
            MappingProxyType(_GATED | {"layers": 26 if part == "after" else 24}),
            MappingProxyType(_GATED_SMOKE | {"layers": 13 if part == "after" else 12}),
            value=68,
            active=2,
        )
        for part in ("before", "before-2", "before-3", "before-4", "again", "after")
    }


# - one-change: a starved run and its repair, each in two processes and in turns; enough steps in a profile for an
#   interval of its own.
def _one_change() -> dict[str, Part]:
    """Build a change and its repetition, in the order in which they are measured."""
    return {
        part: Part(
            "one-change",
            part,
            _TRAINING,
            MappingProxyType(_STARVED | {"starved": not part.startswith("after")}),
            MappingProxyType(_SMOKE_STARVED | {"starved": not part.startswith("after")}),
            value=67,
            active=10,
        )
        for part in ("before", "after", "again", "after-again")
    }


# - late-rank: data-parallel training in two processes, whose gradients are of a size that takes a while to add up. What
#   is kept are the steps that each rank profiles of itself; the times of steps are those of the first rank.
_CREW = {"ranks": 2, "hidden": 2048, "layers": 8, "batch": 512, "bucket_mb": 64.0, "late_ms": 20.0, "profiled": 20}


def _late_rank() -> dict[str, Part]:
    """Build the two runs of a job, with the late rank and without."""
    return {
        part: Part(
            "late-rank",
            part,
            "nsightkit.workloads.late_rank:start",
            MappingProxyType(_CREW | {"late": late}),
            MappingProxyType({"late": late}),
            45,
            warmup=3,
            repetitions=20,
            active=2,
            watch="observed",
        )
        for part, late in (("before", True), ("after", False))
    }


#: {investigation: {part: Part}}
INVESTIGATIONS: Mapping[str, Mapping[str, Part]] = MappingProxyType(
    {
        "gpu-util": {
            "training": Part(
                "gpu-util",
                "training",
                _TRAINING,
                MappingProxyType(_ORDINARY),
                MappingProxyType(_SMOKE),
                90,
                utilization=True,
            ),
            "one-thread": Part(
                "gpu-util",
                "one-thread",
                "nsightkit.workloads.one_thread:start",
                MappingProxyType({"step_ms": 5.0}),
                MappingProxyType({"step_ms": 2.0}),
                60,
                utilization=True,
            ),
        },
        "starved-input": _pair("starved-input", "starved", _STARVED, _SMOKE_STARVED, 100),
        "hidden-sync": _pair("hidden-sync", "sync", _SYNC, _SMOKE, 80),
        "tiny-kernels": _pair("tiny-kernels", "tiny", _TINY, _SMOKE, 70),
        "training-step": _attention(_STEP, _STEP_SMOKE),
        "accumulation": _looked_at("accumulation", "nsightkit.workloads.accumulation:start", {}, "block", (1, 25)),
        "autocast": _looked_at("autocast", "nsightkit.workloads.autocast:start", _CAST, "norm", ("written", "fused")),
        "bench": _cells("bench", _BENCH, _BENCH_SMOKE, _CELLS, 95),
        "precision": _cells("precision", _BENCH, _BENCH_SMOKE | {"d_model": 64}, _PRECISIONS, 94),
        "matrix": _matrix(),
        "ceilings": _ceilings(),
        "roofline": _roofline(),
        "limiters": _limiters(),
        "ladder": _rungs("ladder", 102),
        "decode": _rungs("decode", 101),
        "memory-context": _memory("memory-context", "column", _LENGTHS, _LENGTHS_SMOKE, 72),
        "ledger": _memory("ledger", "start", _LEDGER, _SMALL, 78),
        "memory-snapshot": _remembered(),
        "attention-sweep": _sweep(),
        "gate": _gate(),
        "late-rank": _late_rank(),
        "one-change": _one_change(),
        # new ones
    }
)


def find(investigation: str, part: str) -> Part:
    """Look a part up.

    Parameters
    ----------
    investigation, part : str

    Returns
    -------
    Part

    Raises
    ------
    UsageError
        There is none of that name; the message lists those there are.
    """
    try:
        return INVESTIGATIONS[investigation][part]
    except KeyError:
        known = ", ".join(f"{p.investigation}/{p.name}" for p in parts())
        raise UsageError(f"no part {investigation}/{part}; there are {known}") from None


def parts() -> Iterator[Part]:
    """Go over all parts, the most valuable first.

    Yields
    ------
    Part
    """
    everything = [part for group in INVESTIGATIONS.values() for part in group.values()]
    yield from sorted(everything, key=lambda part: -part.value)
