"""A sweep's column: what runs out of memory, what follows from it, and that cells do not depend on each other."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest

torch = pytest.importorskip("torch")

from nsightkit.capture import timing, torch_profiler  # noqa: E402
from nsightkit.investigations import parts as investigations  # noqa: E402
from nsightkit.investigations import recordings, sweep_column  # noqa: E402
from nsightkit.investigations.pages import sweep as analysis  # noqa: E402
from nsightkit.trace import load  # noqa: E402
from nsightkit.workloads import attention  # noqa: E402
from nsightkit.workloads import attention_samples as vocabulary  # noqa: E402

COUNTS = {"warmup": 1, "repetitions": 4, "active": 1}
MIB = 2**20
#: One matrix of scores has 1 MiB at 256: two of them fit with what is around, three do not. No cell is left out for its
#: time, however busy the machine.
LIMIT = 5 * MIB // 2
SMALL = {
    "batch": 4, "d_model": [16], "context": [16, 128, 256, 512, 1024], "limit_bytes": LIMIT, "cell_s": 1e-3,
    "budget_s": 1e6,
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """As a smoke run has it: threads that spin beside other work cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def swept(tmp_path: Path, workload: Any = attention.start, **changes: Any) -> dict[str, list[float]]:
    samples, _ = sweep_column.swept(workload, "cpu", SMALL | changes, COUNTS, tmp_path)
    return samples


def table(samples: dict[str, list[float]]) -> Any:
    return analysis.cells(recordings.frame(samples)).set_index(["d", "context", "direction"])


def test_memory_runs_out_in_each_direction_by_itself(tmp_path: Path) -> None:
    found = table(swept(tmp_path))
    assert {
        where[1:]: row.status for where, row in found.iterrows() if where[1] >= 256
    } == {
        (256, "forward"): "ok", (256, "backward"): "oom",
        (512, "forward"): "oom", (512, "backward"): "skipped",
        (1024, "forward"): "skipped", (1024, "backward"): "skipped",
    }  # fmt: skip
    scores = 4 * 256 * 256 * 4
    assert found.loc[(16, 256, "backward"), "requested_bytes"] == scores
    assert found.loc[(16, 256, "forward"), "median_ns"] > 0
    # Memory before the backward pass is that of the forward pass.
    assert found.loc[(16, 256, "backward"), "memory_before_bytes"] > scores
    assert math.isnan(found.loc[(16, 256, "backward"), "median_ns"])
    assert found.loc[(16, 512, "forward"), "requested_bytes"] == 4 * scores
    reasons = found["reason"]
    assert reasons[16, 256, "backward"] == "out of memory"
    assert reasons[16, 512, "backward"] == vocabulary.NO_FORWARD
    assert reasons[16, 1024, "forward"] == "cannot fit: forward already ran out of memory at context 512"
    assert reasons[16, 128, "forward"] == ""


def test_the_inputs_alone_can_be_too_much(tmp_path: Path) -> None:
    found = table(swept(tmp_path, context=[1024], limit_bytes=MIB // 2, implementation="flash"))
    assert found["status"].tolist() == ["oom", "skipped"]


@pytest.mark.parametrize("implementation", ["naive", "math", "flash"])
def test_a_cell_alone_equals_the_one_after_others(tmp_path: Path, implementation: str) -> None:
    # Width 16 runs out of memory in both directions before these are reached, where scores are written out.
    among = table(swept(tmp_path, implementation=implementation, d_model=[16, 32, 48], context=[16, 64, 128, 256, 512]))
    columns = [name for name in among if name.endswith("_bytes") or name == "status"]
    for d, context in ((32, 64), (32, 256), (48, 128)):
        alone = table(swept(tmp_path, implementation=implementation, d_model=[d], context=[context]))
        assert among.loc[alone.index, columns].equals(alone[columns])


class Refusing(attention.Attention):
    """Attention that says no, and fails when it is tried all the same."""

    def refusal(self, d: int) -> str | None:
        return vocabulary.TOO_WIDE

    def cell(self, d: int, context: int) -> Any:
        raise AssertionError("nothing is to be run")


def test_the_impossible_is_recorded_without_a_pass(tmp_path: Path) -> None:
    found = table(_refused(tmp_path))
    assert set(found["status"]) == {"unsupported"}
    assert set(found["reason"]) == {vocabulary.TOO_WIDE, vocabulary.SIXTEEN_BITS}
    assert set(found["precision"]) == {"fp32", "tf32"}
    assert len(found) == 2 * 5 * 2


def _refused(tmp_path: Path) -> dict[str, list[float]]:
    def start(device: str, **own: Any) -> Refusing:
        return Refusing(attention.AttentionConfig(**own), device)

    samples = swept(tmp_path, workload=start, implementation="flash", impossible=["tf32"])
    # Its profile has no cell, and can be read.
    assert analysis.backends(load(tmp_path / "trace.json.gz", cache=False)).empty
    return samples


class Half(attention.Attention):
    """Attention without a kernel for the backward pass."""

    def cell(self, d: int, context: int) -> Any:
        made = super().cell(d, context)

        def backward(_: Any) -> None:
            raise RuntimeError("No available kernel. Aborting execution.")

        made.backward = backward  # type: ignore[method-assign]
        return made


def test_a_backend_may_lack_one_direction(tmp_path: Path) -> None:
    def start(device: str, **own: Any) -> Half:
        return Half(attention.AttentionConfig(**own), device)

    found = table(swept(tmp_path, workload=start, context=[16, 64]))
    assert found["status"].tolist() == ["ok", "unsupported"] * 2
    assert found.loc[(16, 16, "backward"), "reason"] == vocabulary.REFUSED
    assert found.loc[(16, 16, "forward"), "peak_bytes"] > 0


def broken(words: str, at: int, way: str = "backward") -> Any:
    """Attention whose passes in one direction end in an error at one context."""

    class Broken(attention.Attention):
        def cell(self, d: int, context: int) -> Any:
            made = super().cell(d, context)

            def fail(*_: Any) -> None:
                raise RuntimeError(words)

            if context == at:
                setattr(made, way, fail)
            return made

    return lambda device, **own: Broken(attention.AttentionConfig(**own), device)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 2.00 MiB.",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN Frontend error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    ],
)
def test_memory_runs_out_in_many_words(tmp_path: Path, words: str) -> None:
    found = table(swept(tmp_path, workload=broken(words, at=64), context=[16, 64, 128]))
    assert found["status"].tolist() == ["ok", "ok", "ok", "oom", "ok", "skipped"]


@pytest.mark.parametrize(
    "words",
    [
        *("mat1 and mat2 shapes cannot be multiplied", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        "out of resource: shared memory, Required: 262144, limit: 232448",
    ],
)
def test_another_error_costs_its_cell_and_is_kept(tmp_path: Path, words: str) -> None:
    given = SMALL | {"context": [16, 64, 128]}
    samples, resolved = sweep_column.swept(broken(words, at=64, way="forward"), "cpu", given, COUNTS, tmp_path)
    found = table(samples)
    assert found["status"].tolist() == ["ok", "ok", "failed", "failed", "ok", "ok"]
    assert found.loc[(16, 64, "forward"), "reason"] == vocabulary.BROKEN
    assert resolved["errors"] == {"forward naive-fp32 d=16 context=64": words}


def test_a_column_of_errors_is_not_a_measurement(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="d=16 context=16: mat1 and mat2 shapes"):
        swept(tmp_path, workload=broken("mat1 and mat2 shapes cannot be multiplied", 16, "forward"), context=[16])


def test_a_profile_that_fails_costs_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = torch_profiler.profile_steps

    def watched(step: Any, output: Path, *, gpu: bool, **how: Any) -> Path:
        if gpu:
            raise RuntimeError("CUDA error: out of memory")
        return profile(step, output, gpu=gpu, **how)

    monkeypatch.setattr(torch_profiler, "profile_steps", watched)
    given = SMALL | {"context": [16, 64], "traced": [16]}
    samples, resolved = sweep_column.swept(attention.start, "cpu", given, COUNTS, tmp_path)
    assert set(table(samples)["status"]) == {"ok"}
    assert resolved["errors"] == {"profile": "CUDA error: out of memory"}
    assert analysis.backends(load(tmp_path / "trace.json.gz", cache=False)).empty


def test_a_lost_gpu_ends_the_column_and_what_there_was_is_kept(tmp_path: Path) -> None:
    lost = broken("CUDA error: an illegal memory access was encountered", at=64)
    samples = swept(tmp_path, workload=lost, d_model=[16, 32], context=[16, 64, 128], traced=[16])
    found = table(samples)
    assert found["status"].tolist() == ["ok", "ok", "skipped", "failed", *["skipped"] * 8]
    assert set(found["reason"].drop((16, 64, "backward"))[2:]) == {vocabulary.LOST}
    assert found.loc[(16, 16, "backward"), "median_ns"] > 0
    assert analysis.backends(load(tmp_path / "trace.json.gz", cache=False)).empty  # nothing more was run


def test_time_is_a_budget(tmp_path: Path) -> None:
    class Slow(attention.Attention):
        def cell(self, d: int, context: int) -> Any:
            made = super().cell(d, context)
            quick = made.forward
            made.forward = lambda: (time.sleep(0.05), quick())[1]  # type: ignore[method-assign]
            return made

    def start(device: str, **own: Any) -> Slow:
        return Slow(attention.AttentionConfig(**own), device)

    # 256 times the work of the first cell would take 13 s and more.
    found = table(swept(tmp_path, workload=start, budget_s=5.0, context=[16, 256]))
    assert found["status"].tolist() == ["ok", "ok", "skipped", "skipped"]
    assert found.loc[(16, 256, "forward"), "reason"] == vocabulary.NO_TIME
    assert set(table(swept(tmp_path, budget_s=0.0))["reason"]) == {vocabulary.NO_TIME}


class Clock:
    """A clock that moves when a pass is run, by what it would take on an H200."""

    now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def perf_counter_ns(self) -> int:
        return round(self.now_s * 1e9)


class Costly:
    """Attention that only takes time, and memory up to 143 GB: what an audit estimated, rounded up.

    Passes take what their arithmetic takes at the rate of the implementation, and what moving matrices of scores takes;
    cuDNN makes a plan for each shape, a compiler code for each cell and starts slowly.
    """

    _TFLOPS: ClassVar = {
        **{("naive", kind): rate for kind, rate in (("fp32", 45), ("tf32", 300), ("bf16", 500))},
        **{("naive-compiled", kind): rate for kind, rate in (("fp32", 45), ("tf32", 300), ("bf16", 500))},
        **{("math", kind): rate for kind, rate in (("fp32", 45), ("tf32", 300), ("bf16", 45))},
        **{("efficient", kind): rate for kind, rate in (("fp32", 25), ("tf32", 80), ("bf16", 150))},
        ("flash", "bf16"): 350, ("cudnn", "bf16"): 450,
    }  # fmt: skip
    _TRIPS: ClassVar = {"naive": 8, "math": 10, "naive-compiled": 4}

    def __init__(self, clock: Clock, **own: Any) -> None:
        self._clock, self._own, self._planned, self._fresh = clock, own, set(), "cold"
        self.parameters = {**own, "causal": True}
        self.column = f"{own['implementation']}-{own['precision']}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def refusal(self, d: int) -> str | None:
        return vocabulary.TOO_WIDE if self.column in ("flash-bf16", "cudnn-bf16") and d > 256 else None

    def forget_compiled(self) -> None:
        self._fresh = self._fresh or "warm"

    def cell(self, d: int, context: int) -> Any:
        self._clock.now_s += 2e-3

        def run(way: str) -> None:
            name, kind = self._own["implementation"], self._own["precision"]
            needed = analysis.footprint(name, kind, d=d, context=context)
            if needed.peak(way) > 143e9:
                raise RuntimeError("CUDA out of memory. Tried to allocate 64.00 GiB.")
            square = 8 * context**2 * (1.0 if way == "forward" else 2.5)
            trips, width = self._TRIPS.get(name, 0), 2 if kind == "bf16" else 4
            arithmetic = square * 4 * d * (1 if trips else 1 / 2) / self._TFLOPS[name, kind] / 1e12
            self._clock.now_s += 2e-4 + arithmetic + trips * square * width / 4e12
            if name == "cudnn" and (d, context, way) not in self._planned:
                self._planned.add((d, context, way))
                self._clock.now_s += 0.5
            if name == "naive-compiled" and self._fresh:
                self._clock.now_s += {"cold": 20.0, "warm": 3.0}[self._fresh]
                self._fresh = ""

        return SimpleNamespace(tensors=[], forward=lambda: run("forward"), backward=lambda _: run("backward"))


@pytest.mark.parametrize("column", ["naive-fp32", "naive-compiled-fp32", "math-fp32", "efficient-fp32", "cudnn-bf16"])
def test_a_column_s_budget_is_enough_for_most_cells(
    column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(sweep_column, "time", clock)
    monkeypatch.setattr(timing, "time", clock)
    monkeypatch.setattr(sweep_column, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
    monkeypatch.setattr(sweep_column.torch_profiler, "profile_steps", lambda step, *_, **__: [step(), step()])
    part = investigations.find("attention-sweep", column)
    samples, _ = sweep_column.swept(
        lambda _, **own: Costly(clock, **own), "cpu", part.parameters("live"), part.counts("live"), tmp_path
    )
    found = table(samples)
    assert set(found["status"]) <= {"ok", "oom", "skipped", "unsupported"}
    measured, late = (found["status"] == "ok").sum(), found["reason"] == vocabulary.NO_TIME
    assert measured >= 0.8 * (measured + late.sum())
    assert late[found.index.get_level_values("d") == 64].sum() <= 2  # the width that the page shows
    assert clock.now_s < part.gpu["budget_s"] + 25  # what comes before and after the clock runs


def test_samples_are_of_single_passes(tmp_path: Path) -> None:
    samples = swept(tmp_path, context=[16, 128])
    for way in ("forward", "backward"):
        values = samples[vocabulary.metric(f"{way}_ns", "naive-fp32", 16, 128)]
        assert 3 <= len(values) <= COUNTS["repetitions"]
        assert all(value > 0 for value in values)
    assert samples["limit_bytes naive-fp32"] == [LIMIT]


@pytest.mark.parametrize(
    ("implementation", "backend"), [("naive", "written out"), ("math", "written out"), ("flash", "flash")]
)
def test_the_backend_is_read_from_the_profile(tmp_path: Path, implementation: str, backend: str) -> None:
    swept(tmp_path, implementation=implementation, traced=[16, 256])
    found = analysis.backends(load(tmp_path / "trace.json.gz", cache=False))
    cells = set(found[["context", "direction"]].itertuples(index=False, name=None))
    # At 256 the naive backward pass ran out of memory, so it is not profiled.
    assert cells >= {(16, "forward"), (16, "backward")}
    assert ((256, "backward") in cells) == (implementation == "flash")
    assert set(found["backend"]) == {backend}
    assert found["evidence"].str.contains("aten::|Backward").all()
    fused = {"naive": [], "math": ["math"], "flash": ["flash"]}[implementation]
    assert torch_profiler.attention_back_ends(tmp_path / "trace.json.gz") == fused


def test_preparation_is_not_timed() -> None:
    order: list[str] = []
    taken = timing.time_prepared(
        lambda: order.append("p") or 7, lambda x: order.append(str(x)), repetitions=3, device="cpu"
    )
    assert order == ["p", "7"] * 3
    assert len(taken) == 3
    with pytest.raises(ValueError, match="at least 1"):
        timing.time_prepared(lambda: None, lambda _: None, repetitions=0, device="cpu")


def test_every_registered_column_can_be_made() -> None:
    names = {field.name for field in sweep_column.dataclasses.fields(sweep_column.SweepConfig)}
    for name, part in investigations.INVESTIGATIONS["attention-sweep"].items():
        for mode in ("live", "smoke"):
            given = part.parameters(mode)
            sweep_column.SweepConfig(**{key: value for key, value in given.items() if key in names})
            config = attention.AttentionConfig(**{key: value for key, value in given.items() if key not in names})
            assert f"{config.implementation}-{config.precision}" == name


def test_running_out_later_than_at_the_first_pass_is_no_loss(tmp_path: Path) -> None:
    class Broken(attention.Attention):
        def cell(self, d: int, context: int) -> Any:
            made = super().cell(d, context)
            whole, left = made.backward, iter(range(3))

            def backward(attended: Any) -> Any:
                if context == 64 and next(left, None) is None:
                    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
                return whole(attended)

            made.backward = backward  # type: ignore[method-assign]
            return made

    def start(device: str, **own: Any) -> Broken:
        return Broken(attention.AttentionConfig(**own), device)

    found = table(swept(tmp_path, workload=start, context=[16, 64, 256]))
    assert found["status"].tolist() == ["ok", "ok", "ok", "oom", "ok", "skipped"]
    assert found.loc[(16, 64, "backward"), "requested_bytes"] == 2 * MIB
    assert found.loc[(16, 256, "backward"), "reason"].endswith("backward already ran out of memory at context 64")


def test_compiled_code_is_made_once_a_cell_and_once_before(tmp_path: Path) -> None:
    made: list[int] = []

    def compiler(graph: Any, inputs: Any) -> Any:
        made.append(len(inputs))
        return graph.forward

    samples = swept(
        tmp_path, implementation="naive-compiled", compiler=compiler, context=[16, 32], limit_bytes=None, traced=[]
    )
    assert set(table(samples)["status"]) == {"ok"}
    assert len(made) == 3  # the first of them before the clock runs
