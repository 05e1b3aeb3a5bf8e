"""torch.profiler around steps and around whole programs, and the timer."""

import json
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import nsightkit
from nsightkit.capture import timing, torch_profiler
from nsightkit.errors import NsightkitError, UsageError

SCRIPT = """
    import sys, torch
    from nsightkit.workloads.phases import phase
    with phase("step"):
        (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item()
    print("arguments:", sys.argv[1:])
    sys.exit(3)
"""


def test_a_program_is_profiled_unchanged(tmp_path, capfd, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTHONPATH", str(Path(nsightkit.__file__).parents[1]))  # the program uses it, we need not
    script = tmp_path / "a program.py"
    script.write_text(textwrap.dedent(SCRIPT))
    output = tmp_path / "-out $(x) 'q"
    done = torch_profiler.profile_command([sys.executable, str(script), "--flag"], output, with_stack=True)
    assert done.trace == output.with_name(output.name + ".json.gz")
    assert done.notes == ["the program ended with exit code 3; its trace is kept"]
    captured = capfd.readouterr()
    assert captured.out == ""  # our stdout belongs to the answer
    assert "arguments: ['--flag']" in captured.err
    trace = nsightkit.load(done.trace)
    assert "step" in set(trace["ranges"]["name"])
    assert {"aten::mm", "aten::item"} <= set(trace["ops"]["name"])
    assert trace["frames"]["name"].str.contains("a program.py").any()
    with pytest.raises(UsageError, match="exists"):
        torch_profiler.profile_command([str(script)], output)


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


MODULE = """
import pathlib, sys, time
pathlib.Path("argv").write_text(f"{__name__} {sys.argv[1:]}")
time.sleep(99)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs run with the small torch."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(SMALL_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "torch" / ".."))
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_module_whose_time_is_up_leaves_its_trace(folder):
    (folder / "mine.py").write_text(MODULE)
    done = torch_profiler.profile_command(["-m", "mine", "7"], folder / "m", timeout_s=3)
    assert done.notes[0] == "the program was interrupted after 3 s; the trace ends there"
    assert (folder / "argv").read_text() == "__main__ ['7']"
    assert "aten::cumsum" in set(nsightkit.load(done.trace)["ops"]["name"])


def test_a_program_without_a_trace_says_so(folder):
    (folder / "p.py").write_text("import os; os._exit(9)")
    with pytest.raises(NsightkitError, match=r"left no trace.*exit code 9"):
        torch_profiler.profile_command(["p.py"], folder / "t")
    for command in ([], ["ls"], ["python"]):
        with pytest.raises(UsageError, match="Python program"):
            torch_profiler.profile_command(command, folder / "t")
    assert [path.name for path in folder.iterdir()] == ["p.py"]


def test_only_the_active_steps_are_kept(tmp_path):
    torch = pytest.importorskip("torch")
    calls = []

    def step():
        calls.append(0)
        torch.ones(len(calls)).cumsum(0)

    out = torch_profiler.profile_steps(step, tmp_path / "t.json", warmup=1, active=3)
    assert len(calls) == 5
    assert nsightkit.load(out)["ops"]["name"].tolist().count("aten::cumsum") == 3
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7", ["cudnn"]),  # of a graph
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64>>", ["flash"]),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", ["efficient"]),
        ("aten::_scaled_dot_product_attention_math", ["math"]),
        ("triton_red_fused_flash_0", []),
    ],
)
def test_the_back_end_of_attention_is_read_from_a_profile(name, chosen, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"name": name}]}))
    assert torch_profiler.attention_back_ends(path) == chosen


def test_every_call_is_timed_after_the_warm_up():
    calls = []
    timed = timing.time_calls(lambda: calls.append(sum(range(1000))), warmup=3, repetitions=7, device="cpu")
    assert len(calls) == 10
    assert (timed.shape, timed.dtype) == ((7,), np.int64)
    assert (timed > 0).all()
    with pytest.raises(ValueError, match="repetitions"):
        timing.time_calls(int, warmup=0, repetitions=0, device="cpu")
