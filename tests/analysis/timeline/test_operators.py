"""Own times of operators against PyTorch's own account, and their kinds by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import nsightkit
from nsightkit.analysis.timeline import operators
from nsightkit.trace.model import Trace, TraceMeta

NAMES = {
    "GEMM": "aten::mm aten::addmm aten::bmm aten::baddbmm aten::mkldnn_linear",
    "convolution": "aten::cudnn_convolution aten::mkldnn_convolution aten::convolution_backward",
    "attention": "aten::_scaled_dot_product_flash_attention_for_cpu aten::_flash_attention_forward",
    "softmax": "aten::_softmax aten::_log_softmax aten::_log_softmax_backward_data",
    "normalization": "aten::native_layer_norm aten::cudnn_batch_norm aten::_fused_rms_norm",
    "reduction": "aten::sum aten::mean aten::nll_loss_forward aten::max aten::norm aten::max_pool2d_with_indices",
    "elementwise": "aten::add_ aten::mul aten::silu_backward aten::exp aten::maximum aten::normal_ aten::ne",
    "optimizer": "aten::_foreach_mul_ aten::_fused_adamw_ aten::lerp_ aten::addcdiv_",
    "memory-like": "aten::copy_ aten::_to_copy aten::cat aten::embedding_backward aten::fill_ aten::_index_put_impl_",
    "communication": "c10d::allreduce_ record_param_comms nccl:all_reduce",
    "dispatch": (
        "aten::linear aten::scaled_dot_product_attention aten::t aten::expand aten::empty_strided aten::new_zeros "
        "aten::view MmBackward0 torch::autograd::AccumulateGrad"
    ),
    "other": "triton_poi_fused_add_0 fbgemm::bounds_check_indices transformer my_operator setup_everything",
}


@pytest.mark.parametrize("category", NAMES)
def test_kinds_of_work(category: str) -> None:
    assert {name: operators.category_of(name) for name in NAMES[category].split()} == dict.fromkeys(
        NAMES[category].split(), category
    )


def _planted(rows: list[tuple[str, int, int, int]]) -> Trace:
    frame = pd.DataFrame(rows, columns=["name", "thread", "start_ns", "end_ns"])
    return Trace.from_frames({"ops": frame}, TraceMeta(tool="planted", missing=["kernels"]))


def test_planted_own_times_are_exact() -> None:
    trace = _planted(
        [
            ("aten::linear", 1, 0, 100),
            ("aten::mm", 1, 10, 90),
            ("aten::empty", 1, 20, 25),
            ("aten::mm", 2, 10, 50),  # another thread, nested in nothing
            ("aten::mm", 1, 200, 230),
        ]
    )
    assert list(operators.own(trace)["duration_ns"]) == [20, 75, 5, 40, 30]
    by_name = operators.summary(trace).set_index("name")
    assert by_name["total_ns"].to_dict() == {"aten::mm": 145, "aten::linear": 20, "aten::empty": 5}
    assert by_name.loc["aten::mm", "share"] == pytest.approx(145 / 170)
    by_kind = operators.summary(trace, by="category")
    assert dict(zip(by_kind["category"], by_kind["count"], strict=True)) == {"GEMM": 3, "dispatch": 2}
    assert by_kind["total_ns"].sum() == 170
    assert list(operators.summary(trace, sort="count", top=1)["name"]) == ["aten::mm"]


def test_own_times_agree_with_pytorchs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiling:
        for _ in range(3):
            model(torch.randn(32, 64)).sum().backward()
    path = tmp_path / "trace.json"
    profiling.export_chrome_trace(str(path))
    ours = operators.summary(nsightkit.load(path, cache=False)).set_index("name")
    theirs = {row.key: row for row in profiling.key_averages()}
    # PyTorch takes an operator that calls itself and nothing else for one, and counts the inner one twice then.
    same = [name for name, row in ours.iterrows() if row["count"] == theirs[str(name)].count]
    assert {"aten::addmm", "aten::mm", "aten::gelu"} <= set(same)
    assert len(same) > 0.8 * len(ours)
    for name in same:
        # PyTorch reckons in microseconds, rounded event by event.
        assert np.isclose(ours["total_ns"][name], theirs[name].self_cpu_time_total * 1e3, rtol=0.02, atol=2_000), name
