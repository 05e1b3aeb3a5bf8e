"""Captures with a real nsys, trap by trap; what goes wrong without one is played by a stand-in."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import stand_in_nsight

import nsightkit
from nsightkit.capture import doctor
from nsightkit.capture import nsys as capture
from nsightkit.capture.profiling import Captured
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.trace import programs
from nsightkit.trace.programs import NSYS

NASTY = "-a b'c\"d $(touch pwned) %h %q{HOME};e"

PROGRAM = """
    import nvtx, sys, time
    for i in range(4):
        with nvtx.annotate("step"):
            with nvtx.annotate("data"):
                time.sleep(0.005)
    with nvtx.annotate("elsewhere", domain="other"):
        time.sleep(0.002)
    if len(sys.argv) > 1:
        open(sys.argv[1], "w").write("ran to its end")
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvtx")
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


@pytest.fixture
def real(nsys: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    return nsys


# -- the real thing ----------------------------------------------------------------------------------------------


@pytest.mark.nsys
def test_ranges_and_os_calls_come_back(real: Path, program: Path, tmp_path: Path) -> None:
    done = capture.profile([sys.executable, str(program)], tmp_path / NASTY)
    assert done.report == tmp_path / f"{NASTY}.nsys-rep"
    assert done.trace == tmp_path / f"{NASTY}.sqlite"
    assert done.returncode == 0
    assert "cuda was traced and nothing" in done.notes[0]
    assert "environment" in done.notes[1]
    assert len(done.notes) == 2
    trace = nsightkit.load(done.trace)
    ranges = trace["ranges"]
    assert ranges["name"].value_counts().to_dict() == {"step": 4, "data": 4, "elsewhere": 1}
    inner = ranges[ranges["name"] == "data"]
    assert set(ranges["name"].iloc[inner["parent"]]) == {"step"}
    # each `data` slept 5 ms, and a sleep is never shorter
    assert (inner["end_ns"] - inner["start_ns"]).min() >= 5_000_000
    assert trace.size("os_calls") >= 5
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{NASTY}.nsys-rep", f"{NASTY}.sqlite"]
    with pytest.raises(UsageError, match="exists"):
        capture.profile(["true"], tmp_path / NASTY)


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
    options = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--capture-range=nvtx", "--nvtx-capture=measure"]
    # nsys by itself compares registered strings only: nothing is captured, there is no report, and all is well.
    alone = [str(real), "profile", *options, f"--output={tmp_path / 'alone'}", *command]
    subprocess.run(alone, capture_output=True, timeout=120, check=True)
    assert not list(tmp_path.glob("alone*"))
    done = capture.profile(command, tmp_path / "ours", nsys_args=options)
    assert nsightkit.load(done.trace)["ranges"]["name"].tolist() == ["measure"]


@pytest.mark.nsys
@pytest.mark.parametrize(("name", "inside"), [("step", {"step", "data"}), ("elsewhere@*", {"elsewhere"})])
def test_a_capture_range_keeps_the_program_running(
    real: Path, program: Path, tmp_path: Path, name: str, inside: set[str]
) -> None:
    end = tmp_path / "end"
    options = ["-t", "nvtx", "-c", "nvtx", "-p", name]
    done = capture.profile([sys.executable, str(program), str(end)], tmp_path / "r", nsys_args=options)
    # with nsys's own default, stop-shutdown, the program gets SIGTERM when the range closes
    assert end.read_text() == "ran to its end"
    assert done.returncode == 0
    counts = nsightkit.load(done.trace)["ranges"]["name"].value_counts().to_dict()
    assert counts == dict.fromkeys(inside, 1)


@pytest.mark.nsys
def test_the_users_own_option_replaces_ours(real: Path, program: Path, tmp_path: Path) -> None:
    end = tmp_path / "end"
    options = ["--trace=nvtx", "-c", "nvtx", "-p", "step", "--capture-range-end", "stop-shutdown"]
    done = capture.profile([sys.executable, str(program), str(end)], tmp_path / "r", nsys_args=options)
    assert done.returncode != 0
    assert "exit code" in done.notes[0]
    assert not end.exists()
    assert done.trace.is_file()


@pytest.mark.nsys
def test_repeat_gives_a_report_each(real: Path, program: Path, tmp_path: Path) -> None:
    options = ["--trace=nvtx", "-c", "nvtx", "-p", "step", "--capture-range-end=repeat:2"]
    command = [sys.executable, str(program)]
    done = capture.profile(command, tmp_path / "r", nsys_args=options)
    assert done.traces == [tmp_path / "r.1.sqlite", tmp_path / "r.2.sqlite"]
    for trace in done.traces:
        assert nsightkit.load(trace)["ranges"]["name"].tolist() == ["step", "data"]
    with pytest.raises(UsageError, match=r"r\.1\.nsys-rep exists"):
        capture.profile(command, tmp_path / "r", nsys_args=options)


@pytest.mark.nsys
def test_a_range_that_never_opens_is_an_error_with_its_remedy(real: Path, program: Path, tmp_path: Path) -> None:
    options = ["--capture-range=nvtx", "--nvtx-capture=elsewhere"]  # it is in a domain
    with pytest.raises(NsightkitError, match=r"exit code 0.*no range 'elsewhere' was opened.*elsewhere@\*"):
        capture.profile([sys.executable, str(program)], tmp_path / "r", nsys_args=options)
    assert not list(tmp_path.iterdir())


@pytest.mark.nsys
def test_an_option_that_this_nsys_lacks(real: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NsightkitError, match="exit code 1"):
        capture.profile(["true"], tmp_path / "r", nsys_args=["--no-such-option=1"])
    assert "no-such-option" in capfd.readouterr().err


@pytest.mark.nsys
def test_a_missing_importer_is_replaced_or_named(
    real: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importer = capture.importer(real)
    if importer is None:
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
    with pytest.raises(NsightkitError, match=r"could not import its raw capture, kept as .*r\.qdstrm"):
        capture.profile(command, tmp_path / "r", nsys_args=["--trace=nvtx"])
    assert (tmp_path / "r.qdstrm").stat().st_size > 0  # not thrown away
    (tmp_path / "nsight-systems" / "host-elsewhere").symlink_to(importer.parent)
    done = capture.profile(command, tmp_path / "s", nsys_args=["--trace=nvtx"])
    assert nsightkit.load(done.trace).size("ranges") == 9


@pytest.mark.nsys
def test_domains_are_not_ranges(real: Path, tmp_path: Path) -> None:
    """The fault of newer nvtx packages: domains arrive, and no range."""
    pytest.importorskip("nvtx")
    body = "import nvtx, sys; nvtx.get_domain('only'); sys.exit(3)"
    done = capture.profile([sys.executable, "-c", body], tmp_path / "r", nsys_args=["--trace=nvtx"])
    assert done.returncode == 3
    assert "nvtx==0.2.11" in done.notes[1]


@pytest.mark.nsys
def test_a_program_that_never_ends_is_interrupted_and_its_trace_kept(real: Path, tmp_path: Path) -> None:
    body = "import time\nwhile True: time.sleep(0.01)"
    done = capture.profile([sys.executable, "-c", body], tmp_path / "r", nsys_args=["-tosrt"], timeout_s=3)
    assert "interrupted after 3 s" in done.notes[0]
    assert nsightkit.load(done.trace).size("os_calls") > 10


# -- a stand-in --------------------------------------------------------------------------------------------------

#: Writes a report where nsys is told to, and an export that is a copy of a database.
WRITES = """
if [ "$1" = export ]; then cp "{export}" "$7"; exit; fi
for word; do case "$word" in --output=*) echo raw > "${{word#--output=}}.{suffix}";; esac; done
"""


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """An export with one OS call, and a domain's name for the only event of NVTX."""
    path = tmp_path / "held.sqlite"
    database = sqlite3.connect(path)
    with database:
        database.execute("CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT)")
        database.execute("INSERT INTO NVTX_EVENTS VALUES (1, 2, 75)")
        database.execute("CREATE TABLE OSRT_API (start INT, end INT)")
        database.execute("INSERT INTO OSRT_API VALUES (1, 2)")
    database.close()
    return path


def run_stand_in(folder: Path, script: str, name: str, *options: str) -> Captured:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(folder, script)))
        NSYS.ask.cache_clear()
        return capture.profile(["true"], folder / name, nsys_args=options)


def test_what_was_traced_and_stayed_empty_is_noted(tmp_path: Path, export: Path) -> None:
    script = WRITES.format(export=export, suffix="nsys-rep")
    done = run_stand_in(tmp_path, script, "x#?%41", "--trace=nvtx,osrt")
    assert done.report.read_text() == "raw\n"
    assert [note.partition(" ")[0] for note in done.notes] == ["nvtx", "the"]
    assert done.ran[1:] == ["profile", "--trace=nvtx,osrt", f"--output={tmp_path}/x#?%%41", "true"]


def test_the_command_that_is_shown_holds_all_that_was_set(tmp_path: Path, export: Path) -> None:
    script = WRITES.format(export=export, suffix="1.nsys-rep")
    options = ["-c", "nvtx", "-p", "step", "--capture-range-end=repeat:1"]
    done = run_stand_in(tmp_path, script, "r", *options)
    ours = ["--trace=cuda,nvtx,osrt", "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0"]  # its help has no --sample
    assert done.ran[1:] == ["profile", *ours, *options, f"--output={tmp_path}/r", "true"]
    assert done.traces == [tmp_path / "r.1.sqlite"]


def test_reasons_for_no_report(tmp_path: Path) -> None:
    for options, reason in (([], "free space"), (["-ccudaProfilerApi"], r"torch\.cuda\.profiler\.start")):
        with pytest.raises(NsightkitError, match=rf"no report \(exit code 5\).*{reason}"):
            run_stand_in(tmp_path, "exit 5", "r", *options)


def test_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "r.sqlite").write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        capture.profile(["true"], tmp_path / "r")
    with pytest.raises(UsageError, match="no command"):
        capture.profile([], tmp_path / "s")
    assert (tmp_path / "r.sqlite").read_text() == "mine"


def _importer() -> dict[str, str]:
    return next(row for row in doctor.report() if row["check"].startswith("nsys importer"))


def test_a_capture_left_unimported_is_imported_with_the_named_libraries(
    tmp_path: Path, export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the copy in Nsight Compute leaves it where libdw is missing: a .qdstrm, no report, exit code 0."""
    host = tmp_path / "compute" / "host"
    for folder in ("target-linux-x64", "linux-desktop-x64"):
        (host / folder).mkdir(parents=True)
    nsys = stand_in_nsight.nsys(host / "target-linux-x64", WRITES.format(export=export, suffix="qdstrm"))
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    lacks = '[ -f "${LD_LIBRARY_PATH%%:*}/libdw.so.1" ] ||'
    importer = host / "linux-desktop-x64" / "QdstrmImporter"
    importer.write_text(f'#!/bin/sh\n{lacks} exit 1\ncp "$2" "$4"\n')
    ldd = tmp_path / "ldd"
    ldd.write_text(f'#!/bin/sh\n{lacks} echo "libdw.so.1 => not found"\n')
    for program in (importer, ldd):
        program.chmod(0o755)
    assert capture.importer(nsys) == importer
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv(programs.LIBRARIES, raising=False)
    with pytest.raises(NsightkitError, match="'nsightkit doctor' says why"):
        capture.profile(["true"], tmp_path / "a")
    assert _importer()["status"] == "missing"
    assert "libdw.so.1" in _importer()["found"]
    (tmp_path / "libdw.so.1").touch()
    monkeypatch.setenv(programs.LIBRARIES, str(tmp_path))
    assert _importer()["status"] == "ok"
    done = capture.profile(["true"], tmp_path / "b")
    assert done.report.read_text() == "raw\n"
