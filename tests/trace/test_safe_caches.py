"""Caches, drafts and stores are safe with untrusted files."""

import contextlib
import io
import json
import os
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from child import command
from make_kineto import write as write_kineto

import nsightkit
from nsightkit.trace import parquet, store
from nsightkit.trace.files import drafted
from nsightkit.trace.model import Trace, TraceMeta
from nsightkit.trace.parquet import read_table, schema_names

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture(scope="module")
def kineto(tmp_path_factory):
    path = tmp_path_factory.mktemp("kineto") / "t.json"
    write_kineto(path, kernels=200)
    return path


@pytest.fixture(autouse=True)
def _small_traces_too(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "CACHE_FROM_BYTES", 0)
    monkeypatch.delenv("NSIGHTKIT_NO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


@pytest.fixture
def trace(kineto, tmp_path):
    (tmp_path / "work").mkdir()
    return Path(shutil.copyfile(kineto, tmp_path / "work" / "t.json"))


@pytest.fixture
def home(tmp_path):
    """A folder whose contents must survive; one of them looks like part of a cache."""
    home = tmp_path / "home"
    for name in (".ssh/id", "Documents/thesis.tex", f"{'0' * 32}/precious.parquet"):
        (home / name).parent.mkdir(parents=True)
        (home / name).write_text("precious")
    return home


def beside(trace):
    return trace.with_name(trace.name + ".nsightkit-cache")


def contents(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def names_in(trace):
    return nsightkit.load(trace)["kernels"]["name"].astype(str).tolist()


def kept_by_user(tmp_path):
    return list((tmp_path / "user" / "nsightkit").rglob("kernels.name.parquet"))


class TestCache:
    def test_is_private(self, trace):
        nsightkit.load(trace)["kernels"]
        (inner,) = beside(trace).iterdir()
        for folder in (beside(trace), inner):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        key = Path(os.environ["XDG_CACHE_HOME"]) / "nsightkit" / "key"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600

    @pytest.mark.parametrize("place", ["link", "file", "open to a group", "open to all", "another user's"])
    def test_a_place_that_is_not_a_private_folder_is_left_alone(self, trace, home, tmp_path, place):
        cache = beside(trace)
        if place == "link":
            cache.symlink_to(os.path.relpath(home, trace.parent))
        elif place == "file":
            cache.write_text("precious")
        else:
            cache.mkdir()
            cache.chmod({"open to a group": 0o770, "open to all": 0o707}.get(place, 0o755))
        if place == "another user's":
            if os.geteuid():
                pytest.skip("only root can give files to another user")
            os.chown(cache, OTHER_USER, OTHER_USER)
        before = contents(tmp_path / "home"), contents(trace.parent)
        assert names_in(trace) == names_in(trace)
        assert (contents(tmp_path / "home"), contents(trace.parent)) == before
        assert kept_by_user(tmp_path)

    def test_a_link_inside_is_not_followed(self, trace, home):
        nsightkit.load(trace)["kernels"]
        before = contents(home)
        for number, name in enumerate((".", ".ssh", "0" * 32)):
            (beside(trace) / f"{number:032x}").symlink_to(home / name)
        nsightkit.load(trace)["kernels"]
        assert contents(home) == before

    def test_a_link_in_place_of_the_columns_is_not_followed(self, trace, home):
        nsightkit.load(trace)["kernels"]
        (inner,) = beside(trace).iterdir()
        shutil.rmtree(inner)
        inner.symlink_to(home)
        before = contents(home)
        assert names_in(trace)
        assert contents(home) == before

    def test_only_what_it_made_is_removed(self, trace):
        nsightkit.load(trace)["kernels"]
        cache = beside(trace)
        (inner,) = cache.iterdir()
        shutil.copytree(inner, cache / ("1" * 32))
        shutil.copytree(inner, cache / ("2" * 32))
        (cache / ("2" * 32) / "notes.txt").write_text("precious")
        shutil.copytree(inner, cache / ("3" * 32))
        (cache / ("3" * 32) / "more.parquet").mkdir()
        for name in ("4" * 31, "g" * 32, "4" * 31 + "A", ".git"):
            shutil.copytree(inner, cache / name)
        everything = set(contents(cache))
        nsightkit.load(trace)["kernels"]
        lost = everything - set(contents(cache))
        assert {Path(path).parts[0] for path in lost} == {"1" * 32}
        assert "1" * 32 in lost

    def test_no_place_at_all(self, trace, tmp_path):
        (tmp_path / "user").write_text("not a folder")
        assert names_in(trace)
        assert not beside(trace).exists()

    def test_a_user_without_a_home(self, trace, monkeypatch):
        def homeless():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
        assert names_in(trace)
        assert not beside(trace).exists()

    def test_the_users_own_folder_is_closed_to_others(self, trace, tmp_path):
        (tmp_path / "user" / "nsightkit" / "exports").mkdir(parents=True)
        (tmp_path / "user" / "nsightkit").chmod(0o775)
        assert names_in(trace)
        assert stat.S_IMODE((tmp_path / "user" / "nsightkit").stat().st_mode) == 0o700
        assert beside(trace).is_dir()

    def test_a_link_in_place_of_the_users_own_folder_is_not_followed(self, trace, home, tmp_path):
        home.chmod(0o755)
        before = contents(home)
        (tmp_path / "user").mkdir()
        (tmp_path / "user" / "nsightkit").symlink_to(home)
        assert names_in(trace)
        assert contents(home) == before
        assert stat.S_IMODE(home.stat().st_mode) == 0o755

    @as_root
    def test_a_user_who_may_not_write_there(self, kineto):
        with tempfile.TemporaryDirectory() as folder:
            trace = Path(shutil.copyfile(kineto, Path(folder) / "t.json"))
            Path(folder).chmod(0o755)
            home = Path(folder) / "home"
            home.mkdir()
            os.chown(home, OTHER_USER, OTHER_USER)
            child = os.fork()
            if not child:
                os.setgid(OTHER_USER)
                os.setuid(OTHER_USER)
                os.environ["XDG_CACHE_HOME"] = str(home)
                first, second = names_in(trace), names_in(trace)
                os._exit(0 if first and first == second else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert list(home.rglob("kernels.name.parquet"))
            assert contents(Path(folder))[-1] == "t.json"

    def planted(self, cache):
        """Replace the kernel names in a cache."""
        (file,) = cache.rglob("kernels.name.parquet")
        frame = pd.read_parquet(file)
        frame["name"] = pd.Categorical(["planted"] * len(frame))
        with file.open("wb") as stream:
            store._write_parquet(frame, stream, "none")

    def test_one_that_came_with_an_archive_is_not_trusted(self, trace, tmp_path, monkeypatch):
        truth = names_in(trace)
        self.planted(beside(trace))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "victim"))
        assert names_in(trace) == truth

    def test_one_that_was_given_away_and_comes_back_is_not_trusted(self, trace, tmp_path):
        truth = names_in(trace)
        back = Path(shutil.copytree(trace.parent, tmp_path / "back")) / trace.name
        assert back.stat().st_mtime_ns == trace.stat().st_mtime_ns
        self.planted(beside(back))
        assert names_in(back) == truth

    @pytest.mark.parametrize("damage", ["short", "open", "link", "folder"])
    def test_a_key_that_others_may_know_is_replaced(self, trace, tmp_path, damage):
        truth = names_in(trace)
        key = tmp_path / "user" / "nsightkit" / "key"
        if damage == "short":
            key.write_bytes(b"x")
        elif damage == "open":
            key.chmod(0o644)
        elif damage == "link":
            key.rename(tmp_path / "known")
            key.symlink_to(tmp_path / "known")
        else:
            key.unlink()
            key.mkdir()
        self.planted(beside(trace))
        assert names_in(trace) == truth
        assert key.is_dir() or stat.S_IMODE(key.lstat().st_mode) == 0o600

    def test_links_to_a_trace_share_its_cache(self, trace, tmp_path):
        link = tmp_path / "link.json"
        link.symlink_to(trace)
        assert names_in(link)
        assert beside(trace).is_dir()
        assert not beside(link).exists()


class TestDrafts:
    LONG_AGO = 1_600_000_000

    def age(self, folder):
        for path in [*folder.rglob("*"), folder]:
            os.utime(path, (self.LONG_AGO, self.LONG_AGO), follow_symlinks=False)

    def killed(self, target, make):
        """Return the draft of a killed process."""
        child = os.fork()
        if not child:
            with drafted(target) as draft:
                make(draft)
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        (left,) = target.parent.glob(".nsightkit-*")
        return left

    def test_of_a_killed_process_are_removed(self, tmp_path):
        def make_folder(draft):
            draft.mkdir()
            (draft / "kernels.parquet").write_text("half")

        for make in (make_folder, lambda draft: draft.write_text("half"), lambda _: None):
            self.age(self.killed(tmp_path / "out.parquet", make))
            store.write(Trace.from_frames({}), tmp_path / "other")
            assert [path.name for path in tmp_path.iterdir()] == ["other"]
            shutil.rmtree(tmp_path / "other")

    def test_others_stay(self, tmp_path, home):
        fresh = self.killed(tmp_path / "out.html", lambda draft: draft.write_text("half"))
        linked, linking, mid, named = (tmp_path / f".nsightkit-aaaaaaa{i}" for i in range(4))
        linked.symlink_to(home)
        for folder in (linking, mid, named, tmp_path / ".nsightkit-mine", tmp_path / ".nsightkit-aaaaaaaa.d"):
            folder.mkdir(mode=0o700)
            (folder / "new").mkdir()
            (folder / "new" / "kernels.parquet").write_text("half")
        (linking / "new" / "home").symlink_to(home)
        (mid / "old").mkdir()
        (named / "thesis.tex").write_text("precious")
        for folder in tmp_path.glob(".nsightkit-*"):
            if folder not in (fresh, linked):
                self.age(folder)
        before = contents(tmp_path)
        store.write(Trace.from_frames({}), tmp_path / "other")
        assert [path for path in contents(tmp_path) if not path.startswith("other")] == before


class TestStore:
    @pytest.fixture
    def folder(self, tmp_path):
        kernels = pd.DataFrame({"start_ns": [10, 20], "end_ns": [15, 25], "name": ["a", "b"]})
        store.write(Trace.from_frames({"kernels": kernels}, TraceMeta(tool="test")), tmp_path / "s.parquet")
        return tmp_path / "s.parquet"

    def test_is_replaced_only_on_request(self, folder):
        with pytest.raises(nsightkit.TraceError, match="exists; give"):
            store.write(Trace.from_frames({}), folder)
        assert len(nsightkit.load(folder)["kernels"]) == 2
        store.write(Trace.from_frames({}), folder, overwrite=True)
        assert len(nsightkit.load(folder)["kernels"]) == 0

    @pytest.mark.parametrize("name", [".git/", "events.parquet", "kernels.parquet.bak", "calls.parquet"])
    def test_with_other_files_is_not_replaced(self, folder, home, name):
        file = folder / name
        if name.endswith("/"):
            file.mkdir()
        elif name == "calls.parquet":
            file.symlink_to(home / ".ssh" / "id")
        else:
            file.write_text("precious")
        before = contents(folder)
        with pytest.raises(nsightkit.TraceError, match=f"not ours: {file.name}"):
            store.write(Trace.from_frames({}), folder, overwrite=True)
        assert contents(folder) == before

    @pytest.mark.parametrize("name", ["trace.json", "kernels.parquet"])
    @pytest.mark.parametrize("kind", ["fifo", "/dev/zero", "loop", "folder"])
    def test_of_special_files_is_refused_at_once(self, folder, name, kind):
        file = folder / name
        file.unlink()
        if kind == "fifo":
            os.mkfifo(file)
        elif kind == "folder":
            file.mkdir()
        else:
            file.symlink_to(file if kind == "loop" else kind)
        ended = ask(folder)
        assert ended.code == 2, ended.error
        assert str(folder) in ended.error
        assert "regular" in ended.error or kind in ("loop", "folder")

    def test_of_links_to_files_is_read(self, folder, tmp_path):
        for name in ("trace.json", "kernels.parquet"):
            (folder / name).rename(tmp_path / name)
            (folder / name).symlink_to(tmp_path / name)
        assert len(nsightkit.load(folder)["kernels"]) == 2

    @pytest.mark.parametrize("text", ["[" * 200_000, '{"meta": ' * 200_000, " " * (17 << 20) + "{}"])
    def test_of_a_hostile_index_is_refused(self, folder, text):
        (folder / "trace.json").write_text(text)
        with pytest.raises(nsightkit.TraceError, match=r"s\.parquet"):
            nsightkit.load(folder)

    @pytest.mark.parametrize("first", ["x", 1e400, None])
    def test_of_a_damaged_start_is_refused(self, folder, first):
        index = json.loads((folder / "trace.json").read_text())
        (folder / "trace.json").write_text(json.dumps({**index, "first_ns": first}))
        with pytest.raises(nsightkit.TraceError, match=r"damaged trace\.json"):
            nsightkit.load(folder)


def ask(folder):
    """Ask a question of a store in a process that a failure does not let fill the machine."""
    return command("kernels", folder, address_space_bytes=3 << 30)


# -- Parquet ----------------------------------------------------------------------------------------------------


def many_times(path, table, times, **options):
    """Write a table repeatedly, because writing a bomb at once would need its memory here."""
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        for _ in range(times):
            writer.write_table(table)


def one_text(text, rows):
    return pa.table({"name": pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([text]))})


def varint(number):
    """Encode a positive integer for Thrift's compact protocol."""
    number *= 2
    groups = []
    while number > 127:
        groups.append(number & 127 | 128)
        number >>= 7
    return bytes([*groups, number])


def claim_five_rows(path, rows):
    """Change the row counts in a file's footer without changing its length."""
    data = path.read_bytes()
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    truth = varint(rows)
    lie = bytes([10 | 128]) + b"\x80" * (len(truth) - 2) + b"\0"
    assert truth in data[start:]
    path.write_bytes(data[:start] + data[start:].replace(truth, lie))


def texts(length, rows, end=""):
    return pa.table({"name": ["x" * length + end * row for row in range(rows)]})


ZEROS = pa.table({"start_ns": np.zeros(1_000_000, np.int64)})
PLAIN = {"use_dictionary": False, "compression": "zstd"}
#: Tables, how often each is written, and how.
BOMBS = {
    "constant": (ZEROS, 100, {}),
    "zeros": (ZEROS, 80, PLAIN),
    "one long text": (one_text("x" * 20_000_000, 1000), 20, {"compression": "zstd", "store_schema": False}),
    "long texts": (texts(1_000_000, 10, "i"), 100, PLAIN),
    "texts by prefix": (texts(100_000, 100), 8, PLAIN | {"column_encoding": {"name": "DELTA_BYTE_ARRAY"}}),
    "texts by length": (texts(1, 1000), 1, PLAIN | {"column_encoding": {"name": "DELTA_LENGTH_BYTE_ARRAY"}}),
}


class TestBombs:
    @pytest.fixture
    def folder(self, tmp_path):
        store.write(Trace.from_frames({}), tmp_path / "s.parquet")
        return tmp_path / "s.parquet"

    @pytest.mark.parametrize("bomb", [*BOMBS, "constant that lies"])
    def test_are_refused(self, folder, bomb):
        file = folder / "kernels.parquet"
        table, times, options = BOMBS.get(bomb, BOMBS["constant"])
        many_times(file, table, times, **options)
        if bomb == "constant that lies":
            claim_five_rows(file, len(ZEROS))
        assert file.stat().st_size < 1 << 20
        ended = ask(folder)
        assert ended.code == 2, ended.error
        assert "kernels.parquet" in ended.error
        assert "expands to" in ended.error or "is not a readable Parquet table" in ended.error
        assert ended.cpu_s < 10
        assert ended.peak_bytes < 1 << 30

    def test_a_long_text_that_often_stands_there_is_kept_once(self, folder):
        table = one_text("x" * 900_000, 100_000)
        for column in ("start_ns", "end_ns"):
            table = table.append_column(column, pa.array(np.zeros(100_000, np.int64)))
        many_times(folder / "kernels.parquet", table, 1, compression="none", store_schema=False)
        ended = ask(folder)
        assert ended.code == 0, ended.error
        assert ended.peak_bytes < 1 << 30

    def test_what_honest_files_hold_is_read(self, folder):
        rows = 400_000
        table = pa.table({"start_ns": np.arange(rows) * 1000, "end_ns": np.arange(rows) * 1000 + 500})
        pq.write_table(
            table,
            folder / "kernels.parquet",
            compression="zstd",
            column_encoding="DELTA_BINARY_PACKED",
            use_dictionary=False,
        )
        kernels = nsightkit.load(folder)["kernels"]
        assert kernels["end_ns"].tolist() == table["end_ns"].to_pylist()


class TestParquet:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"compression": "zstd", "row_group_size": 777},
            {"use_dictionary": False, "data_page_version": "2.0"},
            {"dictionary_pagesize_limit": 100, "data_page_size": 500, "compression": "snappy"},
            {"store_schema": False, "compression": "gzip", "version": "1.0"},
        ],
    )
    def test_tables_are_as_they_were_written(self, tmp_path, options):
        rows = 10_000
        numbers = np.random.default_rng(0).integers(-(1 << 62), 1 << 62, rows)
        names = pa.array([f"name {i % 50}" if i % 7 else None for i in range(rows)])
        table = pa.table(
            {
                "int": numbers,
                "constant": np.zeros(rows, np.int32),
                "float": numbers / 3,
                "bool": numbers > 0,
                "text": names,
                "bytes": names.cast(pa.binary()),
                "category": names.dictionary_encode(),
                "time": pa.array(np.arange(rows), pa.timestamp("us")),
                "null": pa.nulls(rows),
            }
        )
        file = tmp_path / "t.parquet"
        pq.write_table(table, file, **options)
        found = read_table(file, table.column_names)
        assert schema_names(file) == table.column_names
        assert found.to_pylist() == pq.read_table(file).to_pylist()
        assert pa.types.is_dictionary(found["text"].type)
        assert read_table(file, ["int"]).column_names == ["int"]

    @pytest.mark.parametrize(
        "column",
        [
            pa.array([[1], [2]]),
            pa.array([{"x": 1}, {"x": 2}]),
            pa.array([1, 2]).cast(pa.decimal128(19)),
            pa.array([b"ab", b"cd"], pa.binary(2)),
        ],
    )
    def test_other_types_are_refused_where_they_are_asked_for(self, tmp_path, column):
        store.write(Trace.from_frames({}), tmp_path / "s")
        pq.write_table(pa.table({"start_ns": [0, 1], "stream": column}), tmp_path / "s" / "kernels.parquet")
        trace = nsightkit.load(tmp_path / "s")
        assert trace.table("kernels", ["start_ns"])["start_ns"].tolist() == [0, 1]
        with pytest.raises(nsightkit.TraceError, match="stream"):
            trace.table("kernels", ["stream"])

    def test_codes_without_a_text_are_refused(self, tmp_path):
        file = tmp_path / "t.parquet"
        table = pa.table({"name": pa.array(list("abcdefgh")).dictionary_encode()})
        pq.write_table(table, file, compression="none", write_statistics=False)
        data = file.read_bytes()
        header = bytes([0x4C, 0x15, *varint(8)])
        assert data.count(header) == 1
        file.write_bytes(data.replace(header, bytes([0x4C, 0x15, *varint(1)])))
        with pytest.raises(ValueError, match="outside its dictionary"):
            read_table(file, ["name"])

    def test_a_footer_at_which_pyarrow_ends_the_process_is_refused(self, tmp_path):
        file = tmp_path / "t.parquet"
        pq.write_table(pa.table({"start_ns": np.arange(10)}), file)
        optional, required = (bytes([0x25, wire, 0x18, 8]) + b"start_ns" for wire in (2, 0))
        assert optional in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(optional, required))
        with pytest.raises((OSError, ValueError)):
            read_table(file, ["start_ns"])

    @pytest.mark.parametrize(
        "footer",
        [
            b"\x15" + b"\xff" * 1_000_000,
            b"\x1c" * 1_000_000,
            b"\x19\x19" * 500_000,
            b"\x19\xf7" + b"\xff" * 9 + b"\x01",
            b"\x29\xfc\xff\xff\x3f" + b"\0" * 100_000,
        ],
        ids=["number", "structures", "lists", "doubles", "many"],
    )
    def test_a_footer_without_end_is_refused_at_once(self, footer):
        began = time.monotonic()
        with pytest.raises(ValueError, match=r"truncated|too long|type"):
            parquet._struct(io.BytesIO(footer))
        assert time.monotonic() - began < 5

    def test_two_columns_of_one_name_are_refused(self, tmp_path):
        table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["start_ns", "start_ns"])
        pq.write_table(table, tmp_path / "t.parquet")
        with pytest.raises(ValueError, match="same name"):
            read_table(tmp_path / "t.parquet", ["start_ns"])

    def test_more_than_the_free_memory_is_refused(self, tmp_path, monkeypatch):
        pq.write_table(pa.table({"start_ns": np.arange(1000)}), tmp_path / "t.parquet")
        monkeypatch.setattr(parquet, "available_bytes", lambda: 1000)
        with pytest.raises(nsightkit.TraceError, match="of memory"):
            read_table(tmp_path / "t.parquet", ["start_ns"])

    def test_damage_is_an_error(self, tmp_path):
        file = tmp_path / "t.parquet"
        table = pa.table({"start_ns": np.arange(2000), "name": [f"name {i % 9}" for i in range(2000)]})
        pq.write_table(table, file, compression="zstd")
        data = file.read_bytes()
        rng = np.random.default_rng(0)
        for _ in range(500):
            damaged = bytearray(data)
            for place in rng.integers(4, len(data) - 8, 3):
                damaged[place] = rng.integers(256)
            file.write_bytes(damaged)
            with contextlib.suppress(ValueError, OSError, pa.ArrowException, nsightkit.TraceError):
                assert read_table(file, ["start_ns", "name"]).num_rows == 2000
