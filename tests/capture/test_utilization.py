"""The log of a GPU's state beside a measurement: a process of its own, which ends with the block that it watches."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from nsightkit.capture import utilization  # noqa: E402

IDLE = "0, 345, [N/A], 0x0000000000000001"
LOADED = "99, 1980, 350.00, 0x0000000000000024"
LAST = "99, 1980, 350.00, [N/A]"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi that is idle for some readings and then works."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/bash\necho "$@" >> {program}.asked\n'
        "case \"$*\" in *loop*) ;; *) echo '0, 345, [N/A], 0x1'; exit;; esac\n"
        "number=0\n"
        f"while sleep 0.02; do number=$((number + 1)); state='{LOADED}'\n"
        f"[ $number -lt 5 ] && state='{IDLE}'; [ $number -gt 5 ] && state='{LAST}'\n"
        f'echo "$state" || exit; touch {program}.$number; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="7c2a"))
    return program


def wait_for(path):
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_readings_end_with_an_error_in_the_block(smi):
    seen = []

    def fail():
        with utilization.watching("cuda", period_s=0.2) as readings:
            seen.append(readings)
            wait_for(Path(f"{smi}.9"))
            assert readings == {}
            raise RuntimeError("of the work")

    with pytest.raises(RuntimeError, match="of the work"):
        fail()
    (readings,) = seen
    asked = smi.with_name("nvidia-smi.asked").read_text().splitlines()[-1]
    assert asked == (
        "--id=GPU-7c2a --query-gpu=utilization.gpu,clocks.sm,power.draw,clocks_event_reasons.active "
        "--format=csv,noheader,nounits --loop-ms=200"
    )
    assert readings["sm_clock_mhz"][:5] == [345, 345, 345, 345, 1980]
    assert readings["slowdown_mask"][:5] == [1, 1, 1, 1, 36]
    assert set(readings["power_w"]) == {350.0}  # an idle one has none
    written = len(list(smi.parent.iterdir()))
    time.sleep(0.2)
    assert len(list(smi.parent.iterdir())) <= written + 1


def test_without_an_answer_there_are_no_readings(smi):
    smi.write_text("#!/bin/sh\nexit 9\n")
    for device in ("cuda", "cpu"):
        with utilization.watching(device) as readings:
            pass
        assert readings == {}
