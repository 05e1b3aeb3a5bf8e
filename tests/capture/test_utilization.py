"""The log of a GPU's state beside a measurement: a process of its own, which ends with the block that it watches."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from nsightkit.capture import utilization  # noqa: E402

IDLE = "0, 345, [N/A], 0x0000000000000001"
LOADED = "99, 1980, 350.00, 0x0000000000000024"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi that is idle for some readings and then works, each at the present time."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f'#!/bin/bash\necho "$@" >> {program}.asked\n'
        "case \"$*\" in *loop*) ;; *) echo 'now, 0, 345, [N/A], 0x1'; exit;; esac\n"
        "echo '2020/01/01 00:00:00.000, 50, 50, 50, 0x0'\n"
        "number=0\n"
        f"while sleep 0.02; do number=$((number + 1)); state='{LOADED}'; [ $number -lt 5 ] && state='{IDLE}'\n"
        f'echo "$(date "+%Y/%m/%d %H:%M:%S.%3N"), $state" || exit; touch {program}.$number; done\n'
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


@pytest.mark.parametrize("mask", ["clocks_event_reasons.active", "clocks_throttle_reasons.active"])
def test_readings_carry_their_time(smi, mask):
    """By either name of the mask: a driver refuses a question with a name that it does not know."""
    smi.write_text(smi.read_text().replace("case", f'case "$*" in *{mask}*) ;; *) exit 2;; esac\ncase', 1))
    start = time.monotonic()
    with utilization.watching("cuda", period_s=0.2) as readings:
        wait_for(Path(f"{smi}.9"))
        assert readings == []
    duration_s = time.monotonic() - start
    asked = smi.with_name("nvidia-smi.asked").read_text().splitlines()[-1]
    assert asked == (
        f"--id=GPU-7c2a --query-gpu=timestamp,utilization.gpu,clocks.sm,power.draw,{mask} "
        "--format=csv,noheader,nounits --loop-ms=200"
    )
    lists = utilization.by_metric(readings)
    times = lists["time_s"]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] <= duration_s
    assert lists["sm_clock_mhz"][:5] == [345, 345, 345, 345, 1980]
    assert set(lists["power_w"]) == {350.0}  # an idle one has none


def test_the_first_second_is_a_second_whatever_the_period():
    readings = [{"time_s": number / 4, "sm_clock_mhz": number, "slowdown_mask": 4} for number in range(12)]
    lists = utilization.by_metric(readings, settle_s=1.0)
    assert lists["sm_clock_mhz"] == list(range(4, 12))
    summary = {"gpu_utilization_percent": None, "sm_clock_mhz": 8, "power_w": None, "slowed_by": "power limit"}
    assert utilization.summary(lists) == summary


def test_the_log_ends_with_an_error_in_the_block(smi):
    def fail():
        with utilization.watching("cuda"):
            wait_for(Path(f"{smi}.3"))
            raise RuntimeError("of the work")

    with pytest.raises(RuntimeError, match="of the work"):
        fail()
    written = len(list(smi.parent.iterdir()))
    time.sleep(0.3)
    assert len(list(smi.parent.iterdir())) <= written + 1


def test_without_an_answer_there_are_no_readings(smi, monkeypatch):
    smi.write_text("#!/bin/sh\nexit 9\n")
    for device in ("cuda", "cpu"):
        with utilization.watching(device) as readings:
            pass
        assert readings == []
        monkeypatch.setenv("PATH", "/nowhere")
    assert utilization.summary({})["sm_clock_mhz"] is None
