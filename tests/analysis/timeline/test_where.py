"""Where kernels' time belongs: planted programs with known sums, and real profiles of PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from nsightkit import cli
from nsightkit.analysis.timeline import where
from nsightkit.errors import UsageError
from nsightkit.guide import case
from nsightkit.trace.model import Trace, TraceMeta

MAIN, ENGINE = 7 << 24 | 7, 7 << 24 | 9
Event = tuple[str, int, int]


def table(events: Sequence[Event], thread: int | Sequence[int] = MAIN, **more: object) -> pd.DataFrame:
    names, start, end = zip(*events, strict=True) if events else ((), (), ())
    frame = pd.DataFrame({"start_ns": start, "end_ns": end, "process": 7, "thread": thread, **more})
    return frame.assign(name=pd.Categorical(names))


def planted(launches: Sequence[tuple[int, int]], lengths: Sequence[int], **frames: pd.DataFrame) -> Trace:
    """A trace of kernels that are launched at these times on these threads, and last so long."""
    n = len(launches)
    at, threads = np.array([when for when, _ in launches]), [thread for _, thread in launches]
    calls = table([("cudaLaunchKernel", when, when + 1) for when in at], threads, correlation=np.arange(n) + 1)
    kernels = pd.DataFrame(
        {"start_ns": 5000 + 100 * np.arange(n), "process": 7, "correlation": np.arange(n) + 1, "stream": 7}
    ).assign(name=pd.Categorical([f"kernel_{length}" for length in lengths]))
    kernels["end_ns"] = kernels["start_ns"] + np.array(lengths)
    return Trace.from_frames({"calls": calls, "kernels": kernels, **frames}, TraceMeta(tool="planted"))


def sums(trace: Trace, by: where.By | None = None, capture: Trace | None = None) -> dict[tuple[str, str | None], int]:
    """Time by place and phase; what every answer has to fulfil is looked at on the way."""
    rows = where.summary(trace, by, capture).rows
    kernels = trace.table("kernels", ["duration_ns"])["duration_ns"]
    if len(rows):
        assert list(rows.columns) == where.COLUMNS
        assert (rows["gpu_ns"].sum(), rows["count"].sum()) == (kernels.sum(), len(kernels))
        assert (rows["where"] == where.UNATTRIBUTED).sum() == 1
        assert rows["share"].to_numpy() == pytest.approx(rows["gpu_ns"].to_numpy() / kernels.sum())
        assert rows["gpu_ns"].is_monotonic_decreasing
        assert all(len(names) <= min(3, count) for names, count in zip(rows["top_kernels"], rows["count"], strict=True))
    return {(place, phase): ns for place, phase, ns in rows[["where", "phase", "gpu_ns"]].itertuples(index=False)}


# A step of training: the module Net holds two blocks, each with two linear layers, of which the second runs twice.

STACK: list[Event] = [
    ("train.py(30): <module>", 0, 1000),
    ("nn.Module: Net_0", 10, 400),
    ("train.py(12): forward", 11, 399),
    ("nn.Module: Block_0", 20, 190),
    ("nn.Module: Linear_0", 30, 80),
    ("torch/nn/modules/linear.py(124): forward", 31, 79),
    ("<built-in function linear>", 32, 78),
    ("nn.Module: Linear_1", 100, 150),
    ("nn.Module: Block_1", 200, 390),
    ("nn.Module: Linear_2", 210, 260),
    ("nn.Module: Linear_3", 270, 300),
    ("nn.Module: Linear_3", 310, 340),
    ("torch/_tensor.py(570): backward", 500, 800),
]
OPS: list[Event] = [
    ("aten::linear", 35, 75),
    ("aten::addmm", 40, 70),
    ("aten::addmm", 110, 140),
    ("aten::addmm", 220, 250),
    ("aten::addmm", 280, 290),
    ("aten::addmm", 320, 330),
    ("autograd::engine::evaluate_function: AddmmBackward0", 520, 600),
    ("AddmmBackward0", 525, 590),
    ("aten::mm", 530, 550),
    ("aten::mm", 560, 580),
    ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 610, 640),
    ("autograd::engine::evaluate_function: AddmmBackward0", 700, 760),
]
NUMBERS = {
    "sequence": [5, 5, 6, 7, 8, 9, 5, 5, -1, -1, -1, 9],
    "forward_thread": [0, 0, 0, 0, 0, 0, 1, 1, -1, -1, -1, 1],
}


@pytest.fixture(params=[ENGINE, MAIN], ids=["autograd's thread", "one thread"])
def training(request: pytest.FixtureRequest) -> Trace:
    engine = request.param
    launches = [
        *((when, MAIN) for when in (45, 60, 115, 225, 282, 322)),  # in the operators of the forward pass
        *((when, engine) for when in (535, 565, 620, 710)),  # two products, a gradient, a product
        *((when, MAIN) for when in (905, 980)),  # the optimizer, and a launch after it
    ]
    threads = [MAIN] * 6 + [engine] * 6
    return planted(
        launches,
        [1 << i for i in range(12)],
        frames=table(STACK),
        ops=table(OPS, threads, **NUMBERS),
        ranges=table([("ProfilerStep#3", 0, 1000), ("Optimizer.step#SGD.step", 900, 950)], kind="annotation"),
    )


def test_modules_are_known_by_their_path_and_the_backward_pass_by_its_forward_operator(training: Trace):
    assert sums(training, "module") == {
        ("Net/Block/Linear_0", "forward"): 1 + 2 + 8,
        ("Net/Block/Linear_1", "forward"): 4 + 16 + 32,
        ("Net/Block/Linear_0", "backward"): 64 + 128,
        ("Net/Block/Linear_1", "backward"): 512,
        (where.UNATTRIBUTED, None): 256 + 1024 + 2048,
    }


def test_lines_are_those_of_the_program(training: Trace):
    assert sums(training, "line") == {
        ("train.py(12): forward", "forward"): 63,
        ("train.py(12): forward", "backward"): 64 + 128 + 512,
        ("train.py(30): <module>", "optimizer"): 1024,
        ("train.py(30): <module>", None): 2048,
        (where.UNATTRIBUTED, None): 256,
    }


def test_operators_and_ranges(training: Trace):
    node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    assert sums(training, "op") == {
        ("aten::addmm", "forward"): 63,
        ("aten::addmm", "backward"): 64 + 128 + 512,
        (node, "backward"): 256,
        (where.UNATTRIBUTED, None): 1024 + 2048,
    }
    assert sums(training, "range") == {
        ("Optimizer.step#SGD.step", "optimizer"): 1024,
        (where.UNATTRIBUTED, None): 4095 - 1024,
    }


def test_a_selection_is_divided_as_the_whole_is(training: Trace):
    late = np.arange(12) >= 7
    chosen = training.masked({"kernels": late})
    assert sums(chosen, "module")["Net/Block/Linear_0", "backward"] == 128
    assert sums(training.masked({"kernels": late & False}), "module") == {}


def test_what_a_node_computes_again_is_not_its_own_operator_s():
    """Checkpointing runs the forward pass once more inside a node that belongs to another module."""
    stack = [("nn.Module: Net_0", 0, 100), ("nn.Module: Linear_0", 10, 40), ("nn.Module: ReLU_0", 50, 90)]
    ops = [
        ("aten::relu", 60, 70),
        ("autograd::engine::evaluate_function: ReluBackward0", 200, 300),
        ("aten::addmm", 210, 230),
        ("aten::threshold_backward", 240, 260),
    ]
    numbers = {"sequence": [3, 3, 8, -1], "forward_thread": [0, 1, 0, -1]}
    trace = planted(
        [(215, ENGINE), (245, ENGINE)],
        [10, 20],
        frames=table(stack),
        ops=table(ops, [MAIN, ENGINE, ENGINE, ENGINE], **numbers),
    )
    assert sums(trace, "module") == {("Net/ReLU", "backward"): 20, (where.UNATTRIBUTED, None): 10}
    assert sums(trace, "op") == {
        ("aten::relu", "backward"): 20,
        ("aten::addmm", "backward"): 10,
        (where.UNATTRIBUTED, None): 0,
    }


def test_the_default_is_the_finest_kind_that_says_something(training: Trace):
    assert where.summary(training).by == "line"  # a fifth of the time is in modules
    assert where.summary(training.masked({"kernels": np.arange(12) < 8})).by == "module"
    found = where.summary(planted([(5, MAIN), (50, MAIN)], [9, 1], ranges=table([("a", 0, 9), ("b", 40, 60)])))
    assert (found.by, found.note) == ("range", "by innermost range")


# Nsight Systems.


def test_ranges_take_what_autograd_s_thread_launches_while_they_are_open():
    ranges = table([("step 1", 0, 1000), ("forward", 10, 100), ("mlp", 20, 50), ("backward", 200, 300)])
    trace = planted([(30, MAIN), (60, MAIN), (250, ENGINE), (500, MAIN)], [1, 2, 4, 8], ranges=ranges)
    assert sums(trace, "range") == {
        ("mlp", "forward"): 1,
        ("forward", "forward"): 2,
        ("backward", "backward"): 4,
        (where.UNATTRIBUTED, None): 8,  # a step is no place
    }


def test_operators_that_emit_nvtx_names():
    ranges = [
        ("aten::linear, seq = 4, op_id = 1, sizes = [[2, 3]]", 10, 60),
        ("aten::addmm, seq = 4, op_id = 2", 20, 50),
        ("autograd::engine::evaluate_function: AddmmBackward0, seq = 4, op_id = 9", 200, 300),
        ("aten::mm, op_id = 11", 210, 250),
    ]
    trace = planted([(30, MAIN), (220, ENGINE)], [3, 5], ranges=table(ranges, [MAIN, MAIN, ENGINE, ENGINE]))
    assert sums(trace, "op") == {
        ("aten::addmm", "forward"): 3,
        ("aten::addmm", "backward"): 5,
        (where.UNATTRIBUTED, None): 0,
    }
    assert sums(trace, "range") == {}


# CUDA graphs.


def captures(*graphs: Sequence[str], named: bool = True) -> Trace:
    """A trace in which graphs were captured, each of these kernels by a function of its own."""
    events, kernels, stack, now = [], [], [], 0
    for graph in graphs:
        events.append(("hipStreamBeginCapture", now, now + 1))
        for name in graph:
            now += 10
            events.append(("hipLaunchKernel", now, now + 4))
            stack.append((f"model.py(1): {name}", now - 2, now + 6))
        now += 10
        events.append(("hipStreamEndCapture", now, now + 1))
        kernels += ["", *(graph if named else [""] * len(graph)), ""]
        now += 10
    calls = table(events, correlation=np.arange(len(events)) + 1, kernel=pd.Categorical(kernels))
    return Trace.from_frames({"calls": calls, "frames": table(stack)}, TraceMeta(tool="planted"), "capture.json")


def replays(*graphs: Sequence[tuple[str, int]]) -> Trace:
    """A trace in which graphs are replayed: names of kernels, and when they begin; each lasts as its position says."""
    rows = [(i + 1, name, start) for i, graph in enumerate(graphs) for name, start in graph]
    correlation, names, start = (list(column) for column in zip(*rows, strict=True))
    calls = [("hipGraphLaunch", 100 * i, 100 * i + 9) for i in range(len(graphs))]
    frames = {
        "calls": table(calls, correlation=np.arange(len(graphs)) + 1),
        "frames": table([("serve.py(8): run", 0, 1000)]),
        "kernels": pd.DataFrame(
            {"start_ns": start, "end_ns": np.array(start) + (1 << np.arange(len(start))), "process": 7,
             "correlation": correlation, "name": pd.Categorical(names)}
        ),
    }  # fmt: skip
    return Trace.from_frames(frames, TraceMeta(tool="planted"))


def test_a_replay_is_joined_to_its_capture_by_name_and_order():
    # The second replay runs its kernels in another order, as on several streams.
    trace = replays([("a", 100), ("b", 200), ("a", 300)], [("b", 2000), ("a", 2100), ("a", 2200)], [("c", 3000)])
    assert sums(trace, "line") == {("serve.py(8): run", None): 127, (where.UNATTRIBUTED, None): 0}
    found = sums(trace, "line", captures("aba", "x"))
    assert found == {
        ("model.py(1): a", None): 1 + 4 + 16 + 32,
        ("model.py(1): b", None): 2 + 8,
        (where.UNATTRIBUTED, None): 64,
    }
    assert "100% runs in CUDA graphs" in where.summary(trace, "line").note


def test_without_names_order_and_count_decide_and_captures_must_agree():
    trace = replays([("k1", 100), ("k2", 200)])
    joined = {("model.py(1): a", None): 1, ("model.py(1): b", None): 2, (where.UNATTRIBUTED, None): 0}
    assert sums(trace, "line", captures("ab", "abc", named=False)) == joined
    assert sums(trace, "line", captures("ab", "ab", named=False)) == joined
    for others in (captures("ab", "ba", named=False), captures("abc", named=False), captures("ab")):
        assert sums(trace, "line", others) == {(where.UNATTRIBUTED, None): 3}


@pytest.mark.parametrize("driver", [False, True])
def test_a_kernel_that_runs_during_a_capture_was_not_captured(driver: bool):
    """Another stream ran the first of three kernels; its launch is the runtime's call, or the driver's inside it."""
    capture = captures("xab")
    calls = capture["calls"]
    if driver:
        inner = calls[1:2].assign(start_ns=calls["start_ns"] + 1, end_ns=calls["end_ns"] - 1, correlation=99)
        calls = pd.concat([calls, inner.assign(name="hipModuleLaunchKernel")], ignore_index=True)
    ran = pd.DataFrame({"start_ns": [30], "end_ns": [35], "process": [7], "correlation": [99 if driver else 2]})
    frames = {"calls": calls, "frames": capture["frames"], "kernels": ran.assign(name="x")}
    capture = Trace.from_frames(frames, TraceMeta(tool="planted"), "capture.json")
    found = sums(replays([("a", 100), ("b", 200)]), "line", capture)
    assert found == {("model.py(1): a", None): 1, ("model.py(1): b", None): 2, (where.UNATTRIBUTED, None): 0}


def test_a_trace_without_a_capture_is_refused():
    trace = replays([("a", 100)])
    with pytest.raises(UsageError, match="holds no capture of a CUDA graph"):
        where.summary(trace, "line", trace)
    with pytest.raises(UsageError, match="not by 'file'"):
        where.summary(trace, "file")  # type: ignore[arg-type]


def test_the_capture_of_vllm_s_decode_step(capsys: pytest.CaptureFixture[str]):
    """Real: 421 kernels of a replay on an MI300X, and the trace in which the graph was captured."""
    step, capture = case("vllm-graphs", "decode"), case("vllm-graphs", "decode-capture")
    assert cli.run(["where", str(step.path), "--graph-from", str(capture.path), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert (rows[0]["where"], rows[0]["count"], f"{rows[0]['share']:.1%}") == (
        "triton_kernels/matmul_ogs.py(352): matmul_ogs", 48, "65.9%",
    )  # fmt: skip
    assert {row["phase"] for row in rows} == {"forward", None}
    assert sum(row["gpu_ns"] for row in rows) == int(step.trace.kernels()["total_ns"].sum())
    alone = step.trace.where()
    assert f"{alone['share'].iloc[0]:.1%}" == "97.3%"
    assert alone["where"].iloc[0] == "vllm/compilation/cuda_graph.py(208): __call__"
