"""Every way to measure and every workload as on a GPU, against a stand-in for CUDA that judges the order of calls.

Left out are the rungs and the kernel written in Triton, and what Inductor compiles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

torch = pytest.importorskip("torch")

from stand_in_cuda import StandIn, stand_in  # noqa: E402

from nsightkit.capture import bench_child, children, utilization  # noqa: E402
from nsightkit.investigations import child, parts, sweep_column, under_nsight  # noqa: E402
from nsightkit.investigations.pages import sweep  # noqa: E402
from nsightkit.investigations.recordings import frame  # noqa: E402
from nsightkit.workloads import attention, ceilings, layer  # noqa: E402

#: What runs a part's own code is the same at every size.
SMALLER: dict[str, dict[str, Any]] = {
    "memory-context": {"contexts": [16, 32]},
    "attention-sweep": {"d_model": [16], "context": [16, 32], "traced": [16], "limit_bytes": None},
    "matrix": {"layers": 1},
    "late-rank": {"ranks": 1, "profiled": 2},
    "starved-input": {"workers": 1},
    "autocast": {"layers": 1, "context": 16, "batch": 2},
    "ledger": {"layers": 1},
}
RUN = [
    *("gpu-util/training", "gpu-util/one-thread", "starved-input/after", "hidden-sync/before", "tiny-kernels/before"),
    *("training-step/after", "accumulation/before", "autocast/before", "precision/fp16", "precision/tf32"),
    *("matrix/model_a", "ceilings/before", "ceilings/fp8", "ceilings/copy", "ceilings/triad", "ceilings/read"),
    *("roofline/after", "limiters/before", "memory-context/after", "ledger/after", "late-rank/before"),
    "memory-snapshot/before",
    *(f"ladder/{rung}" for rung in ("naive", "compiled", "graphed", "two-streams", "graphed-eager", "flash", "fp8")),
    *(f"decode/{rung}" for rung in ("eager", "graphed", "graphed-eager", "sums")),
    *(f"attention-sweep/{of}" for of in ("naive-fp32", "naive-compiled-tf32", "efficient-tf32", "cudnn-bf16")),
]  # fmt: skip


def measured(place: str, folder: Path, cuda: StandIn, **counts: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    part = parts.find(*place.split("/"))
    given = part.parameters("smoke") | SMALLER.get(part.investigation, {})
    if place.startswith("late-rank"):
        cuda.devices = 0  # fewer than ranks, as with two of them on one card
    few = {"warmup": 1, "repetitions": 2, "active": 1, "utilization": 0, "shapes": int(part.shapes)}
    measure, workload = parts.resolve(parts.MEASURES[part.measured]), parts.resolve(part.workload)
    return measure(workload, "cuda", given, few | counts, folder)


@pytest.mark.parametrize("place", RUN)
def test_a_part_asks_cuda_what_there_is_in_an_order_that_works(place: str, tmp_path: Path) -> None:
    with stand_in() as cuda:
        samples, parameters = measured(place, tmp_path, cuda)
    assert samples
    assert parameters
    assert gzip.decompress((tmp_path / "trace.json.gz").read_bytes()).strip().endswith(b"}")
    assert "synchronize" in cuda.log
    profiles = [call for call in cuda.log if call.startswith("profile ")]
    assert set(profiles) <= {"profile CPU, CUDA", "profile cuda"}
    assert "profile CPU, CUDA" in profiles
    if "record" in cuda.log:  # what is timed is not profiled
        assert max(i for i, call in enumerate(cuda.log) if call == "record") < cuda.index("profile CPU, CUDA")


def test_a_graph_is_what_is_timed(tmp_path: Path) -> None:
    with stand_in() as cuda:
        samples, parameters = measured("decode/graphed-eager", tmp_path, cuda)
    assert parameters["instead"] == ""
    assert len(samples["step_ns"]) == 2
    at = cuda.index("capture ends")
    assert cuda.log[:at].count("wait_stream") == 2
    # warm-up, then a replay between any two events, and nothing that waits
    assert cuda.log[at + 1 : at + 9] == [
        "replay",
        "synchronize",
        "record",
        "replay",
        "record",
        "replay",
        "record",
        "synchronize",
    ]


def test_streams_wait_for_each_other() -> None:
    with stand_in() as cuda, layer.start("cuda", rung="two-streams", layers=2) as run:
        run.step()
    assert (
        cuda.log.count("wait_stream") == 2 * 2
    )  # the side for the main stream, and the other way round, in each layer


def test_pinned_batches_are_copied_without_waiting(tmp_path: Path) -> None:
    with stand_in() as cuda:
        measured("matrix/model_a", tmp_path, cuda)
    assert cuda.index("pin_memory") < cuda.index("to cuda, not waiting")


def test_a_ceiling_and_the_layer_held_against_it_sum_alike(tmp_path: Path) -> None:
    found = []
    for start, how in ((ceilings.start, {"precision": "fp8"}), (layer.start, {"rung": "fp8", "compiler": "aot_eager"})):
        with stand_in() as cuda, start("cuda", **how) as run:
            run.step()
        found.append((run.parameters["use_fast_accum"], {call for call in cuda.log if call.startswith("scaled_mm")}))
    assert found == [(True, {"scaled_mm fast"})] * 2
    with ceilings.start("cpu", precision="fp8") as run:
        assert run.parameters["use_fast_accum"] is False


def test_memory_is_recorded_from_before_the_model_until_it_is_full(tmp_path: Path) -> None:
    with stand_in() as cuda:
        samples, _ = measured("memory-snapshot/full", tmp_path, cuda)
    assert samples["out_of_memory"] == [1]
    assert samples["steps"][0] > 0
    order = [
        *(
            "init",
            "memory fraction",
            "memory history begins",
            "out of memory",
            "synchronize",
            "mem_get_info",
            "snapshot",
        ),
        *("memory history ends", "memory fraction", "empty_cache", "profile CPU, CUDA"),
    ]
    calls = iter(cuda.log)
    for name in order:  # each after the one before
        assert any(call.startswith(name) for call in calls), name


def test_a_cell_of_a_sweep_begins_on_a_device_that_is_as_before(tmp_path: Path) -> None:
    with stand_in() as cuda:
        samples, _ = measured("attention-sweep/flash-bf16", tmp_path, cuda)
    table = sweep.cells(frame(samples))
    assert set(table["status"]) == {"ok"}
    assert table["peak_bytes"].gt(0).all()
    clean = ["synchronize", "clear workspaces", "empty_cache", "reset_peak_memory_stats"]
    begins = [i for i, call in enumerate(cuda.log) if call == "clear workspaces"]
    assert all(cuda.log[i - 1 : i + 3] == clean for i in begins)
    # each of two cells is looked at once and timed in two directions; and once more at the end
    assert len(begins) == 2 * 3 + 1
    assert "can_use_flash_attention" in cuda.log


def test_a_gpu_that_is_lost_is_asked_nothing_more(tmp_path: Path) -> None:
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")

    class Losing(attention.Attention):
        def cell(self, d: int, context: int) -> Any:
            made = super().cell(d, context)
            if context == 32:
                torch.cuda.synchronize = made.forward = lambda *_: (_ for _ in ()).throw(lost)
            return made

    given = {"d_model": [16], "context": [16, 32, 64], "traced": [16]}
    counts = {"warmup": 1, "repetitions": 2, "active": 1}
    with stand_in() as cuda:
        samples, resolved = sweep_column.swept(
            lambda device, **own: Losing(attention.AttentionConfig(**own), device), "cuda", given, counts, tmp_path
        )
    assert sweep.cells(frame(samples))["status"].tolist() == ["ok", "ok", "failed", "failed", "skipped", "skipped"]
    assert list(resolved["errors"].values()) == [str(lost)]
    assert [call for call in cuda.log if call.startswith("profile")] == ["profile CPU"]


def test_utilization_is_read_while_steps_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 97, 1620, 687.31, 0x0000000000000004\n"
        'case "$*" in *loop*) while sleep 0.05; do echo 97, 1980, 687.31, 0x4 || exit; done;; esac\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with stand_in() as cuda:
        found = utilization.sample(lambda: cuda.note("step"), 2.5, 0.5)
    assert set(found["sm_clock_mhz"]) == {1980}, "not the first second"
    steps = [call for call in cuda.log if call in ("step", "synchronize")]
    assert steps[:22] == [*["step"] * 10, "synchronize"] * 2  # the CPU does not run minutes ahead


@pytest.mark.parametrize("cap", [None, 14 * 2**30])
def test_a_benchmark_is_timed_within_its_cap(cap: int | None) -> None:
    sizes = {"batch": 1, "context": 16, "d_model": 32, "layers": 1, "d_ff": 64, "heads": 2, "vocabulary": 64}
    job = {"device": "cuda", "parameters": {**sizes, "precision": "bf16", "mode": "fwd"}, "warmup": 2, "steps": 2}
    with stand_in() as cuda:
        found = bench_child.main(**job, nvtx=True, memory_cap_bytes=cap, provenance=True)
    assert found["status"] == "ok"
    assert found["clock"] == "cuda-event"
    assert found["peak_reserved_bytes"] > 0
    gpu = found["provenance"]["gpu"]
    assert (gpu["name"], gpu["multiprocessors"], gpu["compute_capability"]) == ("NVIDIA H200", 132, "9.0")
    fractions = [call for call in cuda.log if call.startswith("memory fraction")]
    assert fractions == ([] if cap is None else ["memory fraction 0.1", "memory fraction 1"])


def test_memory_runs_out_within_a_benchmark_s_cap() -> None:
    job = {"device": "cuda", "parameters": {"precision": "fp32", "mode": "train"}, "warmup": 50, "steps": 50}
    with stand_in():
        found = bench_child.main(**job, nvtx=False, memory_cap_bytes=2**30, provenance=False)
    assert (found["status"], found["requested_bytes"]) == ("oom", 2 * 2**20)
    assert found["where"] in ("forward", "backward", "optimizer", "zero_grad")


def test_a_second_capture_begins_and_ends_on_a_drained_gpu() -> None:
    class Steps:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def step(self) -> None:
            cuda.note("step")

    with stand_in() as cuda:
        under_nsight.steady_steps(Steps, "cuda", {}, warmup=3, active=2)
    settling = steady = ["step", "step", "synchronize"]
    assert cuda.log == [*["step"] * 3, "synchronize", *settling, *steady]


def test_a_part_is_measured_and_described_in_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = parts.find("training-step", "after")
    small = dataclasses.replace(part, gpu=part.smoke, warmup=1, repetitions=2, active=1)
    monkeypatch.setattr(child, "find", lambda *_: small)
    monkeypatch.setattr(utilization, "logged", lambda device: contextlib.nullcontext({"readings": len(device)}))
    known = dict.fromkeys(("nsys", "ncu", "commit", "dirty"))
    with stand_in():
        child.main({str(tmp_path): "training-step/after"}, "live", known=known)
    samples, provenance = child.read_result(tmp_path)
    assert len(samples["step_ns"]) == 2
    assert (provenance["kind"], provenance["clock"], provenance["gpu"]["name"]) == (
        "measured", "CUDA events", "NVIDIA H200",
    )  # fmt: skip
    assert provenance["sdpa_backend"] == "math"  # as the stand-in has it
    assert provenance["load"] == {"readings": len("cuda")}


def test_parts_of_one_process_give_their_memory_back_and_a_first_look_reaches_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = parts.find("ceilings", "read")
    monkeypatch.setattr(child, "find", lambda *_: dataclasses.replace(part, gpu=part.smoke, utilization=False))
    monkeypatch.setattr(utilization, "logged", lambda _: contextlib.nullcontext({}))
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    jobs = {str(folder): "ceilings/read" for folder in folders}
    with stand_in() as cuda:
        child.main(jobs, "live", known=dict.fromkeys(("nsys", "ncu", "commit", "dirty")))
    assert cuda.log.count("empty_cache") == 2
    with stand_in() as cuda:
        children.main()
    assert cuda.log == ["synchronize"]


# -- the stand-in itself: what must not be, is seen ------------------------------------------------------------------


def _unread(cuda: Any) -> None:
    first, second = (cuda.Event(enable_timing=True) for _ in range(2))
    first.record(), second.record()
    first.elapsed_time(second)


def _unrecorded(cuda: Any) -> None:
    first, second = (cuda.Event(enable_timing=True) for _ in range(2))
    first.record(), cuda.synchronize()
    first.elapsed_time(second)


def _without_timing(cuda: Any) -> None:
    first, second = cuda.Event(), cuda.Event()
    first.record(), second.record(), cuda.synchronize()
    first.elapsed_time(second)


def _captured(inside: Callable[[Any], Any], *, before: Callable[[Any], Any] | None = None) -> Callable[[Any], None]:
    def program(cuda: Any) -> None:
        side, x = cuda.Stream("cuda"), torch.ones(2, device="cuda")
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            (before or inside)(x)
        cuda.current_stream().wait_stream(side)
        with cuda.graph(cuda.CUDAGraph()):
            inside(x)

    return program


def _cold(cuda: Any) -> None:
    with cuda.graph(cuda.CUDAGraph()):
        torch.ones(2, device="cuda") + 1


def _unwaited(cuda: Any) -> None:
    side, x = cuda.Stream(), torch.ones(2, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x.add_(1)
    with cuda.graph(cuda.CUDAGraph()):
        x.add_(1)


def _hasty(cuda: Any) -> None:
    with cuda.stream(cuda.Stream()):
        torch.ones(2, device="cuda").add_(1)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (_unread, "before the device was waited for"),
        (_unrecorded, "never recorded"),
        (_without_timing, "without timing"),
        (_cold, "not run on a side stream"),
        (_unwaited, "does not wait for the side stream"),
        (_hasty, "did not wait for what was launched before"),
        (_captured(lambda _: torch.cuda.synchronize(), before=lambda x: x.add_(1)), "synchronize while a graph"),
        (_captured(lambda x: float(x.sum()), before=lambda x: x.sum()), "waits, and a graph is captured"),
        (_captured(lambda _: torch.randn(2, device="cuda")), "each replay would draw the same"),
        (_captured(lambda x: x.mul_(2), before=lambda x: x.add_(1)), "never run before: .*mul_"),
        (_captured(lambda _: torch.cuda.empty_cache(), before=lambda x: x.add_(1)), "empty_cache while a graph"),
        (lambda cuda: cuda.CUDAGraph().replay(), "was not captured"),
        (lambda cuda: cuda.memory._snapshot(), "without a history"),
        (lambda cuda: cuda.memory._record_memory_history(enabled=None), "begun, or ended, twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # a function has another address in each process
)
def test_the_stand_in_sees_a_wrong_order(program: Callable[[Any], None], says: str) -> None:
    with stand_in(), pytest.raises(AssertionError, match=says):
        program(torch.cuda)


def test_the_stand_in_takes_what_pytorch_takes() -> None:
    cuda = torch.cuda
    for call in (
        lambda: cuda.Event(timing=True),
        lambda: cuda.memory._record_memory_history(enable="all"),
        lambda: cuda.reset_peak_memory_stats("cuda", 1),
        lambda: cuda.mem_get_info(0, 1),
        lambda: torch.profiler.profile(activity=[]),
    ):
        with stand_in(), pytest.raises(TypeError):
            call()


def test_what_is_replaced_is_taken_back() -> None:
    before = torch.cuda.synchronize, torch.Tensor.to, torch.randn, torch.Generator, torch.cuda.is_available()
    with stand_in():
        assert torch.ones(1, device="cuda").device == torch.device("cuda", 0)
    assert before == (torch.cuda.synchronize, torch.Tensor.to, torch.randn, torch.Generator, torch.cuda.is_available())
    assert torch.ones(1).device.type == "cpu"
