"""Many ranks: stragglers, their cost and cause; lost ranks; several jobs; worker processes and Dask."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sqlite3
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic.planted import Export
from synthetic.planted_ranks import job

import nsightkit
from nsightkit import cli
from nsightkit.analysis.core import intervals
from nsightkit.analysis.ranks import job as ranks
from nsightkit.analysis.ranks import lateness, one_rank
from nsightkit.analysis.timeline.selection import select
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import store

SIZES = {"ranks": 3, "steps": 8, "layers": 2, "offsets_ns": {1: 3_000_000, 2: -1_500_000_000}}
#: Ends of collectives differ by up to 3 µs.
CLOCK_NS = 3_000


def wall_ns(truth):
    """From the first arrival to the last end, on the true clock."""
    first = min(truth["collectives"][0]["starts"].values())
    return max(truth["collectives"][-1]["ends"].values()) - first


@pytest.mark.parametrize(
    ("kind", "fault", "cause", "words"),
    [
        ("kineto", "data", "idle, input-pipeline", "idle (waiting for data)"),
        ("nsys", "slow", "kernels of GEMM", "in kernels of GEMM"),
    ],
)
def test_a_straggler_is_named_with_its_cause_and_its_cost(tmp_path, kind, fault, cause, words):
    truth = job(tmp_path, {2: fault}, kind=kind, **SIZES)
    found = ranks.survey(tmp_path, workers=0)
    calm = job(tmp_path, {}, kind=kind, **SIZES)
    assert found.stragglers["rank"].tolist() == [2]
    row = found.stragglers.iloc[0]
    assert row[["cause", "unit", "units", "late_units"]].tolist() == [cause, "step", 8, 8]
    # What it costs is what the same job takes less when no rank is late.
    saved = wall_ns(truth) - wall_ns(calm)
    assert row["gain_ns"] == found.gain_ns == pytest.approx(saved, rel=0.02)
    assert row["gain_ns"] >= saved - 16 * CLOCK_NS
    assert row["extra_ns"] == pytest.approx(8 * 2_000_000 - (2_000_000 if fault == "data" else 0), rel=0.01)
    assert row["text"].startswith("Rank 2 is late by ")
    assert words in found.findings()[0]
    assert "No rank is late" in ranks.survey(truth["paths"], workers=0).findings()[0]  # now without the fault


def test_collectives_are_those_laid_out(tmp_path):
    truth = job(tmp_path, {2: "data"}, kind="kineto", **SIZES)
    found = ranks.survey(tmp_path, workers=0)
    for row, true in zip(found.collectives.to_dict("records"), truth["collectives"], strict=True):
        last = max(true["starts"].values())
        assert row["wait_ns"] == pytest.approx(3 * last - sum(true["starts"].values()), abs=4 * CLOCK_NS)
        assert row["transfer_ns"] == pytest.approx(600_000, abs=2 * CLOCK_NS)
        assert row["bytes"] == true["bytes"]
        if true["late_ns"] > 2 * CLOCK_NS:
            assert row["last_rank"] == true["last"]
    assert found.ranks["waited_ns"].sum() == found.collectives["wait_ns"].sum()
    assert found.kinds()["total_ns"].sum() == found.collectives["total_ns"].sum()
    assert (found.lost, found.notes) == ([], [])


def test_two_stragglers_and_what_both_cost(tmp_path):
    sizes = {"kind": "kineto", "ranks": 5, "steps": 8, "layers": 2}
    late = wall_ns(job(tmp_path, {0: "data", 3: "slow"}, **sizes))
    found = ranks.survey(tmp_path, workers=0)
    rows = found.stragglers.set_index("rank")
    assert rows["cause"].to_dict() == {0: "idle, input-pipeline", 3: "kernels of GEMM"}
    # One alone on time saves little, because the other is as late.
    saved = late - wall_ns(job(tmp_path, {0: "data"}, **sizes))
    assert saved - 16 * CLOCK_NS <= rows.loc[3, "gain_ns"] <= saved + 0.1 * found.gain_ns
    assert found.gain_ns == pytest.approx(late - wall_ns(job(tmp_path, {}, **sizes)), rel=0.02)
    assert found.findings()[2].startswith("With rank ")
    without_gpu_work = dataclasses.replace(found, ranks=found.ranks.assign(span_ns=np.nan))
    assert "nan" not in without_gpu_work.findings()[2]


def test_who_waits_in_another_group_is_late_there(tmp_path):
    """Rank 2 is slow; rank 3 shares its layers, so the others wait for both; only rank 2 has work to show for it."""
    job(tmp_path, {2: "slow"}, kind="kineto", ranks=4, steps=12, layers=2, tensor_parallel=2, jitter=0.05)
    found = ranks.survey(tmp_path, workers=0)
    assert found.stragglers["rank"].iloc[0] == 2
    assert found.stragglers.set_index("rank")["cause"].to_dict() == {
        2: "kernels of GEMM",
        3: "waiting in process group 3 for rank 2",
        0: "waiting in process group 0 for rank 2",
    }
    assert found.stragglers["gain_ns"].iloc[0] == found.gain_ns == pytest.approx(12 * 2_000_000, rel=0.05)


# --- the statistics, on tables ---


def arrivals(rng, crew, steps=24, jitter=100_000, late=None, late_ns=0, often=1.0):
    """Random arrivals: every rank as likely to be late as any other, but for `late`."""
    count = 3 * steps
    at = rng.exponential(jitter, (count, crew))
    if late is not None:
        at[:, late] += late_ns * (rng.random(count) < often)
    number = np.arange(count)
    start = number[:, None] * 10_000_000 + at.astype(np.int64)
    frame = pd.DataFrame({"collective": np.repeat(number, crew), "rank": np.tile(range(crew), count)})
    return waiting(frame.assign(step=frame["collective"] // 3, start_ns=start.ravel()))


def waiting(frame):
    """Add the waits for the last rank, and ends half a millisecond after it."""
    last = frame.groupby("collective")["start_ns"].transform("max")
    times = {"wait_ns": last - frame["start_ns"], "exposed_ns": last + 500_000 - frame["start_ns"]}
    frame = frame.assign(end_ns=last + 500_000, group_id=0, group="", last_rank=0, **times)
    return frame.astype(dict.fromkeys(times, "Int64"))


def named(frame, floor_ns=0.0):
    """Stragglers among ranks of which only the arrivals are known."""
    numbers = range(frame["rank"].max() + 1)
    index = pd.MultiIndex.from_product([numbers, range(frame["step"].max() + 1)], names=["rank", "step"])
    spent = pd.DataFrame({f"{one_rank.TIME}rest": 0}, index)
    found, _ = lateness.find_stragglers(frame, spent, pd.Series(floor_ns, numbers), 10e6 * 72)
    return found


@pytest.mark.parametrize("crew", [2, 64])
def test_chance_names_nobody(crew):
    """Jitter alone, so large that it would be worth naming: fewer than one job in a hundred may name a rank."""
    rng = np.random.default_rng(crew)
    assert sum(len(named(arrivals(rng, crew, jitter=1_000_000))) > 0 for _ in range(20)) <= 1


@pytest.mark.parametrize(("crew", "often"), [(2, 1.0), (8, 1.0), (8, 0.6), (64, 0.5)])
def test_a_late_rank_is_always_named(crew, often):
    rng = np.random.default_rng(crew)
    for late in rng.integers(crew, size=5):
        assert named(arrivals(rng, crew, late=late, late_ns=1_500_000, often=often))["rank"].tolist() == [late]


@pytest.mark.parametrize(
    ("late_ns", "floor_ns", "steps"),
    [(10_000, 0, 24), (1_500_000, 0, 1), (400_000, 500_000, 24)],
    ids=["a thousandth of the time", "too few steps", "less than the clock may feign"],
)
def test_a_rank_that_is_not_named(late_ns, floor_ns, steps):
    frame = arrivals(np.random.default_rng(0), 2, steps, jitter=1_000, late=1, late_ns=late_ns)
    assert named(frame, floor_ns).empty


def test_what_waits_at_the_same_time_is_counted_once():
    """Two all-reduces under way together, as through Gloo; rank 1 brings both 2 ms late, the second 0.25 ms later."""
    rows = []
    for step in range(12):
        for bucket, begun in enumerate((0, 500_000)):
            for rank, after in enumerate((begun, 2_000_000 + begun // 2)):
                rows.append((2 * step + bucket, rank, step, step * 10_000_000 + after))
    frame = waiting(pd.DataFrame(rows, columns=["collective", "rank", "step", "start_ns"]))
    late = lateness.lateness(frame).groupby([frame["step"], frame["rank"]]).sum()
    assert late.unique().tolist() == [0.0, 2_250_000.0]
    assert ranks.waited(frame).groupby(frame["rank"]).sum().tolist() == [12 * 2_250_000, 0]
    assert named(frame)[["rank", "gain_ns"]].to_numpy().tolist() == [[1, 12 * 2_250_000]]


@pytest.mark.parametrize(
    ("rows", "chance"),
    [
        ([[0, 1]] * 8, 2**-8),
        ([[0, 0, 0, 1]] * 3, 4**-3),
        ([[0, 1], [1, 0]], 3 / 4),  # 3 or more with two dice of two sides
        ([[0, 1], [1, 1], [0, 1]], 2**-2),  # nobody is last in the second
        ([[0, np.nan]], 1),
    ],
)
def test_the_chance_of_the_last_rank_is_that_of_dice(rows, chance):
    assert lateness.chances_of_lateness(pd.DataFrame(rows)).iloc[-1] == pytest.approx(chance)


# --- accounts ---


def test_accounts_add_up_to_the_windows(shared_traces):
    trace = nsightkit.load(shared_traces / "hta/trace_filter__sampled_rank-1.json.gz", cache=False)
    rng = np.random.default_rng(1)
    low = np.sort(rng.integers(-1_000, 40_000_000, 20))
    high = low + rng.integers(0, 5_000_000, 20)
    time = one_rank.time_spent(trace, low, high).filter(like=one_rank.TIME)
    assert (time.sum(axis=1) == high - low).all()
    assert (time >= 0).all().all()


# --- files, lost ranks, several jobs ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three ranks, the last of which is late."""
    folder = tmp_path_factory.mktemp("job")
    job(folder, {2: "data"}, kind="kineto", ranks=3, steps=8, layers=2)
    return folder


def test_lost_ranks_are_named_and_the_others_answered(folder, tmp_path):
    text = (folder / "rank0.json").read_bytes()
    for rank in (1, 2):
        (tmp_path / f"rank{rank}.json").write_bytes((folder / f"rank{rank}.json").read_bytes())
    (tmp_path / "rank3.json").write_bytes(text[: len(text) // 2])
    (tmp_path / "rank4.json").write_bytes(b"")
    (tmp_path / "rank6.json").write_text('{"rank": 6}', encoding="utf-8")
    (tmp_path / "source.json").write_text('{"repository": "somebody/something"}', encoding="utf-8")
    found = ranks.survey(tmp_path, workers=0)
    assert found.ranks["rank"].tolist() == [1, 2]
    assert found.stragglers["rank"].tolist() == [2]
    lost = {entry["ranks"][0]: entry["reason"] for entry in found.lost}
    assert set(lost) == {0, 3, 4, 6}
    assert lost[0] == "no trace here (the job has 3 ranks)"
    assert "empty" in lost[4]
    # Without one rank of the group, the last arrival is unknown.
    assert found.collectives["transfer_ns"].isna().all()


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"rank": 0}, "are both of rank 0"),
        ({"world_size": 4}, "of 3 and of 4 ranks"),
    ],
)
def test_two_jobs_in_one_folder_are_an_error(folder, second, words):
    looks = [ranks.look_at_ranks(folder / f"rank{rank}.json")[0] for rank in (0, 1)]
    looks[1] = dataclasses.replace(looks[1], **second)
    with pytest.raises(UsageError, match=f"{words}.*give each job its own folder"):
        ranks.combine(looks)


def test_the_files_of_a_folder(tmp_path):
    with pytest.raises(TraceError, match="cannot be listed"):
        ranks.survey(tmp_path / "absent")
    with pytest.raises(TraceError, match="holds no traces"):
        ranks.survey(tmp_path)
    with pytest.raises(UsageError, match="no traces were given"):
        ranks.survey([])
    for name in ("rank10.json", "rank2.json", "a.nsys-rep", "a.sqlite", "b.nsys-rep", ".hidden.json", "x.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "c.sqlite.nsightkit-cache").mkdir()
    (tmp_path / "other").mkdir()
    store.write(nsightkit.Trace.from_frames({}), tmp_path / "stored")
    names = [path.name for path in ranks.traces_in(tmp_path)]
    assert names == ["a.sqlite", "b.nsys-rep", "rank2.json", "rank10.json", "stored"]
    for rank in (1, 0):
        inner = tmp_path / "other" / f"rank_{rank}"
        inner.mkdir()
        (inner / "trace.json").write_text("x")
    assert [path.parent.name for path in ranks.traces_in(tmp_path / "other")] == ["rank_0", "rank_1"]


@pytest.mark.parametrize(
    ("file", "rank"),
    [("rank_7/trace.json", 7), ("worker3.1623143089861.pt.trace.json", 3), ("local_rank1_a.json", None)],
)
def test_the_rank_in_a_name(file, rank):
    assert one_rank.rank_of(file) == rank


def test_ranks_without_a_number_take_the_next_that_is_free():
    (empty,) = ranks.look_at_ranks(nsightkit.Trace.from_frames({}))
    named = {"a": None, "b": 1, "c": None}
    found = ranks.combine([dataclasses.replace(empty, file=file, rank=rank) for file, rank in named.items()])
    assert found.ranks["file"].tolist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("text", "rank"),
    [("SHELL=/bin/sh\0RANK=5\0LOCAL_RANK=1\0", 5), ('SLURM_PROCID="12"\nLOCAL_RANK="4"', 12), ("LOCAL_RANK=3", None)],
)
def test_the_rank_that_a_launcher_gave_nsys(tmp_path, text, rank):
    path = Export().write(tmp_path / "t.sqlite")
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)")
        connection.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('DeviceEnvironment', ?)", (text,))
    assert ranks.look_at_ranks(path)[0].rank == rank


def test_processes_of_one_capture_are_ranks_of_one_node(shared_traces):
    path = shared_traces / "nsys-ai/mfu_2gpu_before.sqlite"
    found = ranks.survey([path], workers=0)
    assert [name.split("#")[1] for name in found.ranks["file"]] == ["144", "145"]
    assert found.ranks["clock_offset_ns"].tolist() == [0, 0]
    # The ends of 32 collectives fit one clock, and none ends before both have arrived.
    assert len(found.collectives) == 32
    assert (found.ranks["clock_spread_ns"] < 25_000).all()
    assert (found.collectives["transfer_ns"] > 0).all()
    half = select(nsightkit.load(path), time_ns=(0, 150_000_000))
    busy_ns = [look.figures["busy_ns"] for look in ranks.look_at_ranks(half)]
    assert busy_ns == intervals.busy(half)["busy_ns"].tolist()


# --- where it runs ---


def assert_same(found, other):
    for field in dataclasses.fields(found):
        value, expected = getattr(found, field.name), getattr(other, field.name)
        if isinstance(value, pd.DataFrame):
            pd.testing.assert_frame_equal(value, expected)
        else:
            assert value == expected


read = ranks.look_or_reason


def kills_its_worker(path):
    """Read a trace, or die if a file beside it says so."""
    if Path(path).with_suffix(".kills").exists():
        os._exit(1)
    return read(path)


def test_a_trace_that_kills_its_worker_is_lost_alone(folder, monkeypatch, tmp_path):
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    told = []
    with pd.option_context("mode.string_storage", "auto"):  # as in the worker's process
        found = ranks.survey(tmp_path, workers=1, progress=lambda done, total: told.append((done, total)))
        assert_same(found, ranks.survey(tmp_path, workers=0))
    assert told == [(1, 3), (2, 3), (3, 3)]
    (tmp_path / "rank1.kills").touch()
    monkeypatch.setattr(ranks, "look_or_reason", kills_its_worker)
    found = ranks.survey(tmp_path, workers=1)
    assert found.ranks["rank"].tolist() == [0, 2]
    (lost,) = found.lost
    assert lost["ranks"] == [1]
    assert lost["reason"].startswith("was lost with its worker (BrokenProcessPool")


def test_a_dask_scheduler_gives_the_same_answer(folder, monkeypatch):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        assert_same(ranks.survey(folder, cluster.scheduler_address), ranks.survey(folder, workers=0))
    monkeypatch.setattr(ranks, "ANSWER_S", 1)
    with pytest.raises(UsageError, match="no Dask scheduler answers at"):
        ranks.survey(folder, "tcp://127.0.0.1:9")


def test_a_scheduler_needs_dask(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(UsageError, match=r"pip install 'nsightkit\[ranks\]'"):
        ranks.survey(folder, "tcp://127.0.0.1:8786")


# --- at the command line ---


def test_what_the_command_prints(folder, capsys):
    assert cli.run(["ranks", str(folder), "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["rank"] for row in document["stragglers"]] == [2]
    assert (len(document["ranks"]), document["lost"]) == (3, [])
    assert cli.run(["ranks", *map(str, folder.glob("*.json")), "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 3
    assert cli.run(["ranks", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Rank 2 is late by ")
    assert err == ""


def test_some_lost_is_printed_and_all_lost_fails(folder, tmp_path, capsys):
    (tmp_path / "rank0.json").write_bytes((folder / "rank0.json").read_bytes())
    (tmp_path / "\x1b[31m rank7\n.json").write_bytes(b"{")
    assert cli.run(["ranks", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "rank7" in out
    (tmp_path / "rank0.json").write_bytes(b"")
    assert cli.run(["ranks", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "none of 2 traces can be read" in err
