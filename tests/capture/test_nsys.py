"""Captures with a real nsys, trap by trap; and what needs none: names, help texts, messages."""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import stand_in_nsight

import nsightkit
from nsightkit.capture import doctor
from nsightkit.capture import nsys as capture
from nsightkit.capture.profiling import Captured
from nsightkit.errors import NsightkitError, TraceError, UsageError
from nsightkit.trace import programs
from nsightkit.trace.programs import NSYS

NASTY = "-a b'c\"d $(touch pwned) %h %q{HOME};e"

PROGRAM = """
    import ctypes, nvtx, os, sys, time
    other = nvtx.get_domain("other")
    for i in range(4):
        with nvtx.annotate("step"):
            with nvtx.annotate("data"):
                time.sleep(0.005)
            with nvtx.annotate("compute"):
                sum(range(1000))
    with nvtx.annotate("elsewhere", domain="other"):
        time.sleep(0.002)
    open(sys.argv[1], "w").write("ran to its end") if len(sys.argv) > 1 else None
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    pytest.importorskip("nvtx")
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


@pytest.fixture
def real(nsys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    return nsys


def fake(folder: Path, script: str) -> Path:
    """A program called nsys that does what the script says."""
    path = folder / "nsys"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# -- finding it --------------------------------------------------------------------------------------------------


def test_find_prefers_the_environment_then_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    named, on_path = fake(tmp_path / "one", ""), fake(tmp_path / "two", "")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.delenv("NSIGHTKIT_NSYS", raising=False)
    assert NSYS.find() == on_path
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(named))
    assert NSYS.find() == named
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="NSIGHTKIT_NSYS"):
        NSYS.find()


def test_version_is_read_and_rubbish_is_refused(tmp_path: Path) -> None:
    good = fake(tmp_path, "echo 'NVIDIA Nsight Systems version 2024.7.1.84-247134862303v0'")
    assert NSYS.version(good) == (2024, 7, 1, 84)
    (tmp_path / "bad").mkdir()
    with pytest.raises(NsightkitError, match="said no version"):
        NSYS.version(fake(tmp_path / "bad", "echo hello; exit 3"))


def test_an_nsys_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    marker = tmp_path / "child"
    hanging = fake(tmp_path, f"(sleep 30; touch '{marker}') & echo $! > '{tmp_path}/pid'; wait")
    start = time.monotonic()
    with pytest.raises(NsightkitError, match="no answer within 1 s"):
        NSYS.version(hanging, timeout_s=1.0)
    assert time.monotonic() - start < 20  # the 30 s of the child were not waited for
    child = int((tmp_path / "pid").read_text())
    for _ in range(50):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child of the hanging nsys lives on")


def test_too_old_an_nsys_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(fake(tmp_path, "echo version 2022.4.2.1")))
    with pytest.raises(NsightkitError, match="too old"):
        NSYS.require()


# -- exporting ---------------------------------------------------------------------------------------------------


def test_without_nsys_the_remedy_is_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSIGHTKIT_NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(vars(NSYS), "folders", ())  # not where this machine's installers have put it
    monkeypatch.chdir(tmp_path)
    report = Path(NASTY + ".nsys-rep")
    report.write_bytes(b"x")
    with pytest.raises(TraceError) as caught:
        nsightkit.load(report)
    # what a shell makes of the remedy is the command, word by word
    command = shlex.split(caught.value.remedy.partition(": ")[2])
    assert command == ["nsys", "export", "--type", "sqlite", "--force-overwrite", "true",
                       "-o", f"./{NASTY}.sqlite", f"./{NASTY}.nsys-rep"]  # fmt: skip
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def captured(nsys: Path, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """The program, captured once."""
    pytest.importorskip("nvtx")
    folder = tmp_path_factory.mktemp("captured")
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSIGHTKIT_NSYS", str(nsys))
        command = [sys.executable, str(folder / "program.py")]
        return capture.profile(command, folder / NASTY, expect=["ranges", "os_calls"], show=False)


@pytest.mark.nsys
def test_a_report_of_any_name_is_exported_once(
    real: Path, captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "$(touch pwned) 'x' %h"
    folder.mkdir()
    report = folder / f"{NASTY}.nsys-rep"
    shutil.copy(captured.report, report)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = programs.exported(report.name, cache=True).path  # a relative name that begins with a dash
    assert first.is_relative_to(tmp_path / "cache")
    written = first.stat().st_mtime_ns
    assert programs.exported(report.name, cache=True).path == first
    assert first.stat().st_mtime_ns == written  # reused
    os.utime(report, ns=(1, 1))
    assert programs.exported(report.name, cache=True).path == first
    assert first.stat().st_mtime_ns > written  # of another report: made again
    first.write_bytes(b"half an export")
    assert nsightkit.load(report).size("ranges") == 13
    assert [path.name for path in folder.iterdir()] == [report.name]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.nsys
@pytest.mark.parametrize("content", [b"", b"rubbish" * 500, None], ids=["empty", "random", "truncated"])
def test_a_damaged_report_is_one_clear_line(
    real: Path, captured: Captured, tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    report = tmp_path / "damaged.nsys-rep"
    report.write_bytes(captured.report.read_bytes()[:5000] if content is None else content)
    with pytest.raises(TraceError) as caught:
        programs.exported(report, cache=True)
    assert "\n" not in str(caught.value)
    assert "nsys export" in caught.value.remedy
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == [report.name]
    assert not [path.name for path in (tmp_path / "cache").rglob("*") if not path.is_dir()]


# -- the real thing ----------------------------------------------------------------------------------------------


@pytest.mark.nsys
def test_ranges_and_os_calls_come_back(captured: Captured) -> None:
    done = captured
    assert done.report.name == f"{NASTY}.nsys-rep"
    assert done.trace == done.report.with_name(f"{NASTY}.sqlite")
    assert done.returncode == 0
    assert any("cuda was traced and nothing" in note for note in done.notes)
    trace = nsightkit.load(done.trace)
    ranges = trace["ranges"]
    assert ranges["name"].value_counts().to_dict() == {"step": 4, "data": 4, "compute": 4, "elsewhere": 1}
    assert set(ranges.loc[ranges["name"] == "elsewhere", "domain"]) == {"other"}
    inner = ranges[ranges["name"] == "data"]
    assert set(ranges["name"].iloc[inner["parent"]]) == {"step"}
    # each `data` slept 5 ms, and a sleep is never shorter
    assert (inner["end_ns"] - inner["start_ns"]).min() >= 5_000_000
    calls = trace["os_calls"]
    sleeps = calls[calls["name"].isin(["clock_nanosleep", "nanosleep", "select"])]
    assert len(sleeps) >= 5
    assert trace.meta.tool_version is not None


# What the header-only NVTX does in a C program: ask the injected library for its functions, then push plain strings,
# as torch.cuda.nvtx does in a CUDA build. (The nvtx package registers its strings.)
PLAIN_STRINGS = """
    import ctypes, os, time

    sizes = {1: 16, 2: 9, 3: 15, 4: 7, 5: 17, 6: 7}  # functions of each NVTX module
    slots = {m: (ctypes.c_void_p * n)() for m, n in sizes.items()}
    tables = {
        m: (ctypes.c_void_p * (n + 1))(None, *[ctypes.addressof(slots[m]) + 8 * i for i in range(1, n)])
        for m, n in sizes.items()
    }
    Table = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint))
    SetVersion = ctypes.CFUNCTYPE(None, ctypes.c_uint32)

    @Table
    def table(module, out, size):
        if module not in tables:
            return 0
        out[0] = ctypes.addressof(tables[module])
        if size:
            size[0] = sizes[module]
        return 1

    class Functions(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_size_t), ("table", Table)]

    class Version(ctypes.Structure):
        _fields_ = [
            ("bytes", ctypes.c_size_t), ("version", ctypes.c_uint32), ("_", ctypes.c_uint32), ("set", SetVersion)
        ]

    functions = Functions(ctypes.sizeof(Functions), table)
    version = Version(ctypes.sizeof(Version), 3, 0, SetVersion(lambda version: None))
    Exports = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint)
    exports = Exports(lambda which: {1: ctypes.addressof(functions), 3: ctypes.addressof(version)}.get(which))
    library = ctypes.CDLL(os.environ["NVTX_INJECTION64_PATH"])
    library.InitializeInjectionNvtx2.argtypes = [Exports]
    assert library.InitializeInjectionNvtx2(exports)
    push = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(slots[1][9])
    pop = ctypes.CFUNCTYPE(ctypes.c_int)(slots[1][11])
    for _ in range(3):
        push(b"measure")
        time.sleep(0.002)
        pop()
"""


@pytest.mark.nsys
def test_a_range_with_a_plain_name_opens_the_capture(real: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(textwrap.dedent(PLAIN_STRINGS))
    command = [sys.executable, str(plain)]
    # nsys by itself compares registered strings only: nothing is captured, there is no report, and all is well.
    options = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--capture-range=nvtx", "--nvtx-capture=measure"]
    alone = subprocess.run(
        [str(real), "profile", *options, f"--output={tmp_path / 'alone'}", *command],
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert not list(tmp_path.glob("alone*"))
    done = capture.profile(command, tmp_path / "ours", trace=("nvtx",), capture_range="measure", show=False)
    assert nsightkit.load(done.trace)["ranges"]["name"].tolist() == ["measure"]


@pytest.mark.nsys
@pytest.mark.parametrize(
    ("name", "found"),
    [("step", {"step", "data", "compute"}), ("elsewhere@other", {"elsewhere"}), ("elsewhere@*", {"elsewhere"})],
)
def test_a_capture_range_keeps_the_program_running(
    real: Path, program: Path, tmp_path: Path, name: str, found: set[str]
) -> None:
    end = tmp_path / "end"
    done = capture.profile(
        [sys.executable, str(program), str(end)], tmp_path / "r", trace=("nvtx",), capture_range=name, show=False
    )
    # with nsys's own default, stop-shutdown, the program gets SIGTERM when the range closes
    assert end.read_text() == "ran to its end"
    assert done.returncode == 0
    names = nsightkit.load(done.trace)["ranges"]["name"].value_counts().to_dict()
    assert set(names) == found
    assert max(names.values()) == 1


@pytest.mark.nsys
def test_stop_shutdown_would_have_ended_it(real: Path, program: Path, tmp_path: Path) -> None:
    end = tmp_path / "end"
    options = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--capture-range=nvtx", "--nvtx-capture=step"]
    command = [str(real), "profile", *options, f"--output={tmp_path / 'bare'}", sys.executable, str(program), str(end)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert b"Connection to Agent lost" not in done.stdout + done.stderr
    assert done.returncode != 0
    assert not end.exists()


@pytest.mark.nsys
def test_repeat_gives_a_report_each(real: Path, program: Path, tmp_path: Path) -> None:
    done = capture.profile(
        [sys.executable, str(program)], tmp_path / "r", trace=("nvtx",), capture_range="step", repeat=2, show=False
    )
    assert done.traces == [tmp_path / "r.1.sqlite", tmp_path / "r.2.sqlite"]
    assert all(nsightkit.load(t)["ranges"]["name"].tolist().count("step") == 1 for t in done.traces)


@pytest.mark.nsys
def test_a_range_that_never_opens_is_an_error_with_its_remedy(real: Path, program: Path, tmp_path: Path) -> None:
    with pytest.raises(NsightkitError, match=r"no range 'elsewhere' was opened.*elsewhere@\*") as caught:
        # it is in a domain, which the name does not say
        capture.profile([sys.executable, str(program)], tmp_path / "r", capture_range="elsewhere", show=False)
    assert "exit code 0" in str(caught.value)  # nsys itself found nothing wrong
    assert not list(tmp_path.glob("r*"))


@pytest.mark.nsys
def test_a_missing_importer_is_replaced_or_named(
    real: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = capture.importer(real)
    if found is None:
        pytest.skip("this nsys shows no importer")
    # a collector without its importer beside it: hard links, because nsys asks the kernel where it lies
    collector = capture.collector(real).parent
    there = tmp_path / "nsight-systems" / collector.name
    try:
        shutil.copytree(collector, there, copy_function=os.link)
    except (OSError, shutil.Error):
        shutil.copytree(collector, there, dirs_exist_ok=True)
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(there / "nsys"))
    command = [sys.executable, str(program)]
    with pytest.raises(NsightkitError, match="no QdstrmImporter beside"):
        capture.profile(command, tmp_path / "r", trace=("nvtx",), show=False)
    assert (tmp_path / "r.qdstrm").stat().st_size > 0  # not thrown away
    (tmp_path / "nsight-systems" / "host-elsewhere").symlink_to(found.parent)
    done = capture.profile(command, tmp_path / "s", trace=("nvtx",), show=False)
    assert nsightkit.load(done.trace).size("ranges") == 13


@pytest.mark.nsys
def test_a_program_that_fails_still_leaves_its_trace_and_domains_are_not_ranges(real: Path, tmp_path: Path) -> None:
    """The fault of newer nvtx packages: domains arrive, and no range."""
    pytest.importorskip("nvtx")
    body = "import nvtx, sys; nvtx.get_domain('only'); sys.exit(3)"
    done = capture.profile([sys.executable, "-c", body], tmp_path / "r", trace=("nvtx",), show=False)
    assert done.returncode == 3
    assert any("exit code 3" in note for note in done.notes)
    assert done.trace.is_file()
    assert any("nvtx==0.2.11" in note for note in done.notes)


@pytest.mark.nsys
def test_a_program_that_never_ends_is_interrupted_and_its_trace_kept(real: Path, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))\nwhile True: time.sleep(0.01)"
    done = capture.profile([sys.executable, "-c", body], tmp_path / "r", trace=("osrt",), timeout_s=3, show=False)
    assert any("interrupted after 3 s" in note for note in done.notes)
    assert nsightkit.load(done.trace).size("os_calls") > 10
    assert not Path(f"/proc/{pid.read_text()}").exists()


# -- options, without running anything -----------------------------------------------------------------------------


@pytest.mark.nsys
def test_the_installed_help_is_understood(real: Path) -> None:
    can = capture.features(real)
    assert {"--trace", "-t", "--capture-range-end", "--nvtx-capture", "--cuda-graph-trace", "--env-var"} <= can.keys()
    assert {"cuda", "nvtx", "osrt"} <= set(can["--trace"])


HELP_2023 = """
usage: nsys profile [<args>] [application] [<application args>]

\t-c, --capture-range=

\t   Possible values are none, cudaProfilerApi, nvtx, hotkey.

\t--cuda-graph-trace=<granularity>[:<launch origin>]

\t   If the CUDA driver version is 11.7 --not-an-option

\t(Experimental) --gpu-metrics-device=

\t--nvtx-domain-[include|exclude]=

\t-o, --output=

\t-t, --trace=

\t   Possible values are 'cuda', 'nvtx', 'cublas-verbose',
\t   'osrt' or 'none'.
\t   If '<api>-annotations' is selected, 'the corresponding' API is too.
"""


def test_help_is_parsed() -> None:
    can = capture.parse_help(HELP_2023)
    assert can.keys() == {
        "-c", "--capture-range", "--cuda-graph-trace", "--gpu-metrics-device", "--nvtx-domain-include",
        "--nvtx-domain-exclude", "-o", "--output", "-t", "--trace",
    }  # fmt: skip
    assert can["--trace"] == ["cuda", "nvtx", "cublas-verbose", "osrt", "none"]


@pytest.fixture
def helpful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An nsys that has version and help, and fails the test if it is asked to profile."""
    (tmp_path / "help").write_text(HELP_2023)
    path = fake(
        tmp_path,
        f'case "$1 $2" in --version*) echo version 2023.4.4.54;; *--help) cat "{tmp_path}/help";; '
        f'*) touch "{tmp_path}/ran";; esac',
    )
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(path))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"extra": ["--gpu-metrics-devices=all"]}, "did you mean --gpu-metrics-device"),
        ({"extra": ["--capture-range-end=stop-shutdown"]}, "is set by nsightkit"),
        ({"extra": ["--nvtx-domain-include"]}, "--nvtx-domain-include=VALUE"),
        ({"trace": ["nccl"]}, "cannot trace 'nccl'"),
        ({"trace": ["cuda"], "capture_range": "step"}, "needs nvtx"),
        ({"repeat": 2}, "repeat needs a capture range"),
        ({"expect": ["kernel"]}, "there are kernels"),
    ],
)
def test_what_this_nsys_cannot_do_is_said_before_it_runs(
    helpful: Path, tmp_path: Path, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        capture.profile(["true"], tmp_path / "r", show=False, **arguments)
    assert not (tmp_path / "ran").exists()


def test_nothing_is_overwritten_unasked(helpful: Path, tmp_path: Path) -> None:
    (tmp_path / "r.sqlite").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        capture.profile(["true"], tmp_path / "r")
    with pytest.raises(UsageError, match="no command"):
        capture.profile([], tmp_path / "r")
    assert (tmp_path / "r.sqlite").read_text() == "mine"


def test_the_command_that_is_shown_holds_all_that_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = (
        'for a; do case "$a" in --output=*) for i in 1 2; do echo > "${a#--output=}.$i.nsys-rep"; done;; esac; done'
    )
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(tmp_path, writes)))
    how = {"trace": ("nvtx",), "capture_range": "step", "repeat": 2, "export": False, "show": False}
    with pytest.raises(UsageError, match="cannot record the nodes"):
        capture.profile(["true"], tmp_path / "r", graph_nodes=True, **how)
    (tmp_path / "help").write_text(HELP_2023)
    NSYS.ask.cache_clear()
    done = capture.profile(["true"], tmp_path / "r", graph_nodes=True, **how)
    assert done.ran[1:] == [
        "profile", "--trace=nvtx", "--cuda-graph-trace=node", "--capture-range=nvtx", "--nvtx-capture=step",
        "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0", "--capture-range-end=repeat:2", f"--output={tmp_path / 'r'}",
        "true",
    ]  # fmt: skip
    assert done.traces == [tmp_path / "r.1.nsys-rep", tmp_path / "r.2.nsys-rep"]


def test_an_nsys_that_lost_its_helper_is_not_blamed_on_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "echo \"Connection to Agent lost. This is most likely a bug. Internal reason: 'x'.\""
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(tmp_path, f"{said}; exit 1")))
    with pytest.raises(NsightkitError, match=r"Connection to Agent lost\); .* record again") as caught:
        capture.profile(["true"], tmp_path / "r", trace=("nvtx",), capture_range="step", show=False)
    assert "spelling" not in str(caught.value)


def test_only_rows_count_as_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = tmp_path / "held.sqlite"
    with sqlite3.connect(export) as database:
        database.execute("CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT)")
        database.execute("INSERT INTO NVTX_EVENTS VALUES (1, 2, 75)")  # a domain's name
        database.execute("CREATE TABLE OSRT_API (start INT, end INT)")
        database.execute("INSERT INTO OSRT_API VALUES (1, 2)")
    database.close()
    writes = 'for a; do case "$a" in --output=*) echo > "${a#--output=}.nsys-rep";; esac; done'
    exports = f'[ "$1" = export ] && cp "{export}" "$7" && exit'
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(tmp_path, f"{exports}\n{writes}")))
    output = tmp_path / "x#?%41"  # not to be taken for parts of an address
    kinds = ("nvtx", "osrt")
    done = capture.profile(["true"], output, trace=kinds, expect=["os_calls"], show=False)
    assert [note.partition(" ")[0] for note in done.notes] == ["nvtx", "the"]
    for table in ("ranges", "kernels"):
        with pytest.raises(NsightkitError, match=f"recorded no {table}"):
            capture.profile(["true"], output, trace=kinds, expect=[table], overwrite=True, show=False)


# -- the nsys inside Nsight Compute --------------------------------------------------------------------------------


def test_the_copy_in_nsight_compute_is_found_beside_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "nsight-compute" / "2025.3.1"
    for name in ("target/linux-desktop/ncu", "host/target-linux-x64/nsys", "host/linux-desktop-x64/QdstrmImporter"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("#!/bin/sh\n")
        (root / name).chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ncu").symlink_to(root / "target/linux-desktop/ncu")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("NSIGHTKIT_NSYS", raising=False)
    monkeypatch.setitem(vars(NSYS), "folders", ())  # not where this machine's installers have put it
    found = NSYS.find()
    assert found == root / "host/target-linux-x64/nsys"
    assert capture.importer(found) == root / "host/linux-desktop-x64/QdstrmImporter"


def test_libraries_that_are_named_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv(programs.LIBRARIES, raising=False)
    assert programs.environment() == dict(os.environ)
    monkeypatch.setenv("LD_LIBRARY_PATH", "/present")
    assert programs.environment(None, tmp_path)["LD_LIBRARY_PATH"] == f"{tmp_path}{os.pathsep}/present"
    monkeypatch.setenv(programs.LIBRARIES, "/named")
    assert programs.environment({"A": "b"}, tmp_path) == {"A": "b", "LD_LIBRARY_PATH": f"/named{os.pathsep}{tmp_path}"}


def _importer() -> dict[str, str]:
    return next(row for row in doctor.report() if row["check"].startswith("nsys importer"))


def test_a_capture_left_unimported_is_imported_with_the_named_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the copy in Nsight Compute leaves it where libdw is missing: a .qdstrm, no report, exit code 0."""
    root = tmp_path / "compute" / "host"
    for folder in ("target-linux-x64", "linux-desktop-x64"):
        (root / folder).mkdir(parents=True)
    writes = 'for a; do case "$a" in --output=*) echo raw > "${a#--output=}.qdstrm";; esac; done'
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(root / "target-linux-x64", writes)))
    importer = root / "linux-desktop-x64" / "QdstrmImporter"
    importer.write_text(
        '#!/bin/sh\n[ -f "${LD_LIBRARY_PATH%%:*}/libdw.so.1" ] || { echo libdw.so.1 not found; exit 1; }\n'
        'cp "$2" "$4"\n'
    )
    importer.chmod(0o755)
    monkeypatch.delenv(programs.LIBRARIES, raising=False)
    with pytest.raises(NsightkitError, match=r"libdw\.so\.1 not found.*NSIGHTKIT_NSYS_LIBRARIES"):
        capture.profile(["true"], tmp_path / "a", trace=("nvtx",), export=False, show=False)
    (tmp_path / "libraries").mkdir()
    (tmp_path / "libraries" / "libdw.so.1").touch()
    (tmp_path / "ldd").write_text(
        '#!/bin/sh\n[ -f "${LD_LIBRARY_PATH%%:*}/libdw.so.1" ] || echo "libdw.so.1 => not found"\n'
    )
    (tmp_path / "ldd").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert _importer()["status"] == "missing"
    monkeypatch.setenv(programs.LIBRARIES, str(tmp_path / "libraries"))
    assert _importer()["status"] == "ok"
    done = capture.profile(["true"], tmp_path / "b", trace=("nvtx",), export=False, show=False)
    assert done.report.read_text() == "raw\n"
    assert [p.name for p in tmp_path.glob("b*")] == ["b.nsys-rep"]
