"""Measuring without nsys: torch.profiler, timers, provenance, keys, live/replay/smoke, the recorder, the doctor."""

from __future__ import annotations

import dataclasses
import datetime as dt
import gzip
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import nsightkit
from nsightkit.capture import doctor, provenance
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import keys, profiled, record, recordings
from nsightkit.investigations import measurement as investigation
from nsightkit.investigations import parts as investigations
from nsightkit.trace.model import Trace, TraceMeta

PART = investigations.find("starved-input", "before")


def children(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    here = str(Path(nsightkit.__file__).parents[1])
    variables = {**os.environ, **environment}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), here]))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=variables, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


# -- the package -------------------------------------------------------------------------------------------------


def test_importing_capture_loads_nothing_heavy() -> None:
    done = children(
        """
        import sys
        import nsightkit.capture, nsightkit.workloads
        heavy = {"torch", "pandas", "numpy", "matplotlib", "nvtx"} & set(sys.modules)
        assert not heavy, heavy
        assert callable(nsightkit.investigations.measure) and callable(nsightkit.capture.phase)
        assert "torch" not in sys.modules
        """
    )
    assert done.returncode == 0, done.stderr


def test_workloads_do_not_know_capture() -> None:
    folder = Path(nsightkit.__file__).parent
    for source in (folder / "workloads").glob("*.py"):
        assert "nsightkit.capture" not in source.read_text().replace(":mod:`nsightkit.capture", ""), source.name


# -- torch.profiler and timing -----------------------------------------------------------------------------------

SCRIPT = """
    import sys, torch
    from nsightkit.capture import phase
    for i in range(3):
        with phase("step"):
            (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()
    print("arguments:", sys.argv[1:])
    sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "a program.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_is_profiled_unchanged(
    script: Path, tmp_path: Path, code: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTHONPATH", str(Path(nsightkit.__file__).parents[1]))  # the program uses it, we need not
    from nsightkit.capture import torch_profiler

    output = tmp_path / "-out $(x) 'q"
    done = torch_profiler.profile_command([sys.executable, str(script), str(code), "--flag"], output)
    assert done.trace == output.with_name(output.name + ".json.gz")
    assert done.returncode == code
    assert any("exit code 3" in note for note in done.notes) == (code == 3)
    captured = capfd.readouterr()
    assert captured.out == ""  # our stdout belongs to the answer
    assert f"arguments: ['{code}', '--flag']" in captured.err
    trace = nsightkit.load(done.trace)
    assert trace["ranges"]["name"].tolist().count("step") == 3
    assert {"aten::mm", "aten::item"} <= set(trace["ops"]["name"])
    with pytest.raises(UsageError, match="exists"):
        torch_profiler.profile_command([str(script), "0"], output)


def test_a_module_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from nsightkit.capture import torch_profiler

    (tmp_path / "mine.py").write_text("import torch; torch.ones(3).cumsum(0)")
    monkeypatch.chdir(tmp_path)
    done = torch_profiler.profile_command([sys.executable, "-m", "mine"], tmp_path / "m")
    assert "aten::cumsum" in set(nsightkit.load(done.trace)["ops"]["name"])


def test_only_python_programs_are_profiled(tmp_path: Path) -> None:
    from nsightkit.capture import torch_profiler

    for command, words in (([], "no command"), (["ls"], "Python program"), (["python"], "Python program")):
        with pytest.raises(UsageError, match=words):
            torch_profiler.profile_command(command, tmp_path / "t")


def test_a_program_without_a_trace_says_so(tmp_path: Path) -> None:
    from nsightkit.capture import torch_profiler

    program = tmp_path / "p.py"
    program.write_text("import os; os._exit(9)")
    with pytest.raises(NsightkitError, match="exit code 9 and left no trace"):
        torch_profiler.profile_command([sys.executable, str(program)], tmp_path / "t")
    program.write_text("import time; time.sleep(600)")
    with pytest.raises(NsightkitError, match="not done within 3 s"):
        torch_profiler.profile_command([sys.executable, str(program)], tmp_path / "t", timeout_s=3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.py"]


def test_only_the_active_steps_are_kept(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from nsightkit.capture import torch_profiler

    calls = []

    def step() -> None:
        calls.append(0)
        torch.ones(len(calls)).cumsum(0)

    out = torch_profiler.profile_steps(step, tmp_path / "t.json.gz", wait=2, warmup=1, active=3)
    assert len(calls) == 6
    assert out.read_bytes()[:2] == b"\x1f\x8b"
    trace = nsightkit.load(out)
    assert trace["ops"]["name"].tolist().count("aten::cumsum") == 3
    names = set(trace["ranges"]["name"])
    assert {"ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"} <= names


def test_every_call_is_timed_after_the_warm_up() -> None:
    from nsightkit.capture import timing

    calls = []
    timed = timing.time_calls(lambda: calls.append(sum(range(1000))), warmup=3, repetitions=7, device="cpu")
    assert len(calls) == 10
    assert timed.samples_ns.shape == (7,)
    assert timed.samples_ns.dtype == np.int64
    assert (timed.samples_ns > 0).all()
    assert timed.median_ns == float(np.median(timed.samples_ns))
    assert (timed.warmup, timed.repetitions, timed.clock) == (3, 7, "perf_counter")
    with pytest.raises(ValueError, match="repetitions"):
        timing.time_calls(int, repetitions=0)


@pytest.mark.gpu
def test_cuda_events_time_what_the_gpu_does() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from nsightkit.capture import timing

    a = torch.rand(4096, 4096, device="cuda")
    timed = timing.time_calls(lambda: a @ a, warmup=5, repetitions=20)
    assert timed.clock == "cuda-event"
    assert timed.median_ns > 4096**3 * 2 / 1e15 * 1e9  # no card does a PFLOP/s in fp32


# -- keys --------------------------------------------------------------------------------------------------------

SOURCE = '''
"""A module."""
import numpy
from nsightkit.workloads import phases

SIZE = 3
UNUSED = 4


class Model:
    """A docstring."""

    width = SIZE

    def run(self, x):
        # a comment
        return _helper(x) + self.width


def _helper(x):
    with phases.phase("a"):
        return x * 2


def other(x):
    return x


def start(device, **parameters):
    """Begin."""
    return Model()
'''


def key_of(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **parameters: object) -> str:
    """Key of a workload with this source, in a package that looks like ours."""
    path = tmp_path / "fresh_workload.py"
    path.write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(keys, "_OURS", (*keys._OURS, "fresh_workload"))
    keys._load.cache_clear()
    keys._source.cache_clear()
    try:
        return keys.key(["fresh_workload:start"], {"size": 1, **parameters}, {"warmup": 1})
    finally:
        keys._load.cache_clear()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another comment"),
        ('"""A docstring."""', '"""Other words."""\n    # more'),
        ('    """Begin."""\n', ""),
        ("return x * 2", "return (\n            x\n            * 2\n        )"),
        ("UNUSED = 4", "UNUSED = 5"),
        ("def other(x):\n    return x", "def other(x):\n    return x + 1"),
        ("import numpy", "import numpy\nimport json"),
    ],
)
def test_what_does_not_decide_the_figures_keeps_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    assert old in SOURCE
    before = key_of(SOURCE, tmp_path, monkeypatch)
    assert key_of(SOURCE.replace(old, new), tmp_path, monkeypatch) == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * 2", "x * 3"),  # a function that is called
        ("SIZE = 3", "SIZE = 4"),  # a constant that is read
        ("+ self.width", "- self.width"),  # a method
        ('phase("a")', 'phase("b")'),
        ("return Model()", "return None"),
    ],
)
def test_what_decides_the_figures_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    before = key_of(SOURCE, tmp_path, monkeypatch)
    assert key_of(SOURCE.replace(old, new), tmp_path, monkeypatch) != before


def test_parameters_are_part_of_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_of(SOURCE, tmp_path, monkeypatch) != key_of(SOURCE, tmp_path, monkeypatch, size=2)
    assert recordings.part_key(PART) != recordings.part_key(dataclasses.replace(PART, active=PART.active + 1))
    by_key: dict[str, list[investigations.Part]] = {}
    for part in investigations.parts():
        by_key.setdefault(recordings.part_key(part), []).append(part)
    for alike in by_key.values():  # what is measured more than once, to see how runs differ
        of_first = (alike[0].investigation, alike[0].workload, alike[0].gpu, alike[0].counts("live"))
        assert all((p.investigation, p.workload, p.gpu, p.counts("live")) == of_first for p in alike)
    assert len(by_key) > 0.9 * len(list(investigations.parts()))


def test_the_key_covers_the_measuring_and_the_workload() -> None:
    covered = keys.closure(PART.code)
    for name in (
        "nsightkit.investigations.measuring:timed",
        "nsightkit.capture.timing:time_calls",
        "nsightkit.capture.timing:_cuda",
        "nsightkit.capture.torch_profiler:profile_steps",
        "nsightkit.capture._under_profiler:profiler",
        "nsightkit.workloads.phases:phase",
        "nsightkit.workloads.training:Training",
        "nsightkit.workloads.training:TrainingConfig",
        "nsightkit.workloads.training:_ElementaryAdamW",
        "nsightkit.workloads.models:rotated",
    ):
        assert name in covered
    # A module that is chosen at run time and passed on counts as a whole.
    covered |= keys.closure(["nsightkit.workloads.layer:start", "nsightkit.workloads.limiters:start"])
    for name in ("layer_triton:Decode", "layer_triton:_row_kernel", "limiters_triton:_walk_kernel"):
        assert f"nsightkit.workloads.{name}" in covered
    for name in covered:  # what only describes must not make recordings stale
        assert not name.startswith(("nsightkit.capture.provenance", "nsightkit.investigations.measurement"))
    with pytest.raises(LookupError):
        keys.closure(["nsightkit.workloads.training:nothing"])


def test_the_key_of_an_observed_part_covers_the_observing() -> None:
    part = investigations.find("autocast", "before")
    covered = keys.closure(part.code)
    for name in ("nsightkit.investigations.measuring:observed", "nsightkit.workloads.autocast:_saved"):
        assert name in covered
    assert "nsightkit.investigations.measuring:timed" not in covered
    assert recordings.part_key(part) != recordings.part_key(dataclasses.replace(part, measured="timed"))


def test_an_observed_part_brings_what_its_workload_saw(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    part = investigations.find("accumulation", "after")
    samples, told = investigation.run_child(part, "smoke", tmp_path, kind="smoke", command="", timeout_s=300)
    assert len(samples["step_ns"]) == part.counts("smoke")["repetitions"] == told["counts"]["repetitions"]
    assert len(samples["sum/bf16"]) == told["parameters"]["count"] / told["parameters"]["block"]
    assert "loss" not in samples
    ranges = nsightkit.load(tmp_path / "trace.json.gz")["ranges"]["name"].tolist()
    assert ranges.count("step") == ranges.count("bf16") == part.counts("smoke")["active"]


def test_the_key_is_the_same_on_other_pythons() -> None:
    """Recordings are made under another Python than the pages."""
    arguments = f"{PART.code}, {PART.parameters('live')}, {PART.counts('live')}"
    program = f"from nsightkit.investigations.keys import key; print(key({arguments}))"
    others = [p for v in range(11, 16) if v != sys.version_info[1] and (p := shutil.which(f"python3.{v}"))]
    compared = 0
    for other in others:
        done = subprocess.run(
            [other, "-c", program], env={**os.environ, "PYTHONPATH": str(Path(nsightkit.__file__).parents[1])},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode == 0:  # a launcher without its Python behind it is none
            assert done.stdout.strip() == recordings.part_key(PART)
            compared += 1
    if not compared:
        pytest.skip("only one Python here")


# -- provenance --------------------------------------------------------------------------------------------------


def test_provenance_says_what_it_must() -> None:
    facts = provenance.collect(device="cpu", kind="smoke", key="k", counts={"warmup": 1, "repetitions": 2, "active": 3})
    assert {"format", "kind", "key", "utc", "commit", "dirty", "gpu", "cpu", "software"} <= facts.keys()
    assert {"os", "python", "torch", "triton", "cuda", "cudnn", "nsys", "ncu", "nsightkit"} <= facts["software"].keys()
    assert facts["gpu"] is None
    assert facts["utc"].endswith("+00:00")
    json.dumps(facts)
    words = dict(provenance.rows(facts))
    assert words["Steps"] == "1 warm-up, 2 timed, 3 traced"
    assert "GPU" not in words


def test_nothing_that_identifies_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "planted-host.example.org")
    monkeypatch.setenv("LOGNAME", "plantedperson")
    monkeypatch.setenv("HOME", "/home/plantedperson")
    monkeypatch.setenv("PLANTED_API_TOKEN", "s3cr3t-value")
    monkeypatch.setenv("PLANTED_PLAIN", "only-an-environment-variable")
    told = {
        "kernel": "6.1.0 on planted-host.example.org",
        "list": ["/home/plantedperson/data", "built by plantedperson", "planted-host"],
        "s3cr3t-value": 1,
        "kept": ["plantedpersons", "/layer1/Conv", "NVIDIA H200", 3, None, True],
    }
    clean = provenance.scrub(told)
    text = json.dumps(clean)
    for word in ("planted-host", "s3cr3t-value", "/home/plantedperson/", "by plantedperson"):
        assert word not in text
    assert clean["kept"] == told["kept"]
    whole = json.dumps(provenance.collect(device="cpu", command="python /home/plantedperson/x.py s3cr3t-value"))
    for word in ("plantedperson", "planted-host", "s3cr3t-value", "only-an-environment-variable"):
        assert word not in whole


@pytest.mark.parametrize(
    ("told", "found"),
    [("0123abc", ("0123abc", False)), ("0123abcdef-dirty", ("0123abcdef", True)), ("$(id)", None)],
)
def test_a_tree_without_git_may_be_told_its_commit(
    monkeypatch: pytest.MonkeyPatch, told: str, found: tuple[str, bool] | None
) -> None:
    monkeypatch.setenv("NSIGHTKIT_COMMIT", told)
    facts = provenance.collect(device="cpu")
    if found is None:
        assert "id" not in (facts["commit"] or "")
    else:
        assert (facts["commit"], facts["dirty"]) == found


def test_labels_are_words() -> None:
    facts = {"gpu": {"name": "NVIDIA H200"}, "utc": "2026-11-20T01:02:03+00:00"}
    assert provenance.label("live", facts) == "Measured live on NVIDIA H200, 2026-11-20"
    assert provenance.label("replay", facts) == "Recorded on NVIDIA H200, 2026-11-20; not measured in this build"
    assert "not GPU results" in provenance.label("smoke", facts)
    assert provenance.slug("NVIDIA H200 / PCIe") == "nvidia-h200-pcie"


# -- live, replay, smoke -----------------------------------------------------------------------------------------


def planted_trace() -> Trace:
    frames = {
        "kernels": pd.DataFrame({"start_ns": [10, 30], "end_ns": [20, 50], "name": pd.Categorical(["a", "b"])}),
        "ranges": pd.DataFrame({"start_ns": [0], "end_ns": [60], "name": pd.Categorical(["step"])}),
    }
    return Trace.from_frames(frames, TraceMeta(tool="planted"))


def facts(part: investigations.Part = PART, **changes: object) -> dict[str, object]:
    return {
        "format": keys.FORMAT, "kind": "measured", "investigation": part.investigation, "part": part.name,
        "key": recordings.part_key(part), "parameters": {"batch": 2}, "counts": part.counts("live"),
        "gpu": {"name": "Planted GPU <b>", "memory_bytes": 2**37}, "utc": "2026-01-02T03:04:05+00:00",
        "duration_s": 1.5, **changes,
    }  # fmt: skip


def plant(where: Path, **changes: object) -> Path:
    samples = recordings.frame({"step_ns": [3, 1, 2], "loss": [0.5]})
    return recordings.write(planted_trace(), samples, facts(**changes), where)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No GPU, an empty folder of recordings, and a child that need not run."""
    monkeypatch.setattr(investigation, "has_gpu", lambda: False)
    monkeypatch.setattr(record, "has_gpu", lambda: False)
    for name in ("NSIGHTKIT_MODE", "NSIGHTKIT_PUBLISH", "NSIGHTKIT_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NSIGHTKIT_MAX_AGE_DAYS", "100000")  # planted recordings have a date of their own
    where = tmp_path / "recordings"
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(where))

    def child(part: investigations.Part, mode: str, folder: Path, *, kind: str, **_: object) -> tuple[dict, dict]:
        with gzip.open(folder / "trace.json.gz", "wt") as stream:
            json.dump({"schemaVersion": 1, "traceEvents": [
                {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
            ]}, stream)  # fmt: skip
        if part.measured == "remembered":
            (folder / "snapshot.pickle").write_bytes(pickle.dumps({"segments": []}))
        made = facts(part, kind="measured" if mode == "live" else kind, key=recordings.part_key(part, mode))
        if mode != "live":
            made["gpu"] = None
        return {"step_ns": [5, 7]}, made

    monkeypatch.setattr(investigation, "run_child", child)
    monkeypatch.setattr(record, "run_child", child)
    monkeypatch.setattr(profiled, "capture", lambda *_, **__: {"notice": "nsys is not installed"})
    return where


def test_an_old_recording_is_shown_and_says_how_old_it_is(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=40, hours=1)
    plant(no_gpu, utc=then.isoformat(timespec="seconds"))
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.age_days == 40
    html = measured._repr_html_()
    assert "40 days before this page was built" in html
    assert "nsightkit-banner" not in html
    monkeypatch.setenv("NSIGHTKIT_MAX_AGE_DAYS", "30")
    html = measured._repr_html_()
    assert 'class="nsightkit-banner"' in html
    assert "This recording is 40 days old" in html
    monkeypatch.setenv("NSIGHTKIT_MAX_AGE_DAYS", "a month")
    with pytest.raises(UsageError, match="NSIGHTKIT_MAX_AGE_DAYS"):
        measured._repr_html_()


def test_of_several_gpus_the_newest_is_shown_or_the_one_that_is_asked_for(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(no_gpu, gpu={"name": "Planted A"}, utc="2026-01-02T03:04:05+00:00")
    plant(no_gpu, gpu={"name": "Planted B"}, utc="2026-01-03T03:04:05+00:00")
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.recorded_on == ("planted-a", "planted-b")
    assert "Planted B" in measured.label
    html = measured._repr_html_()
    assert '<li data-gpu="planted-b" aria-current=true>' in html
    assert '<li data-gpu="planted-a">' in html
    for asked, shown in (("planted-a", "Planted A"), ("planted-z", "Planted B")):
        monkeypatch.setenv("NSIGHTKIT_GPU", asked)
        assert shown in nsightkit.investigations.measure("starved-input", "before").label


def test_without_gpu_or_recording_it_is_smoke_under_a_banner(no_gpu: Path) -> None:
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "smoke"
    assert measured.notice is None
    assert measured.label.startswith("Smoke run on this machine's CPU")
    assert measured.median("step_ns") == 6.0
    assert measured.values("nothing").size == 0
    assert measured.median("nothing") is None
    assert measured.trace["ranges"]["name"].tolist() == ["step"]
    html = measured._repr_html_()
    assert 'data-mode="smoke"' in html
    assert 'class="nsightkit-banner"' in html
    assert "Smoke run" in repr(measured)


def test_a_valid_recording_is_replayed(no_gpu: Path) -> None:
    plant(no_gpu)
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "replay"
    assert measured.label == "Recorded on Planted GPU <b>, 2026-01-02; not measured in this build"
    assert measured.values("step_ns").tolist() == [3, 1, 2]
    assert measured.median("step_ns") == 2.0
    assert measured.parameters == {"batch": 2}
    assert measured.trace["kernels"]["end_ns"].tolist() == [20, 50]
    html = measured._repr_html_()
    assert 'data-mode="replay"' in html
    assert "nsightkit-banner" not in html
    assert "Planted GPU &lt;b&gt;" in html
    assert "<b>" not in html
    # the other part of the pair has none
    assert nsightkit.investigations.measure("starved-input", "after").mode == "smoke"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": "0" * 32}, "the code or the parameters have changed"),
        ({"format": 0}, "format 0"),
    ],
)
def test_a_stale_recording_is_never_shown(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], reason: str
) -> None:
    plant(no_gpu, **change)
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "smoke"
    assert reason in (measured.notice or "")
    assert "starved-input/planted-gpu-b/before" in (measured.notice or "")
    assert reason in measured._repr_html_()
    (row,) = [r for r in recordings.status() if (r["investigation"], r["part"]) == ("starved-input", "before")]
    assert row["state"] == "stale"
    monkeypatch.setenv("NSIGHTKIT_PUBLISH", "1")
    with pytest.raises(NsightkitError, match="record it again on a GPU"):
        nsightkit.investigations.measure("starved-input", "before")


def test_the_newest_valid_recording_wins(no_gpu: Path) -> None:
    plant(no_gpu, gpu={"name": "Old"}, utc="2025-01-01T00:00:00+00:00")
    plant(no_gpu, gpu={"name": "New"}, utc="2026-01-01T00:00:00+00:00")
    plant(no_gpu, gpu={"name": "Newer but stale"}, utc="2026-06-01T00:00:00+00:00", key="0" * 32)
    assert "Recorded on New," in nsightkit.investigations.measure("starved-input", "before").label


@pytest.mark.parametrize("damage", ["provenance", "samples", "kind", "gpu", "part", "json"])
def test_what_is_no_recording_is_refused(no_gpu: Path, damage: str) -> None:
    place = plant(no_gpu)
    path = place / "provenance.json"
    text = json.loads(path.read_text())
    if damage == "provenance":
        path.unlink()
    elif damage == "json":
        path.write_text("[")
    elif damage == "samples":
        (place / "samples.parquet").unlink()
    else:
        text |= {"kind": {"kind": "dry-run"}, "gpu": {"gpu": None}, "part": {"part": "after"}}[damage]
        path.write_text(json.dumps(text))
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "smoke"
    assert measured.notice
    assert {r["state"] for r in recordings.status() if r["path"]} == {"refused"}


def test_the_mode_can_be_forced(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(no_gpu)
    monkeypatch.setenv("NSIGHTKIT_MODE", "smoke")
    assert nsightkit.investigations.measure("starved-input", "before").mode == "smoke"
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    assert nsightkit.investigations.measure("starved-input", "before").mode == "replay"
    with pytest.raises(NsightkitError, match="no valid recording of starved-input/after"):
        nsightkit.investigations.measure("starved-input", "after")
    monkeypatch.setenv("NSIGHTKIT_MODE", "live")
    with pytest.raises(NsightkitError, match="sees no CUDA GPU"):
        nsightkit.investigations.measure("starved-input", "before")
    monkeypatch.setenv("NSIGHTKIT_MODE", "fast")
    with pytest.raises(UsageError, match="live, replay, smoke"):
        nsightkit.investigations.measure("starved-input", "before")


def test_with_a_gpu_it_is_live_even_beside_a_recording(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(no_gpu)
    monkeypatch.setattr(investigation, "has_gpu", lambda: True)
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "live"
    assert measured.label.startswith("Measured live on Planted GPU")


def test_recordings_are_found_from_below_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSIGHTKIT_RECORDINGS", raising=False)
    monkeypatch.setattr(nsightkit, "__file__", str(tmp_path / "site-packages" / "nsightkit" / "__init__.py"))
    (tmp_path / "checkout" / "docs" / "recordings").mkdir(parents=True)
    (tmp_path / "checkout" / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "checkout" / "examples")
    assert recordings.folder() == tmp_path / "checkout" / "docs" / "recordings"


# -- writing recordings ------------------------------------------------------------------------------------------


def test_what_no_gpu_produced_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "real"))
    samples = recordings.frame({"step_ns": [1]})
    for change in ({"kind": "smoke"}, {"gpu": None}, {"kind": "dry-run", "gpu": None}):
        with pytest.raises(NsightkitError, match="only what was measured on a GPU"):
            recordings.write(planted_trace(), samples, facts(**change), tmp_path / "real")
    with pytest.raises(UsageError, match="give a dry run another folder"):
        recordings.write(planted_trace(), samples, facts(kind="dry-run", gpu=None), tmp_path / "real", dry_run=True)
    with pytest.raises(NsightkitError, match="marked as one"):
        recordings.write(planted_trace(), samples, facts(), tmp_path / "dry", dry_run=True)
    assert not (tmp_path / "real").exists()


def test_a_failed_write_leaves_the_old_recording(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = plant(no_gpu)
    before = sorted(p.relative_to(no_gpu) for p in no_gpu.rglob("*"))

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", broken)
    with pytest.raises(OSError, match="disk full"):
        plant(no_gpu)
    assert sorted(p.relative_to(no_gpu) for p in no_gpu.rglob("*")) == before
    assert (place / "provenance.json").is_file()


def test_a_recording_holds_no_names(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "planted-host")
    monkeypatch.setenv("PLANTED_SECRET", "s3cr3t-value")
    trace = planted_trace()
    frames = {"kernels": trace["kernels"], "ranges": trace["ranges"].assign(name=pd.Categorical(["load s3cr3t-value"]))}
    thread = int(trace["ranges"]["thread"].iloc[0])
    meta = TraceMeta(tool="planted", notes=["from planted-host"], thread_names={thread: "planted-host main"})
    samples = recordings.frame({"step_ns": [1]})
    place = recordings.write(Trace.from_frames(frames, meta), samples, facts(command="run on planted-host"), no_gpu)
    for path in place.rglob("*"):
        if path.suffix == ".json":
            assert "planted-host" not in path.read_text()
    back = nsightkit.load(place / "trace")
    assert back["ranges"]["name"].tolist() == ["load [secret]"]
    assert back["kernels"]["end_ns"].tolist() == [20, 50]
    assert back.meta.thread_names == {thread: "[host] main"}


def test_samples_keep_every_nanosecond(no_gpu: Path) -> None:
    values = [2**53 - 1, 1, 123_456_789_012_345]
    recordings.write(planted_trace(), recordings.frame({"step_ns": values}), facts(), no_gpu)
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert [int(v) for v in measured.values("step_ns")] == values


# -- the recorder ------------------------------------------------------------------------------------------------


def test_without_a_gpu_nothing_is_recorded(no_gpu: Path) -> None:
    with pytest.raises(NsightkitError, match="recordings are made on a GPU"):
        record.record()
    with pytest.raises(UsageError, match="another folder"):
        record.record(out=no_gpu, dry_run=True)
    assert not no_gpu.exists()


def test_the_recorder_resumes_and_survives_a_failure(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "has_gpu", lambda: True)
    working = record.run_child

    def sometimes(part: investigations.Part, *arguments: object, **named: object) -> object:
        if (part.investigation, part.name) == ("gpu-util", "training"):
            raise RuntimeError("CUDA error:\nlost")
        return working(part, *arguments, **named)

    monkeypatch.setattr(record, "run_child", sometimes)
    said: list[str] = []
    first = record.record(echo=said.append)
    everything = [(p.investigation, p.name) for p in investigations.parts()]
    assert [(r["investigation"], r["part"]) for r in first] == everything  # the most valuable first
    assert {(r["part"], r["status"]) for r in first if r["status"] != "recorded"} == {("training", "failed")}
    assert next(r["detail"] for r in first if r["status"] == "failed") == "CUDA error: lost"
    assert sum("recorded" in line for line in said) == len(everything) - 1
    monkeypatch.setattr(record, "run_child", working)
    second = record.record()
    assert [r["part"] for r in second if r["status"] == "recorded"] == ["training"]
    assert {r["status"] for r in second if r["part"] != "training"} == {"kept"}
    assert {r["state"] for r in recordings.status()} == {"current"}


def test_the_recorder_keeps_to_its_budget(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "has_gpu", lambda: True)
    clock = iter(range(0, 10_000, 40))  # every look at the clock finds 40 s gone
    monkeypatch.setattr(record.time, "monotonic", lambda: float(next(clock)))
    statuses = [r["status"] for r in record.record(budget_s=200.0)]
    assert statuses[0] == "recorded"
    assert statuses[-1] == "over budget"
    assert statuses == sorted(statuses, reverse=True)  # once over, it stays so


def test_parts_can_be_chosen(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "has_gpu", lambda: True)
    chosen = record.record(only=["hidden-sync", "gpu-util/training"])
    assert {(r["investigation"], r["part"]) for r in chosen} == {
        ("hidden-sync", "before"), ("hidden-sync", "after"), ("gpu-util", "training")
    }  # fmt: skip
    with pytest.raises(UsageError, match="starved-input/before"):
        record.record(only=["starved"])


def test_a_dry_run_goes_the_whole_way(tmp_path: Path) -> None:
    """With real child processes."""
    pytest.importorskip("torch")
    out = tmp_path / "dry"
    done = children(
        f"""
        import json, pathlib
        from nsightkit.investigations.record import record
        out = pathlib.Path({str(out)!r})
        print(json.dumps(record(["gpu-util/one-thread", "starved-input"], out=out, dry_run=True)))
        """,
        PLANTED_API_KEY="s3cr3t-value",
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [r["status"] for r in rows] == ["recorded"] * 3, rows
    for part in ("before", "after"):
        place = out / "starved-input" / "no-gpu" / part
        told = json.loads((place / "provenance.json").read_text())
        assert told["kind"] == "dry-run"
        assert told["gpu"] is None
        assert told["parameters"]["starved"] == (part == "before")
        samples = pd.read_parquet(place / "samples.parquet")
        counted = samples["metric"].value_counts().to_dict()
        assert counted["step_ns"] == counted["data_wait_ns"] == 12
        trace = nsightkit.load(place / "trace")
        names = trace["ranges"]["name"].value_counts()
        # the active steps, and nothing around them
        assert all(names[phase] == 3 for phase in ("step", "data", "copy", "forward", "backward", "optimizer"))
        assert trace.size("ops") > 100
        # one process decodes between the steps, or two others ahead of them
        assert any("aten::" in name for name in trace["ops"]["name"].unique())
        for path in place.rglob("*"):
            if path.is_file():
                assert b"s3cr3t-value" not in path.read_bytes()
                assert str(Path.home()).encode() + b"/" not in path.read_bytes()
    assert {r.state for r in recordings.find(PART, out)} == {"refused"}
    assert not list(out.rglob(".*"))


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(NsightkitError, match=r"starved-input/before \(live\) failed.*no CUDA GPU"):
        investigation.run_child(PART, "live", tmp_path, kind="smoke", command="", timeout_s=120)
    with pytest.raises(NsightkitError, match=r"not measured within 0\.2 s"):
        investigation.run_child(PART, "smoke", tmp_path, kind="smoke", command="", timeout_s=0.2)


# -- the doctor --------------------------------------------------------------------------------------------------


def test_the_doctor_has_a_remedy_for_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NSIGHTKIT_NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    rows = doctor.report()
    assert len({r["check"] for r in rows}) == len(rows) >= 10
    for row in rows:
        assert row.keys() == {"check", "status", "found", "remedy"}
        assert row["status"] in ("ok", "warn", "missing")
        assert bool(row["remedy"]) == (row["status"] != "ok"), row
        assert "\n" not in "".join(row.values())


def _check(name: str) -> dict[str, str]:
    return next(r for r in doctor.report() if r["check"].startswith(name))


def test_the_doctor_knows_the_traps_of_old_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nsys = tmp_path / "nsys"
    nsys.write_text("#!/bin/sh\necho version 2023.4.4.54\n")
    nsys.chmod(0o755)
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    versions = {"nvtx": "0.2.13"}
    monkeypatch.setattr(doctor, "installed", lambda package: versions.get(package, "1.0"))
    assert _check("nsys (")["status"] == "ok"
    assert _check("NVTX")["status"] == "missing"
    assert "nvtx==0.2.11" in _check("NVTX")["remedy"]
    versions["nvtx"] = "0.2.11"
    assert _check("NVTX")["status"] == "ok"
    assert _check("nsys importer")["status"] == "warn"
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho version 2022.4.2.1\n")
    old.chmod(0o755)
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(old))
    assert "too old" in _check("nsys (")["found"]
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(tmp_path / "absent"))
    assert _check("nsys (")["status"] == "missing"


@pytest.mark.nsys
def test_the_doctor_approves_of_a_real_nsys(nsys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    assert _check("nsys (")["status"] == "ok"
    assert _check("nsys importer")["status"] == "ok"
