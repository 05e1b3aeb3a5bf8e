"""The investigations: which workload each part runs, at which size on a GPU and on a CPU, and how it is measured.

Pure data. Where a part's figures come from when there is no GPU is
:mod:`nsightkit.investigations.measurement`.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from nsightkit.configurations import MATRIX, VARIANTS, Configuration
from nsightkit.errors import UsageError

__all__ = ["INVESTIGATIONS", "MEASURES", "PROFILES", "Part", "find", "parts", "prepared", "resolve"]

#: How a part can be measured, and the function that does it. All take ``(workload, device, parameters, counts,
#: folder)``, write ``trace.json.gz`` into the folder, and give raw samples by metric and all the workload's parameters.
MEASURES = {
    "timed": "nsightkit.investigations.ways_to_measure:timed",
    "observed": "nsightkit.investigations.ways_to_measure:observed",
    "remembered": "nsightkit.investigations.ways_to_measure:remembered",
    "swept": "nsightkit.investigations.sweep_column:swept",
}
#: What else makes the figures of a part that also runs under a profiler.
PROFILES: Mapping[str | None, tuple[str, ...]] = {
    None: (),
    "nsys": ("nsightkit.investigations.under_nsight:steady_steps",),
    "ncu": ("nsightkit.investigations.under_nsight:steady_steps", "nsightkit.investigations.under_nsight:SECTIONS"),
}
#: The most steps of a run on a CPU.
_SMOKE_COUNTS = {"warmup": 2, "repetitions": 12, "active": 3}


@dataclasses.dataclass(frozen=True, eq=False)  # each is one thing, which can be a key
class Part:
    """One measurement of an investigation, run in a process of its own; as a text, ``investigation/name``.

    Parameters
    ----------
    investigation, name : str
    workload : str
        ``module:function``; the function takes a device and `parameters`, and gives an object with
        ``step()``, ``losses()``, ``data_wait_ns``, ``parameters`` and the context-manager protocol.
    gpu, smoke : mapping
        Parameters of the workload on a GPU and, small, on a CPU.
    seconds : float
        About what it takes on an H200, with its context and its profile, until a recording says (`duration_s`).
    warmup, repetitions : int
        Steps before timing starts, and steps timed.
    active : int
        Steps kept in the trace.
    measured : {"timed", "observed", "swept", "remembered"}
        The function of :data:`MEASURES` that measures it. ``timed``: the samples are times of steps, waits for data and
        losses. ``observed``: times of steps and what the workload's ``observed()`` gives; its losses and waits are not
        asked for. ``swept``: the part is a column of cells; the workload makes cells, and `gpu` and `smoke` also say
        which. ``remembered``: the memory's history, from before the workload is built, is kept as a snapshot.
    utilization : bool
        Of a timed or observed part: also read what NVML reports: utilisation, clock, power.
    shapes : bool
        Of an observed part: the profile keeps what operators are given, to reckon what they cost.
    profiled : {"nsys", "ncu"}, optional
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
    seconds: float
    warmup: int = 10
    repetitions: int = 50
    active: int = 3
    measured: str = "timed"
    utilization: bool = False
    shapes: bool = False
    profiled: str | None = None

    def __post_init__(self) -> None:
        for wrong, problem in (
            (self.measured not in MEASURES, f"nothing is measured as {self.measured!r}"),
            (self.profiled not in PROFILES, f"nothing is profiled with {self.profiled!r}"),
            (self.shapes and self.measured != "observed", "shapes are kept of observed parts only"),
            (
                self.utilization and self.measured not in ("timed", "observed"),
                "utilization is read of timed and observed parts only",
            ),
        ):
            if wrong:
                raise ValueError(f"{self}: {problem}")

    def __str__(self) -> str:
        return f"{self.investigation}/{self.name}"

    def parameters(self, mode: str) -> dict[str, Any]:
        """Give the workload's parameters.

        Parameters
        ----------
        mode : {"live", "replay", "smoke"}
        """
        return dict(self.smoke if mode == "smoke" else self.gpu)

    def counts(self, mode: str) -> dict[str, int]:
        """Give the numbers of steps, and what else is read: ``utilization`` and ``shapes``, 0 or 1.

        Parameters
        ----------
        mode : {"live", "replay", "smoke"}
        """
        steps = {"warmup": self.warmup, "repetitions": self.repetitions, "active": self.active}
        if mode == "smoke":
            steps = {name: min(count, _SMOKE_COUNTS[name]) for name, count in steps.items()}
        return steps | {"utilization": int(self.utilization), "shapes": int(self.shapes)}

    @property
    def code(self) -> list[str]:
        """``module:name`` of what makes its figures, each with all that it uses."""
        return [MEASURES[self.measured], self.workload, *PROFILES[self.profiled]]


def resolve(place: str) -> Any:
    """Import what ``module:name`` says.

    Parameters
    ----------
    place : str
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def prepared(mode: str) -> str:
    """Give the device of a measurement, for which this process is made ready.

    Parameters
    ----------
    mode : {"live", "smoke"}

    Raises
    ------
    RuntimeError
        A live measurement needs a GPU, and this machine has none.
    """
    import torch

    if mode != "live":
        # A machine that builds pages has few cores and other work; idle threads that spin make a step ten times longer.
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        raise RuntimeError("this torch sees no CUDA GPU")
    return "cuda" if mode == "live" else "cpu"


_TRAINING, _LM_START = "workloads.training:start", "workloads.lm:start"
#: By part: what the workload is given on a GPU, and small on a CPU.
_Runs = Mapping[str, tuple[dict[str, Any], dict[str, Any]]]


def _parts(
    name: str, workload: str, runs: _Runs, seconds: float, slow: Mapping[str, float] = MappingProxyType({}), **how: Any
) -> dict[str, Part]:
    """Build an investigation's parts, all measured in the same way; some of them take longer than the others."""
    place = f"nsightkit.{workload}"
    return {
        part: Part(name, part, place, MappingProxyType(gpu), MappingProxyType(smoke), slow.get(part, seconds), **how)
        for part, (gpu, smoke) in runs.items()
    }


def _switched(gpu: Mapping[str, Any], smoke: Mapping[str, Any], switches: Mapping[str, Mapping[str, Any]]) -> _Runs:
    """Give runs that differ in their switches and in nothing else."""
    return {part: ({**gpu, **switch}, {**smoke, **switch}) for part, switch in switches.items()}


def _pair(
    name: str, fault: str, gpu: dict[str, Any], smoke: dict[str, Any], seconds: float, *, workload: str = _TRAINING
) -> dict[str, Part]:
    """Build the two runs of an investigation that differ in one switch: with the fault, and without."""
    return _parts(name, workload, _switched(gpu, smoke, {"before": {fault: True}, "after": {fault: False}}), seconds)


_LM = {"vocabulary": 32_000, "heads": 16, "precision": "bf16", "workers": 8}

# Sizes on a GPU that several investigations share, with what decides them:
# - starved: one process decodes a batch of 16 x 1 MB more slowly than a data-centre GPU learns from it,
#   a dozen processes faster;
_STARVED = {
    **_LM, "hidden": 1024, "layers": 8, "context": 512, "batch": 16, "workers": 12,
    "decode_bytes": 1_000_000, "read_ms": 1.0,
}  # fmt: skip
# On a CPU: the same structure at a size where a step takes milliseconds. The machine has few cores, so its starved
# pipeline mostly waits, which processes can do side by side, and the other parts leave the cores to the step.
_SMOKE = {"workers": 0}
_SMOKE_STARVED = {"decode_bytes": 20_000, "read_ms": 5.0, "workers": 4}


# - what looks at values or types needs a few steps only.
_A_FEW: Mapping[str, Any] = {"warmup": 1, "repetitions": 3, "active": 1, "measured": "observed"}

# - bench: GEMMs long enough for an H200; the second size has more than twice the parameters, the second context as
#   many tokens, so that it adds attention and nothing else.
_MEDIUM = {"batch": 16, "context": 512, "d_model": 1024, "layers": 24, "d_ff": 4096, "heads": 16, "vocabulary": 10_000}
_BENCH = {**_MEDIUM, "mode": "train", "precision": "bf16"}
_SMALL = {"batch": 4, "context": 64, "d_model": 128, "layers": 2, "d_ff": 384, "heads": 4, "vocabulary": 512}
_BENCH_SMOKE = {**_SMALL, "mode": "train", "precision": "bf16"}
_CELL: Mapping[str, Any] = {"warmup": 10, "repetitions": 30, "active": 2, "measured": "observed"}


def _multiplied(gpu: dict[str, Any], smoke: dict[str, Any], changes: Mapping[str, Mapping[str, Any]]) -> _Runs:
    """Give runs, each with what it changes: switches are replaced, sizes multiplied."""

    def changed(base: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
        return base | {key: int(base[key] * new) if key in _MEDIUM else new for key, new in change.items()}

    return {part: (changed(gpu, change), changed(smoke, change)) for part, change in changes.items()}


def _sizes(model: Configuration, divisor: int = 1) -> dict[str, Any]:
    """Give a configuration's sizes, each divided and rounded up, the width to a multiple of the heads.

    Every batch is copied from the host, for there to be copies to look at.
    """
    names = ("batch", "context", "d_model", "d_ff", "vocabulary")
    sizes = {name: -(-getattr(model, name) // divisor) for name in names}
    width = -(-sizes["d_model"] // model.heads) * model.heads
    how = {"mode": "train", "precision": "bf16", "attention": "sdpa", "feed": "host"}
    return sizes | {"d_model": width, "heads": model.heads, "layers": model.layers} | how


# - attention-sweep: a batch of 8 and one head, as in a much used course. Contexts double until nothing fits: at 32768
#   one matrix of scores in fp32 has 32 GiB, and at 40960 two of them fit an H200 and three do not. Time is for what is
#   slow in fp32, up to half a minute a column; what is compiled anew for each size has one width and fewer of them.
_WIDTHS, _CONTEXTS = [64, 128, 512], [64, 256, 1024, 4096, 8192, 16384, 32768, 40960, 65536, 131072]
_SWEEP = {"batch": 8, "heads": 1, "d_model": _WIDTHS, "context": _CONTEXTS, "traced": [64, 1024, 4096]}
_SWEEP_COMPILED = {"d_model": [64], "context": [256, 1024, 4096, 16384, 32768, 40960, 65536], "traced": [4096]}
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


def _columns() -> _Runs:
    """Give a run for each implementation in each precision that it can have."""
    found = {}
    for precision, implementation in ((p, i) for p, implementations in _SWEPT.items() for i in implementations):
        gpu = {"implementation": implementation, "precision": precision, **_SWEEP}
        gpu["budget_s"] = 30.0
        smoke = gpu | _SWEEP_SMOKE | {"budget_s": 60.0}
        if implementation == "naive-compiled":
            gpu |= _SWEEP_COMPILED
            smoke |= {"compiler": "eager"}  # traced, but run as it is: inductor needs a C++ compiler
        if implementation in ("flash", "cudnn"):
            gpu["impossible"] = ["fp32", "tf32"]
        found[f"{implementation}-{precision}"] = (gpu, smoke)
    return found


# - ledger: a model of which much is published, at the size it is published for; memory-context: the same at several
#   contexts.
_LEDGER = _MEDIUM | {"batch": 4}
_CONTEXTS_IN: Mapping[str, Mapping[str, str]] = {
    "before": {"mode": "train", "precision": "bf16", "attention": "naive"},
    "after": {"mode": "train", "precision": "bf16", "attention": "sdpa"},
    "fp32": {"mode": "train", "precision": "fp32", "attention": "sdpa"},
    "forward": {"mode": "fwd", "precision": "bf16", "attention": "sdpa"},
}

# - memory-snapshot: few layers, for a file of a megabyte; a vocabulary that makes what is kept by mistake as large as
#   everything that has to be kept. The limit leaves room for a step or two of it on a GPU of 24 GB.
_KEPT_HOW = {"mode": "train", "precision": "bf16"}
_KEPT = _MEDIUM | {"batch": 8, "context": 1024, "layers": 4, "vocabulary": 32_000} | _KEPT_HOW
_KEPT_SMOKE = _SMALL | {"vocabulary": 2048} | _KEPT_HOW
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


# - roofline: the layer that has more intensity than its card has balance, first with its attention written out.
_LAYERS = "workloads.layer:start"
_LAYER = {"mode": "prefill", "batch": 1, "context": 2048, "hidden": 4096, "heads": 32, "d_ff": 11_008, "layers": 3}
_LAYER_SMOKE = {**_LAYER, "context": 128, "hidden": 256, "heads": 4, "d_ff": 704, "layers": 2}


# - limiters: products that fill any card, tensors larger than any cache, and rows for the softmax fewer than any card
#   has multiprocessors, then many; blocks of walks for several rounds of them. Counting replays each launch dozens of
#   times, so a few steps of it are enough.
_LIMITERS = {
    "side": 8192, "side_fp32": 4096, "elements": 2**26, "stride": 8, "programs": 1024, "hops": 128, "table": 2**26,
}  # fmt: skip
_LIMITERS_SMOKE = {
    "side": 256, "side_fp32": 128, "elements": 2**18, "stride": 8, "programs": 16, "hops": 16, "table": 2**16,
}  # fmt: skip


# - ladder and decode: the same layer in every implementation. Warm for a second before it counts; on a CPU through a
#   compiler that needs none, and small. Decoding passes through more layers, each of which takes little.
_ON_CPU = _LAYER_SMOKE | {"context": 64, "hidden": 128, "d_ff": 352, "layers": 3, "compiler": "aot_eager"}
_RUNG: Mapping[str, Any] = {"repetitions": 100, "active": 2, "utilization": True, "measured": "observed"}


def _rungs(mode: str, *rungs: str, **sizes: int) -> _Runs:
    """Give a run for each rung of a ladder."""
    gpu = _LAYER | sizes | {"mode": mode, "compiler": "inductor"}
    return _switched(gpu, _ON_CPU | {"mode": mode}, {rung: {"rung": rung} for rung in rungs})


#: {investigation: {part: Part}}
#:
#: :meta hide-value:
INVESTIGATIONS: Mapping[str, Mapping[str, Part]] = MappingProxyType(
    {
        "gpu-util": {
            # An ordinary run: 16k tokens a step on 0.27 G parameters, long enough for its matmuls to count.
            **_parts(
                "gpu-util",
                _TRAINING,
                {"training": (_LM | {"hidden": 1024, "layers": 12, "context": 1024, "batch": 16}, _SMOKE)},
                12,
                utilization=True,
            ),
            **_parts(
                "gpu-util",
                "workloads.one_thread:start",
                {"one-thread": ({"step_ms": 5.0}, {"step_ms": 2.0})},
                8,
                utilization=True,
            ),
        },
        "starved-input": _pair("starved-input", "starved", _STARVED, _SMOKE_STARVED, 9),
        # A layer takes the GPU longer than it takes the CPU to launch it, so the CPU could run ahead.
        "hidden-sync": _pair(
            "hidden-sync", "sync", _LM | {"hidden": 2048, "layers": 12, "context": 1024, "batch": 4}, _SMOKE, 7
        ),
        # 1k tokens on narrow layers, where each kernel is over before the next is launched.
        "tiny-kernels": _pair(
            "tiny-kernels",
            "tiny",
            _LM | {"hidden": 512, "heads": 8, "layers": 12, "context": 256, "batch": 4, "precision": "fp32"},
            _SMOKE,
            6,
        ),
        # A language model whose attention writes its scores out, with ranges for the parts of attention.
        "training-step": _parts(
            "training-step",
            _LM_START,
            _switched(
                {
                    "vocabulary": 32_000,
                    "d_model": 1024,
                    "layers": 12,
                    "d_ff": 4096,
                    "heads": 16,
                    "context": 1024,
                    "batch": 8,
                    "mode": "train",
                    "annotate_mha": True,
                    "precision": "bf16",
                },
                {
                    "vocabulary": 512,
                    "d_model": 128,
                    "layers": 2,
                    "d_ff": 384,
                    "heads": 4,
                    "context": 256,
                    "batch": 2,
                    "mode": "train",
                    "annotate_mha": True,
                    "precision": "fp32",
                },
                {"before": {"attention": "naive"}, "after": {"attention": "sdpa"}},
            ),
            9,
            profiled="nsys",
        ),
        "accumulation": _parts(
            "accumulation",
            "workloads.accumulation:start",
            _switched({}, {}, {"before": {"block": 1}, "after": {"block": 25}}),
            5,
            **_A_FEW,
        ),
        # The types are those of any size; the bytes should be those of layers that count, not of the vocabulary.
        "autocast": _parts(
            "autocast",
            "workloads.autocast:start",
            _switched(
                {"vocabulary": 8_192, "hidden": 1024, "layers": 4, "heads": 16, "context": 512, "batch": 8},
                {},
                {"before": {"norm": "written"}, "after": {"norm": "fused"}},
            ),
            5,
            **_A_FEW,
        ),
        "bench": {
            # Before and after differ in the warm-up alone.
            **_parts("bench", _LM_START, {"before": (_BENCH, _BENCH_SMOKE)}, 9, **{**_CELL, "warmup": 0}),
            **_parts(
                "bench",
                _LM_START,
                _multiplied(
                    _BENCH,
                    _BENCH_SMOKE,
                    {
                        "after": {},
                        "forward": {"mode": "fwd"},
                        "no-optimizer": {"mode": "fwd_bwd"},
                        "context": {"context": 2, "batch": 1 / 2},
                        "size": {"d_model": 5 / 4, "d_ff": 5 / 4, "heads": 5 / 4, "layers": 3 / 2},
                        "precision": {"precision": "fp32"},
                    },
                ),
                9,
                **_CELL,
            ),
        },
        # The same model in each; the last repeats "after" with other weights and tokens of the same sizes, to see how
        # far apart equals are.
        "precision": _parts(
            "precision",
            _LM_START,
            _switched(
                _BENCH,
                _BENCH_SMOKE | {"d_model": 64},
                {
                    "before": {"precision": "fp32"},
                    "tf32": {"precision": "tf32"},
                    "after": {"precision": "bf16"},
                    "fp16": {"precision": "fp16"},
                    "again": {"precision": "bf16", "seed": 1},
                },
            ),
            9,
            **{**_CELL, "repetitions": 50},  # to judge small differences by
        ),
        # Ten models as they are, and small in every direction but depth and heads, which are their shape.
        "matrix": _parts(
            "matrix",
            _LM_START,
            {model.name: (_sizes(model), _sizes(model, 16)) for model in (*MATRIX, *VARIANTS)},
            6,
            **_CELL,
        ),
        "ceilings": {
            name: Part(
                "ceilings",
                name,
                "nsightkit.workloads.ceilings:start",
                MappingProxyType(gpu),
                MappingProxyType(smoke),
                seconds=8,
                warmup=warmup,
                repetitions=200,
                utilization=True,
            )
            for name, (gpu, smoke, warmup) in _CEILINGS.items()
        },
        "roofline": _parts(
            "roofline",
            _LAYERS,
            _switched(_LAYER, _LAYER_SMOKE, {"before": {"rung": "naive"}, "after": {"rung": "fused"}}),
            15,
            warmup=300,
            measured="observed",
            shapes=True,
        ),
        "limiters": _parts(
            "limiters",
            "workloads.limiters:start",
            {
                "before": (_LIMITERS | {"rows": 16}, _LIMITERS_SMOKE | {"rows": 4}),
                "after": (_LIMITERS | {"rows": 16_384}, _LIMITERS_SMOKE | {"rows": 256}),
            },
            12,
            warmup=20,
            profiled="ncu",
        ),
        # Inductor tries many kernels for "autotuned" and compiles many for "sums"; then those that compile our own.
        "ladder": _parts(
            "ladder",
            _LAYERS,
            _rungs(
                "prefill",
                *("naive", "sdpa", "fused", "compiled", "autotuned", "graphed", "two-streams"),
                *("graphed-eager", "flash", "cudnn", "triton", "epilogue", "fp8"),
            ),
            15,
            {"autotuned": 110},
            warmup=300,
            **_RUNG,
        ),
        "decode": _parts(
            "decode",
            _LAYERS,
            _rungs(
                "decode",
                *("eager", "fused", "compiled", "graphed", "graphed-eager", "sums", "triton"),
                *("streamed", "overlapped", "one-mlp"),
                layers=8,
            ),
            21,
            {"sums": 110, **dict.fromkeys(("triton", "streamed", "overlapped", "one-mlp"), 28)},
            warmup=1500,
            **_RUNG,
        ),
        "memory-context": _parts(
            "memory-context",
            "workloads.memory_steps:Column",
            # The contexts double until nothing fits. On a CPU the limit is one that the counter of tensors enforces.
            _switched(
                {name: size for name, size in _LEDGER.items() if name != "context"}
                | {"contexts": [128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768]},
                {name: size for name, size in _SMALL.items() if name != "context"}
                | {"contexts": [32, 64, 128, 256, 512], "limit_bytes": 64 * 2**20},
                _CONTEXTS_IN,
            ),
            25,
            **_A_FEW,
        ),
        "ledger": _parts(
            "ledger",
            "workloads.memory_steps:start",
            _switched(
                _LEDGER,
                _SMALL,
                {
                    "before": _CONTEXTS_IN["fp32"],
                    "after": _CONTEXTS_IN["after"],
                    "naive": _CONTEXTS_IN["before"],
                    "forward": _CONTEXTS_IN["forward"],
                },
            ),
            20,
            **_A_FEW,
        ),
        "memory-snapshot": _parts(
            "memory-snapshot",
            "workloads.leak:start",
            {
                "before": (_KEPT | {"keep_graph": True}, _KEPT_SMOKE | {"keep_graph": True}),
                "after": (_KEPT | {"keep_graph": False}, _KEPT_SMOKE | {"keep_graph": False}),
                "full": (
                    _KEPT | {"keep_graph": True, "limit_bytes": 16 * 10**9},
                    _KEPT_SMOKE | {"keep_graph": True, "limit_bytes": 48 * 10**6},
                ),
            },
            16,
            warmup=0,
            repetitions=0,
            measured="remembered",
        ),
        "attention-sweep": _parts(
            "attention-sweep",
            "workloads.attention:start",
            _columns(),
            35,
            warmup=5,
            repetitions=30,
            active=1,
            measured="swept",
        ),
        # The same step in several processes, and once with a twelfth more layers: a slowdown of some percent that was
        # not planned. On a CPU as deep, and narrow enough for milliseconds.
        "gate": _parts(
            "gate",
            _LM_START,
            _multiplied(
                _BENCH,
                _SMALL
                | {"context": 16, "d_model": 64, "d_ff": 192, "layers": 12, "mode": "train", "precision": "fp32"},
                {
                    **{part: {} for part in ("before", "before-2", "before-3", "before-4", "again")},
                    "after": {"layers": 13 / 12},
                },
            ),
            9,
            active=2,
        ),
        # Data-parallel training in two processes, whose gradients are of a size that takes a while to add up. What is
        # kept are the steps that each rank profiles of itself; the times of steps are those of the first rank.
        "late-rank": _parts(
            "late-rank",
            "workloads.late_rank:start",
            _switched(
                {
                    "ranks": 2,
                    "hidden": 2048,
                    "layers": 8,
                    "batch": 512,
                    "bucket_mb": 64.0,
                    "late_ms": 20.0,
                    "profiled": 20,
                },
                {},
                {"before": {"late": True}, "after": {"late": False}},
            ),
            10,
            warmup=3,
            repetitions=20,
            active=2,
            measured="observed",
        ),
        # A starved run and its repair, each in two processes and in turns, in the order in which they are measured;
        # enough steps in a profile for an interval of its own.
        "one-change": _parts(
            "one-change",
            _TRAINING,
            _switched(
                _STARVED,
                _SMOKE_STARVED,
                {
                    part: {"starved": not part.startswith("after")}
                    for part in ("before", "after", "again", "after-again")
                },
            ),
            9,
            active=10,
        ),
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
        No part has that name; the message lists all names.
    """
    try:
        return INVESTIGATIONS[investigation][part]
    except KeyError:
        raise UsageError(f"no part {investigation}/{part}; there are {', '.join(map(str, parts()))}") from None


def parts() -> Iterator[Part]:
    """Go over all parts.

    Yields
    ------
    Part
    """
    for group in INVESTIGATIONS.values():
        yield from group.values()
