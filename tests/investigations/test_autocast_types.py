"""Types under autocast: the CPU's list and the model's types against PyTorch itself."""

from __future__ import annotations

import pytest

from nsightkit.investigations.pages import autocast_types
from nsightkit.investigations.recordings import frame

pytest.importorskip("torch")
from nsightkit.workloads import autocast


def test_the_list_of_a_cpu_is_that_of_pytorch():
    for (name, given), made in autocast.probe("cpu", "bf16").items():
        expected = autocast_types.operation(autocast_types.CPU, name, autocast_types.by_bits(given))
        assert autocast_types.by_bits(made) == expected, (name, given)


@pytest.mark.parametrize("norm", ["written", "fused"])
def test_types_and_bytes_of_a_model(norm):
    with autocast.start("cpu", norm=norm) as work:
        work.step()
        samples = frame(work.observed())
    outputs = autocast_types.seen(samples, "output", ["tensor", "type"])
    outputs = outputs[outputs["precision"] == "bf16"].set_index("tensor")["type"].map(autocast_types.by_bits)
    expected = autocast_types.in_model(autocast_types.CPU, norm)
    assert outputs.to_dict() == {name: kind for name, (kind, _) in expected.items()}
    saved = samples[samples["metric"].str.startswith("saved/bf16/") & ~samples["metric"].str.contains("/parameter/")]
    assert autocast_types.kept(samples)["bf16"].sum() == saved["value"].sum() > 0
