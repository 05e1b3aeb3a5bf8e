"""Many ranks: stragglers, their cost and cause; lost ranks; where ranks get their numbers; Dask."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic.planted import Export
from synthetic.planted_ranks import job

import nsightkit
from nsightkit import cli
from nsightkit.analysis.ranks import job as ranks
from nsightkit.analysis.ranks import lateness as stragglers
from nsightkit.analysis.ranks import one_rank
from nsightkit.errors import TraceError, UsageError
from nsightkit.trace import store

OFFSETS = {1: 3_000_000, 2: -1_500_000_000}
SIZES = {"ranks": 3, "steps": 8, "layers": 2, "offsets_ns": OFFSETS}
#: Of the alignment of clocks: ends of collectives differ by up to 3 µs.
CLOCK_NS = 3_000
LATE = {"data": "idle, input-pipeline", "slow": "kernels of GEMM", "work": "kernels of GEMM"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A planted job for each cause, in both forms, with what is true of it and what was found."""
    made = {}
    for kind, cause in [("kineto", "data"), ("nsys", "slow"), ("kineto", "work"), ("nsys", None)]:
        folder = tmp_path_factory.mktemp(f"{kind}-{cause}")
        truth = job(folder, {2: cause} if cause else {}, kind=kind, **SIZES)
        made[kind, cause] = (folder, truth, ranks.survey(folder, workers=0))
    return made


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """What is true of the same job when nobody is late."""
    return job(tmp_path_factory.mktemp("calm"), {}, kind="kineto", **SIZES)


def wall_ns(truth):
    """From the first arrival to the last end, on the true clock."""
    starts = [t for c in truth["collectives"] for t in c["starts"].values()]
    return max(t for c in truth["collectives"] for t in c["ends"].values()) - min(starts)


@pytest.mark.parametrize(("kind", "cause"), [("kineto", "data"), ("nsys", "slow"), ("kineto", "work")])
def test_a_straggler_is_named_with_its_cause_and_its_cost(jobs, calm, kind, cause):
    _, truth, found = jobs[kind, cause]
    assert found.stragglers["rank"].tolist() == [2]
    row = found.stragglers.iloc[0]
    assert row["cause"] == LATE[cause]
    assert row[["unit", "units", "late_units"]].tolist() == ["step", 8, 8]
    assert row["p_value"] < 0.01
    # Late by what was planted, each time one of the collectives waited for it.
    last = [c["late_ns"] for c in truth["collectives"] if c["last"] == 2 and c["late_ns"] > 2 * CLOCK_NS]
    assert len(last) == (8 if cause == "data" else 16) <= row["last_count"] <= row["collectives"] == 16
    assert row["waited_for_ns"] == pytest.approx(2 * sum(last), abs=32 * CLOCK_NS)
    # What it costs is what the same job takes less when nobody is late.
    saved = wall_ns(truth) - wall_ns(calm)
    assert row["gain_ns"] == found.gain_ns == pytest.approx(saved, rel=0.02)
    assert row["gain_ns"] >= saved - 16 * CLOCK_NS  # a bound
    # And why.
    reason = row["because"][0]
    assert reason["extra_ns"] == pytest.approx(8 * 2_000_000 - (2_000_000 if cause == "data" else 0), rel=0.01)
    if cause == "slow":
        assert reason["count_ratio"] == 1
        assert "as many as on the others, but slower" in row["text"]
    if cause == "work":
        assert reason["count_ratio"] == pytest.approx((3 * 2 + 16) / (3 * 2))
        assert "3.67 times as many" in row["text"]
    assert "Rank 2 comes late in 8 of 8 steps" in row["text"]
    assert found.findings()[0] == row["text"]


def test_who_came_when(jobs):
    for (kind, _), (_, truth, found) in jobs.items():
        each = found.collectives
        assert len(each) == len(truth["collectives"])
        zero = truth["collectives"][0]["starts"][0] - int(
            found.arrivals.query("rank == 0 and collective == 0")["start_ns"].iloc[0]
        )
        for row, true in zip(each.to_dict("records"), truth["collectives"], strict=True):
            assert row["start_ns"] + zero == pytest.approx(min(true["starts"].values()), abs=CLOCK_NS)
            assert row["arrived_ns"] + zero == pytest.approx(max(true["starts"].values()), abs=CLOCK_NS)
            assert row["step"] == true["step"]
            waits = sum(max(true["starts"].values()) - start for start in true["starts"].values())
            assert row["wait_ns"] == pytest.approx(waits, abs=4 * CLOCK_NS)
            if true["late_ns"] > 2 * CLOCK_NS:
                assert row["last_rank"] == true["last"]
                assert row["late_ns"] == pytest.approx(true["late_ns"], abs=2 * CLOCK_NS)
            if kind == "kineto":
                # 600 µs were planted for the transfer, between three ranks.
                assert row["transfer_ns"] == pytest.approx(600_000, abs=2 * CLOCK_NS)
                assert row["bus_gb_per_s"] == pytest.approx(true["bytes"] * 4 / 3 / row["transfer_ns"])
                assert row["sequence"] == true["sequence"]


def test_sums_of_each_rank(jobs):
    _, truth, found = jobs["kineto", "data"]
    table = found.ranks.set_index("rank")
    for rank in range(3):
        for what in ("compute_ns", "communication_ns", "exposed_ns"):
            assert table.loc[rank, what] == truth[what][rank]
        assert table.loc[rank, "clock_offset_ns"] == pytest.approx(OFFSETS.get(rank, 0), abs=CLOCK_NS)
        own = found.arrivals[found.arrivals["rank"] == rank]
        assert table.loc[rank, "waited_ns"] == own["wait_ns"].sum()
    assert table["matched"].tolist() == table["collectives"].tolist() == [16] * 3
    assert table["steps"].tolist() == [8] * 3
    assert set(table["rank_from"]) == {"trace"}
    assert not found.lost
    assert not found.notes


def test_kinds_and_steps_add_up(jobs):
    _, _, found = jobs["nsys", "slow"]
    kinds, each, steps = found.kinds(), found.collectives, found.steps
    for column, of_each in (("total_ns", "mean_ns"), ("exposed_ns", "exposed_ns"), ("transfer_ns", "transfer_ns")):
        assert kinds[column].sum() == each[of_each].sum()
    assert kinds["count"].sum() == len(each)
    assert kinds["wait_ns"].sum() == pytest.approx(each["wait_ns"].sum() / 3)
    assert steps["wait_ns"].sum() == each["wait_ns"].sum()
    # Two milliseconds more on one of three ranks.
    assert set(steps["slowest"]) == {2}
    others = (steps["compute_ns"] * 3 - steps["compute_max_ns"]) / 2
    assert (steps["compute_max_ns"] - others).to_numpy() == pytest.approx(2_000_000, rel=0.03)
    assert steps["imbalance"].to_numpy() == pytest.approx(steps["compute_max_ns"] / steps["compute_ns"] - 1)


def test_nobody_is_named_where_nobody_is_late(jobs):
    _, _, found = jobs["nsys", None]
    assert not len(found.stragglers)
    assert found.gain_ns == 0
    assert found.findings()[0].startswith("No rank is late more often")


def test_two_stragglers_and_what_both_cost(tmp_path):
    truth = job(tmp_path, {0: "data", 3: "slow"}, kind="kineto", ranks=5, steps=8, layers=2)
    found = ranks.survey(tmp_path, workers=0)
    assert dict(zip(found.stragglers["rank"], found.stragglers["cause"], strict=True)) == {
        0: "idle, input-pipeline",
        3: "kernels of GEMM",
    }
    # What each alone on time would save, and both: the same job without.
    for rank, left in ((0, {3: "slow"}), (3, {0: "data"})):
        saved = wall_ns(truth) - wall_ns(job(tmp_path, left, kind="kineto", ranks=5, steps=8, layers=2))
        (gain,) = found.stragglers.loc[found.stragglers["rank"] == rank, "gain_ns"]
        assert saved - 16 * CLOCK_NS <= gain <= saved + 0.1 * found.gain_ns
        assert gain < 0.5 * found.gain_ns  # the other is nearly as late
    calm = job(tmp_path, {}, kind="kineto", ranks=5, steps=8, layers=2)
    assert found.gain_ns == pytest.approx(wall_ns(truth) - wall_ns(calm), rel=0.02)
    assert "If all of them were on time" in found.findings()[2]


def test_who_waits_in_another_group_is_late_there(tmp_path):
    """Rank 2 is slow; rank 3 shares its layers, so the others wait for both; one of them has work to show for it."""
    job(tmp_path, {2: "slow"}, kind="kineto", ranks=4, steps=12, layers=2, tensor_parallel=2, jitter=0.05)
    found = ranks.survey(tmp_path, workers=0)
    rows = {row["rank"]: row for row in found.stragglers.to_dict("records")}
    assert rows[2]["cause"] == "kernels of GEMM"
    # Rank 3 waits for it before each gradient, rank 0 at the end of each step.
    assert rows[3]["cause"] == "waiting in process group 3 for rank 2"
    assert rows[0]["cause"] == "waiting in process group 0 for rank 2"
    assert set(rows) == {0, 2, 3}
    assert found.stragglers["rank"].iloc[0] == 2  # who is late of itself comes first
    assert "after" in rows[3]["text"]
    # Rank 2 in time saves its 24 ms, and is not charged for each group that waits.
    assert rows[2]["gain_ns"] == found.gain_ns == pytest.approx(12 * 2_000_000, rel=0.05)


# --- the statistics, on tables ---


def arrivals(rng, ranks_=8, steps=24, collectives=3, jitter=100_000, late=None, late_ns=0, often=1.0):
    """Random arrivals: every rank as likely to be late as any other, but for `late`."""
    count = steps * collectives
    at = rng.exponential(jitter, (count, ranks_))
    if late is not None:
        at[:, late] += late_ns * (rng.random(count) < often)
    number = np.arange(count)
    at = number[:, None] * 10_000_000 + at.astype(np.int64)
    last = at.max(axis=1, keepdims=True)
    each = {"start_ns": at, "end_ns": last + 500_000, "wait_ns": last - at, "exposed_ns": last + 500_000 - at}
    frame = pd.DataFrame({"collective": np.repeat(number, ranks_), "group": 0, "rank": np.tile(range(ranks_), count)})
    frame = frame.assign(step=frame["collective"] // collectives)
    frame = frame.assign(**{name: np.broadcast_to(of, at.shape).ravel() for name, of in each.items()})
    return frame.astype({"wait_ns": "Int64", "exposed_ns": "Int64"})


def stragglers_of(frame, floors=None):
    """Find them among ranks of which nothing is known but when they came."""
    numbers = range(frame["rank"].max() + 1)
    spent = pd.DataFrame({"step": range(frame["step"].max() + 1), f"{one_rank.TIME}rest": 0})
    return stragglers.find(frame, dict.fromkeys(numbers, spent), floors or dict.fromkeys(numbers, 0.0), 10e6 * 72)[0]


def named(frame, floors=None):
    return stragglers_of(frame, floors)["rank"].tolist()


def held_back(frame, late):
    """The same collectives, to which some arrivals come 1.5 ms after all others, which come together."""
    start = frame.groupby("collective")["start_ns"].transform("min") + 1_500_000 * late
    wait = start.groupby(frame["collective"]).transform("max") - start
    return frame.assign(start_ns=start, wait_ns=wait.astype("Int64"), end_ns=start + wait + 500_000)


@pytest.mark.parametrize("crew", [2, 8, 64])
def test_chance_names_nobody(crew):
    """Jitter alone, so large that it would be worth naming: fewer than one job in a hundred may name anyone."""
    rng = np.random.default_rng(crew)
    tries = 100 if crew < 64 else 20
    assert sum(bool(named(arrivals(rng, crew, jitter=1_000_000))) for _ in range(tries)) <= 2


@pytest.mark.parametrize(("crew", "often"), [(2, 1.0), (8, 1.0), (8, 0.6), (64, 0.5)])
def test_a_late_rank_is_always_named(crew, often):
    rng = np.random.default_rng(crew)
    for late in rng.integers(crew, size=10):
        assert named(arrivals(rng, crew, late=late, late_ns=1_500_000, often=often)) == [late]


def test_who_is_not_named():
    rng = np.random.default_rng(0)
    # Always last, but by a thousandth of the time; in too few steps; by less than its clock may feign.
    assert not named(arrivals(rng, jitter=1_000, late=3, late_ns=10_000))
    assert not named(arrivals(rng, 2, steps=2, collectives=2, late=1, late_ns=1_500_000))
    frame = arrivals(rng, jitter=1_000, late=3, late_ns=400_000)
    assert named(frame) == [3]
    assert not named(frame, dict.fromkeys(range(8), 500_000.0))


def test_how_late_is_told_of_when_it_is_late():
    """Late in 29 of 60 steps, and then by 1.5 ms: the median over all of them would be 0."""
    frame = arrivals(np.random.default_rng(0), 2, steps=60, collectives=1, jitter=1_000)
    (row,) = stragglers_of(held_back(frame, (frame["rank"] == 1) & (frame["step"] < 29))).to_dict("records")
    assert (row["rank"], row["late_units"], row["median_late_ns"]) == (1, 29, 1_500_000)
    assert "late in 29 of 60 steps, by 1.500 ms at the median" in row["text"]


def test_what_waits_at_the_same_time_is_counted_once():
    """Two all-reduces under way together, as through Gloo; rank 1 brings both 2 ms late, the second 0.25 ms later."""
    rows = []
    for step in range(12):
        for bucket, begun in enumerate((0, 500_000)):
            at = [step * 10_000_000 + begun, step * 10_000_000 + 2_000_000 + begun // 2]
            end = at[1] + 1_000_000
            number = step * 2 + bucket
            rows += [(number, 0, rank, step, t, end, at[1] - t, end - t) for rank, t in enumerate(at)]
    frame = pd.DataFrame(rows, columns=list(arrivals(np.random.default_rng(0), 2, 1, 1)))
    frame = frame.astype({"wait_ns": "Int64", "exposed_ns": "Int64"})
    late = stragglers.lateness(frame)
    assert late.groupby([frame["step"], frame["rank"]]).sum().unique().tolist() == [0.0, 2_250_000.0]
    assert ranks.waited(frame).groupby(frame["rank"]).sum().tolist() == [12 * 2_250_000, 0]
    spent = {r: pd.DataFrame({"step": np.arange(12), f"{one_rank.TIME}rest": r * 2_250_000}) for r in range(2)}
    found, gain = stragglers.find(frame, spent, {0: 0.0, 1: 0.0}, 120e6)
    row = found.iloc[0]
    assert (row["rank"], row["median_late_ns"], row["waited_for_ns"]) == (1, 2_250_000, 12 * 2_250_000)
    assert gain == row["gain_ns"] == 12 * 2_250_000
    assert "by 2.250 ms at the median" in row["text"]


@pytest.mark.parametrize(("crew", "times", "late"), [(4, 5, [1]), (4, 4, []), (2, 5, []), (2, 8, [1])])
def test_collectives_that_nobody_came_late_to_do_not_speak_for_chance(crew, times, late):
    """Late to so many of ten, and nobody to the others: chance throws the highest place each time."""
    frame = arrivals(np.random.default_rng(0), crew, steps=1, collectives=10, jitter=0)
    assert bool(crew * crew**-times < 0.01) is bool(late)
    assert named(held_back(frame, (frame["rank"] == 1) & (frame["collective"] < times))) == late


def test_the_chance_of_places_is_that_of_dice():
    tail = stragglers.chance_of_places
    assert tail([6, 6], 12) == pytest.approx(1 / 36)
    assert tail([6, 6], 11) == pytest.approx(3 / 36)
    assert tail([2] * 8, 16) == pytest.approx(2**-8)
    assert tail([2] * 8, 8) == pytest.approx(1)
    assert tail([4, 8], 12) == pytest.approx(1 / 32)
    assert tail([], 3) == 1
    # Beyond what is counted out: a normal distribution, as close as a hundredth of what matters.
    many = [8] * 3000
    mean, deviation = 3000 * 4.5, np.sqrt(3000 * 63 / 12)
    assert tail(many, int(mean)) == pytest.approx(0.5, abs=0.01)
    assert tail(many, int(mean + 3 * deviation)) == pytest.approx(0.00135, rel=0.1)


# --- accounts ---


def test_accounts_add_up_to_the_windows(shared_traces):
    trace = nsightkit.load(shared_traces / "hta/trace_filter__sampled_rank-1.json.gz", cache=False)
    rng = np.random.default_rng(1)
    low = np.sort(rng.integers(-1_000, 40_000_000, 20))
    high = low + rng.integers(0, 5_000_000, 20)
    time = one_rank.time_spent(trace, low, high).filter(like=one_rank.TIME)
    assert (time.sum(axis=1) == high - low).all()
    assert (time >= 0).all().all()


def test_accounts_without_a_gpu():
    main = 5 << 24 | 1
    names = ["ProfilerStep#1", "data", "forward", "inner", "batch 1", "batch 2", "gloo:all_reduce"]
    start, end = [0, 0, 300, 350, 700, 800, 400], [1_000, 200, 600, 400, 750, 900, 950]
    frame = pd.DataFrame(
        {
            "name": pd.Categorical(names),
            "start_ns": start,
            "end_ns": end,
            "thread": [main] * 6 + [main + 1],
            "process": 5,
            "parent": [-1, 0, 0, 2, 0, 0, -1],
            "level": [0, 1, 1, 2, 1, 1, 0],
        }
    )
    trace = nsightkit.Trace.from_frames({"ranges": frame})
    spent = one_rank.time_spent(trace, [0, 500], [1_000, 720])
    assert spent.to_dict("list") == {
        "time: range forward": [300, 100],
        "time: range data": [200, 0],
        "time: range batch #": [150, 20],
        "time: in no range": [350, 100],
    }


# --- what is lost ---


def test_lost_ranks_are_named_and_the_others_answered(jobs, tmp_path):
    folder, truth, _ = jobs["kineto", "data"]
    for path in truth["paths"]:
        shutil.copy(path, tmp_path)
    text = (folder / "rank0.json").read_bytes()
    (tmp_path / "rank3.json").write_bytes(text[: len(text) // 2])
    (tmp_path / "rank4.json").write_bytes(b"")
    (tmp_path / "rank5.json.gz").write_bytes(gzip.compress(text)[:-2000])
    (tmp_path / "rank6.json").write_text('{"rank": 6}', encoding="utf-8")
    (tmp_path / "rank7.sqlite").write_bytes(b"SQLite format 3\x00" + os.urandom(4000))
    (tmp_path / "rank9.json").write_bytes(text)  # says that it is rank 0
    (tmp_path / "notes.txt").write_text("no trace")
    found = ranks.survey(tmp_path, workers=0)
    assert found.ranks["rank"].tolist() == [0, 1, 2]
    assert found.stragglers["rank"].tolist() == [2]
    lost = {Path(one["file"]).name if one["file"] else None: one for one in found.lost}
    assert set(lost) == {*(f"rank{i}.json" for i in (3, 4, 6, 9)), "rank5.json.gz", "rank7.sqlite"}
    assert [lost[name]["ranks"] for name in ("rank3.json", "rank7.sqlite", "rank9.json")] == [[3], [7], []]
    assert "empty" in lost["rank4.json"]["reason"]
    assert "truncated" in lost["rank5.json.gz"]["reason"]
    assert lost["rank9.json"]["reason"] == "a second trace of rank 0 was left out; the first is rank0.json"
    assert all("\n" not in one["reason"] for one in found.lost)


def test_ranks_without_a_trace_are_named(jobs):
    _, truth, _ = jobs["kineto", "data"]
    found = ranks.survey([truth["paths"][0], truth["paths"][2]])
    assert found.lost == [{"file": None, "ranks": [1], "reason": "there is no trace of it (the job has 3 ranks)"}]
    # Who came last of all three nobody knows now, nor when the transfer began.
    assert any("2 of 3 ranks were seen" in note for note in found.notes)
    assert found.collectives[["transfer_ns", "bus_gb_per_s"]].isna().all().all()
    assert found.stragglers["rank"].tolist() == [2]
    # A number that a lost file's name claims stays free for it.
    found = ranks.combine([seen("x.json"), seen("y.txt")], [{"file": "rank0.json", "ranks": [0], "reason": "is empty"}])
    assert found.ranks["rank"].tolist() == [1, 2]
    assert [lost["file"] for lost in found.lost] == ["rank0.json"]


def test_when_all_are_lost_it_fails(tmp_path):
    (tmp_path / "rank0.json").write_bytes(b"")
    (tmp_path / "rank1.json").write_text("{", encoding="utf-8")
    with pytest.raises(TraceError, match=r"none of 2 traces can be read; the first, rank0\.json, is empty"):
        ranks.survey(tmp_path)


def test_folders_without_traces(tmp_path):
    with pytest.raises(TraceError, match="no such folder"):
        ranks.survey(tmp_path / "absent")
    with pytest.raises(TraceError, match="holds no traces"):
        ranks.survey(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(TraceError, match="is not a folder"):
        ranks.survey(tmp_path / "file")
    with pytest.raises(UsageError, match="no traces were given"):
        ranks.survey([])


# --- which files, which ranks ---


def test_the_files_of_a_folder(tmp_path):
    for name in ("rank10.json", "rank2.json", "a.nsys-rep", "a.sqlite", "b.nsys-rep", ".hidden.json", "x.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "c.sqlite.nsightkit-cache").mkdir()
    (tmp_path / "other").mkdir()
    store.write(nsightkit.Trace.from_frames({}), tmp_path / "stored")
    for name in ("source.json", "rank3.json"):  # what is called a rank and is no trace is lost, not passed over
        (tmp_path / name).write_text('{"repository": "somebody/something"}')
    names = [path.name for path in ranks.traces_in(tmp_path)]
    assert names == ["a.sqlite", "b.nsys-rep", "rank2.json", "rank3.json", "rank10.json", "stored"]
    deeper = tmp_path / "deeper"
    for rank in (1, 0):
        (deeper / f"rank_{rank}").mkdir(parents=True)
        (deeper / f"rank_{rank}" / "trace.json").write_text("x")
    assert [path.parent.name for path in ranks.traces_in(deeper)] == ["rank_0", "rank_1"]


def seen(file, rank=None, world=None):
    empty = nsightkit.Trace.from_frames({})
    (one,) = ranks.look(empty)
    return dataclasses.replace(one, file=file, rank=rank, world_size=world)


@pytest.mark.parametrize(
    ("looks", "numbers"),
    [
        ([seen("x.json", 3), seen("rank7.json", 1)], {3: "trace", 1: "trace"}),
        ([seen("rank-7.json"), seen("job_rank_2.sqlite")], {7: "name", 2: "name"}),
        ([seen("worker3.1623143089861.pt.trace.json"), seen("worker4.1.pt.trace.json")], {3: "name", 4: "name"}),
        ([seen("rank3/trace.json"), seen("rank4/trace.json")], {3: "name", 4: "name"}),
        ([seen("report_0.sqlite"), seen("report_1.sqlite")], {0: "name", 1: "name"}),
        ([seen("a_1700000001.json"), seen("a_1700000002.json")], {0: "order", 1: "order"}),
        ([seen("local_rank1_a.json"), seen("local_rank1_b.json")], {0: "order", 1: "order"}),
        # Programs that never learned their rank all say 0.
        ([seen("b.json", 0), seen("c.json", 0)], {0: "order", 1: "order"}),
        ([seen("a.json", 1), seen("b.json")], {1: "trace", 0: "order"}),
    ],
)
def test_where_ranks_get_their_numbers(looks, numbers):
    found = ranks.combine(looks)
    assert dict(zip(found.ranks["rank"], found.ranks["rank_from"], strict=True)) == numbers
    assert any("numbered in order" in note for note in found.notes) == ("order" in numbers.values())


@pytest.mark.parametrize(
    ("worlds", "starts", "said"),
    [
        ((16, 8), (0, 0), "of 8 and of 16 ranks"),
        ((8, 8), (1_661_203_462 * 10**9, 1_683_564_901 * 10**9), "they begin 258.8 days apart"),
        ((8, 8), (1_683_564_000 * 10**9, 1_683_564_901 * 10**9), None),
        ((8, 8), (10**15, 3 * 10**14), None),  # of two machines, since each was booted
        ((8, 8), (10**15, 1_683_564_901 * 10**9), None),
        ((8, None), (0, 0), None),
    ],
)
def test_traces_of_different_jobs_are_said_to_be_and_nothing_is_lost(jobs, worlds, starts, said):
    looks = [one for path in jobs["kineto", "data"][1]["paths"][:2] for one in ranks.look(path)]
    found = ranks.combine(
        [
            dataclasses.replace(one, rank=rank, world_size=world, t0_ns=start)
            for rank, (one, world, start) in enumerate(zip(looks, worlds, starts, strict=True))
        ]
    )
    if said is None:
        assert found.lost[0]["ranks"] == [2, 3, 4, 5, 6, 7]
        assert len(found.collectives)
    else:
        assert found.notes[0] == f"The traces are of different jobs: {said}."
        assert not found.lost
        assert not len(found.collectives)
        assert not len(found.steps)


@pytest.mark.parametrize(
    ("text", "distributed"),
    [
        ("SHELL=/bin/sh\0RANK=5\0WORLD_SIZE=8\0LOCAL_RANK=1\0", {"rank": 5, "world_size": 8}),
        ('SLURM_PROCID="12"\nSLURM_NTASKS="64"\nLOCAL_RANK="4"', {"rank": 12, "world_size": 64}),
        ("OMPI_COMM_WORLD_RANK=0;OMPI_COMM_WORLD_SIZE=2", {"rank": 0, "world_size": 2}),
        ("LOCAL_RANK=3\0NODE_RANK=1\0WORLD_SIZE=4", {}),
        ("[scrubbed]", {}),
    ],
)
def test_the_rank_that_a_launcher_gave_nsys(tmp_path, text, distributed):
    out = Export()
    thread = Export.thread(1, 1)
    out.kernel("k", 10, 20, out.call("cudaLaunchKernel", thread, 1, 2), Export.process(1))
    path = out.write(tmp_path / "t.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)")
        connection.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('DeviceEnvironment', ?)", (text,))
    connection.close()
    trace = nsightkit.load(path, cache=False)
    assert trace.meta.distributed == distributed
    (one,) = ranks.look(path)
    assert (one.rank, one.world_size) == (distributed.get("rank"), distributed.get("world_size"))


def test_processes_of_one_capture_are_ranks_of_one_node(shared_traces):
    path = shared_traces / "nsys-ai/mfu_2gpu_before.sqlite"
    found = ranks.survey([path], workers=0, cache=False)
    assert found.ranks["file"].tolist() == [f"{path}#144", f"{path}#145"]
    assert found.ranks["devices"].tolist() == [[0], [1]]
    assert set(found.ranks["rank_from"]) == {"order"}
    assert found.ranks["clock_offset_ns"].tolist() == [0, 0]
    assert found.ranks["matched"].tolist() == [32, 32]
    trace = nsightkit.load(path, cache=False)
    for row in found.ranks.to_dict("records"):
        own = trace["kernels"][trace["kernels"]["device"] == row["devices"][0]]
        assert row["compute_ns"] + row["communication_ns"] - row["overlapped_ns"] <= own.eval("end_ns - start_ns").sum()
    # No rank is late to a collective before the other has ended it.
    each = found.collectives
    assert (each["arrived_ns"] <= each["end_ns"]).all()
    assert not len(found.stragglers)


def test_two_real_ranks(shared_traces):
    """HTA's sampled pair, by hand: events were left out of both at random, and both are of one machine.

    Of ten collectives each, these are the same: on stream 84 the ones that end at ...898187.835, ...898307.389/.334 and
    ...899182.485/.493, on stream 203 those at ...898627.817/628.149 and ...899249.534/.345 (ms of the traces' clock).
    """
    files = [shared_traces / f"hta/trace_filter__sampled_rank-{rank}.json.gz" for rank in (0, 1)]
    found = ranks.survey(files, workers=0, cache=False)
    each = found.collectives
    assert each["kind"].tolist() == ["all_to_all", "all_reduce", "all_gather", "all_reduce", "all_gather"]
    assert each["step"].tolist() == [551, 551, 551, 552, 552]
    ends = found.arrivals.pivot(index="collective", columns="rank", values="end_ns")
    t0_us = 1682725898079292
    assert sorted((ends[0] // 1000 + t0_us - 1682725898000000).tolist()) == [187835, 307389, 627817, 1182485, 1249534]
    assert sorted((ends[1] // 1000 + t0_us - 1682725898000000).tolist()) == [187835, 307334, 628149, 1182493, 1249345]
    # Rank 1 came last to all five; that is too little to call it a straggler.
    assert each["last_rank"].tolist() == [1] * 5
    assert each["skew_ns"].tolist() == [4_859_000, 3_302_000, 84_000, 22_328_000, 1_292_000]
    assert not len(found.stragglers)
    assert found.ranks["clock_offset_ns"].tolist() == [0, 0]
    # 126 of 128 ranks are not there: nobody knows when the last one came.
    (lost,) = found.lost
    assert lost["ranks"] == list(range(2, 128))
    assert each["transfer_ns"].isna().all()
    assert found.steps[["step", "ranks", "slowest"]].to_numpy().tolist() == [[551, 2, 1], [552, 2, 1]]


# --- where it runs ---


def assert_same(one, other):
    for field in dataclasses.fields(one):
        mine, others = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, pd.DataFrame):
            pd.testing.assert_frame_equal(mine, others)
        else:
            assert mine == others


def test_other_processes_give_the_same_answer(jobs):
    folder, _, here = jobs["kineto", "data"]
    told = []
    there = ranks.survey(folder, workers=2, progress=lambda done, total: told.append((done, total)))
    assert_same(there, here)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_dask_scheduler_gives_the_same_answer(jobs):
    distributed = pytest.importorskip("distributed")
    folder, _, here = jobs["kineto", "data"]
    with distributed.LocalCluster(n_workers=2, processes=False, dashboard_address="127.0.0.1:0") as cluster:
        there = ranks.survey(folder, cluster.scheduler_address)
    assert_same(there, here)


look_at = ranks.attempt


def kills_its_worker(path, cache):
    """Look at a trace, and die as often as the file beside it says."""
    left = Path(path).with_suffix(".deaths")
    if left.exists() and (count := int(left.read_text())):
        left.write_text(str(count - 1))
        os._exit(1)
    return look_at(path, cache)


@pytest.mark.parametrize("deaths", [1, 99])
def test_a_trace_that_kills_its_worker_is_lost_alone(jobs, monkeypatch, tmp_path, deaths):
    _, truth, here = jobs["kineto", "data"]
    for path in truth["paths"]:
        shutil.copy(path, tmp_path)
    (tmp_path / "rank1.deaths").write_text(str(deaths))
    monkeypatch.setattr(ranks, "attempt", kills_its_worker)
    found = ranks.survey(tmp_path, workers=1)
    if deaths == 1:  # it is asked for once more
        assert found.ranks["rank"].tolist() == here.ranks["rank"].tolist()
        assert not found.lost
        return
    assert found.ranks["rank"].tolist() == [0, 2]
    (lost,) = found.lost
    assert lost["ranks"] == [1]
    assert lost["reason"].startswith("was lost with its worker (BrokenProcessPool")


def test_a_script_without_a_guard_is_told_so(jobs, tmp_path):
    folder, _, _ = jobs["kineto", "data"]
    script = tmp_path / "script.py"
    script.write_text(f"from nsightkit.analysis.ranks import job\njob.survey({str(folder)!r}, workers=1)\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=120)
    assert "NsightkitError: worker processes did not start; in a script" in done.stderr


def test_a_scheduler_that_does_not_answer(jobs, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr(ranks, "ANSWER_S", 1)
    folder, _, _ = jobs["kineto", "data"]
    for address in ("tcp://127.0.0.1:9", "nonsense://"):
        with pytest.raises(UsageError, match=f"no Dask scheduler answers at '{address}'"):
            ranks.survey(folder, address)


def test_without_dask(jobs, monkeypatch):
    folder, _, here = jobs["kineto", "data"]
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert_same(ranks.survey(folder, workers=1), here)
    with pytest.raises(UsageError, match=r"pip install 'nsightkit\[ranks\]'"):
        ranks.survey(folder, "tcp://127.0.0.1:8786")


# --- at the command line ---


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = cli.run([str(a) for a in arguments])
        return code, *capsys.readouterr()

    return call


def test_what_the_command_prints(jobs, run):
    folder, truth, here = jobs["kineto", "data"]
    code, out, err = run("ranks", folder, "--format", "json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["lost"] == []
    assert [row["rank"] for row in document["stragglers"]] == [2]
    for table in ("ranks", "stragglers", "steps", "groups"):
        assert list(document[table][0]) == list(getattr(here, table).columns)
    assert list(document["collectives"][0]) == list(here.kinds().columns)
    assert {type(row[column]) for row in document["ranks"] for column in ("span_ns", "late_ns")} == {int}
    _, out, _ = run("ranks", *truth["paths"], "--format", "csv", "--each")
    assert len(out.splitlines()) == 1 + 16
    code, out, err = run("ranks", folder, "--format", "text")
    assert (code, err) == (0, "")
    assert out.startswith(f"3 ranks · pytorch-profiler · {folder.name}\nRank 2 comes late in 8 of 8 steps")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["absent"], "no such folder"),
        ([".", "--workers", "-1"], "--workers"),
        ([".", "--workers", "2", "--scheduler", "tcp://127.0.0.1:1"], "a scheduler has workers of its own"),
    ],
)
def test_bad_usage(arguments, says, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("ranks", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_some_lost_is_said_and_all_lost_fails(jobs, tmp_path, run):
    _, truth, _ = jobs["kineto", "data"]
    for path in truth["paths"][:2]:
        shutil.copy(path, tmp_path)
    (tmp_path / "rank2.json").write_bytes(b"")
    (tmp_path / "\x1b[31m rank7\n.json").write_bytes(b"{")
    code, out, err = run("ranks", tmp_path, "--format", "json")
    assert code == 0
    assert sorted(tuple(one["ranks"]) for one in json.loads(out)["lost"]) == [(2,), (7,)]
    lines = err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("nsightkit: ") and line.endswith("the other traces are answered for") for line in lines)
    assert "\x1b" not in err
    code, out, err = run("ranks", tmp_path, "--format", "text")
    assert code == 0
    assert "lost: rank 2 (rank2.json): is empty" in out
    shutil.copy(truth["paths"][0], tmp_path / "z.json")
    assert "lost: z.json: a second trace of rank 0 was left out" in run("ranks", tmp_path, "--format", "text")[1]
    (tmp_path / "z.json").unlink()
    assert "\x1b" not in out
    for path in truth["paths"][:2]:
        (tmp_path / path.name).write_bytes(b"")
    code, out, err = run("ranks", tmp_path)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "none of 4 traces can be read" in err


def test_hostile_names_of_groups_and_ranges(tmp_path, run):
    hostile = "\x1b[31m<script>$x^2$\u202e"
    events = []
    for step in range(3):
        at = 100_000 * step
        said = {"Collective name": "allreduce", "In msg nelems": 8, "Out msg nelems": 8, "dtype": "Float"}
        said |= {"Process Group Name": hostile, "Process Group Ranks": "[0, 1]", "Group size": 2}
        args = {"device": 0, "stream": 20, "correlation": step + 1, "Seq": step, **said}
        name = f"ncclDevKernel_AllReduce{hostile}"
        events.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 20, "ts": at + 50, "dur": 100, "args": args}
        )
        events.append(
            {"ph": "X", "cat": "user_annotation", "name": f"step {hostile}", "pid": 5, "tid": 5, "ts": at, "dur": 900}
        )
    for rank in range(2):
        document = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
        (tmp_path / f"{rank}.json").write_text(json.dumps(document), encoding="utf-8")
    for extra in ([], ["--each"]):
        code, out, err = run("ranks", tmp_path, "--format", "text", *extra)
        assert (code, err) == (0, "")
        assert "\x1b" not in out
        assert "\u202e" not in out
    code, out, _ = run("ranks", tmp_path, "--format", "json")
    assert json.loads(out)["collectives"][0]["group"] == f"process group {hostile}"
