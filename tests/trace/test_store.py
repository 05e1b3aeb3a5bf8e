"""The Parquet store and the cache beside a big trace."""

import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
from synthetic.planted import training

import nsightkit
from nsightkit.analysis.timeline import gaps, ranges, selection
from nsightkit.errors import UsageError
from nsightkit.trace import TABLES, model, store


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    path = tmp_path_factory.mktemp("planted") / "t.sqlite"
    training(path, "sync", steps=4)
    return path


@pytest.fixture
def export(planted, tmp_path):
    """A copy: caches lie beside it, and what is written must leave it alone."""
    return Path(shutil.copyfile(planted, tmp_path / "t.sqlite"))


def equal(a, b):
    for table in TABLES:
        left, right = a.table(table), b.table(table)
        pd.testing.assert_frame_equal(left, right, check_categorical=False)


def test_what_is_written_is_read(export, tmp_path):
    trace = nsightkit.load(export)
    store.write(trace, tmp_path / "out.parquet")
    again = nsightkit.load(tmp_path / "out.parquet")
    equal(trace, again)
    assert again.t0_ns == trace.t0_ns
    assert again.meta == trace.meta
    pd.testing.assert_frame_equal(gaps.summary(again), gaps.summary(trace))


def test_threads_of_other_programs_are_not_passed_on(export, tmp_path):
    trace = nsightkit.load(export, cache=False)
    mine = int(trace["ranges"]["thread"].iloc[0])
    trace.meta.thread_names = {mine: "main", 99 << 24 | 7: "another program's"}
    store.write(trace, tmp_path / "out")
    assert nsightkit.load(tmp_path / "out").meta.thread_names == {mine: "main"}
    assert "another" not in "".join(p.read_text(errors="replace") for p in (tmp_path / "out").iterdir())


def test_a_selection_is_written_alone(export, tmp_path):
    trace = selection.select(nsightkit.load(export), last_steps=1)
    store.write(trace, tmp_path / "one")
    again = nsightkit.load(tmp_path / "one")
    assert len(again["kernels"]) == len(trace["kernels"]) < len(trace.whole["kernels"])
    inner = again["ranges"][again["ranges"]["parent"] >= 0]
    assert set(again["ranges"].loc[inner["parent"], "name"]) == {"step"}
    assert ranges.summary(again)["count"].sum() == len(trace["ranges"])


def test_a_failed_write_leaves_the_old_one(export, tmp_path, monkeypatch):
    trace = nsightkit.load(export)
    store.write(trace, tmp_path / "out")

    def fails(*_args, **_options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", fails)
    with pytest.raises(UsageError, match="No space"):
        store.write(trace, tmp_path / "out", overwrite=True)
    monkeypatch.undo()
    equal(trace, nsightkit.load(tmp_path / "out"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "t.sqlite"]


DAMAGES = {
    "no JSON": ("trace.json", b"{", b"["),
    "another format": ("trace.json", b'"format": 2', b'"format": 99'),
    "no meta": ("trace.json", b'"gpus": [', b'"gpus": [3, '),
    "no Parquet": ("kernels.parquet", b"PAR1", b"NONE"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_stores(export, tmp_path, kind):
    name, old, new = DAMAGES[kind]
    store.write(nsightkit.load(export), tmp_path / "out")
    damaged = tmp_path / "out" / name
    damaged.write_bytes(damaged.read_bytes().replace(old, new))
    with pytest.raises(nsightkit.TraceError, match="out"):
        nsightkit.load(tmp_path / "out")["kernels"]


class TestCache:
    @pytest.fixture(autouse=True)
    def _small_traces_too(self, monkeypatch, tmp_path):
        monkeypatch.setattr(model, "CACHE_FROM_BYTES", 0)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("NSIGHTKIT_NO_CACHE", raising=False)

    def folder(self, export):
        return export.with_name(export.name + ".nsightkit-cache")

    def test_the_second_look_opens_no_database(self, export, monkeypatch):
        first = nsightkit.load(export)
        answers = gaps.summary(first), ranges.summary(first), first.table("kernels", ["name", "duration_ns"])
        monkeypatch.setattr(nsightkit.trace.nsys, "Sqlite", None)
        second = nsightkit.load(export)
        pd.testing.assert_frame_equal(gaps.summary(second), answers[0])
        pd.testing.assert_frame_equal(ranges.summary(second), answers[1])
        pd.testing.assert_frame_equal(second.table("kernels", ["name", "duration_ns"]), answers[2])
        assert second.meta == first.meta

    def test_other_content_is_another_key(self, export):
        before = len(nsightkit.load(export)["kernels"])
        stamp = export.stat()
        training(export, "sync", steps=5)
        os.utime(export, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        assert len(nsightkit.load(export)["kernels"]) > before
        assert len(list(self.folder(export).iterdir())) == 1

    def test_off(self, export, monkeypatch):
        monkeypatch.setenv("NSIGHTKIT_NO_CACHE", "1")
        nsightkit.load(export)["kernels"]
        assert not self.folder(export).exists()

    def test_damage_is_repaired(self, export):
        truth = nsightkit.load(export)["kernels"]
        for file in self.folder(export).rglob("*.parquet"):
            file.write_bytes(b"nonsense")
        pd.testing.assert_frame_equal(nsightkit.load(export)["kernels"], truth)
        for file in self.folder(export).rglob("*.json"):
            file.write_text("[]")
        pd.testing.assert_frame_equal(nsightkit.load(export)["kernels"], truth)

    def test_a_read_only_folder_uses_the_users_cache(self, export, tmp_path, monkeypatch):
        access = os.access
        monkeypatch.setattr(store.os, "access", lambda path, mode: path != tmp_path and access(path, mode))
        nsightkit.load(export)["kernels"]
        assert not self.folder(export).exists()
        assert list((tmp_path / "cache" / "nsightkit").rglob("kernels.*.parquet"))

    def test_a_disk_that_is_full_costs_nothing_but_the_cache(self, export, monkeypatch):
        def full(*_args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store, "replacing", full)
        assert len(nsightkit.load(export)["kernels"])
