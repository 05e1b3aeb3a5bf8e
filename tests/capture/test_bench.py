"""The end-to-end benchmark: its document, its statistics, and memory that runs out on purpose."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nsightkit import cli
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.capture import bench as benchmark
from nsightkit.capture import children
from nsightkit.capture.bench import Cell, bench, cells, write
from nsightkit.configurations import Configuration, find
from nsightkit.errors import UsageError
from nsightkit.workloads.out_of_memory import is_out_of_memory, requested_bytes

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
SCHEMA = json.loads(Path(benchmark.__file__).with_name("bench.schema.json").read_text(encoding="utf-8"))


def valid(document: dict[str, Any]) -> dict[str, Any]:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)
    return document


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Jobs that were given to children; each answers as an H200 would, with 1, 2, 3 and 6 ms."""
    jobs: list[dict[str, Any]] = []
    answer = {
        "status": "ok",
        "gpu": "NVIDIA H200",
        "samples_ns": [1_000_000, 6_000_000, 2_000_000, 3_000_000],
        "first_step_ns": 600_000_000,
        "clock": "cuda-event",
        "peak_allocated_bytes": 10,
        "peak_reserved_bytes": 20,
    }
    provenance = {"utc": "", "commit": None, "gpu": None, "cpu": {}, "software": {}}

    def measure(module: str, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        jobs.append(job)
        return answer | ({"provenance": provenance} if job["provenance"] else {})

    monkeypatch.setattr(benchmark, "ask_child", measure)
    monkeypatch.setattr(benchmark, "has_gpu", lambda: True)
    return jobs


# ---------------------------------------------------------------- figures


def test_statistics_are_those_of_the_samples(measured: list[dict[str, Any]]) -> None:
    document = valid(bench([Cell(find("medium"), precision="bf16", accumulate=2)], steps=4, measured_tflops=800.0))
    (row,) = document["rows"]
    samples = row["samples_ns"]
    assert row["median_ns"] == 2_500_000
    assert row["mean_ns"] == 3_000_000
    assert row["std_ns"] == round(statistics.stdev(samples))
    assert row["first_step_ns"] == 600_000_000
    assert row["tokens_per_s"] == pytest.approx(2 * 4 * 512 / 2.5e-3)
    assert row["flops"] == 2 * envelope(find("medium")).train_flops
    assert row["tflops"] == pytest.approx(row["flops"] / 2.5e-3 / 1e12)
    assert row["mfu_datasheet"] == pytest.approx(row["tflops"] / 989.4)
    assert row["mfu_measured"] == pytest.approx(row["tflops"] / 800.0)
    assert (row["peak_allocated_bytes"], row["peak_reserved_bytes"]) == (10, 20)
    assert (document["gpu"], document["device"]) == ("NVIDIA H200", "cuda")


def test_flops_follow_the_mode_and_the_peak_the_precision(measured: list[dict[str, Any]]) -> None:
    rows = bench(cells(["small"], modes=benchmark.MODES, precisions=benchmark.PRECISIONS), steps=4)["rows"]
    one = envelope(find("small"))
    flops = {"fwd": one.fwd_flops, "fwd_bwd": one.train_flops, "train": one.train_flops}
    peaks = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4}
    assert [(r["mode"], r["precision"]) for r in rows] == [(m, p) for m in flops for p in peaks]
    assert all(r["flops"] == flops[r["mode"]] and r["peak_tflops"] == peaks[r["precision"]] for r in rows)
    assert all(r["mfu_measured"] is None for r in rows)


@pytest.mark.parametrize("gpu", ["Some GPU", "Tesla T4"])
def test_a_gpu_without_known_peaks_has_no_mfu(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"status": "ok", "gpu": gpu, "samples_ns": [5]}
    monkeypatch.setattr(benchmark, "ask_child", lambda *_: found)
    (row,) = bench([Cell(find("smoke"), precision="bf16")], device="cpu")["rows"]  # which a T4 has not
    assert (row["peak_tflops"], row["mfu_datasheet"], row["std_ns"]) == (None, None, None)


def test_the_child_is_told_sizes_and_switches(measured: list[dict[str, Any]]) -> None:
    chosen = cells(["model_b"], contexts=[64, 128], batch=3, attention="naive", nvtx=True, annotate_mha=True)
    document = valid(bench(chosen, warmup=0, steps=4, memory_cap_bytes=10**9))
    assert [job["parameters"]["context"] for job in measured] == [64, 128]
    assert [job["provenance"] for job in measured] == [True, False]  # once is enough
    assert {key: measured[0][key] for key in ("warmup", "steps", "memory_cap_bytes", "nvtx")} == {
        "warmup": 0, "steps": 4, "memory_cap_bytes": 10**9, "nvtx": True,
    }  # fmt: skip
    parameters = measured[0]["parameters"]
    assert (parameters["batch"], parameters["d_model"], parameters["layers"]) == (3, 384, 12)
    assert (parameters["attention"], parameters["annotate"], parameters["annotate_mha"]) == ("naive", True, True)
    assert [row["context"] for row in document["rows"]] == [64, 128]


def test_parameters_are_fields_of_the_model(measured: list[dict[str, Any]]) -> None:
    lm = pytest.importorskip("nsightkit.workloads.lm")
    fields = {field.name for field in dataclasses.fields(lm.LMConfig)}
    bench([Cell(find("smoke"))])
    assert set(measured[0]["parameters"]) == fields - {"seed", "feed"}


def test_progress_is_told(measured: list[dict[str, Any]]) -> None:
    told: list[tuple[int, str]] = []
    bench(cells(["smoke", "small"], modes=["fwd"]), steps=4, progress=lambda n, text: told.append((n, text)))
    assert told == [(0, "smoke context 64 fwd fp32"), (1, "small context 512 fwd fp32"), (2, "")]


# ---------------------------------------------------------------- real runs, on the CPU


@needs_torch
@pytest.mark.usefixtures("forked")
def test_smoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    options = [
        "--device",
        "cpu",
        "--warmup",
        "2",
        "--steps",
        "3",
        "--nvtx",
        "--precision",
        "fp32",
        "--precision",
        "tf32",
    ]
    code = cli.run(["bench", *options, "--out-json", str(out), "--format", "json"])
    printed, err = capsys.readouterr()
    assert (code, err) == (0, "")
    document = valid(json.loads(out.read_text(encoding="utf-8")))
    assert json.loads(printed) == document
    full, tf32 = document["rows"]
    assert (full["config"], full["status"], len(full["samples_ns"])) == ("smoke", "ok", 3)
    assert full["first_step_ns"] not in full["samples_ns"]
    assert (full["peak_allocated_bytes"], full["mfu_datasheet"], full["clock"]) == (None, None, "perf_counter")
    assert (tf32["status"], tf32["samples_ns"]) == ("unsupported", [])
    assert document["provenance"]["software"]["torch"]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are measured in processes that need not import torch again, but in all else are those of a fresh one."""
    ask = functools.partial(children.ask_child, start=children.fork_child)
    monkeypatch.setattr(benchmark, "ask_child", ask)


@needs_torch
@pytest.mark.usefixtures("forked")
def test_without_warm_up_the_first_sample_is_the_first_step() -> None:
    row = valid(bench([Cell(find("smoke"), mode="fwd")], device="cpu", warmup=0, steps=3))["rows"][0]
    assert row["first_step_ns"] == row["samples_ns"][0]
    assert row["clock"] == "perf_counter"


#: 134 MB of weights and hardly any activations: what a step adds comes in pieces of known size.
_HEAVY = Configuration("heavy", 1, 8, 1024, 2, 4096, 8, 512, "weights only")
_WEIGHTS = 4 * envelope(_HEAVY).params


@needs_torch
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU's memory cap needs Linux")
@pytest.mark.parametrize(
    ("cell", "cap_bytes", "where"),
    [
        (Cell(_HEAVY), _WEIGHTS // 2, "setup"),
        (Cell(dataclasses.replace(find("smoke"), batch=8192)), 300_000_000, "forward"),
        (Cell(_HEAVY, mode="fwd_bwd"), _WEIGHTS * 3 // 2, "backward"),
        (Cell(_HEAVY), _WEIGHTS * 3, "optimizer"),  # weights, gradients, and one of two moments
    ],
    ids=["setup", "forward", "backward", "optimizer"],
)
def test_out_of_memory_is_a_row_that_says_where(cell: Cell, cap_bytes: int, where: str) -> None:
    document = valid(bench([cell], device="cpu", warmup=0, steps=2, memory_cap_bytes=cap_bytes))
    (row,) = document["rows"]
    assert (row["status"], row["where"]) == ("oom", where), row["detail"]
    assert row["median_ns"] is None


@needs_torch
@pytest.mark.usefixtures("forked")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the CPU's memory cap needs Linux")
def test_a_cap_that_is_high_enough_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--device", "cpu", "--memory-cap-gb", "0.2", "--mode", "fwd", "--warmup", "1", "--steps", "1"]
    code = cli.run(["bench", "--size", "smoke", *options, "--format", "table"])
    out = capsys.readouterr().out
    assert code == 0
    assert re.search(r"^smoke +(4 +)?64 +fwd +fp32 +ok +[\d.,]+ (ms|µs|s)", out, re.MULTILINE)
    assert "CPU (these times say nothing about a GPU) · 1 warm-up and 1 timed steps" in out


def test_messages_of_allocators() -> None:
    torch = pytest.importorskip("torch")
    cuda = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.81 GiB"
    assert requested_bytes(cuda) == 2.5 * 2**30
    assert requested_bytes("you tried to allocate 16777216 bytes. Error code 12") == 16_777_216
    assert requested_bytes("") is None
    assert is_out_of_memory(torch.OutOfMemoryError(cuda))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(RuntimeError("out of resource: shared memory, Required: 262144, limit: 232448"))


@needs_torch
@pytest.mark.nsys
def test_nsys_sees_the_timed_steps_and_their_parts(nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child of a profiled command is profiled too, and `measure` leaves the warm-up out."""
    import nsightkit
    from nsightkit.analysis.timeline import ranges
    from nsightkit.capture import nsys as capture

    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    command = [sys.executable, "-m", "nsightkit", "bench", "--device", "cpu", "--warmup", "2", "--steps", "3"]
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))
    captured = capture.profile(
        [*command, "--annotate-mha"], tmp_path / "bench", trace=("nvtx",), capture_range="measure"
    )
    found = ranges.summary(nsightkit.load(captured.trace)).set_index("name")["count"]
    layers = find("smoke").layers
    assert {name: int(found[name]) for name in ("step", "forward", "backward", "optimizer", "zero_grad")} == {
        "step": 3, "forward": 3, "backward": 3, "optimizer": 3, "zero_grad": 3,
    }  # fmt: skip
    parts = ("qkv_projections", "rope", "qk_mask", "softmax", "attention_v", "output_projection")
    assert {name: int(found[name]) for name in parts} == dict.fromkeys(parts, 3 * layers)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--size", "huge"], "no configuration is called 'huge'; there are smoke, small,"),
        (["--size", "model_a"], "no configuration is called 'model_a'"),
        (["--config", "huge"], "no configuration is called 'huge'; there are model_a,"),
        (["--mode", "sideways"], "mode 'sideways' is not one of fwd, fwd_bwd, train"),
        (["--precision", "int4"], "precision 'int4' is not one of fp32, tf32, bf16, fp16"),
        (["--compile", "--annotate-mha"], "a compiled model has no ranges inside"),
        (["--device", "tpu"], "device 'tpu' is neither cpu nor cuda nor cuda:N"),
        (["--memory-cap-gb", "0"], "--memory-cap-gb must be above 0"),
        (["--measured-tflops", "nan"], "--measured-tflops must be above 0"),
        (["--out-json", "no/such/folder/b.json"], "its folder does not exist"),
    ],
)
def test_bad_usage(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--device", "cpu", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert err.count("\n") == 1


def test_no_gpu_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "has_gpu", lambda: False)
    with pytest.raises(UsageError, match="torch sees no CUDA GPU here"):
        bench([Cell(find("smoke"))], device="cuda")
    with pytest.raises(UsageError, match="steps at least 1"):
        bench([], steps=0)
    with pytest.raises(UsageError, match="accumulate must be at least 1"):
        Cell(find("smoke"), accumulate=0)


def test_a_cell_that_fails_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = iter([(1, "Traceback\nValueError: no"), (-9, ""), (1, "No module named 'torch'")])

    def run(command: list[str], timeout_s: float, **_: object) -> subprocess.CompletedProcess[str]:
        step = next(outcomes, None)
        if step is None:
            raise subprocess.TimeoutExpired(command, timeout_s, output="still at it")
        return subprocess.CompletedProcess(command, step[0], step[1])

    monkeypatch.setattr(children, "run", run)
    sizes = [option for name in ("smoke", "small", "medium", "large") for option in ("--size", name)]
    assert cli.run(["bench", "--device", "cpu", *sizes, "--format", "json"]) == 2
    out, err = capsys.readouterr()
    rows = valid(json.loads(out))["rows"]
    assert [row["status"] for row in rows] == ["failed"] * 4
    assert [row["detail"] for row in rows] == [
        "exit code 1: Traceback | ValueError: no",
        "killed; the machine probably ran out of memory",
        "install torch first (pip install 'nsightkit[torch]'); exit code 1: No module named 'torch'",
        "not done within 600 s; it last said: still at it",
    ]
    assert err.startswith("nsightkit: not measured: smoke train fp32 (exit code 1")
    assert err.count("\n") == 1


def test_writing_where_one_cannot(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        write({}, tmp_path)


def test_the_parent_needs_no_torch() -> None:
    code = "import sys, nsightkit.capture.bench; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# ---------------------------------------------------------------- terminals and GPUs


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a pseudo-terminal")
def test_the_bar_is_on_a_terminals_stderr_only() -> None:
    code = (
        "import sys, time\n"
        "from nsightkit import cli\n"
        "from nsightkit.capture import bench\n"
        "bench.ask_child = lambda *_: time.sleep(0.3) or {'status': 'failed', 'detail': 'planted'}\n"
        "sys.exit(cli.run(['bench', '--device', 'cpu', '--size', 'smoke', '--size', 'small', '--format', 'json']))\n"
    )
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        out, _ = process.communicate(timeout=120)
    os.close(theirs)
    seen = os.read(ours, 100_000).decode(errors="replace")
    os.close(ours)
    assert process.returncode == 2
    assert [row["status"] for row in json.loads(out)["rows"]] == ["failed", "failed"]
    assert "0/2" in seen
    assert "smoke context 64 train fp32" in seen
    assert "nsightkit: not measured" in seen


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    if not children.has_gpu():
        pytest.skip("no CUDA GPU")
    rows = valid(bench(cells(["smoke"], precisions=benchmark.PRECISIONS), device="cuda", warmup=2, steps=3))["rows"]
    assert {row["status"] for row in rows} <= {"ok", "unsupported"}
    assert all(row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0 for row in rows if row["status"] == "ok")
    # Weights and gradients fit, the optimizer's moments do not.
    document = valid(bench([Cell(_HEAVY)], device="cuda", warmup=0, steps=2, memory_cap_bytes=_WEIGHTS * 3))
    (row,) = document["rows"]
    assert (row["status"], row["where"]) == ("oom", "optimizer"), row["detail"]
    assert row["requested_bytes"] > 0
