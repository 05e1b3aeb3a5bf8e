"""What a part runs: what is listed of it without a GPU, and what counts as a change."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from nsightkit.investigations import what_runs
from nsightkit.investigations.listed import listed
from nsightkit.investigations.parts import Part
from nsightkit.investigations.what_runs import closure
from nsightkit.workloads.phases import phase
from nsightkit.workloads.workload import Workload, autocast


@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 4096
    precision: str = "bf16"
    seed: int = 0


class Numbers(IterableDataset[Tensor]):
    def __iter__(self):
        while True:
            time.sleep(0.001)
            yield torch.arange(64)


class Toy(Workload):
    """A bit of everything that is to be seen; every method can be another in a test."""

    def __init__(self, config: Config, device: str) -> None:
        super().__init__(config, device)
        self._set_fp32_products("fp32")
        torch.manual_seed(config.seed)
        self.generator = torch.Generator(self.device).manual_seed(config.seed)
        self.weight = torch.randn(config.width, config.width, device=self.device, requires_grad=True)
        self.optimizer = torch.optim.AdamW([self.weight], lr=1e-3)
        self.rows = iter(DataLoader(Numbers(), batch_size=8, num_workers=2))
        self.model = torch.nn.Linear(config.width, 8).to(self.device)
        self.run = torch.compile(self.model, mode="max-autotune")

    def step(self) -> None:
        with phase("step"):
            rows = next(self.rows).to(self.device, non_blocking=True)
            with autocast(self.device, self.config.precision):
                self.attend(self.helped(rows)).sum().backward()
            self.optimizer.step()
            self.wait()

    def helped(self, rows: Tensor) -> Tensor:
        drawn = torch.randn(len(rows), self.config.width, device=self.device, generator=self.generator)
        return (drawn + 1.5) * 2.0 @ self.weight

    def attend(self, x: Tensor) -> Tensor:
        heads = x.view(8, 4, -1, 64)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    def wait(self) -> None:
        self.read = self.weight.detach().abs().amax().item()
        torch.cuda.synchronize()


def start(device: str, **parameters: object) -> Toy:
    return Toy(Config(**parameters), device)


def a_part(**gpu: object) -> Part:
    return Part("toy", "toy", f"{__name__}:start", MappingProxyType(gpu), MappingProxyType({}), 1)


def listing(**gpu: object) -> dict:
    found = listed(a_part(**gpu))
    counts = a_part().counts("live")
    return found | {"counts": counts, "sources": {"kernel": {}, "data": {}, "timing": {}}, "key": "", "torch": ""}


@pytest.fixture(scope="module")
def then() -> dict:
    return listing()


# -- what is listed ----------------------------------------------------------------------------------------------


def test_a_workload_is_listed_as_it_runs_on_a_gpu_where_there_is_none(then: dict) -> None:
    lines = then["operators"]
    assert "randn([4096, 4096], pin_memory=False)" in lines  # 64 MB that nobody has allocated
    order = (
        *("manual_seed(0)", "Generator(device(type='cuda'))", "Generator.manual_seed(0)"),
        *("Linear.to(device(type='cuda'))", "compile(mode='max-autotune')", "settings(", "phase('step')"),
        *("DataLoader(batch_size=8, num_workers=2", "sleep(0.001)", "to(int64[8, 64], device(type='cuda')"),
        *("autocast('cuda', torch.bfloat16)", "add.Tensor(float32[8, 4096], 1.5)", "mul.Tensor(float32[8, 4096], 2.0)"),
        "mm(bfloat16[8, 4096], bfloat16[4096, 4096])",
        *("scaled_dot_product_attention(bfloat16[8, 4, 16, 64]", "mm(bfloat16[4096, 8]"),  # there and back
        *("addcdiv_", "amax(float32[4096, 4096])", "_local_scalar_dense(float32[])", "synchronize()"),
    )
    at = -1
    for begin in order:
        at = next((i for i, line in enumerate(lines) if i > at and line.startswith(begin)), -1)
        assert at >= 0, f"{begin} is not listed, or in another place"
    assert then["data"] == [f"{__name__}:Numbers"]
    assert then["parameters"] == {"width": 4096, "precision": "bf16", "seed": 0}


def test_the_list_is_the_same_each_time_and_leaves_torch_as_it_was(then: dict) -> None:
    before = (torch.cuda.is_available, torch.compile, torch.autocast, torch.manual_seed, time.sleep)
    assert listing() == then
    assert (torch.cuda.is_available, torch.compile, torch.autocast, torch.manual_seed, time.sleep) == before
    assert torch.randn(2).tolist()  # real again


def test_streams_and_graphs_are_listed_in_their_places() -> None:
    parameters = {"mode": "prefill", "hidden": 64, "heads": 2, "d_ff": 96, "context": 32, "layers": 1}
    two, graph = (
        listed(Part("x", "x", "nsightkit.workloads.layer:start", MappingProxyType(parameters | {"rung": rung}), {}, 1))[
            "operators"
        ]
        for rung in ("two-streams", "graphed-eager")
    )
    entered = two.index("stream(Stream)")
    assert two[entered - 1] == "Stream.wait_stream(current_stream)"
    assert "end of stream()" in two[entered:]
    assert graph.index("graph(CUDAGraph)") < graph.index("end of graph()") < graph.index("CUDAGraph.replay()")


def test_what_a_workload_cannot_do_here_is_said() -> None:
    part = Part("late-rank", "x", "nsightkit.workloads.late_rank:start", MappingProxyType({}), {}, 1)
    with pytest.raises(NotImplementedError, match="starts processes of its own"):
        listed(part)


# -- what is a change --------------------------------------------------------------------------------------------


def _renamed(self: Toy, rows: Tensor) -> Tensor:
    """The same by other names, in another order of lines, with a comment."""
    count, width = rows.shape[0], self.config.width
    fresh = torch.randn(count, width, generator=self.generator, device=self.device)
    return _moved(fresh) @ self.weight


def _moved(x: Tensor) -> Tensor:
    return (x + 1.5) * 2.0


def test_renaming_and_moving_a_helper_is_no_change(then: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Toy, "helped", _renamed)
    assert what_runs.differs(then, listing()) == ""


def _drawn(self: Toy, rows: Tensor) -> Tensor:
    return torch.randn(len(rows), self.config.width, device=self.device, generator=self.generator)


def _written_out(self: Toy, x: Tensor) -> Tensor:
    heads = x.view(8, 4, -1, 64)
    return (heads @ heads.mT).softmax(-1) @ heads


def _forced(self: Toy, x: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
        return _attend(self, x)


def _in_fp32(self: Toy) -> None:
    with phase("step"):
        self.attend(self.helped(next(self.rows).to(self.device, non_blocking=True))).sum().backward()
        self.optimizer.step()
        self.wait()


_attend = Toy.attend

CHANGES: dict[str, tuple[str, Callable, str]] = {
    "a shape": ("attend", lambda self, x: _attend(self, x[:4].repeat(2, 1)), "slice.Tensor("),
    "a precision": ("helped", lambda self, rows: (_drawn(self, rows).half() + 1.5) * 2.0 @ self.weight, "float16"),
    "no autocast": ("step", _in_fp32, "was autocast('cuda', torch.bfloat16) and is randn"),
    "the order": (
        "helped",
        lambda self, rows: (_drawn(self, rows) * 2.0 + 1.5) @ self.weight,
        "was add.Tensor(float32[8, 4096], 1.5) and is mul.Tensor(float32[8, 4096], 2.0)",
    ),
    "a number": (
        "helped",
        lambda self, rows: (_drawn(self, rows) + 1.5) * 3.0 @ self.weight,
        "was mul.Tensor(float32[8, 4096], 2.0) and is mul.Tensor(float32[8, 4096], 3.0)",
    ),
    "the layout": ("helped", lambda self, rows: (_drawn(self, rows) + 1.5) * 2.0 @ self.weight.t(), "is t("),
    "the data": (
        "helped",
        lambda self, rows: torch.zeros(8, 4096, device="cuda") * 2.0 @ self.weight,
        "was randn on cuda and is zeros on cuda",
    ),
    "where a tensor lies": (
        "helped",
        lambda self, rows: (torch.randn(8, 4096, generator=self.generator) + 1.5) * 2.0 @ self.weight,
        "was randn on cuda and is randn.generator([8, 4096]",
    ),
    "attention written out": ("attend", _written_out, "scaled_dot_product_attention"),
    "another backend of attention": ("attend", _forced, "'flash', 'mem_efficient', 'cudnn', 'math']) and is"),
    "no read": ("wait", lambda self: torch.cuda.synchronize(), "and is synchronize()"),
    "no synchronisation": ("wait", lambda self: self.weight.detach().abs().amax().item(), "was synchronize()"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_runs_differently_is_a_change_and_is_named(name: str, then: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    method, changed, said = CHANGES[name]
    monkeypatch.setattr(Toy, method, changed)
    why = what_runs.differs(then, listing())
    assert said in why
    assert "\n" not in why
    assert len(why) < 400


def test_parameters_counts_and_their_order_are_compared_first(then: dict) -> None:
    assert what_runs.differs(then, listing(seed=1)) == "its parameter seed was 0 and is 1"
    assert what_runs.differs(then, listing(precision="fp16")) == "its parameter precision was bf16 and is fp16"
    counts = then["counts"] | {"warmup": 3}
    assert what_runs.differs(then, then | {"counts": counts}) == "its count warmup was 10 and is 3"


# -- what is compared as source ----------------------------------------------------------------------------------

TIMING = """
import torch

_FEW = 3


def timed(work, counts):
    for _ in range(counts["warmup"]):
        work.step()
    return _marks(work, counts["repetitions"])


def _marks(work, repetitions):
    torch.cuda.synchronize()
    for _ in range(max(repetitions, _FEW)):
        work.step()
    torch.cuda.synchronize()
"""


def timing(source: str, root: Path, module: str = "timing") -> dict[str, str]:
    folder = root / "nsightkit" / "capture"
    folder.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    return what_runs.digests(closure([f"nsightkit.capture.{module}:timed"], root))


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("_marks", "_between_marks", ""),
        ("_FEW", "_FEWEST", ""),
        (
            "    torch.cuda.synchronize()\n    for",
            "    # Wait for what came before.\n    torch.cuda.synchronize()\n    for",
            "",
        ),
        ("_FEW = 3", "_FEW = 5", "_FEW"),
        ('range(counts["warmup"])', 'range(counts["warmup"] + 1)', "timed"),
        ("    torch.cuda.synchronize()\n    for", "    for", "_marks"),
        ("        work.step()\n    torch", "        work.step()\n        torch", "_marks"),
        ("max(repetitions, _FEW)", "repetitions", "_marks"),
    ],
)
def test_how_it_is_timed_is_compared_by_what_it_does_not_by_names(
    tmp_path: Path, then: dict, old: str, new: str, changed: str
) -> None:
    assert old in TIMING
    before, after = timing(TIMING, tmp_path / "a"), timing(TIMING.replace(old, new), tmp_path / "b")
    sources = {"kernel": {}, "data": {}}
    why = what_runs.differs(
        then | {"sources": {**sources, "timing": before}}, then | {"sources": {**sources, "timing": after}}
    )
    assert (why == "") if not changed else f"nsightkit.capture.timing:{changed}" in why
    assert why == "" or why.startswith("the source of how it is timed has changed")


def test_a_module_that_is_moved_is_no_change(tmp_path: Path) -> None:
    before, after = timing(TIMING, tmp_path / "a"), timing(TIMING, tmp_path / "b", "clock")
    assert set(before.values()) == set(after.values())
    assert not before.keys() & after.keys()


def test_the_source_of_kernels_and_of_data_is_named(then: dict) -> None:
    for group, said in (("kernel", "a Triton kernel"), ("data", "what makes its data")):
        one, other = ({"sources": {**then["sources"], group: {"module:name": digest}}} for digest in ("1", "2"))
        assert what_runs.differs(then | one, then | other) == f"the source of {said} has changed: module:name"


def test_a_kernel_is_listed_as_a_launch_with_the_source_of_all_it_uses() -> None:
    pytest.importorskip("triton")
    parameters = {"mode": "decode", "rung": "one-mlp", "hidden": 64, "heads": 2, "d_ff": 96, "context": 128}
    part = Part("x", "x", "nsightkit.workloads.layer:start", MappingProxyType(parameters), {}, 1)
    found = listed(part)
    launches = [line for line in found["operators"] if line.startswith("launch ")]
    assert any(line.startswith("launch _mlp_kernel[") and "bfloat16[96, 64]" in line for line in launches)
    kernels = what_runs.sources(part, found["kernels"], [])["kernel"]
    assert {"_mlp_kernel", "_MLPS", "_ask_ahead"} <= {place.partition(":")[2] for place in kernels}


def test_a_part_of_the_guide_has_its_timing_and_its_data_in_its_sources() -> None:
    from nsightkit.investigations.parts import find

    place = "nsightkit.workloads.training:Documents"
    found = what_runs.sources(find("starved-input", "before"), [], [place])
    assert list(found["data"]) == [place]
    assert {"nsightkit.capture.timing:time_calls", "nsightkit.investigations.ways_to_measure:timed"} <= set(
        found["timing"]
    )
    assert not [each for each in found["timing"] if "workloads" in each]


# -- kept with a recording ---------------------------------------------------------------------------------------


def test_a_list_is_kept_small_and_read_back(then: dict, tmp_path: Path) -> None:
    what_runs.write(then, tmp_path)
    assert what_runs.read(tmp_path) == then
    assert (tmp_path / what_runs.NAME).stat().st_size < 10_000


@pytest.mark.parametrize(
    "damage", [None, b"", b"no gzip at all", gzip.compress(b"[]", mtime=0), gzip.compress(b"{}", mtime=0)[:-9]]
)
def test_a_list_that_is_not_there_or_cannot_be_read_says_so(damage: bytes | None, tmp_path: Path) -> None:
    with contextlib.suppress(TypeError):
        (tmp_path / what_runs.NAME).write_bytes(damage)
    said = what_runs.read(tmp_path)["why_not"]
    assert said.startswith(("the recording holds no list", "its list cannot be read", "its list is not whole"))
