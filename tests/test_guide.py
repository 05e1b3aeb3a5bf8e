"""``measure``: what it runs, keeps and shows, and that a killed recording loses only what was under way."""

from __future__ import annotations

import contextlib
import getpass
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from stand_in_cuda import stand_in  # noqa: E402
from synthetic import planted  # noqa: E402

import nsightkit  # noqa: E402
from nsightkit.errors import NsightkitError, TraceError, UsageError  # noqa: E402
from nsightkit.guide import Measurement, headline, measure, running  # noqa: E402
from nsightkit.trace import store  # noqa: E402

ROOT = Path(__file__).parents[1]
GPU, SMALL = {"size": 4096}, {"size": 8}
#: Steps of all workloads that were built, in order.
STEPS: list[int] = []


class Work(contextlib.ExitStack):
    """A matmul a step."""

    def __init__(self, device: str, size: int = 8, samples: dict[str, list[float]] | None = None):
        super().__init__()
        self.matrix = torch.randn(size, size, device=device)
        self.given = samples or {}
        STEPS.append(0)

    def step(self):
        STEPS[-1] += 1
        self.matrix @ self.matrix

    def samples(self) -> dict[str, list[float]]:
        return {"seen": list(range(STEPS[-1])), **self.given}


class Sweep(contextlib.ExitStack):
    def __init__(self, device: str, sizes: list[int]):
        super().__init__()
        self.sizes = sizes

    def rows(self):
        for size in self.sizes:
            yield {"size": size, "status": "ok", "median_ns": 1e3 * size}
        yield {"size": 99, "status": "oom"}


def run(device: str, **parameters: object) -> Work:
    parameters.pop("precision", None)
    return Work(device, **parameters)


def part(**changes: object) -> Measurement:
    arguments = {"name": "page/part", "workload": run, "gpu": GPU, "small": SMALL, "profile": None}
    return measure(**arguments | changes)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting of NSIGHTKIT but an empty folder of recordings."""
    for name in list(os.environ):
        if name.startswith("NSIGHTKIT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "recordings"))
    STEPS.clear()
    return tmp_path / "recordings"


@pytest.fixture
def recorded(settings: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Make recordings of a GPU out of a dry run's."""

    def make(gpu: str = "nvidia-h200", **changes: object) -> Path:
        with monkeypatch.context() as patch:
            patch.setenv("NSIGHTKIT_MODE", "record")
            part()
        place = settings / "page" / "part" / gpu
        shutil.move(settings / "page" / "part" / "cpu", place)
        file = place / "provenance.json"
        facts = json.loads(file.read_text())
        facts |= {"kind": "measured", "gpu": {"name": gpu.upper()}, "parameters": GPU, **changes}
        file.write_text(json.dumps(facts))
        STEPS.clear()
        return place

    return make


# -- what runs ------------------------------------------------------------------------------------------------------


def test_small_is_always_small(recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    recorded()
    monkeypatch.setenv("NSIGHTKIT_MODE", "small")
    small = part(steps=500, warmup=100, profile="torch")
    assert small.mode == "small"
    assert small.parameters == SMALL
    assert len(small.values("step_ns")) == 5
    assert small.values("seen").tolist() == [2, 3, 4, 5, 6]  # of the timed steps, not of the two before them
    assert STEPS == [2 + 5 + 1 + 1 + 2]  # warm-up, timed; of the profile left alone, warm-up, kept
    assert len(small.trace["ops"]) > 0
    assert "small run on this CPU" in small.label


def test_without_a_gpu_the_recording_is_shown_and_else_a_small_run(settings: Path, recorded: Callable[..., Path]):
    assert part().mode == "small"
    assert not settings.exists()
    recorded()
    shown = part()
    assert (shown.mode, shown.parameters, shown.notice) == ("recorded", GPU, None)
    assert not STEPS


def test_a_missing_recording_is_one_line_and_page_code_survives_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    missing = part()
    assert not missing
    assert not STEPS
    line = "not measured yet: run this page on your GPU (python test_guide.py)"
    assert repr(missing) == f"page/part: {line}"
    assert line in missing._repr_html_()
    assert "<details" not in missing._repr_html_()
    assert missing.median("step_ns") is None
    assert missing.values("step_ns").size == 0
    assert missing.rows.empty
    assert missing.trace.verdict()["bottleneck"] == "not-enough-data"
    assert missing.nsys_trace is missing.ncu_report is missing.snapshot is None
    answer = {"verdict": "it was.", "badge": "exact", "waits": 3}
    assert headline("", missing, otherwise="it was.", badge="exact", waits=3) == answer


def test_a_sweep_keeps_its_rows_and_parameters_are_those_of_json(settings: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    for revision in (1, 1, 2):  # measured, read again, and measured again
        sweep = part(workload=Sweep, small={"sizes": (1, 2)}, revision=revision)
        assert sweep.rows["size"].tolist() == [1, 2, 99]
        assert sweep.rows["median_ns"].isna().tolist() == [False, False, True]
        facts = json.loads((settings / "page" / "part" / "cpu" / "provenance.json").read_text())
        assert (facts["parameters"], facts["revision"]) == ({"sizes": [1, 2]}, revision)


@pytest.mark.parametrize(
    ("samples", "precision", "problem"),
    [
        ({"relative_error": [0.06]}, "bf16", "above 0.05"),
        ({"relative_error": [0.06]}, "fp8", None),
        ({"relative_error": [0.13]}, "fp8", "above 0.12"),
        ({"relative_error": [math.nan]}, "bf16", "relative_error is not finite"),
        ({"loss": [1.0, math.nan]}, "bf16", "loss is not finite"),
        ({"step_ns": [0.0]}, "bf16", "took no time"),
    ],
)
def test_a_wrong_result_is_an_error_and_leaves_no_recording(
    settings: Path, monkeypatch: pytest.MonkeyPatch, samples: dict, precision: str, problem: str | None
):
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    expected = contextlib.nullcontext() if problem is None else pytest.raises(NsightkitError, match=problem)
    with expected:
        part(small={"samples": samples, "precision": precision})
    assert bool(list(settings.rglob("*.json"))) == (problem is None)


@pytest.mark.parametrize(
    ("name", "mode", "problem"),
    [
        ("page", "", "write it as page/part"),
        ("page/part", "live", "record, replay or small"),
        ("page/part", "record", "set NSIGHTKIT_RECORDINGS"),
    ],
)
def test_what_cannot_be_honoured(monkeypatch: pytest.MonkeyPatch, name: str, mode: str, problem: str):
    monkeypatch.setenv("NSIGHTKIT_MODE", mode)
    monkeypatch.delenv("NSIGHTKIT_RECORDINGS")
    with pytest.raises(UsageError, match=problem):
        part(name=name)
    assert not STEPS


# -- recordings -----------------------------------------------------------------------------------------------------

#: A page of three measurements. The workload counts its runs in a file; the process is killed as the second is written.
PAGE = """
import contextlib, os, shutil, signal
from pathlib import Path
import torch
from nsightkit.guide import measure

class Work(contextlib.ExitStack):
    def __init__(self, name):
        super().__init__()
        with Path("counted").open("a") as file:
            file.write(name + " ")

    def step(self):
        torch.ones(4) + 1

def run(device, name):
    return Work(name)

def dying(source, target, *more):
    copy(source, target, *more)
    if "two" in str(target) and not more and os.environ.get("DIES"):
        (target / "samples.parquet").unlink()
        os.kill(os.getpid(), signal.SIGKILL)

copy, shutil.copytree = shutil.copytree, dying
for name in ("one", "two", "three"):
    part = measure(f"page/{name}", run, gpu={"name": name}, small={"name": name})
    assert part.median("step_ns") > 0
"""


def test_a_killed_recording_loses_only_the_measurement_under_way_and_names_nobody(tmp_path: Path, settings: Path):
    folder = tmp_path / "home" / "quentine"
    folder.mkdir(parents=True)
    (folder / "page.py").write_text(PAGE)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NSIGHTKIT_MODE": "record", "HOSTNAME": "quentines-host"}
    environment |= {"USER": "quentine", "LOGNAME": "quentine", "HOME": str(folder)}
    command = [sys.executable, "page.py"]
    how = {"cwd": folder, "capture_output": True, "timeout": 300}
    killed = subprocess.run(command, check=False, env=environment | {"DIES": "1"}, **how)
    assert killed.returncode == -9, killed.stderr
    first = settings / "page" / "one" / "cpu" / "provenance.json"
    recorded_first = first.read_bytes()
    assert list(settings.glob("page/*/cpu")) == [first.parent]
    subprocess.run(command, check=True, env=environment, **how)
    assert (folder / "counted").read_text().split() == ["one", "two", "two", "three"]
    assert first.read_bytes() == recorded_first
    for name in ("one", "two", "three"):
        files = sorted(path.name for path in (settings / "page" / name / "cpu").iterdir())
        assert files == ["provenance.json", "samples.parquet", "trace"]
    texts = [file.read_text() for file in settings.rglob("*.json")]
    texts += [pd.read_parquet(file).to_csv() for file in settings.rglob("*.parquet")]
    for text in texts:
        for private in ("quentine", str(tmp_path), socket.gethostname(), f"/{getpass.getuser()}/", str(ROOT)):
            assert private not in text, private


def test_a_dry_run_is_no_recording_of_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    assert part().mode == "small"
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    assert not part(gpu=SMALL)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"parameters": {"size": 2048}}, "parameters have changed"), ({"revision": 0}, "revision has changed")],
)
def test_a_stale_recording_has_a_banner_until_somebody_accepts_it(
    recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], why: str
):
    file = recorded(**changes) / "provenance.json"
    stale = part()
    assert (stale.mode, stale.parameters) == ("recorded", changes.get("parameters", GPU))
    assert why in str(stale.notice)
    assert '<p class="nsightkit-banner"' in stale._repr_html_()
    monkeypatch.setenv("NSIGHTKIT_PUBLISH", "1")
    with pytest.raises(TraceError, match=f"{why}.*record it again on a GPU"):
        part()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"accepted": "only a comment changed"}))
    accepted = part()
    assert (accepted.mode, accepted.notice) == ("recorded", None)
    assert "only a comment changed" in accepted._repr_html_()


def test_the_newest_current_recording_is_shown(recorded: Callable[..., Path]):
    recorded("h100", utc="2026-01-01T00:00:00+00:00")
    recorded("h200", utc="2026-02-01T00:00:00+00:00")
    recorded("b200", utc="2026-03-01T00:00:00+00:00", revision=0)
    assert part().label == "recorded on H200, 2026-02-01"


@pytest.mark.parametrize("file", ["provenance.json", "samples.parquet"])
def test_a_damaged_recording_is_named(recorded: Callable[..., Path], file: str):
    (recorded() / file).write_bytes(b"{")
    with pytest.raises(TraceError, match=r"page/part/nvidia-h200.*record again"):
        part()


# -- answers --------------------------------------------------------------------------------------------------------


def test_a_headline_is_what_gpus_say(
    recorded: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    recorded("h200")
    on_gpu = part()
    monkeypatch.setenv("NSIGHTKIT_MODE", "small")
    small = part()
    otherwise = {"verdict": "?", "badge": "exact"}
    for runs, answer, printed in (
        ((on_gpu, on_gpu), {"verdict": "yes.", "badge": "measured, H200"}, "yes."),
        ((small,), otherwise, "yes."),
        ((small, on_gpu), otherwise, "The runs are of different machines (CPU, H200)"),
    ):
        assert headline("yes.", *runs, otherwise="?", badge="exact") == answer
        assert capsys.readouterr().out.startswith(printed)


# -- on a GPU -------------------------------------------------------------------------------------------------------


def test_what_a_gpu_is_asked_in_which_order(settings: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    with stand_in() as cuda:
        measured = part(gpu=SMALL, steps=4, warmup=3, profile="memory")
    assert measured.mode == "measured"
    assert (settings / "page" / "part" / "nvidia-h200" / "snapshot.pickle").is_file()
    assert measured.snapshot is not None
    assert measured.median("peak_bytes") == 2 * 2**30
    assert STEPS == [3 + 3 + 4 + 1 + 2 + 3]  # recorded, warm-up, timed; left alone, warm-up, profiled
    order = ["memory history begins", "snapshot", "memory history ends", "record", "profile CPU, CUDA", "empty_cache"]
    assert sorted(order, key=cuda.index) == order
    assert "profile" not in "".join(cuda.log[: cuda.index("record")])  # what is timed is not profiled


def test_the_program_that_a_tool_watches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "watched", sys.modules[__name__])
    with stand_in() as cuda:
        running._run_watched_program("watched:run", json.dumps(SMALL), "cuda", "4", "3")
    assert STEPS == [4 + 2 + 3]
    assert cuda.log.count("synchronize") == 3


def test_a_capture_is_cut_to_the_steady_steps(tmp_path: Path):
    out = planted.Export()
    thread, process = out.thread(1, 1), out.process(1)
    steps = range(100_000, 600_000, 100_000)
    out.range("nsightkit-captured", thread, 50_000, 650_000)
    out.range("nsightkit-steady", thread, 290_000, 600_000)
    for start in steps:
        call = out.call("cudaLaunchKernel", thread, start + 1_000, start + 2_000)
        out.kernel("k", start + 5_000, start + 9_000, call, process)
        out.range("step", thread, start, start + 50_000)
        out.range("forward", thread, start + 500, start + 40_000)
    out.write(tmp_path / "capture.sqlite")
    store.write(
        running._cut_to_steady_steps(nsightkit.load(tmp_path / "capture.sqlite", cache=False)), tmp_path / "cut"
    )
    cut = nsightkit.load(tmp_path / "cut")
    ranges = cut["ranges"]
    assert sorted(ranges["name"]) == 3 * ["forward"] + 3 * ["step"]
    assert len(cut["kernels"]) == len(cut["calls"]) == 3
    assert set(ranges.loc[ranges["name"] == "step", "level"]) == {0}
    forward = ranges[ranges["name"] == "forward"]
    assert set(forward["level"]) == {1}
    assert set(ranges["name"].iloc[forward["parent"]]) == {"step"}


def task_under(tool: str, workload: Callable[..., object], parameters: dict[str, object]) -> running.Run:
    return running.Run("page/part", workload, parameters, "cpu", 1, 2, 5, tool, "examples/page.py")


@pytest.mark.nsys
def test_nsys_sees_the_steps_that_torch_profiles(nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("nvtx")
    from nsightkit.workloads import ceilings

    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    task = task_under("nsys", ceilings.copy, {"megabytes": 1, "kind": "copy"})
    assert running._run_under_tool(task, tmp_path) == {"steps": 2}
    assert nsightkit.load(tmp_path / "nsys")["ranges"]["name"].tolist() == ["step", "step"]


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_a_tool_that_fails_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str):
    monkeypatch.setenv(f"NSIGHTKIT_{tool.upper()}", str(tmp_path / "absent"))
    notice = running._run_under_tool(task_under(tool, run, SMALL), tmp_path)["notice"]
    assert "absent" in notice
    assert str(tmp_path) not in notice
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_real_gpu_is_measured_and_recorded(monkeypatch: pytest.MonkeyPatch):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    measured = part(gpu={"size": 1024}, profile="memory")
    assert measured.gpu
    assert measured.median("step_ns") > 0
    assert len(measured.trace["kernels"]) >= 3
    assert measured.snapshot is not None
