"""Caches, drafts and stores are safe with untrusted files."""

import contextlib
import os
import shutil
import stat
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
from nsightkit.trace import model, store
from nsightkit.trace.model import Trace, TraceMeta
from nsightkit.trace.parquet import columns_of, read_table

OTHER_USER = 12345


@pytest.fixture(scope="module")
def kineto(tmp_path_factory):
    path = tmp_path_factory.mktemp("kineto") / "t.json"
    write_kineto(path, kernels=200)
    return path


@pytest.fixture(autouse=True)
def _small_traces_too(monkeypatch, tmp_path):
    monkeypatch.setattr(model, "CACHE_FROM_BYTES", 0)
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
        before = contents(home), contents(trace.parent)
        assert names_in(trace) == names_in(trace)
        assert (contents(home), contents(trace.parent)) == before
        assert list((tmp_path / "user" / "nsightkit").rglob("kernels.name.parquet"))

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

    def test_a_link_in_place_of_the_users_own_folder_is_not_followed(self, trace, home, tmp_path):
        home.chmod(0o755)
        before = contents(home)
        (tmp_path / "user").mkdir()
        (tmp_path / "user" / "nsightkit").symlink_to(home)
        assert names_in(trace)
        assert contents(home) == before
        assert stat.S_IMODE(home.stat().st_mode) == 0o755

    def test_one_that_came_with_an_archive_is_not_trusted(self, trace, tmp_path, monkeypatch):
        truth = names_in(trace)
        (file,) = beside(trace).rglob("kernels.name.parquet")
        pd.read_parquet(file).assign(name="planted").astype("category").to_parquet(file)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "victim"))
        assert names_in(trace) == truth


class TestStore:
    @pytest.fixture
    def folder(self, tmp_path):
        kernels = pd.DataFrame({"start_ns": [10, 20], "end_ns": [15, 25], "name": ["a", "b"]})
        store.write(Trace.from_frames({"kernels": kernels}, TraceMeta(tool="test")), tmp_path / "s.parquet")
        return tmp_path / "s.parquet"

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
    @pytest.mark.parametrize("kind", ["fifo", "/dev/zero"])
    def test_of_special_files_is_refused_at_once(self, folder, name, kind):
        file = folder / name
        file.unlink()
        if kind == "fifo":
            os.mkfifo(file)
        else:
            file.symlink_to(kind)
        ended = ask(folder)
        assert ended.code == 2, ended.error
        assert str(folder) in ended.error
        assert "regular" in ended.error

    @pytest.mark.parametrize("text", ["[" * 200_000, '{"meta": ' * 200_000, " " * (17 << 20) + "{}"])
    def test_of_a_hostile_index_is_refused(self, folder, text):
        (folder / "trace.json").write_text(text)
        with pytest.raises(nsightkit.TraceError, match=r"s\.parquet"):
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


def read(file, names):
    """Read columns of a file, as a reader of a trace does."""
    columns = columns_of([file])[file]
    return read_table(file, {name: columns[name] for name in names})


def texts(length, rows, end=""):
    return pa.table({"name": ["x" * length + end * row for row in range(rows)]})


ZEROS = pa.table({"start_ns": np.zeros(1_000_000, np.int64)})
PLAIN = {"use_dictionary": False, "compression": "zstd"}
#: Tables, how often each is written, and how.
BOMBS = {
    "constant": (ZEROS, 100, {}),
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

    @pytest.mark.parametrize("bomb", BOMBS)
    def test_are_refused(self, folder, bomb):
        file = folder / "kernels.parquet"
        table, times, options = BOMBS[bomb]
        many_times(file, table, times, **options)
        assert file.stat().st_size < 1 << 20
        ended = ask(folder)
        assert ended.code == 2, ended.error
        assert "kernels.parquet" in ended.error
        assert "expands to" in ended.error or "is not a readable Parquet table" in ended.error
        assert ended.cpu_s < 10
        assert ended.peak_bytes < 1 << 30


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
        found = read(file, table.column_names)
        assert list(columns_of([file])[file]) == table.column_names
        assert found.to_pylist() == pq.read_table(file).to_pylist()
        assert pa.types.is_dictionary(found["text"].type)
        assert read(file, ["int"]).column_names == ["int"]

    def test_codes_without_a_text_are_refused(self, tmp_path):
        file = tmp_path / "t.parquet"
        table = pa.table({"name": pa.array(list("abcdefgh")).dictionary_encode()})
        pq.write_table(table, file, compression="none", write_statistics=False)
        data = file.read_bytes()
        header = bytes([0x4C, 0x15, *varint(8)])
        assert data.count(header) == 1
        file.write_bytes(data.replace(header, bytes([0x4C, 0x15, *varint(1)])))
        with pytest.raises(ValueError, match="outside its dictionary"):
            read(file, ["name"])

    def test_a_footer_at_which_pyarrow_ends_the_process_is_refused(self, tmp_path):
        file = tmp_path / "t.parquet"
        pq.write_table(pa.table({"start_ns": np.arange(10)}), file)
        optional, required = (bytes([0x25, wire, 0x18, 8]) + b"start_ns" for wire in (2, 0))
        assert optional in file.read_bytes()
        file.write_bytes(file.read_bytes().replace(optional, required))
        with pytest.raises(nsightkit.TraceError):
            read(file, ["start_ns"])

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
    def test_a_footer_without_end_is_refused_at_once(self, tmp_path, footer):
        began = time.monotonic()
        file = tmp_path / "t.parquet"
        file.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
        with pytest.raises(nsightkit.TraceError):
            columns_of([file])
        assert time.monotonic() - began < 5

    def test_damage_is_an_error(self, tmp_path):
        file = tmp_path / "t.parquet"
        table = pa.table({"start_ns": np.arange(2000), "name": [f"name {i % 9}" for i in range(2000)]})
        pq.write_table(table, file, compression="zstd")
        data = file.read_bytes()
        rng = np.random.default_rng(0)
        for _ in range(25):
            damaged = bytearray(data)
            for place in rng.integers(4, len(data) - 8, 3):
                damaged[place] = rng.integers(256)
            file.write_bytes(damaged)
            with contextlib.suppress(ValueError, OSError, pa.ArrowException, nsightkit.TraceError):
                assert read(file, ["start_ns", "name"]).num_rows == 2000
