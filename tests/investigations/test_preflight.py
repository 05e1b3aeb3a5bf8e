"""The checks of a machine before it records: each runs here, on a CPU or against a stand-in; a failure costs itself."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stand_in_cuda import stand_in

from nsightkit.cli import run as command
from nsightkit.errors import NsightkitError
from nsightkit.investigations import parts, preflight
from nsightkit.workloads.layer import RUNGS

#: Checks that start other programs, or take long, have tests of their own.
_APART = ("snapshot", "nsys", "gloo")
QUICK = [name for name, check in preflight.CHECKS.items() if check.where != "gpu" and name not in _APART]


def asked(check: str, device: str) -> tuple[bool, str]:
    answer = preflight.main(check, device)
    return answer["ok"], answer["detail"]


# -- each check --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", QUICK)
def test_a_check_that_runs_on_a_cpu_works_there(tmp_path: Path, check: str) -> None:
    works, detail = asked(check, "cpu")
    assert works, detail


def test_processes_that_work_together_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workload itself runs in ``tests/workloads/test_late_rank.py``."""
    done: list[str] = []

    @contextlib.contextmanager
    def crew(device: str, **sizes: Any) -> Iterator[SimpleNamespace]:
        parameters = {"ranks": sizes.get("ranks", 2), "backend": f"gloo on {device}"}
        yield SimpleNamespace(step=lambda: done.append("step"), parameters=parameters)

    monkeypatch.setattr(preflight, "resolve", lambda place: crew if place.endswith("late_rank:start") else None)
    assert asked("gloo", "cpu") == (True, "2 processes through gloo on cpu")
    assert done == ["step"]


@pytest.mark.nsys
def test_the_capture_under_nsys_works(tmp_path: Path, nsys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    assert asked("nsys", "cpu") == (True, "1 ranges")


def test_a_real_ncu_without_a_gpu_says_why_it_counts_nothing(
    tmp_path: Path, real_ncu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSIGHTKIT_NCU", str(real_ncu))
    works, detail = asked("ncu", "cpu")
    assert not works
    assert "no NVIDIA GPU here" in detail or "no CUDA driver" in detail


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A GPU as torch and nvidia-smi describe one."""
    has = SimpleNamespace(
        name="Planted GPU", total_memory=141 * 2**30, multi_processor_count=132, major=9, minor=0, uuid="GPU-planted"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: has)
    has.smi = tmp_path / "bin" / "nvidia-smi"
    has.smi.parent.mkdir()
    has.smi.write_text("#!/bin/sh\necho '97, 1980, 655.5, 0x0000000000000004'\n")
    has.smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{has.smi.parent}:/usr/bin:/bin")
    return has


def test_the_gpu_is_described(tmp_path: Path, gpu: SimpleNamespace) -> None:
    works, detail = asked("gpu", "cuda")
    assert works
    assert detail.startswith("Planted GPU, 141 GiB, 132 multiprocessors, compute capability 9.0, CUDA ")
    assert asked("nvml", "cuda") == (
        True, "gpu_utilization_percent 97, sm_clock_mhz 1980, power_w 655.5, slowdown_mask 4"
    )  # fmt: skip
    gpu.smi.write_text("#!/bin/sh\nexit 9\n")
    assert asked("nvml", "cuda") == (
        False,
        "nvidia-smi does not give sm_clock_mhz, power_w, slowdown_mask; recordings go without",
    )


@pytest.mark.parametrize(
    "check", ["gpu", "host", "bf16", "fp8", "cuda-graph", "snapshot", "attention", "trace", "write"]
)
def test_what_a_check_asks_of_cuda_exists_and_comes_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: str
) -> None:
    def small(investigation: str, name: str) -> parts.Part:
        part = parts.find(investigation, name)
        return dataclasses.replace(part, gpu=part.smoke) if investigation == "decode" else part

    monkeypatch.setattr(preflight, "find", small)
    with stand_in() as cuda:
        works, detail = asked(check, "cuda")
    if check == "trace":
        assert (works, detail) == (False, "the profile of PyTorch holds no kernels")  # which a CPU has none of
    else:
        assert works, detail
    if check == "cuda-graph":
        assert "launched one by one" not in detail
        assert cuda.log


def test_a_name_that_scrubbing_would_change_is_said(
    tmp_path: Path, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked("host", "cuda")[0]
    monkeypatch.setenv("PLANTED_SECRET", "s3cr3t-value")
    gpu.name = "Planted s3cr3t-value"
    works, detail = asked("host", "cuda")
    assert not works
    assert detail.startswith("Planted s3cr3t-value would be recorded as Planted [secret]")


def test_what_is_absent_or_wrong_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    works, detail = asked("imports", "cpu")
    assert not works
    assert detail.startswith("these cannot be imported: nvtx (")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    works, detail = asked("disk", "cpu")
    assert not works
    assert "1.0 GiB are free" in detail
    scaled, ones = torch._scaled_mm, torch.ones_like
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **named: ones(scaled(*given, **named)))
    works, detail = asked("fp8", "cpu")
    assert not works
    assert detail.startswith("its result is wrong: numbers of 1, not about 12.8")
    monkeypatch.setattr(torch, "_scaled_mm", None)
    works, detail = asked("fp8", "cpu")
    assert not works
    assert detail.startswith("TypeError: ")


# -- all of them -------------------------------------------------------------------------------------------------


def test_real_processes_answer(tmp_path: Path) -> None:
    rows = preflight.run("cpu", ["snapshot", "disk"])
    assert [(row["check"], row["ok"]) for row in rows] == [("snapshot", True), ("disk", True)]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What processes answer, by check, and the jobs they were given."""
    found: dict[str, Any] = {"jobs": {}}

    def ask(module: str, job: dict[str, str], timeout_s: float, start: object) -> dict[str, Any]:
        found["jobs"][job["check"]] = job["device"]
        answer = found.get(job["check"], {"ok": True, "detail": "planted"})
        if isinstance(answer, Exception):
            raise NsightkitError(f"{answer}") from answer
        return answer

    monkeypatch.setattr(preflight, "ask_child", ask)
    monkeypatch.setattr(preflight, "starter", lambda: None)
    return found


def test_on_a_gpu_all_is_asked_and_a_crash_or_a_hang_costs_one_answer(answers: dict[str, Any], tmp_path: Path) -> None:
    answers |= {"fp8": RuntimeError("exit code -11"), "compile": subprocess.TimeoutExpired("compile", 60.0)}
    answers["ncu"] = {"ok": False, "detail": "no counters"}
    said: list[str] = []
    rows = preflight.results(tmp_path / "new" / preflight.SAVED, said.append)
    assert [row["check"] for row in rows] == list(preflight.CHECKS)
    assert set(answers["jobs"].values()) == {"cuda"}
    assert {row["check"]: row["ok"] for row in rows if not row["ok"]} == {"fp8": False, "compile": None, "ncu": False}
    assert preflight.no_gpu(rows) == ""
    assert "ncu: does not work, no counters" in said
    assert sum(": works, planted" in line for line in said) == len(rows) - 3
    # Until the machine is started again, that is known.
    answers["jobs"].clear()
    assert preflight.results(tmp_path / "new" / preflight.SAVED) == rows
    assert not answers["jobs"]
    kept = json.loads((tmp_path / "new" / preflight.SAVED).read_text())
    for text in (json.dumps(kept | {"boot": "another"}), "[", "[]"):
        (tmp_path / "new" / preflight.SAVED).write_text(text)
        answers["jobs"].clear()
        assert len(preflight.results(tmp_path / "new" / preflight.SAVED)) == len(rows)
        assert answers["jobs"]


def test_without_a_gpu_it_is_said_in_one_line_with_what_could_be_checked(
    answers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers["gpu"] = {"ok": False, "detail": "torch sees none"}
    answers["nsys"] = {"ok": False, "detail": "not installed"}
    assert command(["record", "--preflight", "--out", str(tmp_path), "-f", "json"]) == 2
    out, err = capsys.readouterr()
    asked = ["imports", "gpu", "trace", "write", "gloo", "nsys", "disk"]
    assert [row["check"] for row in json.loads(out)] == asked
    assert {check: answers["jobs"][check] for check in asked[2:]} == dict.fromkeys(asked[2:], "cpu")
    assert err.splitlines()[-1] == (
        "nsightkit: there is no GPU here (torch sees none); of what can be checked without one: imports works, trace "
        "works, write works, gloo works, nsys does not work, disk works"
    )
    assert not list(tmp_path.iterdir())


def test_a_module_that_is_not_installed_is_named_and_costs_no_other_answer(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['msgspec'] = None\n"
        "from nsightkit import cli\n"
        "from nsightkit.investigations import preflight\n"
        "preflight.ask_child = lambda *_: {'ok': True, 'detail': 'planted'}\n"
        "preflight.starter = lambda: None\n"
        f"sys.exit(cli.run(['record', '--preflight', '--out', {str(tmp_path)!r}, '-f', 'json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert [row["check"] for row in json.loads(done.stdout)] == list(preflight.CHECKS)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "nsightkit: msgspec is not installed, and this needs it: pip install msgspec"
    )


def test_what_there_is_no_time_for_is_not_called_broken(answers: dict[str, Any]) -> None:
    rows = preflight.run(limit_s=0.5)
    assert not answers["jobs"]
    assert {(row["ok"], row["detail"]) for row in rows} == {(None, "no time was left for it")}


# -- what a part needs -------------------------------------------------------------------------------------------


def test_a_part_needs_what_it_uses() -> None:
    every = {(part.investigation, part.name): preflight.needs(part) for part in parts.parts()}
    assert set().union(*every.values()) <= set(preflight.CHECKS)
    assert all(part.profiled in {None, *preflight.CHECKS} for part in parts.parts())
    assert every["ceilings", "copy"] == set()
    assert every["ceilings", "fp8"] == {"fp8"}
    assert every["ladder", "fp8"] == {"fp8", "compile"}
    assert every["decode", "sums"] == {"cuda-graph", "compile"}
    assert every["attention-sweep", "naive-compiled-bf16"] == {"bf16", "compile"}
    assert every["memory-snapshot", "full"] == {"bf16", "snapshot"}
    assert every["late-rank", "before"] == {"gloo"}
    for mode, investigation in (("prefill", "ladder"), ("decode", "decode")):
        for name, rung in RUNGS[mode].items():
            found = every[investigation, name]
            assert ("triton" in found, "cuda-graph" in found) == (rung.triton, rung.graphed)
    others = {investigation for (investigation, _), found in every.items() if "triton" in found}
    assert others == {"ladder", "decode", "limiters"}


def test_what_travels_is_what_images_for_pytorch_lack_at_pinned_versions() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["capture"]]
    names = {re.split(r"[><=]", requirement)[0] for requirement in needed}
    default = re.search(r"set -- (.+)", (root / "tools/carry_to_gpu.sh").read_text(encoding="utf-8"))
    assert default is not None
    assert set(default[1].split()) == names - {"numpy", "pandas", "pyarrow", "rich", "typer"}
    pins = re.findall(r"^([\w-]+)==", (root / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert names <= set(pins)
