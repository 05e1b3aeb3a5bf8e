"""Reading a sweep: names and codes, the memory model against counted bytes, forecasts against what happened."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nsightkit.errors import NsightkitError
from nsightkit.investigations.pages import sweep
from nsightkit.trace.model import TABLES, Trace, TraceMeta
from nsightkit.workloads import attention_samples as vocabulary

KEY = ["implementation", "precision", "d", "context", "direction"]


def frame(samples: dict[str, list[float]]) -> pd.DataFrame:
    rows = [(name, i, float(value)) for name, values in samples.items() for i, value in enumerate(values)]
    return pd.DataFrame(rows, columns=["metric", "index", "value"])


def column(name: str = "naive-fp32", **of_column: float) -> dict[str, list[float]]:
    given = {"batch": 8.0, "heads": 1.0, "causal": 1.0, **of_column}
    return {vocabulary.metric(quantity, name): [value] for quantity, value in given.items()}


def cell(
    d: int, context: int, name: str = "naive-fp32", status: str = "ok", reason: str = "", **more: list[float]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for way in vocabulary.DIRECTIONS:
        found[vocabulary.metric(f"{way}_status", name, d, context)] = [vocabulary.STATUSES.index(status)]
        found[vocabulary.metric(f"{way}_reason", name, d, context)] = [vocabulary.REASONS.index(reason)]
    return found | {vocabulary.metric(quantity, name, d, context): values for quantity, values in more.items()}


def line(times: dict[int, float], name: str = "naive-fp32") -> dict[str, list[float]]:
    samples = column(name)
    for context, ns in times.items():
        peak = 1e6 * context**2
        samples |= cell(
            64, context, name, forward_ns=[ns], inputs_bytes=[0.0], idle_bytes=[0.0], forward_peak_bytes=[peak]
        )
    return samples


def test_every_name_and_code_comes_back() -> None:
    samples: dict[str, list[float]] = {}
    expected = {}
    columns = ["naive-fp32", "naive-compiled-tf32", "flash-bf16"]
    places = itertools.product(columns, (16, 512), (64, 131_072))
    outcomes = itertools.cycle(itertools.product(vocabulary.STATUSES, vocabulary.REASONS))
    for (name, d, context), (status, reason) in zip(places, outcomes, strict=False):
        samples |= column(name) | cell(d, context, name, status, reason)
        implementation, precision = name.rsplit("-", 1)
        for way in vocabulary.DIRECTIONS:
            expected[implementation, precision, d, context, way] = status, reason
    found = sweep.cells(frame(samples)).set_index(KEY)
    assert {where: (row["status"], row["reason"]) for where, row in found.iterrows()} == expected


def test_a_reason_names_the_context_that_failed() -> None:
    samples = column() | cell(64, 2048, status="skipped", reason=vocabulary.FORWARD_CANNOT_FIT)
    samples |= {vocabulary.metric(f"{way}_stopped_context", "naive-fp32", 64, 2048): [1024] for way in ("forward",)}
    found = sweep.cells(frame(samples)).set_index("direction")["reason"]
    assert found["forward"] == "cannot fit: forward already ran out of memory at context 1024"


def test_statistics_and_rates_follow_the_formula() -> None:
    samples = column() | cell(
        64, 1024, forward_ns=[1e6, 2e6, 3e6, 4e6, 5e6], backward_ns=[6e6], inputs_bytes=[10.0], idle_bytes=[12.0],
        before_backward_bytes=[20.0], forward_peak_bytes=[30.0], backward_peak_bytes=[40.0],
        backward_reserved_bytes=[64.0],
    )  # fmt: skip
    forward, backward = sweep.cells(frame(samples)).to_dict("records")
    assert (forward["direction"], forward["repetitions"], forward["median_ns"]) == ("forward", 5, 3e6)
    assert forward["spread"] == pytest.approx(2 / 3)
    # Causal: half of 4 B S^2 d forward, and twice that backward.
    assert forward["tflops"] == pytest.approx(2 * 8 * 1024**2 * 64 / 3e6 / 1e3)
    assert backward["tflops"] == pytest.approx(4 * 8 * 1024**2 * 64 / 6e6 / 1e3)
    assert (forward["memory_before_bytes"], forward["peak_bytes"], forward["workspace_bytes"]) == (12, 30, 2)
    assert (backward["memory_before_bytes"], backward["peak_bytes"], backward["reserved_bytes"]) == (20, 40, 64)
    full = sweep.cells(frame(samples | column(causal=0.0)))
    assert full["tflops"].iloc[0] == pytest.approx(2 * forward["tflops"])


GOOD = column() | cell(64, 1024)


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (frame(GOOD | {"<script>alert(1)</script>": [1.0]}), "no sample of a sweep"),
        (frame(GOOD | {"forward_ns naive-fp32 d=64 context=1024\n": [1.0]}), "no sample of a sweep"),
        (frame(GOOD | {"forward_ns naive-fp32 d=99999999 context=1024": [1.0]}), "no sample of a sweep"),
        (frame(GOOD | {"x" * 10_000: [1.0]}), "no sample of a sweep"),
        (frame(GOOD | {"forward_speed naive-fp32 d=64 context=1024": [1.0]}), "no sample of a sweep"),
        (frame(GOOD | {"forward_ns naive-fp32": [1.0]}), "out of place"),
        (frame(GOOD | {"batch naive-fp32 d=64 context=1024": [1.0]}), "out of place"),
        (frame(GOOD | {"forward_status naive-fp32 d=64 context=1024": [99.0]}), "does not exist"),
        (frame(GOOD | {"forward_reason naive-fp32 d=64 context=1024": [0.5]}), "does not exist"),
        (frame(GOOD | {"forward_ns naive-fp32 d=64 context=1024": [float("nan")]}), "not numbers"),
        (frame(GOOD | {"forward_ns naive-fp32 d=64 context=1024": [float("inf")]}), "not numbers"),
        (frame(GOOD | {"forward_ns naive-fp32 d=64 context=1024": [-1.0]}), "not numbers"),
        (frame(GOOD | {"forward_ns naive-fp32 d=64 context=2048": [1.0]}), "does not exist"),
        (frame(cell(64, 1024)), "batch"),
        (pd.concat([frame(GOOD), frame(GOOD)]), "two columns"),
        (frame(GOOD).assign(value="much"), "not numbers"),
        (frame(GOOD).assign(metric=[None] * len(frame(GOOD))), "no sample of a sweep"),
        (pd.DataFrame({"a": [1]}), "metric, index and value"),
    ],
)
def test_damaged_samples_are_one_line(samples: pd.DataFrame, words: str) -> None:
    with pytest.raises(NsightkitError, match=words) as error:
        sweep.cells(samples)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_no_samples_are_no_cells() -> None:
    assert sweep.cells(frame({})).empty
    assert sweep.cells(frame(column())).empty
    assert sweep.limits(frame({})).empty


@pytest.mark.parametrize(("heads", "causal"), [(1, True), (2, False)])
@pytest.mark.parametrize(
    "column_name", ["naive-fp32", "naive-bf16", "math-fp32", "math-bf16", "flash-fp32", "flash-bf16"]
)
def test_the_model_is_exact_where_tensors_can_be_counted(column_name: str, heads: int, causal: bool) -> None:
    torch = pytest.importorskip("torch")
    from nsightkit.workloads import attention
    from nsightkit.workloads.tensor_memory import TensorMemory

    implementation, precision = column_name.split("-")
    # The last two are wider than long: there other moments are the peak.
    for d, context in ((16, 64), (32, 96), (64, 16), (256, 8)):
        sizes = {"batch": 3, "heads": heads, "causal": causal}
        expected = sweep.footprint(implementation, precision, d=d, context=context, on_gpu=False, **sizes)
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with attention.start("cpu", implementation=implementation, precision=precision, **sizes) as work:
            made = work.cell(d, context)
            with TensorMemory() as memory:
                memory.count(made.tensors)
                assert memory.allocated_bytes == expected.inputs
                attended = made.forward()
                assert memory.peak_bytes == expected.forward_peak
                assert memory.allocated_bytes == expected.before_backward
                memory.reset_peak()
                made.backward(attended)
                assert memory.peak_bytes == expected.backward_peak
            # Autograd says itself what it keeps; what it does not keep of that is the output and the gradient.
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                attended = made.forward()
            for tensor in (*made.tensors, attended):
                saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
            assert sum(saved.values()) == expected.before_backward


def test_what_is_known_by_hand() -> None:
    gib = 2**30
    naive = sweep.footprint("naive", "fp32", d=64, context=16_384)
    # 8 x 16384 x 16384 fp32 scores are 8 GiB: two forward, three backward.
    assert 16 * gib < naive.forward_peak < 17 * gib
    assert 24 * gib < naive.backward_peak < 25 * gib
    assert sweep.footprint("naive", "bf16", d=64, context=16_384).forward_peak < 0.52 * naive.forward_peak
    compiled = sweep.footprint("naive-compiled", "fp32", d=64, context=16_384)
    assert naive.backward_peak - compiled.backward_peak == pytest.approx(8 * gib, rel=1e-3)
    short, long = (sweep.footprint("flash", "bf16", d=64, context=s) for s in (1024, 4096))
    assert long.backward_peak == 4 * short.backward_peak
    with pytest.raises(NsightkitError, match="nothing is known"):
        sweep.footprint("other", "fp32", d=64, context=64)


def test_a_forecast_is_tight() -> None:
    limit, contexts = 3 * 2**30, [1024, 4096, 8192, 16_384]
    table = sweep.forecast(limit, "naive", "fp32", d=[64, 512], contexts=contexts)
    for row in table.to_dict("records"):
        sizes = {"d": row["d"], "batch": 8}
        longest = row["largest_context"]
        assert sweep.footprint("naive", "fp32", context=longest, **sizes).peak(row["direction"]) <= limit
        assert sweep.footprint("naive", "fp32", context=longest + 1, **sizes).peak(row["direction"]) > limit
        assert row["context"] == min(s for s in contexts if s > longest)
    endless = sweep.forecast(limit, "flash", "bf16", d=[64], contexts=[64])
    assert endless["context"].isna().all()
    assert (sweep.forecast(10, "naive", "fp32", d=[64], contexts=[64])["largest_context"] == 0).all()


def test_the_ends_come_where_they_are_forecast(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from nsightkit.investigations import recordings, sweep_column
    from nsightkit.workloads import attention

    options = {
        "batch": 2, "d_model": [16, 64], "context": [16, 64, 128, 256, 512, 1024], "limit_bytes": 3 * 2**20,
        "cell_s": 1e-4,
    }  # fmt: skip
    counts = {"warmup": 0, "repetitions": 3, "active": 1}
    samples = []
    for name in ("naive-fp32", "math-fp32", "math-bf16", "flash-bf16"):
        implementation, precision = name.split("-")
        own = options | {"implementation": implementation, "precision": precision}
        samples.append(recordings.frame(sweep_column.swept(attention.start, "cpu", own, counts, tmp_path)[0]))
    table, limits = sweep.cells(pd.concat(samples)), sweep.limits(pd.concat(samples))
    ends = sweep.ends(table, limits, on_gpu=False)
    assert set(limits) == {3 * 2**20}
    assert set(ends["outcome"]) == {"as forecast"}
    assert ends["measured_context"].notna().sum() == 12  # all but flash, which has no end
    compared = sweep.compare(table, on_gpu=False)
    assert (compared["error"] == 0).all()
    assert (compared["predicted_before_bytes"] == compared["memory_before_bytes"]).all()
    # On a GPU fused kernels would have allocated more within themselves.
    on_gpu = sweep.compare(table)
    fused = (on_gpu["implementation"] == "flash") & (on_gpu["direction"] == "backward")
    assert (on_gpu.loc[fused, "error"] > 0).all()
    slopes = sweep.exponents(table).set_index(["implementation", "precision", "d", "direction"])["memory"]
    assert slopes["flash", "bf16", 16, "backward"] == pytest.approx(1)
    assert slopes["naive", "fp32", 16, "forward"] > 1.7


def test_a_sweep_that_ended_early_proves_nothing() -> None:
    samples = column(limit_bytes=2**30) | cell(64, 64)
    samples |= cell(64, 65_536, status="skipped", reason=vocabulary.NO_TIME)
    samples |= column("flash-fp32") | cell(64, 64, "flash-fp32", "unsupported", vocabulary.SIXTEEN_BITS)
    table = sweep.cells(frame(samples))
    found = sweep.ends(table, sweep.limits(frame(samples)))
    assert found["outcome"].tolist() == ["not reached"] * 2
    assert found["measured_context"].isna().all()
    assert sweep.ends(table, pd.Series(dtype=float)).empty
    early = samples | cell(64, 64, status="oom", reason=vocabulary.RAN_OUT)
    assert sweep.ends(sweep.cells(frame(early)), sweep.limits(frame(samples)))["outcome"].tolist() == ["earlier"] * 2


def test_launch_bound_is_where_time_does_not_grow() -> None:
    table = sweep.cells(frame(line({64: 100.0, 256: 120.0, 1024: 140.0, 4096: 900.0, 8192: 120.0})))
    (found,) = sweep.launch_bound(table).to_dict("records")
    # What comes after the first that takes longer is not a launch again.
    assert (found["direction"], found["floor_ns"], found["context"]) == ("forward", 100.0, 1024)
    growing = sweep.launch_bound(sweep.cells(frame(line({64: 100.0, 256: 200.0}))))
    assert growing["context"].tolist() == [0]


def test_exponents_are_slopes_on_logarithmic_axes() -> None:
    table = sweep.cells(frame(line({64: 100.0, 1024: 10.0, 2048: 80.0})))
    table = table[table["direction"] == "forward"]
    (found,) = sweep.exponents(table).to_dict("records")
    assert (found["context"], found["time"], found["memory"]) == (2048, pytest.approx(3), pytest.approx(2))
    assert sweep.exponents(sweep.cells(frame(line({64: 1.0})))).empty


KERNELS = {
    "flash": "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>(Flash_fwd_params)",
    "efficient": "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    "cudnn": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0",
    "compiled": "triton_red_fused__softmax_div_masked_fill_0",
    "written out": "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*)",
    "unknown": "void at::native::vectorized_elementwise_kernel<4, FillFunctor>()",
}


@pytest.mark.parametrize("backend", KERNELS)
def test_backends_are_read_from_kernels_whatever_was_asked_for(backend: str) -> None:
    gemm = "sm90_xmma_gemm_f32f32" if backend == "compiled" else "Memset"
    names = [KERNELS[backend], gemm]

    def table(which: str, /, **columns: object) -> pd.DataFrame:
        rows = pd.DataFrame(columns)
        for key, kind in TABLES[which].items():
            if key not in rows:
                rows[key] = "" if kind == "category" else 0
        return rows.astype(TABLES[which])[list(TABLES[which])]

    thread = (1 << 24) + 1
    ranges = table(
        "ranges", start_ns=[0], end_ns=[100], process=1, thread=thread, end_thread=thread, parent=-1,
        name=["forward math-fp32 d=64 context=1024"], kind="annotation",
    )  # fmt: skip
    calls = table(
        "calls",
        start_ns=[10, 20],
        end_ns=[12, 22],
        process=1,
        thread=thread,
        correlation=[1, 2],
        name="cudaLaunchKernel",
    )
    kernels = table(
        "kernels", start_ns=[200, 400], end_ns=[390, 500], process=1, correlation=[1, 2], name=names, short_name="k"
    )
    trace = Trace.from_frames(
        {"ranges": ranges, "calls": calls, "kernels": kernels}, TraceMeta(tool="planted", missing=[])
    )
    (found,) = sweep.backends(trace).to_dict("records")
    assert (found["implementation"], found["d"], found["context"]) == ("math", 64, 1024)
    assert (found["direction"], found["backend"], found["count"]) == ("forward", backend, 2)
    assert found["evidence"] == ("" if backend == "unknown" else KERNELS[backend])


def test_figures_say_what_they_show() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib import pyplot as plt

    from nsightkit import plots

    samples = line({64: 100.0, 1024: 120.0, 4096: 900.0}) | column("naive-fp32", limit_bytes=1e13)
    samples |= cell(64, 8192, status="oom", reason=vocabulary.RAN_OUT)
    table = sweep.cells(frame(samples))
    times = plots.sweep_times(table, sweep.launch_bound(table), title="Time <b>$x$")
    assert "100 ns at 64" in times.get_label()
    assert "900 ns at 4096" in times.get_label()
    foreseen = sweep.forecast(1e9, "naive", "fp32", d=[64], contexts=[64, 8192, 65_536])
    memory = plots.sweep_memory(table, 1e13, foreseen, title="Memory")
    assert "ran out of memory at 8192" in memory.get_label()
    assert f"was to fit up to {foreseen['largest_context'].iloc[0]}" in memory.get_label()
    for empty in (plots.sweep_times(table.iloc[:0]), plots.sweep_memory(table.iloc[:0], 1.0)):
        assert empty.axes[0].texts[0].get_text().startswith("nothing was")
    for figure in map(plt.figure, plt.get_fignums()):
        figure.canvas.draw()
    assert np.isfinite(times.axes[0].get_ylim()).all()
    plt.close("all")


def test_an_implementation_has_its_style_in_every_figure() -> None:
    plots = pytest.importorskip("nsightkit.plots")
    plt = pytest.importorskip("matplotlib.pyplot")
    times = {64: 100.0, 1024: 900.0}
    both = sweep.cells(frame(line(times) | line(times, "flash-bf16")))
    alone = both[both["implementation"] == "flash"]
    figures = [plots.sweep_times(table) for table in (both, alone)]
    among, single = ({(drawn.get_color(), drawn.get_linestyle()) for drawn in f.axes[0].lines} for f in figures)
    assert len(among) == len(single) + 1
    assert single < among
    plt.close("all")
