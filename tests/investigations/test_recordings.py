"""Live, replay or smoke: what is shown when, what a recording holds, and the recorder."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import pickle
import socket
from pathlib import Path

import pandas as pd
import pytest

import nsightkit
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import measurement as investigation
from nsightkit.investigations import parts as investigations
from nsightkit.investigations import recordings, under_nsight, what_runs
from nsightkit.trace.model import Trace, TraceMeta

PART = investigations.find("starved-input", "before")


# -- live, replay, smoke -----------------------------------------------------------------------------------------


def planted_trace() -> Trace:
    frames = {
        "kernels": pd.DataFrame({"start_ns": [10, 30], "end_ns": [20, 50], "name": pd.Categorical(["a", "b"])}),
        "ranges": pd.DataFrame({"start_ns": [0], "end_ns": [60], "name": pd.Categorical(["step"])}),
    }
    return Trace.from_frames(frames, TraceMeta(tool="planted"))


def facts(part: investigations.Part = PART, **changes: object) -> dict[str, object]:
    return {
        "format": what_runs.FORMAT, "kind": "measured", "investigation": part.investigation, "part": part.name,
        "key": recordings.part_key(part), "parameters": {"batch": 2}, "counts": part.counts("live"),
        "gpu": {"name": "Planted GPU <b>", "memory_bytes": 2**37}, "utc": "2026-01-02T03:04:05+00:00",
        "duration_s": 1.5, **changes,
    }  # fmt: skip


def plant(where: Path, **changes: object) -> Path:
    samples = recordings.frame({"step_ns": [3, 1, 2], "loss": [0.5]})
    return recordings.write(planted_trace(), samples, facts(**changes), where)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No GPU, an empty folder of recordings, and a child that need not run."""
    monkeypatch.setattr(investigation, "has_gpu", lambda: False)
    for name in ("NSIGHTKIT_MODE", "NSIGHTKIT_PUBLISH", "NSIGHTKIT_GPU"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NSIGHTKIT_MAX_AGE_DAYS", "100000")  # planted recordings have a date of their own
    where = tmp_path / "recordings"
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(where))

    def child(part: investigations.Part, mode: str, folder: Path, *, kind: str, **_: object) -> tuple[dict, dict]:
        with gzip.open(folder / "trace.json.gz", "wt") as stream:
            json.dump({"schemaVersion": 1, "traceEvents": [
                {"ph": "X", "cat": "user_annotation", "name": "step", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
            ]}, stream)  # fmt: skip
        if part.measured == "remembered":
            (folder / "snapshot.pickle").write_bytes(pickle.dumps({"segments": []}))
        made = facts(part, kind="measured" if mode == "live" else kind, key=recordings.part_key(part, mode))
        if mode != "live":
            made["gpu"] = None
        return {"step_ns": [5, 7]}, made

    monkeypatch.setattr(investigation, "run_child", child)
    monkeypatch.setattr(under_nsight, "capture", lambda *_, **__: {"notice": "nsys is not installed"})
    return where


def test_an_old_recording_is_shown_and_says_how_old_it_is(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=40, hours=1)
    plant(no_gpu, utc=then.isoformat(timespec="seconds"))
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.age_days == 40
    html = measured._repr_html_()
    assert "40 days before this page was built" in html
    assert "nsightkit-banner" not in html
    monkeypatch.setenv("NSIGHTKIT_MAX_AGE_DAYS", "30")
    html = measured._repr_html_()
    assert 'class="nsightkit-banner"' in html
    assert "This recording is 40 days old" in html
    monkeypatch.setenv("NSIGHTKIT_MAX_AGE_DAYS", "a month")
    with pytest.raises(UsageError, match="NSIGHTKIT_MAX_AGE_DAYS"):
        measured._repr_html_()


def test_of_several_gpus_the_newest_is_shown_or_the_one_that_is_asked_for(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(no_gpu, gpu={"name": "Planted A"}, utc="2026-01-02T03:04:05+00:00")
    plant(no_gpu, gpu={"name": "Planted B"}, utc="2026-01-03T03:04:05+00:00")
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.recorded_on == ("planted-a", "planted-b")
    assert "Planted B" in measured.label
    html = measured._repr_html_()
    assert '<li data-gpu="planted-b" aria-current=true>' in html
    assert '<li data-gpu="planted-a">' in html
    for asked, shown in (("planted-a", "Planted A"), ("planted-z", "Planted B")):
        monkeypatch.setenv("NSIGHTKIT_GPU", asked)
        assert shown in nsightkit.investigations.measure("starved-input", "before").label


def test_without_gpu_or_recording_it_is_smoke_under_a_banner(no_gpu: Path) -> None:
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "smoke"
    assert measured.notice is None
    assert measured.label.startswith("Smoke run on this machine's CPU")
    assert measured.median("step_ns") == 6.0
    assert measured.values("nothing").size == 0
    assert measured.median("nothing") is None
    assert measured.trace["ranges"]["name"].tolist() == ["step"]
    html = measured._repr_html_()
    assert 'data-mode="smoke"' in html
    assert 'class="nsightkit-banner"' in html
    assert "Smoke run" in repr(measured)


def test_a_valid_recording_is_replayed(no_gpu: Path) -> None:
    plant(no_gpu)
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "replay"
    assert measured.label == "Recorded on Planted GPU <b>, 2026-01-02; not measured in this build"
    assert measured.values("step_ns").tolist() == [3, 1, 2]
    assert measured.median("step_ns") == 2.0
    assert measured.parameters == {"batch": 2}
    assert measured.trace["kernels"]["end_ns"].tolist() == [20, 50]
    html = measured._repr_html_()
    assert 'data-mode="replay"' in html
    assert "nsightkit-banner" not in html
    assert "Planted GPU &lt;b&gt;" in html
    assert "<b>" not in html
    # the other part of the pair has none
    assert nsightkit.investigations.measure("starved-input", "after").mode == "smoke"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": "0" * 32}, "the code or the parameters have changed"),
        ({"format": 0}, "format 0"),
    ],
)
def test_a_stale_recording_is_never_shown(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], reason: str
) -> None:
    plant(no_gpu, **change)
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "smoke"
    assert reason in (measured.notice or "")
    assert "starved-input/planted-gpu-b/before" in (measured.notice or "")
    assert reason in measured._repr_html_()
    (row,) = [r for r in recordings.status() if (r["investigation"], r["part"]) == ("starved-input", "before")]
    assert row["state"] == "stale"
    monkeypatch.setenv("NSIGHTKIT_PUBLISH", "1")
    with pytest.raises(NsightkitError, match="record it again on a GPU"):
        nsightkit.investigations.measure("starved-input", "before")


def test_the_newest_valid_recording_wins(no_gpu: Path) -> None:
    plant(no_gpu, gpu={"name": "Old"}, utc="2025-01-01T00:00:00+00:00")
    plant(no_gpu, gpu={"name": "New"}, utc="2026-01-01T00:00:00+00:00")
    plant(no_gpu, gpu={"name": "Newer but stale"}, utc="2026-06-01T00:00:00+00:00", key="0" * 32)
    assert "Recorded on New," in nsightkit.investigations.measure("starved-input", "before").label


@pytest.mark.parametrize("damage", ["provenance", "samples", "kind", "gpu", "part", "json"])
def test_what_is_no_recording_is_refused(no_gpu: Path, damage: str) -> None:
    place = plant(no_gpu)
    path = place / "provenance.json"
    text = json.loads(path.read_text())
    if damage == "provenance":
        path.unlink()
    elif damage == "json":
        path.write_text("[")
    elif damage == "samples":
        (place / "samples.parquet").unlink()
    else:
        text |= {"kind": {"kind": "dry-run"}, "gpu": {"gpu": None}, "part": {"part": "after"}}[damage]
        path.write_text(json.dumps(text))
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "smoke"
    assert measured.notice
    assert {r["state"] for r in recordings.status() if r["path"]} == {"refused"}


def test_the_mode_can_be_forced(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(no_gpu)
    monkeypatch.setenv("NSIGHTKIT_MODE", "smoke")
    assert nsightkit.investigations.measure("starved-input", "before").mode == "smoke"
    monkeypatch.setenv("NSIGHTKIT_MODE", "replay")
    assert nsightkit.investigations.measure("starved-input", "before").mode == "replay"
    with pytest.raises(NsightkitError, match="no valid recording of starved-input/after"):
        nsightkit.investigations.measure("starved-input", "after")
    monkeypatch.setenv("NSIGHTKIT_MODE", "live")
    with pytest.raises(NsightkitError, match="sees no CUDA GPU"):
        nsightkit.investigations.measure("starved-input", "before")
    monkeypatch.setenv("NSIGHTKIT_MODE", "fast")
    with pytest.raises(UsageError, match="live, replay, smoke"):
        nsightkit.investigations.measure("starved-input", "before")


def test_with_a_gpu_it_is_live_even_beside_a_recording(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(no_gpu)
    monkeypatch.setattr(investigation, "has_gpu", lambda: True)
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert measured.mode == "live"
    assert measured.label.startswith("Measured live on Planted GPU")


def test_recordings_are_found_from_below_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NSIGHTKIT_RECORDINGS", raising=False)
    monkeypatch.setattr(nsightkit, "__file__", str(tmp_path / "site-packages" / "nsightkit" / "__init__.py"))
    (tmp_path / "checkout" / "docs" / "recordings").mkdir(parents=True)
    (tmp_path / "checkout" / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "checkout" / "examples")
    assert recordings.folder() == tmp_path / "checkout" / "docs" / "recordings"


# -- writing recordings ------------------------------------------------------------------------------------------


def test_what_no_gpu_produced_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(tmp_path / "real"))
    samples = recordings.frame({"step_ns": [1]})
    for change in ({"kind": "smoke"}, {"gpu": None}, {"kind": "dry-run", "gpu": None}):
        with pytest.raises(NsightkitError, match="only what was measured on a GPU"):
            recordings.write(planted_trace(), samples, facts(**change), tmp_path / "real")
    with pytest.raises(UsageError, match="give a dry run another folder"):
        recordings.write(planted_trace(), samples, facts(kind="dry-run", gpu=None), tmp_path / "real", dry_run=True)
    with pytest.raises(NsightkitError, match="marked as one"):
        recordings.write(planted_trace(), samples, facts(), tmp_path / "dry", dry_run=True)
    assert not (tmp_path / "real").exists()


def test_a_failed_write_leaves_the_old_recording(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = plant(no_gpu)
    before = sorted(p.relative_to(no_gpu) for p in no_gpu.rglob("*"))

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", broken)
    with pytest.raises(OSError, match="disk full"):
        plant(no_gpu)
    assert sorted(p.relative_to(no_gpu) for p in no_gpu.rglob("*")) == before
    assert (place / "provenance.json").is_file()


def test_a_recording_holds_no_names(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "planted-host")
    monkeypatch.setenv("PLANTED_SECRET", "s3cr3t-value")
    trace = planted_trace()
    frames = {"kernels": trace["kernels"], "ranges": trace["ranges"].assign(name=pd.Categorical(["load s3cr3t-value"]))}
    thread = int(trace["ranges"]["thread"].iloc[0])
    meta = TraceMeta(tool="planted", notes=["from planted-host"], thread_names={thread: "planted-host main"})
    samples = recordings.frame({"step_ns": [1]})
    place = recordings.write(Trace.from_frames(frames, meta), samples, facts(command="run on planted-host"), no_gpu)
    for path in place.rglob("*"):
        if path.suffix == ".json":
            assert "planted-host" not in path.read_text()
    back = nsightkit.load(place / "trace")
    assert back["ranges"]["name"].tolist() == ["load [secret]"]
    assert back["kernels"]["end_ns"].tolist() == [20, 50]
    assert back.meta.thread_names == {thread: "[host] main"}


def test_samples_keep_every_nanosecond(no_gpu: Path) -> None:
    values = [2**53 - 1, 1, 123_456_789_012_345]
    recordings.write(planted_trace(), recordings.frame({"step_ns": values}), facts(), no_gpu)
    measured = nsightkit.investigations.measure("starved-input", "before")
    assert [int(v) for v in measured.values("step_ns")] == values
