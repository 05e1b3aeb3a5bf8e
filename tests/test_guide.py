"""``measure``: what it runs, keeps and shows, and that a killed recording loses only what was under way."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

torch = pytest.importorskip("torch")

from stand_in_cuda import stand_in  # noqa: E402
from synthetic import planted  # noqa: E402

import nsightkit  # noqa: E402
from nsightkit.errors import NsightkitError, TraceError, UsageError  # noqa: E402
from nsightkit.guide import headline, measure, running  # noqa: E402
from nsightkit.trace import store  # noqa: E402

ROOT = Path(__file__).parents[1]
GPU, SMALL = {"size": 4096}, {"size": 8}
#: Steps of all workloads that were built, in order.
STEPS: list[int] = []


class Work(contextlib.ExitStack):
    """A matmul a step."""

    def __init__(self, device: str, size: int, samples: dict[str, list[float]] | None = None) -> None:
        super().__init__()
        self.matrix = torch.randn(size, size, device=device)
        self.given = samples or {}
        STEPS.append(0)

    def step(self) -> None:
        STEPS[-1] += 1
        self.matrix @ self.matrix

    def samples(self) -> dict[str, list[float]]:
        return {"seen": list(range(STEPS[-1])), **self.given}


class Sweep(contextlib.ExitStack):
    def __init__(self, sizes: list[int], error: float) -> None:
        super().__init__()
        self.sizes, self.error = sizes, error

    def rows(self):
        for size in self.sizes:
            yield {"size": size, "status": "ok", "median_ns": 1e3 * size, "relative_error": self.error}
        yield {"size": 99, "status": "out of memory"}


def run(device: str, **parameters: object) -> Work:
    return Work(device, **parameters)


def sweep(device: str, sizes: list[int], error: float = 0.0) -> Sweep:
    return Sweep(sizes, error)


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting of NSIGHTKIT but an empty folder of recordings."""
    for name in list(os.environ):
        if name.startswith("NSIGHTKIT_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "recordings"))
    STEPS.clear()
    return tmp_path / "recordings"


def recorded(settings: Path, monkeypatch: pytest.MonkeyPatch, gpu: str = "nvidia-h200", **changes: object) -> Path:
    """Make a recording of a GPU out of a dry run's."""
    with monkeypatch.context() as patch:
        patch.setenv("NSIGHTKIT_MODE", "record")
        measure("page/part", run, gpu=GPU, small=SMALL)
    place = settings / "page" / "part" / gpu
    shutil.move(settings / "page" / "part" / "cpu", place)
    file = place / "provenance.json"
    facts = json.loads(file.read_text())
    facts |= {"kind": "measured", "gpu": {"name": gpu.upper()}, "parameters": GPU, **changes}
    file.write_text(json.dumps(facts))
    STEPS.clear()
    return place


# -- what runs ------------------------------------------------------------------------------------------------------


def test_small_is_always_small(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(settings, monkeypatch)
    monkeypatch.setenv("NSIGHTKIT_MODE", "small")
    small = measure("page/part", run, gpu=GPU, small=SMALL, steps=500, warmup=100)
    assert small.mode == "small"
    assert small
    assert small.parameters == SMALL
    assert len(small.values("step_ns")) == 5
    assert small.values("seen").tolist() == [2, 3, 4, 5, 6]  # of the timed steps, not of the two before them
    assert STEPS == [2 + 5 + 1 + 1 + 2]  # warm-up, timed; of the profile left alone, warm-up, kept
    assert len(small.trace["ops"]) > 0
    assert "small run on this CPU" in small.label


def test_without_a_gpu_the_recording_is_shown_and_else_a_small_run(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measure("page/part", run, gpu=GPU, small=SMALL).mode == "small"
    assert not settings.exists()
    recorded(settings, monkeypatch)
    shown = measure("page/part", run, gpu=GPU, small=SMALL)
    assert (shown.mode, shown.parameters, shown.notice) == ("recorded", GPU, None)
    assert not STEPS


def test_a_missing_recording_is_one_line_and_page_code_survives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    missing = measure("page/part", run, gpu=GPU, small=SMALL)
    assert not missing
    assert not STEPS
    line = "not measured yet: run this page on your GPU (python test_guide.py)"
    assert repr(missing) == f"page/part: {line}"
    assert line in missing._repr_html_()
    assert 'data-mode="missing"' in missing._repr_html_()
    assert "<details" not in missing._repr_html_()
    assert missing.parameters == GPU
    assert missing.median("step_ns") is None
    assert missing.values("step_ns").size == 0
    assert missing.rows.empty
    assert missing.trace.verdict()["bottleneck"] == "not-enough-data"
    assert missing.trace.gaps().empty
    assert missing.nsys_trace is missing.ncu_report is missing.snapshot is None
    assert headline("", missing, otherwise="it was.", badge="exact", waits=3) == {
        "verdict": "it was.", "badge": "exact", "waits": 3,
    }  # fmt: skip


def test_a_sweep_keeps_its_rows(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    for _ in range(2):  # as measured, and as read again
        rows = measure("page/sweep", sweep, gpu={}, small={"sizes": (1, 2)}).rows
        assert rows["size"].tolist() == [1, 2, 99]
        assert rows["status"].tolist() == ["ok", "ok", "out of memory"]
        assert rows["median_ns"].isna().tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("workload", "parameters", "problem"),
    [
        (run, {"samples": {"relative_error": [0.06]}}, "above 0.05"),
        (run, {"samples": {"relative_error": [float("nan")]}}, "the result is wrong"),
        (run, {"samples": {"loss": [1.0, float("nan")]}}, "loss is not finite"),
        (run, {"samples": {"step_ns": [0.0]}}, "took no time"),
        (sweep, {"sizes": [1], "error": 0.2}, "above 0.05"),
    ],
)
def test_a_wrong_result_is_an_error_and_leaves_no_recording(
    settings: Path, monkeypatch: pytest.MonkeyPatch, workload, parameters, problem: str
) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    size = {} if workload is sweep else SMALL
    with pytest.raises(NsightkitError, match=problem):
        measure("page/part", workload, gpu={}, small={**size, **parameters})
    assert not list(settings.rglob("*.json"))


def test_eight_bits_may_be_further_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "small")

    def fp8(device: str, precision: str, error: float) -> Work:
        return Work(device, 8, {"relative_error": [error]})

    assert measure("page/part", fp8, gpu={}, small={"precision": "fp8", "error": 0.1})
    with pytest.raises(NsightkitError, match=r"above 0\.12"):
        measure("page/part", fp8, gpu={}, small={"precision": "fp8", "error": 0.13})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": "page"}, "write it as page/part"),
        ({"profile": "perf"}, "choose torch"),
    ],
)
def test_arguments_that_cannot_be_honoured(change: dict[str, str], problem: str) -> None:
    arguments = {"name": "page/part", "workload": run, "gpu": GPU, "small": SMALL}
    with pytest.raises(UsageError, match=problem):
        measure(**arguments | change)


def test_a_mode_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "live")
    with pytest.raises(UsageError, match="record, replay or small"):
        measure("page/part", run, gpu=GPU, small=SMALL)


# -- recordings -----------------------------------------------------------------------------------------------------

#: A page of four measurements. The workload counts its runs in a file, and kills its process where it is told to.
PAGE = """
import contextlib, os, shutil, signal
from pathlib import Path
import torch
from nsightkit.guide import measure

class Work(contextlib.ExitStack):
    def __init__(self, name):
        super().__init__()
        self.name = name
        with Path(os.environ["COUNTED"]).open("a") as file:
            file.write(name + "\\n")

    def step(self):
        torch.ones(4) + 1
        if os.environ.get("DIES_IN") == self.name:
            os.kill(os.getpid(), signal.SIGKILL)

def run(device, name):
    return Work(name)

def dying(source, target):
    shutil.copytree = copy
    copy(source, target)
    (target / "samples.parquet").unlink()
    os.kill(os.getpid(), signal.SIGKILL)

copy = shutil.copytree
if os.environ.get("DIES_IN") == "writing":
    shutil.copytree = dying

for name in ("one", "two", "three", "four"):
    part = measure(f"page/{name}", run, gpu={"name": name}, small={"name": name})
    assert part.median("step_ns") > 0
print("done")
"""


def test_a_killed_recording_loses_only_the_measurement_under_way(tmp_path: Path, settings: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(PAGE)
    counted = tmp_path / "counted"

    def record(dies_in: str) -> tuple[int, str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "NSIGHTKIT_MODE": "record", "COUNTED": str(counted)}
        environment["DIES_IN"] = dies_in
        done = subprocess.run(
            [sys.executable, str(page)], check=False, env=environment, capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stdout

    assert record("two") == (-9, "")
    assert sorted(p.name for p in (settings / "page").iterdir()) == ["one"]
    first = (settings / "page" / "one" / "cpu" / "provenance.json").read_bytes()
    assert record("writing") == (-9, "")  # of the second, which nothing has of yet
    assert not list(settings.glob("page/two/cpu"))
    assert record("four") == (-9, "")
    assert record("") == (0, "done\n")
    assert record("") == (0, "done\n")
    assert counted.read_text().split() == ["one", "two", "two", "two", "three", "four", "four"]
    assert (settings / "page" / "one" / "cpu" / "provenance.json").read_bytes() == first
    recordings = sorted(p.parent.parent.name for p in settings.glob("*/*/*/provenance.json"))
    assert recordings == ["four", "one", "three", "two"]
    for place in settings.glob("page/*/cpu"):
        assert sorted(p.name for p in place.iterdir()) == ["provenance.json", "samples.parquet", "trace"]


def test_to_record_needs_a_gpu_or_a_folder_for_a_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    monkeypatch.delenv("NSIGHTKIT_RECORDINGS")
    with pytest.raises(UsageError, match="set NSIGHTKIT_RECORDINGS"):
        measure("page/part", run, gpu=GPU, small=SMALL)
    assert not STEPS


def test_a_dry_run_is_no_recording_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    assert measure("page/part", run, gpu=GPU, small=SMALL).mode == "small"
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    assert not measure("page/part", run, gpu=SMALL, small=SMALL)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"parameters": {"size": 2048}}, "parameters have changed"), ({"revision": 0}, "revision has changed")],
)
def test_a_stale_recording_has_a_banner_until_somebody_accepts_it(
    settings: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], why: str
) -> None:
    place = recorded(settings, monkeypatch, **changes)
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    stale = measure("page/part", run, gpu=GPU, small=SMALL)
    assert stale.mode == "recorded"
    assert stale.parameters == changes.get("parameters", GPU)
    assert why in str(stale.notice)
    assert '<p class="nsightkit-banner"' in stale._repr_html_()
    monkeypatch.setenv("NSIGHTKIT_PUBLISH", "1")
    with pytest.raises(TraceError, match=f"{why}.*record it again on a GPU"):
        measure("page/part", run, gpu=GPU, small=SMALL)
    file = place / "provenance.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"accepted": "only a comment changed"}))
    accepted = measure("page/part", run, gpu=GPU, small=SMALL)
    assert accepted.mode == "recorded"
    assert accepted.notice is None
    assert "only a comment changed" in accepted._repr_html_()


def test_parameters_compare_as_json_keeps_them(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    for revision in (1, 1, 2):
        measure("page/sweep", sweep, gpu={}, small={"sizes": (1, 2)}, revision=revision)
        facts = json.loads((settings / "page" / "sweep" / "cpu" / "provenance.json").read_text())
        assert facts["parameters"] == {"sizes": [1, 2]}
        assert facts["revision"] == revision


def test_the_newest_current_recording_is_shown_or_that_of_the_gpu_asked_for(
    settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(settings, monkeypatch, "h100", utc="2026-01-01T00:00:00+00:00")
    recorded(settings, monkeypatch, "h200", utc="2026-02-01T00:00:00+00:00")
    recorded(settings, monkeypatch, "b200", utc="2026-03-01T00:00:00+00:00", revision=0)
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    shown = measure("page/part", run, gpu=GPU, small=SMALL)
    assert shown.gpu == "H200"
    assert shown._repr_html_().count("data-gpu=") == 3
    assert '<li data-gpu="h200" aria-current=true>' in shown._repr_html_()
    monkeypatch.setenv("NSIGHTKIT_GPU", "h100")
    assert measure("page/part", run, gpu=GPU, small=SMALL).label == "recorded on H100, 2026-01-01"


@pytest.mark.parametrize("file", ["provenance.json", "samples.parquet"])
def test_a_damaged_recording_is_named(settings: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    place = recorded(settings, monkeypatch)
    (place / file).write_bytes(b"{")
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    with pytest.raises(TraceError, match=f"{file}.*record again"):
        measure("page/part", run, gpu=GPU, small=SMALL)


def test_a_recording_names_no_person_and_no_machine(tmp_path: Path, settings: Path) -> None:
    folder = tmp_path / "home" / "quentine"
    folder.mkdir(parents=True)
    page = folder / "page.py"
    page.write_text(PAGE)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "NSIGHTKIT_MODE": "record", "COUNTED": str(tmp_path / "counted"),
        "USER": "quentine", "LOGNAME": "quentine", "HOME": str(folder), "HOSTNAME": "quentines-host",
    }  # fmt: skip
    subprocess.run([sys.executable, str(page)], check=True, env=environment, capture_output=True, timeout=300)
    texts = [file.read_text() for file in settings.rglob("*.json")]
    texts += [pd.read_parquet(file).to_csv() for file in settings.rglob("*.parquet")]
    assert len(texts) > 8
    for text in texts:
        for private in ("quentine", str(tmp_path), socket.gethostname(), f"/{getpass.getuser()}/", str(ROOT)):
            assert private not in text, private


# -- answers --------------------------------------------------------------------------------------------------------


def test_a_headline_is_what_gpus_say(settings: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    recorded(settings, monkeypatch, "h200")
    on_gpu = measure("page/part", run, gpu=GPU, small=SMALL)
    assert headline("faster.", on_gpu, on_gpu, otherwise="?", badge="exact") == {
        "verdict": "faster.", "badge": "measured, H200",
    }  # fmt: skip
    monkeypatch.setenv("NSIGHTKIT_MODE", "small")
    small = measure("page/part", run, gpu=GPU, small=SMALL)
    assert headline("small.", small, otherwise="?", badge="exact") == {"verdict": "?", "badge": "exact"}
    assert capsys.readouterr().out.splitlines() == ["faster.", "small."]
    assert headline("mixed.", small, on_gpu, otherwise="?", badge="exact") == {"verdict": "?", "badge": "exact"}
    assert "different machines (CPU, H200)" in capsys.readouterr().out


# -- on a GPU -------------------------------------------------------------------------------------------------------


def test_what_a_gpu_is_asked_in_which_order(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    with stand_in() as cuda:
        measured = measure("page/part", run, gpu=SMALL, small=SMALL, steps=4, warmup=3, profile="memory")
    assert measured.mode == "measured"
    assert (settings / "page" / "part" / "nvidia-h200" / "snapshot.pickle").is_file()
    assert measured.snapshot is not None
    assert measured.median("peak_bytes") == 2 * 2**30
    assert STEPS == [3 + 3 + 4 + 1 + 2 + 3]  # recorded, warm-up, timed; left alone, warm-up, profiled
    order = ["memory history begins", "snapshot", "memory history ends", "record", "profile CPU, CUDA", "empty_cache"]
    assert sorted(order, key=cuda.index) == order
    assert "profile" not in "".join(cuda.log[: cuda.index("record")])  # what is timed is not profiled


def test_the_program_that_a_tool_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "watched", sys.modules[__name__])
    with stand_in() as cuda:
        running._child("watched:run", json.dumps(SMALL), "cuda", "4", "3")
    assert STEPS == [4 + 2 + 3]
    assert cuda.log.count("synchronize") == 3


def test_a_capture_is_cut_to_the_steady_steps(tmp_path: Path) -> None:
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
    store.write(running._steady(nsightkit.load(tmp_path / "capture.sqlite", cache=False)), tmp_path / "cut")
    cut = nsightkit.load(tmp_path / "cut")
    ranges = cut["ranges"]
    assert sorted(ranges["name"]) == 3 * ["forward"] + 3 * ["step"]
    assert len(cut["kernels"]) == len(cut["calls"]) == 3
    assert set(ranges.loc[ranges["name"] == "step", "level"]) == {0}
    forward = ranges[ranges["name"] == "forward"]
    assert set(forward["level"]) == {1}
    assert set(ranges["name"].iloc[forward["parent"]]) == {"step"}


@pytest.mark.nsys
def test_nsys_sees_the_steps_that_torch_profiles(nsys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvtx")
    from nsightkit.workloads import training

    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    task = running.Run("page/part", training.run, {}, "cpu", 1, 2, 5, 2, "nsys", "examples/page.py")
    assert running._under_tool(task, tmp_path) == {"steps": 2}
    names = nsightkit.load(tmp_path / "nsys")["ranges"]["name"].value_counts()
    assert names["step"] == names["forward"] == names["backward"] == 2


def test_a_tool_that_fails_is_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in ("nsys", "ncu"):
        monkeypatch.setenv(f"NSIGHTKIT_{tool.upper()}", str(tmp_path / "absent"))
        task = running.Run("page/part", run, SMALL, "cpu", 1, 2, 5, 2, tool, "examples/page.py")
        notice = running._under_tool(task, tmp_path)["notice"]
        assert "absent" in notice
        assert str(tmp_path) not in notice
        assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_a_real_gpu_is_measured_and_recorded(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    monkeypatch.setenv("NSIGHTKIT_MODE", "record")
    for steps in (11, 0):
        measured = measure("page/part", run, gpu={"size": 1024}, small=SMALL, profile="memory")
        assert measured.gpu
        assert measured.median("step_ns") > 0
        assert len(measured.trace["kernels"]) >= 3
        assert measured.snapshot is not None
        assert sum(STEPS) >= steps
        STEPS.clear()
