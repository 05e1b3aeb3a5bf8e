"""The investigations: their form, that each runs as a plain script, and what each says of a GPU's trace."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import planted

import nsightkit
from nsightkit.analysis.timeline import overview
from nsightkit.investigations.parts import INVESTIGATIONS

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))
import house_form  # noqa: E402

SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
#: A build of the site runs all scripts, in the folder where they lie, and says what they print that is wrong.
A_FEW = SCRIPTS[::6]


#: What idle time on a GPU explains: pages of these work an example with a planted trace.
PLANTED = {"gpu-util", "starved-input", "hidden-sync", "tiny-kernels"}


@each
def test_each_measures_what_is_registered(script):
    assert house_form.measured(script) <= set(INVESTIGATIONS)


def test_every_worked_example_has_its_page():
    assert set.union(*map(house_form.measured, SCRIPTS)) >= PLANTED


def test_all_have_the_form_of_the_house():
    assert len(SCRIPTS) >= 6
    assert house_form.main([]) == 0


@each
def test_what_idle_time_explains_has_a_worked_example(script):
    planted = "planted." in re.sub(r"``[^`]*``", "", script.read_text(encoding="utf-8"))
    assert planted or not house_form.measured(script) & PLANTED


#: Runs each script as a program of its own would run it, in a folder of its own. Prints how each ended, as JSON.
#: They follow one another in one process, because each would import PyTorch and start a process to fork from.
_AS_PROGRAMS = """
import contextlib, io, json, os, runpy, sys, tempfile, traceback
import matplotlib.pyplot as plt

ended = {}
for script in sys.argv[1:]:
    said, complained = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            try:
                runpy.run_path(script, run_name="__main__")
            except BaseException:
                traceback.print_exc()
        plt.close("all")
        ended[script] = {"stdout": said.getvalue(), "stderr": complained.getvalue(), "left": os.listdir()}
print("\\n" + json.dumps(ended))
"""


def _run(program: list[str], **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that has nsightkit and the tests' own modules, and no setting but these."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith("NSIGHTKIT_")}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**unset, "MPLBACKEND": "Agg", "PYTHONPATH": paths, **settings}
    done = subprocess.run(
        [sys.executable, *program], check=False, env=environment, capture_output=True, encoding="utf-8", timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def as_programs():
    done = _run(["-c", _AS_PROGRAMS, *map(str, A_FEW)], NSIGHTKIT_MODE="smoke")
    assert "Warning" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", A_FEW, ids=lambda path: path.stem)
def test_runs_as_a_script_from_anywhere(script, as_programs):
    ended = as_programs[str(script)]
    assert not ended["stderr"]
    assert ended["stdout"].strip()
    assert not ended["left"], "it leaves nothing behind"


#: Runs scripts as a build with GPU traces would: `measure` gives planted traces under the names and with the
#: operators that a profile of the real program has. Prints what each made, as JSON.
_WITH_GPU = """
import ast, dataclasses, functools, gc, importlib, itertools, json, sys, tempfile
from pathlib import Path
import matplotlib.pyplot as plt
import numpy as np, pandas as pd
import nsightkit, nsightkit.trace.snapshot
from make_snapshot import leaking_program
from nsightkit.analysis import snapshot as snapshots
from nsightkit.analysis.roofline.envelope import envelope
from nsightkit.capture import memory
from nsightkit.configurations import Configuration
from nsightkit.trace.model import TABLES, Trace, TraceMeta
from _lib import counters as planted_counters
from synthetic import planted
from nsightkit.investigations import measurement as investigation, recordings, sweep_column
from nsightkit.investigations.parts import find
from nsightkit.workloads.training import TrainingConfig

FAULTS = {"starved-input": "starved", "hidden-sync": "sync", "tiny-kernels": "tiny", "gpu-util": None}
FAULTS |= {"one-change": "starved"}
NAMES = {"dataload": "data", "to_device": "copy"}
folder = Path(tempfile.mkdtemp())
scripts, runs, permitted = json.loads(sys.argv[1])

def six_kernels(path, microseconds):
    # One kernel in each of six ranges, three times over.
    out = planted.Export()
    cpu, process, now = out.thread(1, 1), out.process(1), 10_000
    for _ in range(3):
        begun = now
        for case, lasting in microseconds.items():
            call = out.call("cudaLaunchKernel", cpu, now + 1_000, now + 3_000)
            out.kernel(case, now + 5_000, now + 5_000 + 1_000 * lasting, call, process)
            out.range(case, cpu, now, now + 4_000)
            now += 1_000 * lasting + 10_000
        out.range("step", cpu, begun, now)
        now += 1_000
    out.write(path)

def measure(name, part):
    changed = part in ("after", "one-thread", "aligned_dims", "flash-bf16", "compiled", "after-again")
    return measured(name, part, modes[changed])

@functools.cache
def measured(name, part, mode):
    fault = FAULTS.get(name) if part in ("before", "again") else None
    path = folder / f"{name}-{part}.sqlite"
    if name == "limiters":
        softmax = {"before": 2000, "after": 100}[part]
        times = {"product": 1400, "product_fp32": 2700, "add": 100, "strided": 450, "softmax": softmax, "chase": 500}
        six_kernels(path, times)
    else:
        planted.training(path, fault, steps=3, layers=3)
    source = nsightkit.load(path)
    frames = {t: source.table(t) for t in TABLES}
    frames["ranges"]["name"] = frames["ranges"]["name"].cat.rename_categories(lambda n: NAMES.get(n, n))
    calls = frames["calls"]
    item = calls["name"] == "cudaStreamSynchronize"
    ops = calls[["start_ns", "end_ns", "thread"]]
    process = frames["ranges"]["process"].iloc[0]
    inputs = '[[[4096,4096],[]],["c10::BFloat16","Scalar"],[]]'
    names = np.where(item, "aten::item", "aten::mul")
    frames["ops"] = ops.assign(process=process, name=names, inputs=np.where(item, "", inputs))
    missing = []
    if mode == "smoke":
        missing = ["kernels", "memops", "graphs", "calls", "syncs", "os_calls", "overhead"]
        frames = {t: f for t, f in frames.items() if t not in missing}
    trace = Trace.from_frames(frames, TraceMeta(tool="planted", missing=missing, gpus=source.meta.gpus))
    sizes = find(name, part).parameters(mode)
    looked_at = find(name, part).measured == "observed"
    if looked_at:
        module, _, start = find(name, part).workload.partition(":")
        with getattr(importlib.import_module(module), start)("cpu", **find(name, part).parameters("smoke")) as work:
            work.step()
            observed, sizes = work.observed(), work.parameters
    elif find(name, part).workload == "nsightkit.workloads.training:start":
        sizes = dataclasses.asdict(TrainingConfig(**sizes))
    samples = {"step_ns": [9e6, 1e7, 1.1e7], "data_wait_ns": [4e6, 5e6, 6e6], "loss": [2.0] * (1 + (mode == "smoke"))}
    if name == "gpu-util" and mode != "smoke":
        samples["gpu_utilization_percent"] = [97.0, 98.0]
    if looked_at:
        samples = {"step_ns": samples["step_ns"], **observed}
    if find(name, part).measured == "swept":
        # Nobody has a planted GPU's memory; the counter of tensors stands in for it, with its limit and its failures.
        module, _, start = find(name, part).workload.partition(":")
        work, small = getattr(importlib.import_module(module), start), find(name, part).parameters("smoke")
        small = small | {"context": [16, 256, 512, 1024], "d_model": [16], "cell_s": 1e-4}
        counts = find(name, part).counts("smoke")
        samples, sizes = sweep_column.swept(work, "cpu", small, counts, folder)
    made = folder / f"{name}-{part}-{mode}"
    made.mkdir(exist_ok=True)
    if find(name, part).measured == "remembered":
        model = Configuration(
            "planted", intent="", **{k: v for k, v in sizes.items() if k in Configuration.__dataclass_fields__}
        )
        snapshot = leaking_program(
            tokens=model.tokens, vocabulary=model.vocabulary, parameters=envelope(model).params,
            keep_graph=sizes["keep_graph"], limit_bytes=sizes.get("limit_bytes"),
        )
        taken = memory.write(snapshot, made / "snapshot.pickle")
        read = snapshots.summary(nsightkit.trace.snapshot.read(taken))
        samples |= {"steps": [3], "peak_bytes": [read["peak_bytes"]], "context_bytes": [5e8]}
    gpu = None if mode == "smoke" else {"name": "Planted GPU"}
    provenance = {"investigation": name, "part": part, "parameters": sizes, "gpu": gpu, "utc": "2026-01-01"}
    run = investigation.Measurement(made, mode, recordings.frame(samples), provenance)
    run.__dict__["trace"] = trace
    if find(name, part).profiled == "nsys" and mode != "smoke":
        by_nsys = {t: f for t, f in frames.items() if t != "ops"}
        run.__dict__["nsys_trace"] = Trace.from_frames(by_nsys, TraceMeta(tool="planted", missing=["ops"]))
    if find(name, part).profiled == "ncu":
        if permitted and mode != "smoke":
            run.__dict__["ncu_report"] = planted_counters.counters(many_rows=part == "after")[0]
        else:
            run.provenance["ncu"] = {"notice": "they are closed to this user"}
    return run

investigation.measure = measure

class Shown(ast.NodeTransformer):
    def visit_Module(self, node):
        for statement in node.body:
            if isinstance(statement, ast.Expr):
                statement.value = ast.Call(ast.Name("_show", ast.Load()), [statement.value], [])
        return ast.fix_missing_locations(node)

made = [{} for _ in runs]
for (modes, pages), script in itertools.product(zip(runs, made), map(Path, scripts)):
    gc.freeze()  # some workloads collect between steps, and here all of PyTorch would be gone through
    shown = []
    def _show(value):
        shown.append(getattr(value, "_repr_html_", str)() or "")
    names = {"__name__": "__main__", "_show": _show}
    exec(compile(Shown().visit(ast.parse(script.read_text())), str(script), "exec"), names)
    figures = [plt.figure(n) for n in plt.get_fignums()]
    titles = [  # several charts under one title are titled as one
        title
        for figure in figures
        for title in list(filter(None, [figure.get_suptitle()])) or [axes.get_title(loc="left") for axes in figure.axes]
    ]
    labels = [figure.get_label() for figure in figures]
    plt.close("all")
    pages[script.stem] = {"titles": titles, "labels": labels, "html": "".join(shown), "findings": names["findings"]}
print("\\n" + json.dumps(made))
"""


def _with_gpu(*runs: tuple[str, str], scripts: list[Path] = SCRIPTS, counters: bool = True) -> list[dict[str, dict]]:
    """What each script made, for each pair of modes: of its first part, and of the changed one."""
    job = json.dumps([list(map(str, scripts)), runs, counters])
    done = _run(["-W", "error::RuntimeWarning", "-c", _WITH_GPU, job])
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def both_ways():
    return _with_gpu(("replay", "replay"), ("replay", "smoke"))


@pytest.fixture(scope="module")
def replayed(both_ways):
    return both_ways[0]


@each
def test_a_recording_of_a_gpu_is_read_like_the_synthetic_trace(script, replayed):
    page = replayed[script.stem]
    assert page["titles"]
    assert all(page["titles"] + page["labels"])
    assert any("(replay)" in title for title in page["titles"])
    origins = ("replay", "synthetic", "predicted", "exact", "case file", "reported")
    assert all(any(origin in title for origin in origins) for title in page["titles"])
    for absent in ("smoke", "not measured<", "not recorded", "no GPU<", ">nan<"):
        assert absent not in page["html"], absent
    assert "CPU" not in page["findings"]["verdict"]
    if not script.name.startswith("01") and house_form.measured(script) & PLANTED:
        assert "GPU idle time by cause (replay)" in page["titles"]


def test_two_captures_of_one_program_are_shown_to_agree(replayed):
    html = replayed["07_where_a_step_goes"]["html"]
    (table,) = [t for t in html.split("</table>") if ">difference<" in t]
    assert ">Nsight Systems<" in table
    assert set(re.findall(r">([+-][\d.,]+%)<", table)) == {"+0.0%"}
    assert table.count("+0.0%") > 20
    for row in ("busy (ms)", "backward", "GEMM", "kernel count"):
        assert f">{row}<" in table


def _verdict(pages: dict[str, dict], number: str) -> str:
    return next(page["findings"]["verdict"] for name, page in pages.items() if name.startswith(number))


def test_verdicts_say_what_was_measured(replayed):
    assert "98%" in replayed["01_gpu_util_lies"]["findings"]["verdict"]
    starved = replayed["02_starved_input_pipeline"]["findings"]
    assert "waiting took 50% of a step without workers and 50%" in " ".join(starved["verdict"].split())
    assert "1.0 times as fast (predicted by replay: " in starved["verdict"]
    assert "): 10.0 ms" in starved["verdict"]
    assert "no effect beyond the spread" in replayed["03_hidden_synchronisation"]["findings"]["verdict"]
    changed = _verdict(replayed, "20")
    assert "the change made a step faster" in changed
    assert "0 of 4 kernels changed" in changed
    assert "moved from input-pipeline" in changed
    sums = replayed["05_mixed_precision_accumulation"]["findings"]
    assert "10.0001 in fp32, 9.9531 in fp16 and 4.0000 in bf16" in sums["verdict"]
    assert "12 of 12 sums" in sums["verdict"]
    # The planted GPU has the CPU's types, and the page must notice that they are not CUDA's.
    right, of = re.search(r"(\d+) of (\d+) types were as the lists for CUDA say", _verdict(replayed, "06")).groups()
    assert 0 < int(right) < int(of)


def test_a_predicted_gain_stands_beside_the_measured_one(replayed, tmp_path):
    """The truth is the same loop without its fault, which is what the replay has to predict."""

    def window_ns(fault):
        path = tmp_path / f"{fault}.sqlite"
        planted.training(path, fault, steps=3, layers=3)
        return overview.summary(nsightkit.load(path, cache=False))["window_ns"]

    healthy_ns = window_ns(None)
    for number, fault in (("02", "starved"), ("03", "sync"), ("20", "starved")):
        said = re.search(r"predicted by replay: ([^)]*)\)", _verdict(replayed, number))[1]
        left = 1 + float(said.removesuffix("%")) / 100 if said.endswith("%") else 1 / float(said)
        assert left == pytest.approx(healthy_ns / window_ns(fault), rel=0.03), number
    # The planted loop with tiny kernels has more of them than the one without.
    assert float(re.search(r"predicted by replay: ([\d.]+)", _verdict(replayed, "04"))[1]) > 1.5


def test_limiters_are_read_from_counters_and_without_them(replayed):
    (script,) = [script for script in SCRIPTS if script.name.startswith("19")]
    page = replayed[script.stem]
    assert "Six kernels, six limiters (replay)" in page["titles"]
    verdict = page["findings"]["verdict"]
    assert "6 of 6 kernels" in verdict
    assert "4.5 times as long to add (by the bytes: 4.5)" in verdict
    assert "over few rows 20.0 times as long as over many" in verdict
    assert "goes from latency-bound to memory-bound" in verdict
    ((closed,),) = [run.values() for run in _with_gpu(("replay", "replay"), scripts=[script], counters=False)]
    verdict = closed["findings"]["verdict"]
    assert "There were no counters" in verdict
    assert "4.5 times as long to add" in verdict
    assert closed["html"].count(">memory-bound<") < page["html"].count(">memory-bound<")
    assert "Six kernels under their roofs (replay)" in closed["titles"]
    assert not any("six limiters (replay)" in title for title in closed["titles"])


def test_runs_of_two_kinds_of_machine_are_not_compared(both_ways):
    for name, page in both_ways[1].items():
        verdict = page["findings"]["verdict"]
        assert ("nothing to compare" in verdict) != name.startswith("01"), verdict
        if name.startswith("01"):
            assert "was not read" in verdict
