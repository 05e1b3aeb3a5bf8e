"""`peaks --measure`, against a stand-in for CUDA: what is run, and the list that `sol` reads back."""

import json

import pytest

torch = pytest.importorskip("torch")

from stand_in_cuda import stand_in  # noqa: E402

from nsightkit import cli  # noqa: E402
from nsightkit.analysis.roofline import sol  # noqa: E402
from nsightkit.capture import ceilings  # noqa: E402
from nsightkit.errors import NsightkitError  # noqa: E402
from nsightkit.hardware import find, peak_rows  # noqa: E402


@pytest.fixture
def said(monkeypatch):
    """Small sizes on the stand-in, and the lines of progress."""
    monkeypatch.setattr(ceilings, "has_gpu", lambda: True)
    small = {"_SIZE": 64, "_COPY_BYTES": 4_000_000, "_WARMUP_NS": 1e6, "_TIMED_NS": 1e6}
    for name, value in small.items():
        monkeypatch.setattr(ceilings, name, value)
    with stand_in():
        yield []


def test_the_list_is_read_back(said, tmp_path):
    before = torch.get_float32_matmul_precision()
    listed = ceilings.measure_ceilings(said.append)
    assert torch.get_float32_matmul_precision() == before
    assert [row["unit"] for row in listed] == ["fp32", "tf32", "bf16", "fp16", "fp8", "memory"]
    assert said == [f"measuring {row['unit']} ..." for row in listed]
    assert list(listed[0]) == list(peak_rows(find("H200"))[0])
    assert ": GEMM 64x64 64x64, median of " in listed[0]["source"]
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps(listed))
    rates = sol.read_ceilings(path)
    assert (rates.tflops["bf16"], rates.gb_per_s) == (listed[2]["tflops"], listed[5]["gb_per_s"])


def test_what_the_card_lacks_is_left_out(said, monkeypatch):
    def run(call, what):
        raise RuntimeError("no such unit\nat line 7")

    monkeypatch.setattr(ceilings, "_time_for_seconds", run)
    with pytest.raises(NsightkitError, match="nothing could be measured"):
        ceilings.measure_ceilings(said.append)
    assert "fp8: no such unit" in said


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(ceilings, "has_gpu", lambda: False)
    assert cli.run(["peaks", "--measure"]) == 2
    assert "--measure needs a CUDA GPU" in capsys.readouterr().err
