"""What needs a CUDA GPU; asked for in a child, for a CUDA build without a driver may crash."""

import pytest

from nsightkit.capture import ceilings, children, timing, utilization
from nsightkit.capture.bench import bench, cells

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _gpu():
    if not children.has_gpu():
        pytest.skip("no CUDA GPU")


def test_events_time_what_the_gpu_does_and_readings_cover_it():
    a = torch.rand(4096, 4096, device="cuda")
    with utilization.watching("cuda") as readings:
        timed = timing.time_calls(lambda: a @ a, warmup=5, repetitions=1000, device="cuda")
    assert min(timed) > 4096**3 * 2 / 1e15 * 1e9  # no card does a PFLOP/s in fp32
    assert max(readings["gpu_utilization_percent"]) > 50


def test_bench():
    (row,) = bench(cells(["small"], precisions=["bf16"]), device="cuda", warmup=0, steps=2)["rows"]
    assert row["status"] == "ok", row["detail"]
    assert row["peak_reserved_bytes"] >= row["peak_allocated_bytes"] > 0


def test_ceilings():
    assert ceilings.measure_ceilings(print)[-1]["gb_per_s"] > 100
