"""Captures with a real nsys, trap by trap; what goes wrong without one is played by a stand-in."""

import sqlite3
import subprocess
import sys
import textwrap

import pytest
import stand_in_nsight

import nsightkit
from nsightkit.capture import nsys as capture
from nsightkit.errors import NsightkitError, UsageError
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
    open(sys.argv[-1], "w").close() if len(sys.argv) > 1 else None
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    pytest.importorskip("nvtx")
    path = tmp_path_factory.mktemp("program") / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


@pytest.fixture
def real(nsys, monkeypatch):
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    return nsys


# -- the real thing ----------------------------------------------------------------------------------------------


@pytest.mark.nsys
def test_ranges_and_os_calls_come_back(real, program, tmp_path):
    done = capture.profile([sys.executable, str(program)], tmp_path / NASTY)
    assert (done.report, done.trace) == (tmp_path / f"{NASTY}.nsys-rep", tmp_path / f"{NASTY}.sqlite")
    assert sorted(tmp_path.iterdir()) == [done.report, done.trace]
    assert done.returncode == 0
    trace = nsightkit.load(done.trace)
    ranges = trace["ranges"]
    assert ranges["name"].value_counts().to_dict() == {"step": 4, "data": 4, "elsewhere": 1}
    inner = ranges[ranges["name"] == "data"]
    assert set(ranges["name"].iloc[inner["parent"]]) == {"step"}
    # each `data` slept 5 ms, and a sleep is never shorter
    assert (inner["end_ns"] - inner["start_ns"]).min() >= 5_000_000
    assert trace.size("os_calls") >= 5


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
def test_a_range_with_a_plain_name_opens_the_capture(real, tmp_path):
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
@pytest.mark.parametrize(
    ("options", "inside", "ends"),
    [
        (["-p", "step"], {"step", "data"}, True),
        (["-p", "elsewhere@*"], {"elsewhere"}, True),
        (["-p", "step", "--capture-range-end", "stop-shutdown"], {"step", "data"}, False),  # nsys's own default
    ],
)
def test_a_capture_range_keeps_the_program_running(real, program, tmp_path, options, inside, ends):
    end = tmp_path / "end"
    command = [sys.executable, str(program), str(end)]
    done = capture.profile(command, tmp_path / "r", nsys_args=["-t", "nvtx", "-c", "nvtx", *options])
    assert end.exists() == ends
    assert (done.returncode == 0) == ends
    assert ("exit code" in done.notes[0]) != ends
    counts = nsightkit.load(done.trace)["ranges"]["name"].value_counts().to_dict()
    assert counts == dict.fromkeys(inside, 1)


@pytest.mark.nsys
def test_a_range_that_never_opens_is_an_error_with_its_remedy(real, program, tmp_path):
    options = ["--capture-range=nvtx", "--nvtx-capture=elsewhere"]  # it is in a domain
    with pytest.raises(NsightkitError, match=r"exit code 0.*no range 'elsewhere' was opened.*elsewhere@\*"):
        capture.profile([sys.executable, str(program)], tmp_path / "r", nsys_args=options)
    assert not list(tmp_path.iterdir())


@pytest.mark.nsys
def test_a_program_that_never_ends_is_interrupted_and_its_trace_kept(real, tmp_path):
    body = "import time\nwhile True: time.sleep(0.01)"
    done = capture.profile([sys.executable, "-c", body], tmp_path / "r", nsys_args=["-tosrt"], timeout_s=8)
    assert "interrupted after 8 s" in done.notes[0]
    assert nsightkit.load(done.trace).size("os_calls") > 10


# -- a stand-in --------------------------------------------------------------------------------------------------

#: Writes a report where nsys is told to, and an export that is a copy of a database.
WRITES = """
if [ "$1" = export ]; then cp "{export}" "$7"; exit; fi
for word; do case "$word" in --output=*) echo raw > "${{word#--output=}}.{suffix}";; esac; done
"""


@pytest.fixture
def export(tmp_path):
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


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """An nsys whose run is the script that is written over it."""
    NSYS.ask.cache_clear()
    path = stand_in_nsight.nsys(tmp_path, "exit 5")
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(path))
    return path


def test_what_was_asked_is_shown(stand_in, export, tmp_path):
    stand_in_nsight.nsys(tmp_path, WRITES.format(export=export, suffix="nsys-rep"))
    options = ["-c", "nvtx", "-p", "step"]
    done = capture.profile(["true"], tmp_path / "x#?41", nsys_args=options)
    ours = [
        "--trace=cuda,nvtx,osrt",
        "--capture-range-end=stop",
        "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
    ]  # its help has no --sample
    assert done.ran == [str(stand_in), "profile", *ours, *options, f"--output={tmp_path}/x#?41", "true"]
    assert done.report == tmp_path / "x#?41.nsys-rep"


@pytest.mark.parametrize(("option", "reason"), [("-x", "free space"), ("-ccudaProfilerApi", "torch.cuda.profiler")])
def test_reasons_for_no_report(stand_in, tmp_path, option, reason):
    with pytest.raises(NsightkitError, match=rf"no report \(exit code 5\).*{reason}"):
        capture.profile(["true"], tmp_path / "r", nsys_args=[option])
    for command, options, problem in (([], [], "no command"), (["true"], ["--capture-range-end=repeat:2"], "several")):
        with pytest.raises(UsageError, match=problem):
            capture.profile(command, tmp_path / "s", nsys_args=options)


def test_a_raw_capture_that_nsys_could_not_import_is_kept(tmp_path, export, monkeypatch):
    """As the copy in Nsight Compute leaves it where libdw is missing: a .qdstrm, no report, exit code 0."""
    host = tmp_path / "compute" / "host"
    for folder in ("target-linux-x64", "linux-desktop-x64"):
        (host / folder).mkdir(parents=True)
    nsys = stand_in_nsight.nsys(host / "target-linux-x64", WRITES.format(export=export, suffix="qdstrm"))
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    importer = host / "linux-desktop-x64" / "QdstrmImporter"
    importer.touch()
    assert capture.importer(nsys) == importer
    with pytest.raises(NsightkitError, match=r"kept as .*a\.qdstrm; 'nsightkit doctor' says why"):
        capture.profile(["true"], tmp_path / "a")
    assert (tmp_path / "a.qdstrm").read_text() == "raw\n"  # the run may have been costly
