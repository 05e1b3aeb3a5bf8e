"""Accepting a recording whose code has changed: when it counts again, when not, and what the page says."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import nsightkit
from nsightkit import cli
from nsightkit.errors import NsightkitError, UsageError
from nsightkit.investigations import measurement, record, recordings, what_runs
from nsightkit.investigations.parts import Part, find
from nsightkit.investigations.recordings import accept
from nsightkit.trace.model import Trace, TraceMeta

PART = find("ceilings", "triad")
RUNS = {
    "torch": "2.11.0", "parameters": {"megabytes": 4000}, "counts": PART.counts("live"), "operators": ["step()"],
    "sources": {"kernel": {}, "data": {}, "timing": {"nsightkit.capture.timing:time_calls": "d1"}}, "key": "0" * 32,
}  # fmt: skip
OLD = {"key": "0" * 32, "commit": "1234567890abcdef1234567890abcdef12345678"}


def plant(where: Path, runs: dict | None = RUNS, **changes: object) -> Path:
    """A recording, made by other code than today's unless `changes` say otherwise."""
    facts = {
        "format": what_runs.FORMAT, "kind": "measured", "investigation": PART.investigation, "part": PART.name,
        "gpu": {"name": "Planted GPU"}, "utc": "2026-01-02T03:04:05+00:00", **OLD, **changes,
    }  # fmt: skip
    frames = {"ranges": pd.DataFrame({"start_ns": [0], "end_ns": [60], "name": pd.Categorical(["step"])})}
    trace = Trace.from_frames(frames, TraceMeta(tool="planted"))
    place = recordings.write(trace, recordings.frame({"step_ns": [3, 1]}), facts, where)
    if runs is not None:
        what_runs.write(runs, place)
    return place


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of recordings on a machine without a GPU, and a list of what the part runs that need not be made."""
    folder = tmp_path / "recordings"
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(folder))
    monkeypatch.setenv("NSIGHTKIT_MAX_AGE_DAYS", "100000")
    monkeypatch.setattr(measurement, "has_gpu", lambda: False)
    monkeypatch.setattr(what_runs, "ask", lambda part, *_, **__: RUNS | {"key": recordings.part_key(part)})
    return folder


def now_runs(monkeypatch: pytest.MonkeyPatch, **changes: object) -> None:
    found = RUNS | {"key": recordings.part_key(PART)} | changes
    monkeypatch.setattr(what_runs, "ask", lambda *_, **__: found)


def state() -> str:
    return recordings.find(PART)[0].state


# -- what is accepted --------------------------------------------------------------------------------------------


def test_an_accepted_recording_is_current_and_the_page_says_so(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = plant(where)
    assert state() == "stale"
    (row,) = accept("ceilings/triad", "renamed <a>  helper")
    assert row == {
        "investigation": "ceilings", "part": "triad", "gpu": "planted-gpu", "status": "accepted",
        "detail": "renamed <a> helper",
    }  # fmt: skip
    assert state() == "current"
    monkeypatch.setenv("NSIGHTKIT_PUBLISH", "1")
    measured = nsightkit.investigations.measure("ceilings", "triad")
    assert measured.mode == "replay"
    assert measured.accepted == "the code has changed since 1234567890ab; renamed <a> helper"
    assert "Accepted: the code has changed since 1234567890ab; renamed <a> helper" in repr(measured)
    html = measured._repr_html_()
    assert "Accepted: the code has changed since 1234567890ab; renamed &lt;a&gt; helper</p>" in html
    assert "<dt>Accepted</dt><dd>the code has changed" in html
    assert "<a>" not in html
    assert not [s for s in recordings.status() if s["state"] == "stale"]
    kept = json.loads((place / "provenance.json").read_text())
    (entry,) = kept["accepted"]
    assert kept["key"] == OLD["key"]  # what made it is not rewritten
    assert entry["key"] == recordings.part_key(PART)
    assert entry["since"] == OLD["commit"]
    assert entry.keys() == {"key", "since", "because", "commit", "dirty", "utc"}


def test_an_acceptance_holds_for_one_key_only(where: Path) -> None:
    place = plant(where)
    accept("ceilings/triad", "renamed a helper")
    facts = json.loads((place / "provenance.json").read_text())
    facts["accepted"][0]["key"] = "1" * 32  # of code that has changed again
    (place / "provenance.json").write_text(json.dumps(facts))
    assert state() == "stale"
    for damaged in (["words"], {}, [{"key": recordings.part_key(PART)}], None):
        (place / "provenance.json").write_text(json.dumps(facts | {"accepted": damaged}))
        assert state() == "stale"
    (place / "provenance.json").write_text(json.dumps(facts))
    accept("ceilings/triad", "and moved it")
    assert state() == "current"
    facts = json.loads((place / "provenance.json").read_text())
    assert [entry["because"] for entry in facts["accepted"]] == ["renamed a helper", "and moved it"]
    assert (nsightkit.investigations.measure("ceilings", "triad").accepted or "").endswith("; and moved it")


def test_a_recording_that_is_current_is_left_alone(where: Path) -> None:
    place = plant(where, key=recordings.part_key(PART))
    before = (place / "provenance.json").read_bytes()
    (row,) = accept("ceilings/triad", "nothing")
    assert row["status"] == "current"
    assert "current already" in row["detail"]
    assert (place / "provenance.json").read_bytes() == before
    assert nsightkit.investigations.measure("ceilings", "triad").accepted is None


def test_of_several_gpus_all_are_accepted_or_none(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(where, gpu={"name": "Planted A"})
    plant(where, RUNS | {"operators": ["another()"]}, gpu={"name": "Planted B"})
    with pytest.raises(UsageError, match="on planted-b is not accepted"):
        accept("ceilings/triad", "renamed a helper")
    assert {recording.state for recording in recordings.find(PART)} == {"stale"}
    plant(where, gpu={"name": "Planted B"})
    assert [row["status"] for row in accept("ceilings/triad", "renamed a helper")] == ["accepted", "accepted"]


def test_a_reason_keeps_no_secret(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_SECRET", "s3cr3t-value")
    place = plant(where)
    accept("ceilings/triad", "as s3cr3t-value said")
    assert "s3cr3t-value" not in (place / "provenance.json").read_text()


# -- what is refused ---------------------------------------------------------------------------------------------


def _timed(digest: str) -> dict:
    return {"kernel": {}, "data": {}, "timing": {"nsightkit.capture.timing:time_calls": digest}}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"operators": ["mm(float32[2, 2])"]}, r"number 0 was step\(\) and is mm\(float32\[2, 2\]\)"),
        ({"operators": ["step()", "sync()"]}, r"number 1 was nothing and is sync\(\)"),
        ({"parameters": {"megabytes": 8}}, "its parameter megabytes was 4000 and is 8"),
        ({"counts": {"warmup": 1}}, "its count active was 3 and is nothing"),
        ({"sources": _timed("d2")}, "how it is timed has changed: nsightkit.capture.timing:time_calls"),
        ({"why_not": "RuntimeError: this rung needs Triton"}, "cannot be listed .RuntimeError: this rung needs Triton"),
    ],
)
def test_what_runs_differently_is_refused_in_one_line(
    where: Path, monkeypatch: pytest.MonkeyPatch, now: dict, said: str
) -> None:
    place = plant(where)
    before = (place / "provenance.json").read_bytes()
    now_runs(monkeypatch, **now)
    with pytest.raises(UsageError, match=said) as refused:
        accept("ceilings/triad", "renamed a helper")
    assert "record --only ceilings/triad" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (place / "provenance.json").read_bytes() == before
    assert state() == "stale"


def test_what_was_not_listed_is_refused(where: Path) -> None:
    plant(where, None)
    with pytest.raises(UsageError, match=r"holds no list of it\), and this checkout does not have its commit 12345678"):
        accept("ceilings/triad", "renamed a helper")
    plant(where, None, commit="--output=planted")
    with pytest.raises(UsageError, match="does not have its commit --output=pla"):
        accept("ceilings/triad", "renamed a helper")
    plant(where, {"why_not": "NotImplementedError: it starts processes"})
    with pytest.raises(UsageError, match=r"not known \(NotImplementedError: it starts processes\), and"):
        accept("ceilings/triad", "renamed a helper")


def test_lists_of_two_versions_of_pytorch_that_are_equal_are_enough(where: Path) -> None:
    plant(where, RUNS | {"torch": "2.10.0", "operators": ["step_by_step()"]})
    with pytest.raises(
        UsageError, match=r"is step\(\) \(it was listed by PyTorch 2.10.0, and this is 2.11.0\), and this"
    ):
        accept("ceilings/triad", "renamed a helper")
    plant(where, RUNS | {"torch": "2.10.0"})
    assert accept("ceilings/triad", "renamed a helper")[0]["status"] == "accepted"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"format": 0}, "it has format 0"), ({"gpu": None, "kind": "dry-run"}, "it was not measured on a GPU")],
)
def test_what_is_no_recording_or_of_another_form_is_refused(where: Path, change: dict, said: str) -> None:
    place = plant(where)
    facts = json.loads((place / "provenance.json").read_text()) | change
    (place / "provenance.json").write_text(json.dumps(facts))
    with pytest.raises(UsageError, match=said):
        accept("ceilings/triad", "renamed a helper")


def test_bad_input_is_one_line(where: Path) -> None:
    for name, because, said in (
        ("ceilings/triad", " \n", "--because is empty"),
        ("ceilings", "why", "'ceilings' is not a part; name one as INVESTIGATION/PART"),
        ("ceilings/nothing", "why", "no part ceilings/nothing; there are"),
        ("ceilings/triad", "why", "ceilings/triad has no recording"),
    ):
        with pytest.raises(UsageError, match=said) as refused:
            accept(name, because)
        assert "\n" not in str(refused.value)
    assert not where.exists()


# -- the command -------------------------------------------------------------------------------------------------


def test_the_command_accepts_and_refuses(where: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant(where)
    for options, said in (
        (["--accept", "ceilings/triad"], "--accept and --because go together"),
        (["--because", "why"], "--accept and --because go together"),
        (["--accept", "ceilings/triad", "--because", "why", "--dry-run"], "--accept measures nothing"),
        (["--accept", "ceilings/triad", "--because", ""], "--because is empty"),
    ):
        assert cli.run(["record", *options]) == 2
        out, err = capsys.readouterr()
        assert said in err
        assert err.count("\n") == 1
        assert not out
    assert cli.run(["record", "--accept", "ceilings/triad", "--because", "a comment", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["status"] == "accepted"
    assert state() == "current"


def test_a_machine_without_a_gpu_accepts_and_records_nothing(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(where)
    accept("ceilings/triad", "a comment")
    monkeypatch.setattr(record, "gpu_name", lambda: None)
    with pytest.raises(NsightkitError, match="recordings are made on a GPU"):
        record.record(["ceilings/triad"], out=where)


# -- with a real list --------------------------------------------------------------------------------------------


@pytest.fixture
def real(where: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.undo()
    monkeypatch.setenv("NSIGHTKIT_RECORDINGS", str(where))
    return where


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    """What the part runs, listed by a process."""
    return what_runs.ask(PART)


def test_where_there_is_a_driver_a_recording_holds_what_it_ran(
    real: Path, now: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "has_driver", lambda: True)
    monkeypatch.setattr(what_runs, "ask", lambda part, **_: now if part == PART else {})
    place = plant(real, None, key=recordings.part_key(PART))
    runs = what_runs.read(place)
    assert runs["key"] == recordings.part_key(PART)
    assert [line for line in runs["operators"] if line.startswith("add")] == [
        "add.out(float32[1000000000], float32[1000000000], alpha=3.0, out=float32[1000000000])"
    ]
    assert runs["counts"]["warmup"] == 300
    assert "nsightkit.capture.utilization:sample" in runs["sources"]["timing"]
    # What is added to a recording later leaves the list as it was.
    monkeypatch.setattr(what_runs, "ask", lambda *_, **__: pytest.fail("it was listed again"))
    plant(real, None, key=recordings.part_key(PART))
    assert what_runs.read(place) == runs


def test_a_list_that_fails_fails_no_recording(real: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(what_runs, "fork_child", broken)
    monkeypatch.setattr(recordings, "has_driver", lambda: True)
    place = plant(real, None, key=recordings.part_key(PART))
    assert what_runs.read(place) == {"why_not": "no more processes"}
    assert state() == "current"


def test_lists_of_two_versions_of_pytorch_that_differ_are_made_again_from_the_commit(
    real: Path, now: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(nsightkit.__file__).parent, checkout / "nsightkit", ignore=ignored)
    file = checkout / "nsightkit" / "workloads" / "ceilings.py"
    file.write_text(file.read_text().replace("_transfer", "_moved"))
    git = ["git", "-C", str(checkout), "-c", "user.name=planted", "-c", "user.email=planted@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "then"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    then = what_runs.key(PART.code, PART.parameters("live"), PART.counts("live"), checkout)
    plant(real, RUNS | {"torch": "0.1"}, key=then, commit=commit)
    ask, listed = what_runs.ask, []
    assert now["key"] != then

    def asked(part: Part, start: Callable[..., object] | None = None) -> dict:
        if start is not None:
            listed.append(listed[0] if listed else ask(part, start))  # takes seconds
        return now if start is None else listed[0]

    monkeypatch.setattr(what_runs, "ask", asked)
    monkeypatch.setattr(nsightkit, "__file__", str(checkout / "nsightkit" / "__init__.py"))
    assert accept("ceilings/triad", "renamed a helper")[0]["status"] == "accepted"
    assert listed[0]["key"] == then
    # A commit that is not what made the recording proves nothing.
    plant(real, RUNS | {"torch": "0.1"}, key="0" * 32, commit=commit)
    with pytest.raises(UsageError, match="and its commit holds other code than made it"):
        accept("ceilings/triad", "renamed a helper")
