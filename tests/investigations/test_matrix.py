"""Ten models: what is expected of them is judged by rates, shares and noise."""

from __future__ import annotations

import pandas as pd
import pytest
from synthetic import planted

import nsightkit
from nsightkit.analysis.core.noise import Estimate
from nsightkit.configurations import MATRIX
from nsightkit.investigations.pages import matrix

NAMES = [model.name for model in MATRIX]


def _outcomes(ratio, *, rates=range(1, 11), idle=(0.1,) * 10, tail=0.6):
    rate = pd.Series(dict(zip(NAMES, map(float, rates), strict=True)))
    kinds = pd.DataFrame({name: {"GEMM": 60.0, "attention": 5.0, "(others)": 35.0} for name in NAMES})
    kinds["bandwidth_bound"] = [30.0, 10.0, 60.0]
    kinds["wide_ffn"] = [70.0, 5.0, 25.0]
    against = dict.fromkeys(("model_b", "misaligned_dims", "bad_head_size"), ("another", ratio))
    found = matrix.judged(rate, pd.Series(dict(zip(NAMES, idle, strict=True))), kinds, tail, against)
    assert list(found["model"]) == NAMES == list(matrix.EXPECTED)
    return found.set_index("model")["outcome"]


def test_what_lies_outside_the_noise_is_judged():
    slower = _outcomes(Estimate(0.8, 0.79, 0.81, (9, 9)))
    assert slower[["model_b", "misaligned_dims"]].tolist() == ["holds"] * 2
    assert slower["bad_head_size"] == "does not hold"
    assert slower[["model_a", "vocab_bottleneck", "wide_ffn", "bandwidth_bound"]].tolist() == ["holds"] * 4
    # By the rates, model_a is the slowest and deep_sequential the quickest; both are idle for the same share.
    assert slower[["latency_bound", "compute_bound", "deep_sequential"]].tolist() == ["does not hold"] * 3


def test_what_lies_within_the_noise_is_not():
    narrow = _outcomes(Estimate(1.0, 0.99, 1.01, (9, 9)))
    assert narrow[["model_b", "misaligned_dims", "bad_head_size"]].tolist() == ["not shown", "not shown", "holds"]
    few = _outcomes(Estimate(0.5, None, None, (2, 2)))
    assert few[["model_b", "misaligned_dims", "bad_head_size"]].tolist() == ["not shown"] * 3


def test_time_by_kind_sums_to_that_of_all_kernels(tmp_path):
    planted.training(tmp_path / "run.sqlite", steps=3, layers=3)
    trace = nsightkit.load(tmp_path / "run.sqlite", cache=False)
    kinds = matrix.by_kind({"one": trace, "two": trace})
    assert kinds.sum().tolist() == [pytest.approx(trace.summary()["kernel_ns"])] * 2
    assert kinds.index[-1] == "(others)"
    assert matrix.tail_share(trace) == 0.0  # it has neither a head nor a loss
