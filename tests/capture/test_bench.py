"""The end-to-end benchmark: its document, its statistics, and memory that runs out on purpose."""

import importlib.util
import json
import statistics
import types
from pathlib import Path

import pytest

from nsightkit import cli
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.capture import bench as benchmark
from nsightkit.capture.bench import bench, cells
from nsightkit.configurations import find
from nsightkit.errors import NsightkitError

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
SCHEMA = json.loads(Path(benchmark.__file__).with_name("bench.schema.json").read_text(encoding="utf-8"))
ANSWER = {
    "status": "ok",
    "gpu": "NVIDIA H200",
    "samples_ns": [1_000_000, 6_000_000, 2_000_000, 3_000_000],
    "first_step_ns": 600_000_000,
    "clock": "cuda-event",
    "peak_allocated_bytes": 10,
    "peak_reserved_bytes": 20,
    "provenance": {"utc": "", "commit": None, "gpu": None, "cpu": {}, "software": {}},
}


def valid(document):
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)
    return document


@pytest.fixture
def jobs(monkeypatch):
    """Jobs that were given to children; each answers as an H200 would, with 1, 6, 2 and 3 ms."""
    jobs = []

    def measure(module, job, timeout_s):
        assert module == "nsightkit.capture.bench_child"
        jobs.append(job)
        return dict(ANSWER)

    monkeypatch.setattr(benchmark, "ask_child", measure)
    monkeypatch.setattr(benchmark, "has_gpu", lambda: True)
    return jobs


# -- figures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "mode", "precision", "peak"),
    [
        ("NVIDIA H200", "train", "bf16", 989.4),
        ("NVIDIA H200", "fwd", "fp32", 66.9),
        ("Tesla T4", "train", "bf16", None),
    ],
)
def test_figures_are_those_of_the_samples(jobs, monkeypatch, gpu, mode, precision, peak):
    monkeypatch.setitem(ANSWER, "gpu", gpu)
    document = valid(bench(cells(["medium"], modes=[mode], precisions=[precision]), steps=4))
    (row,) = document["rows"]
    cost = envelope(find("medium"))
    flops = cost.fwd_flops if mode == "fwd" else cost.train_flops
    expected = {"median_ns": 2_500_000, "mean_ns": 3_000_000, "std_ns": round(statistics.stdev(ANSWER["samples_ns"]))}
    expected |= {"first_step_ns": 600_000_000, "tokens_per_s": 4 * 512 / 2.5e-3, "peak_allocated_bytes": 10}
    expected |= {"flops": flops, "tflops": flops / 2.5e-3 / 1e12, "peak_tflops": peak}
    expected["mfu_datasheet"] = None if peak is None else flops / 2.5e-3 / 1e12 / peak
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert (document["gpu"], document["device"]) == (gpu, "cuda")


def test_the_child_is_told_sizes_and_switches(jobs):
    told = []
    chosen = cells(["model_b"], contexts=[64, 128], batch=3, attention="naive", nvtx=True, annotate_mha=True)
    document = valid(bench(chosen, warmup=0, steps=4, progress=lambda number, text: told.append((number, text))))
    assert [row["context"] for row in document["rows"]] == [64, 128]
    first, second = jobs
    assert (first["describe"], second["describe"]) == (True, False)  # once is enough
    assert (first["device"], first["parameters"]["d_model"]) == ("cuda", 384)
    assert first["parameters"] | {"batch": 3, "attention": "naive", "annotate": True} == first["parameters"]
    assert told == [(0, "model_b context 64 train fp32"), (1, "model_b context 128 train fp32"), (2, "")]


# -- real runs, on the CPU ---------------------------------------------------------------------------------------


@needs_torch
def test_the_command_line(tmp_path, capsys):
    out = tmp_path / "bench.json"
    line = "bench --device cpu --warmup 2 --steps 3 --nvtx --precision fp32 --precision tf32"
    code = cli.run([*line.split(), "--out-json", str(out), "--format", "json"])
    printed, err = capsys.readouterr()
    assert (code, err) == (0, f"nsightkit: {out}: written\n")
    document = valid(json.loads(out.read_text(encoding="utf-8")))
    assert json.loads(printed) == document
    full, tf32 = document["rows"]
    assert (full["config"], full["status"], full["clock"]) == ("smoke", "ok", "perf_counter")
    assert full["first_step_ns"] not in full["samples_ns"]
    assert (tf32["status"], tf32["samples_ns"]) == ("unsupported", [])
    assert document["provenance"]["software"]["torch"]


@needs_torch
@pytest.mark.parametrize(("in_setup", "where"), [(True, "setup"), (False, "backward")])
def test_out_of_memory_is_a_result_that_says_where(in_setup, where, monkeypatch):
    from nsightkit.capture import bench_child
    from nsightkit.workloads import lm

    def run_out(*_, **__):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    running = types.SimpleNamespace(step=run_out, doing="backward")
    monkeypatch.setattr(lm, "run", run_out if in_setup else lambda *_, **__: running)
    result = bench_child._measure_steps("cpu", {"annotate": False}, 1, 2)
    assert (result["status"], result["where"]) == ("oom", where)
    assert "2.00 GiB" in result["detail"]


@needs_torch
def test_a_profiler_sees_the_timed_steps_in_a_range():
    """`measure` leaves the warm-up out."""
    import torch

    from nsightkit.capture import bench_child

    sizes = {"batch": 1, "context": 8, "d_model": 8, "layers": 1, "d_ff": 8, "heads": 2, "vocabulary": 16}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watch:
        result = bench_child._measure_steps("cpu", {**sizes, "annotate": True}, 2, 3)
    assert (result["status"], len(result["samples_ns"])) == ("ok", 3)
    events = sorted((event.time_range.start, event.name) for event in watch.events())
    assert [name for _, name in events if name in ("step", "measure")] == 2 * ["step"] + ["measure"] + 3 * ["step"]


# -- what goes wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--size huge", "no configuration is called 'huge'; there are smoke, small,"),
        ("--size model_a", "no configuration is called 'model_a'"),
        ("--config huge", "no configuration is called 'huge'; there are model_a,"),
        ("--mode sideways", "argument --mode: invalid choice: 'sideways'"),
        ("--precision int4", "argument --precision: invalid choice: 'int4'"),
        ("--compile --annotate-mha", "a compiled model has no ranges inside"),
        ("--device tpu", "device 'tpu' is neither cpu nor cuda nor cuda:N"),
        ("--device cuda", "torch sees no CUDA GPU here"),
        ("--steps 0", "--steps must be above 0"),
        ("--out-json no/such/folder/b.json", "its folder does not exist"),
    ],
)
def test_bad_usage(line, problem, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "has_gpu", lambda: False)
    assert cli.run(["bench", "--device", "cpu", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert problem in err
    assert err.count("\n") == 1


def test_a_cell_that_fails_does_not_stop_the_others(monkeypatch, capsys):
    def ask(module, job, timeout_s):
        if job["parameters"]["mode"] == "fwd":
            raise NsightkitError("exit code 1: no")
        return {"status": "oom", "where": "backward", "detail": "Tried to allocate"}

    monkeypatch.setattr(benchmark, "ask_child", ask)
    assert cli.run(["bench", "--device", "cpu", "--mode", "fwd", "--mode", "train", "--format", "text"]) == 2
    out, err = capsys.readouterr()
    assert "CPU (a GPU's times will differ) · 5 warm-up and 10 timed steps" in out
    assert "oom in backward" in out
    assert "smoke train fp32: Tried to allocate" in out
    assert err == "nsightkit: not measured: smoke fwd fp32 (exit code 1: no)\n"
