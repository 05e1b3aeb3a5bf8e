"""Parity with HolisticTraceAnalysis 0.5.0 on real PyTorch profiler traces.

The figures below were printed by HTA itself (the script at the end of this file, ``HTA_DISABLE_NS_ROUNDING=1`` and
``include_last_profiler_step=True``), so parity is checked where HTA is not installed too. Where it is (in this
interpreter, or in the one that ``NSIGHTKIT_HTA_PYTHON`` names) the script runs again, on traces that agree and on one
for each difference, and its figures are compared.

Three definitions differ, and each has its test: HTA leaves out GPU work whose launch is not in the trace, counts a wait
of a stream for an event as computation, and takes a CPU operator for a kernel when its arguments name a stream.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import nsightkit
from nsightkit.analysis.core import intervals

# trace: (kernel time = computation + communication, memory time, span of GPU work, idle time), µs
HTA = {
    "tracelens/h100__facebook_timesformer-base-finetuned-k400__1016002.json.gz":
        (154855.595, 3577.579, 159992.427, 1559.253),
    "hta/critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz": (371, 3, 19506, 19132),
    "hta/negative_queue_length_values_check__rank0.json.gz": (345095, 45142, 1229072, 848216),
    "hta/trace_diff__control__control.json.gz": (446813, 54754, 464594, 76007),
    "hta/trace_diff__test__test.json.gz": (745787, 161458, 744514, 51692),
    "hta/trace_filter__sampled_rank-0.json.gz": (606519, 1325, 1222847, 675191),
    "hta/trace_filter__sampled_rank-1.json.gz": (651026, 16504, 1231186, 651136),
    "hta/triton_example__triton_example.json.gz": (97.572, 0, 95.812, 0),
    "kineto/resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz": (591532, 12026, 996477, 392919),
    "kineto/resnet50_num_workers_4__worker0.1623212756351.pt.trace.json.gz": (594868, 19545, 801550, 187137),
    "param/linear_kineto.json.gz": (369343, 1640, 1008570, 637587),
}  # fmt: skip

STREAM_WAITS, ORPHANS, LAUNCHER = "hta/critical_path", ("hta/negative", "hta/trace_diff__test"), "hta/triton"
DIFFERENT = (STREAM_WAITS, *ORPHANS, LAUNCHER)
#: What HTA is run on again: the others take it many times as long, and show nothing more.
AGAIN = [n for n in HTA if n.startswith((STREAM_WAITS, ORPHANS[0], LAUNCHER, "hta/trace_filter", "param"))]


def figures(trace, kernels=None):
    """HTA's four figures, in nanoseconds, by our tables."""
    kernels = trace["kernels"] if kernels is None else kernels
    memops = trace["memops"]
    start = np.concatenate([kernels["start_ns"], memops["start_ns"]])
    end = np.concatenate([kernels["end_ns"], memops["end_ns"]])
    span = int(end.max() - start.min())
    return (
        int((kernels["end_ns"] - kernels["start_ns"]).sum()),
        int((memops["end_ns"] - memops["start_ns"]).sum()),
        span,
        span - int(intervals.union_length(start, end)),
    )


def expected(name):
    return tuple(round(us * 1000) for us in HTA[name])


@pytest.mark.parametrize("name", [n for n in HTA if not n.startswith(DIFFERENT)])
def test_kernel_breakdown_and_idle_time(shared_traces, name):
    trace = nsightkit.load(shared_traces / name, cache=False)
    assert figures(trace) == expected(name)
    busy = intervals.busy(trace)
    assert len(busy) == 1
    assert (int(busy["span_ns"].iloc[0]), int(busy["idle_ns"].iloc[0])) == expected(name)[2:]


@pytest.mark.parametrize("name", [n for n in HTA if n.startswith(ORPHANS)])
def test_hta_leaves_out_what_was_launched_before_the_trace(shared_traces, name):
    """With several ProfilerSteps HTA keeps only GPU work whose launch was recorded; ours counts all that ran."""
    trace = nsightkit.load(shared_traces / name, cache=False)
    launched = {
        t: trace.table(t)["correlation"].isin(trace["calls"]["correlation"]).to_numpy() for t in ("kernels", "memops")
    }
    assert not launched["kernels"].all()
    assert figures(trace.masked(launched)) == expected(name)
    assert figures(trace)[0] > expected(name)[0]


def test_hta_counts_a_stream_waiting_for_an_event_as_computation(shared_traces):
    name = next(n for n in HTA if n.startswith(STREAM_WAITS))
    trace = nsightkit.load(shared_traces / name, cache=False)
    waits = trace["syncs"][trace["syncs"]["stream"] >= 0]
    waited = int((waits["end_ns"] - waits["start_ns"]).sum())
    assert set(waits["kind"]) == {"stream-wait-event"}
    assert waited == 2000
    kernel, memory, span, idle = figures(trace)
    assert (kernel + waited, memory, span, idle - waited) == expected(name)


def test_hta_counts_the_launcher_of_a_triton_kernel(shared_traces):
    name = next(n for n in HTA if n.startswith(LAUNCHER))
    trace = nsightkit.load(shared_traces / name, cache=False)
    assert figures_of_kernels(trace) == {"triton_poi_fused_add_cos_sin_0": 1760}
    launcher = trace["ops"][trace["ops"]["name"].astype(str).str.startswith("triton_poi_fused_add_cos_sin_0")]
    assert len(launcher) == 1
    of_launcher = int((launcher["end_ns"] - launcher["start_ns"]).iloc[0])
    assert expected(name)[0] == 1760 + of_launcher


def figures_of_kernels(trace):
    return trace.table("kernels", ["name", "duration_ns"]).groupby("name", observed=True)["duration_ns"].sum().to_dict()


# --- HTA itself, where it is installed ---


@pytest.fixture(scope="module")
def hta(shared_traces):
    """HTA's figures of some traces, made now."""
    python = os.environ.get("NSIGHTKIT_HTA_PYTHON", sys.executable)
    found = subprocess.run([python, "-c", "import hta.trace_analysis"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip("HolisticTraceAnalysis is not installed (NSIGHTKIT_HTA_PYTHON names an interpreter that has it)")
    done = subprocess.run(
        [python, "-c", SCRIPT, *(str((shared_traces / name).resolve()) for name in AGAIN)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
        env={**os.environ, "HTA_DISABLE_NS_ROUNDING": "1"},
    )
    return dict(zip(AGAIN, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", AGAIN)
def test_hta_still_says_so(hta, name):
    now = hta[name]
    assert [now["kernel"], now["memory"], now["span"], now["idle"]] == pytest.approx(HTA[name], abs=5e-4)


@pytest.mark.parametrize("name", [n for n in AGAIN if not n.startswith(DIFFERENT)])
def test_every_kernel_name_has_the_same_sum(hta, shared_traces, name):
    ours = figures_of_kernels(nsightkit.load(shared_traces / name, cache=False))
    assert {k: round(us * 1000) for k, us in hta[name]["by_name"].items()} == ours


SCRIPT = """
import contextlib, io, json, logging, os, sys, warnings
warnings.simplefilter("ignore")
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis

answers = []
for path in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()):
        analysis = TraceAnalysis(
            trace_files={0: path}, trace_dir=os.path.dirname(path), include_last_profiler_step=True
        )
        _, kernels = analysis.get_gpu_kernel_breakdown(
            visualize=False, duration_ratio=1.0, num_kernels=10**6, include_memory_kernels=True
        )
        temporal = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    memory = kernels["kernel_type"] == "MEMORY"
    answers.append({
        "kernel": float(kernels.loc[~memory, "sum (us)"].sum()),
        "memory": float(kernels.loc[memory, "sum (us)"].sum()),
        "span": float(temporal["kernel_time(us)"]),
        "idle": float(temporal["idle_time(us)"]),
        "by_name": {str(k): float(v) for k, v in kernels[~memory].groupby("name")["sum (us)"].sum().items()},
    })
print(json.dumps(answers))
"""
