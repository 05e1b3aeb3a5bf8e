"""Parity with HolisticTraceAnalysis 0.5.0 on real PyTorch profiler traces.

The figures were printed by HTA itself (``HTA_DISABLE_NS_ROUNDING=1``, ``include_last_profiler_step=True``). HTA leaves
out GPU work whose launch is not in the trace. Two more differences have no figure here: it counts a wait of a stream
for an event as computation, and takes a CPU operator for a kernel when its arguments name a stream.
"""

from __future__ import annotations

import numpy as np
import pytest

import nsightkit
from nsightkit.analysis.core import intervals

# trace: (kernel time = computation + communication, memory time, span of GPU work, idle time), µs
HTA = {
    "tracelens/h100__facebook_timesformer-base-finetuned-k400__1016002.json.gz":
        (154855.595, 3577.579, 159992.427, 1559.253),
    "hta/negative_queue_length_values_check__rank0.json.gz": (345095, 45142, 1229072, 848216),
    "hta/trace_diff__control__control.json.gz": (446813, 54754, 464594, 76007),
    "hta/trace_diff__test__test.json.gz": (745787, 161458, 744514, 51692),
    "hta/trace_filter__sampled_rank-0.json.gz": (606519, 1325, 1222847, 675191),
    "hta/trace_filter__sampled_rank-1.json.gz": (651026, 16504, 1231186, 651136),
    "kineto/resnet50_num_workers_0__worker0.1623143089861.pt.trace.json.gz": (591532, 12026, 996477, 392919),
    "kineto/resnet50_num_workers_4__worker0.1623212756351.pt.trace.json.gz": (594868, 19545, 801550, 187137),
    "param/linear_kineto.json.gz": (369343, 1640, 1008570, 637587),
}  # fmt: skip

ORPHANS = ("hta/negative", "hta/trace_diff__test")


def figures(trace):
    """HTA's four figures, in nanoseconds."""
    kernels, memops = trace["kernels"], trace["memops"]
    start = np.concatenate([kernels["start_ns"], memops["start_ns"]])
    end = np.concatenate([kernels["end_ns"], memops["end_ns"]])
    span = int(end.max() - start.min())
    kernel_ns = int((kernels["end_ns"] - kernels["start_ns"]).sum())
    memop_ns = int((memops["end_ns"] - memops["start_ns"]).sum())
    return kernel_ns, memop_ns, span, span - intervals.Coverage(start, end).length


def expected(name):
    return tuple(round(us * 1000) for us in HTA[name])


@pytest.mark.parametrize("name", [n for n in HTA if not n.startswith(ORPHANS)])
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
