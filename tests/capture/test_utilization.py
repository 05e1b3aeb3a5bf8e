"""The log of a GPU's state beside a measurement: a process of its own, which ends with what it watches."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from nsightkit.capture import provenance, utilization  # noqa: E402


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nvidia-smi that says what it was asked, once what it is to say, and then the last of it again and again."""
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="7c2a"))
    return program


def says(program: Path, *lines: str) -> None:
    spoken = "\n".join(f"echo '{line}'" for line in lines)
    program.write_text(
        f'#!/bin/sh\ncase "$*" in *loop*) ;; *) echo "{lines[-1]}"; exit;; esac\necho $$ "$@" > {program}.asked\n'
        f"{spoken}\ntouch {program}.said\n"
        f"while sleep 0.02; do echo '{lines[-1]}' || exit; done\n"
    )
    program.chmod(0o755)


def wait_for(there: Path) -> None:
    while not there.exists():
        time.sleep(0.01)


@pytest.mark.skipif(not shutil.which("stdbuf"), reason="no stdbuf")
def test_what_a_program_would_keep_to_itself_is_read_all_the_same(smi: Path) -> None:
    # grep writes whole blocks into a pipe; here it waits for more, until it is ended.
    smi.write_text(
        f"#!/bin/sh\ncase $* in *loop*) ;; *) echo '99, 1980, 350.00, 0x0'; exit;; esac\n"
        f"mkfifo {smi}.pipe && exec 3<>{smi}.pipe\necho '99, 1980, 350.00, 0x0' >&3\n"
        f"touch {smi}.said\nexec grep , <&3\n"
    )
    smi.chmod(0o755)
    with utilization.logged("cuda") as load:
        wait_for(Path(f"{smi}.said"))
        time.sleep(0.5)
    assert load["readings"] == 1


def test_a_part_is_logged_under_load_only(smi: Path) -> None:
    says(
        smi,
        *("0, 345, 75.00, 0x0000000000000001", "99, 1980, 350.00, 0x0000000000000000"),
        *("100, 1500, 700.00, 0x0000000000000004", "100, 1410, 699.00, 0x0000000000000024"),
        *("0, 345, [N/A], 0x0000000000000001",),
    )  # fmt: skip
    with utilization.logged("cuda") as load:
        wait_for(Path(f"{smi}.said"))
        assert load == {}
    assert load.pop("readings") >= 5
    assert load == {
        "under_load": 3,
        "sm_clock_mhz": {"median": 1500, "min": 1410, "max": 1980},
        "power_w": {"median": 699, "min": 350, "max": 700},
        "slowed_by": {"power limit": 0.667, "heat": 0.333},
    }
    pid, *asked = Path(f"{smi}.asked").read_text().split()
    assert asked == [
        "--id=GPU-7c2a", "--query-gpu=utilization.gpu,clocks.sm,power.draw,clocks_event_reasons.active",
        "--format=csv,noheader,nounits", "--loop-ms=500",
    ]  # fmt: skip
    assert not Path("/proc", pid).exists()
    told = dict(provenance.rows({"load": load}))
    assert told["SM clock under load"] == "1,500 MHz (1,410 to 1,980)"
    assert told["Power under load"] == "699 W (350 to 700)"
    assert told["Clock held down by"] == "power limit (67% of the time), heat (33% of the time)"


def test_the_log_ends_with_an_error_in_the_block(smi: Path) -> None:
    says(smi, "99, 1980, 350.00, 0x0000000000000000")

    def fail() -> None:
        with utilization.logged("cuda"):
            wait_for(Path(f"{smi}.said"))
            raise RuntimeError("of the work")

    with pytest.raises(RuntimeError, match="of the work"):
        fail()
    assert not Path("/proc", Path(f"{smi}.asked").read_text().split()[0]).exists()


def test_the_log_does_not_outlive_a_process_that_is_killed(smi: Path) -> None:
    says(smi, "99, 1980, 350.00, 0x0000000000000000")
    program = (
        "import os, signal, sys, time, types, pathlib\n"
        "from nsightkit.capture import utilization\n"
        "cuda = types.SimpleNamespace(get_device_properties=lambda _: None)\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=cuda, device=str)\n"
        "with utilization.logged('cuda'):\n"
        f"    while not pathlib.Path('{smi}.said').exists(): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, env=dict(os.environ))
    assert done.returncode == -9
    pid = Path(f"{smi}.asked").read_text().split()[0]
    end = time.monotonic() + 30
    while Path("/proc", pid).exists() and time.monotonic() < end:  # it writes once more, to nobody
        time.sleep(0.02)
    assert not Path("/proc", pid).exists()


@pytest.mark.parametrize("script", ["exit 9", "echo 'Field \"clocks_event_reasons.active\" is not a valid field'"])
def test_without_an_answer_there_is_no_log(smi: Path, script: str) -> None:
    smi.write_text(f"#!/bin/sh\n{script}\n")
    smi.chmod(0o755)
    with utilization.logged("cuda") as load:
        pass
    assert load == {}


def test_without_the_program_or_a_gpu_there_is_no_log(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cuda", "cpu"):
        monkeypatch.setenv("PATH", str(smi.parent))
        with utilization.logged(device) as load:
            pass
        assert load == {}
