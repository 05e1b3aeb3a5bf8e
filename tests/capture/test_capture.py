"""Measuring without nsys: torch.profiler, timers, provenance, the doctor."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import nsightkit
from nsightkit.capture import doctor, provenance, torch_profiler
from nsightkit.errors import NsightkitError, UsageError

# -- the package -------------------------------------------------------------------------------------------------


def test_importing_capture_loads_nothing_heavy() -> None:
    program = """
        import sys
        import nsightkit.capture, nsightkit.workloads
        heavy = {"torch", "pandas", "numpy", "matplotlib", "nvtx"} & set(sys.modules)
        assert not heavy, heavy
        assert callable(nsightkit.capture.phase)
        assert "torch" not in sys.modules
        """
    environment = os.environ | {"PYTHONPATH": str(Path(nsightkit.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, timeout=300, check=True)


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


def test_a_program_is_profiled_unchanged(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTHONPATH", str(Path(nsightkit.__file__).parents[1]))  # the program uses it, we need not
    from nsightkit.capture import torch_profiler

    output = tmp_path / "-out $(x) 'q"
    done = torch_profiler.profile_command([sys.executable, str(script), "3", "--flag"], output, with_stack=True)
    assert done.trace == output.with_name(output.name + ".json.gz")
    assert done.returncode == 3
    assert done.notes == ["the program ended with exit code 3"]
    captured = capfd.readouterr()
    assert captured.out == ""  # our stdout belongs to the answer
    assert "arguments: ['3', '--flag']" in captured.err
    trace = nsightkit.load(done.trace)
    assert trace["ranges"]["name"].tolist().count("step") == 3
    assert {"aten::mm", "aten::item"} <= set(trace["ops"]["name"])
    assert trace["frames"]["name"].str.contains("a program.py").any()
    with pytest.raises(UsageError, match="exists"):
        torch_profiler.profile_command([str(script), "0"], output)


#: What the profiled process needs of torch: which program it runs, and how, does not depend on the rest.
SMALL_TORCH = """
import json, sys
from types import ModuleType, SimpleNamespace
class profile(SimpleNamespace):
    def start(self): pass
    def stop(self): pass
    def export_chrome_trace(self, path):
        op = {"ph": "X", "cat": "cpu_op", "name": "aten::cumsum", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
        json.dump({"schemaVersion": 1, "traceEvents": [op]}, open(path, "w"))
cuda = SimpleNamespace(is_available=lambda: False)
profiler = sys.modules["torch.profiler"] = ModuleType("torch.profiler")
profiler.profile, profiler.ProfilerActivity = profile, SimpleNamespace(CPU=1)
"""


@pytest.fixture
def small_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SMALL_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("small_torch")
def test_a_module_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "mine.py").write_text("import sys; open('argv', 'w').write(f'{__name__} {sys.argv[1:]}')")
    monkeypatch.chdir(tmp_path / "cwd")
    done = torch_profiler.profile_command([sys.executable, "-m", "mine", "7"], tmp_path / "m")
    assert (done.returncode, done.notes) == (0, [])
    assert (tmp_path / "cwd" / "argv").read_text() == "__main__ ['7']"
    assert "aten::cumsum" in set(nsightkit.load(done.trace)["ops"]["name"])


def test_only_python_programs_are_profiled(tmp_path: Path) -> None:
    from nsightkit.capture import torch_profiler

    for command, words in (([], "no command"), (["ls"], "Python program"), (["python"], "Python program")):
        with pytest.raises(UsageError, match=words):
            torch_profiler.profile_command(command, tmp_path / "t")


@pytest.mark.usefixtures("small_torch")
def test_a_program_without_a_trace_says_so(tmp_path: Path) -> None:
    program = tmp_path / "p.py"
    program.write_text("import os; os._exit(9)")
    with pytest.raises(NsightkitError, match="exit code 9 and left no trace"):
        torch_profiler.profile_command([sys.executable, str(program)], tmp_path / "t")
    program.write_text("import os, signal, time\nsignal.signal(signal.SIGINT, lambda *_: os._exit(9))\ntime.sleep(600)")
    with pytest.raises(NsightkitError, match=r"not done within 0\.5 s"):
        torch_profiler.profile_command([sys.executable, str(program)], tmp_path / "t", timeout_s=0.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.py", "torch"]


@pytest.mark.usefixtures("small_torch")
def test_a_program_whose_time_is_up_leaves_its_trace(tmp_path: Path) -> None:
    program = tmp_path / "p.py"
    program.write_text("import time; time.sleep(600)")
    done = torch_profiler.profile_command([sys.executable, str(program)], tmp_path / "t", timeout_s=5)
    assert done.notes[0] == "the program was interrupted after 5 s; the trace ends there"
    assert done.returncode != 0
    assert "aten::cumsum" in set(nsightkit.load(done.trace)["ops"]["name"])


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
    assert timed.shape == (7,)
    assert timed.dtype == np.int64
    assert (timed > 0).all()
    with pytest.raises(ValueError, match="repetitions"):
        timing.time_calls(int, warmup=0, repetitions=0, device="cpu")


@pytest.mark.gpu
def test_cuda_events_time_what_the_gpu_does() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from nsightkit.capture import timing

    a = torch.rand(4096, 4096, device="cuda")
    timed = timing.time_calls(lambda: a @ a, warmup=5, repetitions=20, device="cuda")
    assert np.median(timed) > 4096**3 * 2 / 1e15 * 1e9  # no card does a PFLOP/s in fp32


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


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["aten::_scaled_dot_product_cudnn_attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"], ["cudnn"]),
        (["cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7"], ["cudnn"]),  # of a graph
        (["void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>"], ["flash"]),
        (["aten::_scaled_dot_product_efficient_attention", "fmha_cutlassF_f32_aligned_64x64_rf_sm80"], ["efficient"]),
        (
            ["aten::_scaled_dot_product_attention_math", "nvjet_hsh_64x8", "aten::scaled_dot_product_attention"],
            ["math"],
        ),
        (["aten::softmax", "triton_red_fused_flash_0", "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_TNT"], []),
    ],
)
def test_the_back_end_of_attention_is_read_from_a_profile(names: list[str], chosen: list[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"name": name} for name in names]}).encode()))
    assert torch_profiler.attention_back_ends(path) == chosen


def test_provenance_shows_the_back_end_of_attention() -> None:
    assert ("Fused attention by", "cudnn") in provenance.rows({"sdpa_backend": "cudnn"})
    assert not provenance.rows({})


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
