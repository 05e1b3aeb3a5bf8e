"""The Nsight Systems reader: every schema at hand, pages against SQL, parquetdir, damaged and foreign files."""

import contextlib
import itertools
import random
import re
import sqlite3

import pandas as pd
import pytest
from synthetic.planted import Export, training

import nsightkit
from nsightkit.analysis.timeline import gaps, kernels, memops, overview, ranges
from nsightkit.trace import TABLES, nsys_tables
from nsightkit.trace.model import GPU_TABLES

#: Words of the manifest, and the tables they count.
BEHIND = {"kernels": "kernels", "runtime": "calls", "graph": "graphs", "osrt": "os_calls"}
EVENT = re.compile(r"(kernels|memcpy|runtime|graph|osrt|nvtx) (\d+)")


def manifest(traces):
    """Event counts that the manifest states, by file."""
    for line in (traces / "MANIFEST.md").read_text().splitlines():
        cells = [c.strip() for c in line.split("|")]
        if len(cells) > 4 and cells[1].endswith(".sqlite"):
            yield traces / cells[1], EVENT.findall(cells[4])


@pytest.fixture(scope="module")
def real(shared_traces):
    """Every real export, opened once."""
    return {path: nsightkit.load(path) for path, _ in manifest(shared_traces)}


@pytest.fixture
def export(tmp_path):
    training(tmp_path / "t.sqlite", None, steps=2)
    return tmp_path / "t.sqlite"


def change(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)
    return path


def count(path, table, condition):
    """Rows of the exporter's table; none where it is absent."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        try:
            return connection.execute(f"SELECT count(*) FROM {table} WHERE {condition}").fetchone()[0]
        except sqlite3.OperationalError:
            return 0


def test_every_schema_reads_with_the_counts_of_its_manifest(shared_traces, real):
    assert len(real) == 10
    for path, counts in manifest(shared_traces):
        trace = real[path]
        # The manifest counts rows; those of classes 31 and 32 only mark the start and end of the tracing.
        marks = count(path, "OSRT_API", "eventClass IN (31, 32)")
        for what, number in counts:
            if what in BEHIND:
                size = trace.size(BEHIND[what]) + marks * (what == "osrt")
                assert size == int(number), (path.name, what)
        assert trace.size("ranges") == count(path, "NVTX_EVENTS", "eventType IN (59, 60, 70, 71)")
        for table, columns in TABLES.items():
            assert {c: str(d) for c, d in trace.table(table).dtypes.items()} == columns, (path.name, table)


def test_versions_and_clock(shared_traces, real):
    trace = real[shared_traces / "cs336-zx3xyy" / "result_2_7B_nvtx.sqlite"]
    assert (trace.meta.tool_version, trace.meta.schema) == ("2024.6.2.225", "3.16.1")
    assert trace.meta.gpus[0].name == "NVIDIA A100-SXM4-80GB"
    first = trace["kernels"]["start_ns"].min() + trace.t0_ns
    assert not count(trace.path, "CUPTI_ACTIVITY_KIND_KERNEL", f"start < {first}")
    assert count(trace.path, "CUPTI_ACTIVITY_KIND_KERNEL", f"start = {first}")


def test_tables_not_recorded_are_named_and_tables_without_events_are_not(real):
    missing = {path.parent.name + "/" + path.name: set(trace.meta.missing) for path, trace in real.items()}
    gpu = {"kernels", "memops", "graphs", "calls", "syncs"}
    assert gpu <= missing["EfficientCenterFormer/baseline_v2.sqlite"]  # NVTX only
    assert gpu <= missing["StellaWava/report1.sqlite"]  # OS calls only
    # One CUDA table is there, so the absent ones say that nothing of theirs happened.
    assert not gpu & missing["tutorial_vqe/report1.sqlite"]
    assert not gpu & missing["cs336-zx3xyy/result_2_7B_compile_ro.sqlite"]
    # Asked for by the capture, hence recorded and empty.
    assert "ranges" not in missing["cs336-zx3xyy/result_2_7B_compile_ro.sqlite"]


@pytest.mark.parametrize("rows", [1, 5000])
def test_integers_are_those_of_sqlite(tmp_path, rows):
    sizes = [0, -1, 127, -128, 2**15, -(2**23), 2**31, -(2**47), 2**62, -(2**63) + 1, None]
    numbers = [sizes[row * 7919 % len(sizes)] for row in range(rows)]
    path = change(tmp_path / "t.sqlite", "CREATE TABLE t (a INTEGER, s TEXT, b INTEGER, c INTEGER)")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("INSERT INTO t VALUES (?, ?, NULL, 7)", [(n, "x" * 90) for n in numbers])
    read = nsys_tables.Sqlite(path, ()).integers("t", ["c", "a", "b"])
    assert read["a"].tolist() == [nsys_tables.NULL if n is None else n for n in numbers]
    assert set(read["b"]) == {nsys_tables.NULL}
    assert set(read["c"]) == {7}


def test_launches_without_any_gpu_work_say_that_it_was_lost(export):
    for kind in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE"):
        change(export, f"DROP TABLE IF EXISTS CUPTI_ACTIVITY_KIND_{kind}")
    trace = nsightkit.load(export)
    assert not any(map(trace.recorded, GPU_TABLES))
    assert trace.recorded("calls")
    assert "calls launched work on a GPU, but the trace holds none of it" in trace.meta.notes[0]
    assert trace.summary()["kernel_count"] is None


@pytest.mark.parametrize(
    ("severity", "text", "said"),
    [
        (2, "Not all CUDA events might have been collected.", "not all CUDA events may have been collected"),
        (2, "Not all NVTX events might have been collected.", "not all NVTX events may have been collected"),
        (3, "ActivityFlushAll returned 4: CUPTI_ERROR_INVALID_DEVICE", "operations of a GPU may be missing"),
        (2, "Some events (\t12) were lost in /home/person/secret. <b>\x1b[31m", "events were lost"),
        (1, "Some events (12) were lost.", ""),  # for information
        (2, "No CUDA events collected. Does the process use CUDA?", ""),  # a helper process never does
        (2, "CUDA profiling might have not been started correctly.", ""),
        (3, None, ""),
        ("3; DROP", "Some events (12) were lost.", ""),
    ],
)
def test_what_nsys_said_was_lost_is_noted_by_kind_and_never_copied(export, severity, text, said):
    change(export, "CREATE TABLE DIAGNOSTIC_EVENT (timestamp, severity, text)")
    with contextlib.closing(sqlite3.connect(export)) as connection, connection:
        connection.executemany("INSERT INTO DIAGNOSTIC_EVENT VALUES (0, ?, ?)", [(severity, text)] * 2)
    notes = nsightkit.load(export).meta.notes
    assert len(notes) == bool(said)
    for note in notes:
        assert note.startswith("Nsight Systems warned that ")
        assert note.endswith(f"{said}.")
        assert "secret" not in note


def test_a_database_in_wal_mode_is_read_once_it_is_whole_and_nothing_is_made_beside_it(export):
    truth = nsightkit.load(export)["kernels"]
    connection = sqlite3.connect(export)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("INSERT INTO META_DATA_EXPORT VALUES ('late', 'row')")
    connection.commit()
    beside = sorted((file.name, file.read_bytes()) for file in export.parent.iterdir())
    with pytest.raises(nsightkit.TraceError, match=r"has changes in t\.sqlite-wal that are not in the file yet"):
        nsightkit.load(export)
    assert sorted((file.name, file.read_bytes()) for file in export.parent.iterdir()) == beside
    connection.close()
    pd.testing.assert_frame_equal(nsightkit.load(export)["kernels"], truth)
    assert [file.name for file in export.parent.iterdir()] == ["t.sqlite"]


def test_cuda_visible_devices_are_kept_apart(tmp_path):
    out = Export(gpus=2)
    for pid in (10, 11):
        c = out.call("cudaLaunchKernel", Export.thread(pid, pid), 0, 5)
        out.kernel("k", 10, 20, c, Export.process(pid), device=0)
    path = change(
        out.write(tmp_path / "t.sqlite"),
        "CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER)",
        "INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0, 10), (1, 0, 11)",
    )
    assert sorted(nsightkit.load(path)["kernels"]["device"]) == [0, 1]


def test_names_are_any_bytes(tmp_path):
    out = Export()
    c = out.call("cudaLaunchKernel_v7000", Export.thread(1, 1), 0, 5)
    out.kernel("PLACEHOLDER", 10, 20, c, Export.process(1))
    out.range("plain", Export.thread(1, 1), 0, 9, registered=False)
    path = change(
        out.write(tmp_path / "t.sqlite"),
        "UPDATE StringIds SET value = CAST(x'6bff3c7363726970743e' AS TEXT) WHERE value = 'PLACEHOLDER'",
        "UPDATE NVTX_EVENTS SET text = CAST(x'ffe9' AS TEXT)",
    )
    trace = nsightkit.load(path)
    assert trace["kernels"]["name"].tolist() == ["k\ufffd<script>"]
    assert trace["ranges"]["name"].tolist() == ["\ufffd\ufffd"]
    assert trace["calls"]["name"].tolist() == ["cudaLaunchKernel"]


NOISE = random.Random(1).randbytes(1 << 20)
#: What becomes of the bytes of an export.
DAMAGES = {
    "truncated": lambda raw: raw[: len(raw) // 2],
    "header only": lambda raw: raw[:60],
    "zeroed pages": lambda raw: raw[:8192] + bytes(len(raw) - 8192),
    "noise": lambda raw: raw[:4096] + NOISE[: len(raw) - 4096],
    "schema of other bytes": lambda raw: raw.replace(b"CREATE TABLE", b"CR\xff\xfe\x80 TABLE"),
}
#: SQL that makes it the wrong database.
WRONG = {
    "foreign": "CREATE TABLE customers (id INTEGER, name TEXT)",
    "other columns": "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (when_it_began INTEGER)",
    "text in numbers": "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon' WHERE rowid = 9",
    "fractions": "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 1.5 WHERE rowid = 9",
}


@pytest.mark.parametrize("kind", [*DAMAGES, *WRONG])
def test_bad_files_are_named_with_a_remedy(export, kind):
    if kind in DAMAGES:
        export.write_bytes(DAMAGES[kind](export.read_bytes()))
    if kind in ("foreign", "other columns"):
        export.unlink()
    if kind in WRONG:
        change(export, WRONG[kind])
    with pytest.raises(nsightkit.TraceError) as caught:
        read_all(export)
    assert str(export) in str(caught.value)
    assert "export" in str(caught.value)
    assert "\n" not in str(caught.value)


def read_all(path):
    trace = nsightkit.load(path)
    for table in TABLES:
        trace.table(table)


def test_parquetdir_with_gpu_tables_answers_like_sqlite(export, tmp_path):
    folder = tmp_path / "t_pqtdir"
    folder.mkdir()
    # An event that is still open, without a name, and a call of no class.
    change(
        export,
        "CREATE TABLE PROFILER_OVERHEAD (start INT, end INT, globalTid INT, nameId INT)",
        "INSERT INTO PROFILER_OVERHEAD VALUES (10, 20, 1, 1), (15, NULL, 1, NULL)",
        "CREATE TABLE OSRT_API (start INT, end INT, globalTid INT, nameId INT, eventClass INT)",
        "INSERT INTO OSRT_API VALUES (10, 11, 1, 1, 1), (12, 13, 1, 1, NULL)",
    )
    with contextlib.closing(sqlite3.connect(export)) as connection:
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            frame = pd.read_sql(f"SELECT * FROM {table}", connection, dtype_backend="pyarrow")
            frame.to_parquet(folder / f"{table}.parquet")
    a, b = nsightkit.load(export), nsightkit.load(folder)
    assert overview.summary(a) == overview.summary(b)
    # Times count from the first event.
    assert b.table("overhead", ["end_ns", "name"]).to_numpy().tolist()[1] == [10, ""]
    assert a.size("os_calls") == b.size("os_calls") == 1
    for answer in (gaps.summary, ranges.summary, kernels.summary, memops.summary):
        pd.testing.assert_frame_equal(answer(a), answer(b))


@pytest.mark.parametrize("table", [None, "customers", "CUPTI_ACTIVITY_KIND_KERNEL"])
def test_bad_folders(tmp_path, table):
    if table:
        (tmp_path / f"{table}.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(nsightkit.TraceError, match=re.escape(str(tmp_path))):
        nsightkit.load(tmp_path)
    (tmp_path / "demo" / "trace.parquet").mkdir(parents=True)
    with pytest.raises(nsightkit.TraceError, match="folder without trace tables"):
        nsightkit.load(tmp_path / "demo")


def _with_details(path, *rows):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE ANALYSIS_DETAILS (globalVid INT, duration INT, startTime INT, stopTime INT)")
        connection.executemany("INSERT INTO ANALYSIS_DETAILS VALUES (?, ?, ?, ?)", rows)
    return nsightkit.load(path, cache=False)


def test_the_capture_counts_from_its_own_beginning(tmp_path):
    out, process, main = Export(), Export.process(7), Export.thread(7, 7)
    call = out.call("cudaLaunchKernel_v7000", main, 1_000, 2_000)
    out.kernel("gemm", 5_000, 9_000, call, process)
    # The session was 45 s old when collection began; the events' clock starts at collection.
    began = 45_000_000_000
    trace = _with_details(out.write(tmp_path / "late.sqlite"), (1, 20_000, began, began + 20_000))
    assert trace.meta.window_ns == (0, 20_000)
    figures = overview.summary(trace)
    assert (figures["lead_ns"], figures["wall_ns"], figures["tail_ns"]) == (5_000, 4_000, 11_000)
    # Clocks of several machines cannot be told apart: from the first event to the last, then.
    rows = (1, 20_000, began, began + 20_000), (2, 30_000, began + 1, began + 30_001)
    figures = overview.summary(_with_details(out.write(tmp_path / "two.sqlite"), *rows))
    assert (figures["lead_ns"], figures["tail_ns"]) == (4_000, 0)


LIBC, KERNEL = "/lib/x86_64-linux-gnu/libc.so.6", "[kernel.kallsyms]"


@pytest.mark.parametrize(
    ("frames", "name"),
    [
        ([("work", "a.out"), ("main", "a.out")], "work"),
        ([("__memmove_avx", LIBC), ("copy_rows", "a.out")], "copy_rows"),
        ([("0xffffffff83174c70", KERNEL), ("0x7f12", "/lib/libcuda.so.525"), ("upload", "a.out")], "upload"),
        ([("copy_user", KERNEL), ("read", LIBC), ("[Max depth]", "[Max depth]")], "copy_user"),
        ([("0x7f12", "/lib/libcuda.so.525"), ("[Broken backtraces]", "[Broken backtraces]")], "libcuda.so.525"),
        ([], ""),
    ],
)
def test_a_sample_is_named_by_the_innermost_function_that_says_something(tmp_path, frames, name):
    out, thread = Export(), Export.thread(7, 7)
    out.call("cudaLaunchKernel", thread, 0, 10)
    out.sample(thread, 100, ("other", "a.out"))
    out.sample(thread, 200, *frames)
    assert nsightkit.load(out.write(tmp_path / "t.sqlite"))["samples"]["name"].tolist() == ["other", name]


def sampled(path, **options):
    """Two threads of a process that calls CUDA, sampled each millisecond while they run, and a stranger."""
    out = Export()
    threads = Export.thread(7, 7), Export.thread(7, 8), Export.thread(9, 9)
    out.call("cudaLaunchKernel", threads[0], 5_000_000, 5_000_010)
    for start in (1, 2, 3, 90):
        out.sample(threads[0], start * 1_000_000, ("work", "a.out"))
    for start in (1_400_000, 2_500_000, 2_900_000):
        out.sample(threads[1], start, ("more", "a.out"))
    out.sample(threads[2], 1_000_000, ("secret", "a.out"))
    return out.write(path, **options)


def test_a_sample_lasts_until_the_next_one_or_for_a_period(tmp_path):
    trace = nsightkit.load(sampled(tmp_path / "t.sqlite", shuffle=1))
    assert trace.t0_ns == 5_000_000  # a sample is not an event
    assert "samples" not in trace.meta.missing
    samples = trace["samples"].sort_values(["thread", "start_ns"])
    lasting = (samples["end_ns"] - samples["start_ns"]).tolist()
    assert lasting == [1_000_000] * 4 + [1_100_000, 400_000, 1_000_000]
    assert set(samples["name"]) == {"work", "more"}  # another program is not the trace's


#: Tables as Nsight Systems 2023.4 writes them: start, end and name of each row.
MESSAGES = {
    "MPI_COLLECTIVES_EVENTS": [(100, 180, "MPI_Allreduce")],
    "MPI_P2P_EVENTS": [(200, 210, "MPI_Isend"), (215, 216, "MPI_Irecv")],
    # A row per request.
    "MPI_START_WAIT_EVENTS": [(220, 300, "MPI_Waitall"), (220, 300, "MPI_Waitall"), (300, 301, "MPI_Wait")],
    # Still open when the capture ended.
    "MPI_OTHER_EVENTS": [(50, 90, "MPI_Init"), (400, None, "MPI_Finalize")],
    "UCP_EVENTS": [(60, 70, "ucp_init_version")],
    "UCP_SUBMIT_EVENTS": [(201, 202, "ucp_tag_send_nbx")],
}


def test_calls_of_mpi_and_ucx_are_host_calls(tmp_path):
    out = Export()
    thread = Export.thread(7, 9)
    tables = {"MPI_RANKS": pd.DataFrame({"globalTid": [thread], "rank": 3})}
    for table, rows in MESSAGES.items():
        frame = pd.DataFrame(rows, columns=["start", "end", "name"]).astype({"end": "Int64"})
        tables[table] = frame.assign(globalTid=thread, textId=frame.pop("name").map(out.string))
    # In flight, on no thread.
    tables["UCP_PROGRESS_EVENTS"] = tables["UCP_EVENTS"]
    path = out.write(tmp_path / "t.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for table, frame in tables.items():
            frame.to_sql(table, connection, index=False)
    trace = nsightkit.load(path)
    calls = trace.table("os_calls", ["start_ns", "end_ns", "name"])
    expected = set()
    for start, end, name in itertools.chain.from_iterable(MESSAGES.values()):
        expected.add((start - 50, (end or start) - 50, name))
    assert sorted(calls.itertuples(index=False, name=None)) == sorted(expected)
    assert set(trace["os_calls"]["thread"]) == {7 << 24 | 9}
    assert trace.meta.distributed == {"rank": 3}
    assert trace.recorded("os_calls")


@pytest.mark.parametrize(
    ("variable", "option", "missing"),
    [("PMI_RANK=3", None, True), ("OMPI_COMM_WORLD_RANK=3", "true", False), ("RANK=3", None, False)],
)
def test_mpi_that_was_not_traced_is_named(export, variable, option, missing):
    statements = [
        "CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)",
        f"INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('DeviceEnvironment', 'A=b;{variable};C=d')",
    ]
    if option:
        statements.append(f"INSERT INTO META_DATA_CAPTURE VALUES ('MPI_TRACE_OPTIONS:COLLECT_MPI_TRACE', '{option}')")
    trace = nsightkit.load(change(export, *statements))
    assert ("MPI" in trace.meta.missing) == missing
