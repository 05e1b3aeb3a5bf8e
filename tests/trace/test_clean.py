"""Copies of a trace identify no person, and answers as the trace does."""

from __future__ import annotations

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from make_secrets import GRACE, HARMLESS, HOST, ORION, SECRETS, USER, survivors
from make_snapshot import Allocator
from synthetic.planted import training

import nsightkit
from nsightkit import cli
from nsightkit.analysis.memory import snapshot as memory
from nsightkit.trace import Trace, TraceMeta, snapshot, store
from nsightkit.trace.clean import TextCleaner, clean, clean_snapshot, clean_text, left_out, write_snapshot

#: What only the file says, in places made for it.
SAID = (HOST, USER, ORION, GRACE, "k3y-of-nobody", "plantedvalue", "printed-by-the-program")


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_NO_CACHE", "1")


@pytest.mark.parametrize("secret", SECRETS, ids=[secret.text[:30] for secret in SECRETS])
def test_every_form_is_recognised(secret: Any) -> None:
    cleaner = TextCleaner({HOST: "host", USER: "user"})
    cleaned = cleaner.text(secret.text)
    assert not survivors(cleaned.encode(), secret.hidden)
    assert cleaner.text(cleaned) == cleaned


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_like_a_secret_stays(name: str) -> None:
    assert TextCleaner({}).text(name) == name


@pytest.mark.parametrize(
    ("path", "cleaned"),
    [
        ("/home/ann/a.py(3): forward", "a.py(3): forward"),
        ("/opt/conda/lib/python3.12/site-packages/torch/nn/module.py", "site-packages/torch/nn/module.py"),
        ("/tmp/torchinductor_ann/zg/czg.py(267): call", "torchinductor_/zg/czg.py(267): call"),
        (r"C:\Users\ann\run.py", "run.py"),
        ("/scratch/ann/run", "[path]"),
        ("~ann/x", "[path]"),
        ("/layer1/Conv", "/layer1/Conv"),
    ],
)
def test_paths(path: str, cleaned: str) -> None:
    assert TextCleaner({}).text(path) == cleaned


def plant(path: Path) -> None:
    """Put secrets into an export, in every place where nsys has text."""
    connection = sqlite3.connect(path)
    connection.executescript(
        f"""
        CREATE TABLE TARGET_INFO_SYSTEM_ENV
            (globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
        CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
        CREATE TABLE ProcessStreams (globalPid INTEGER, filenameId INTEGER, contentId INTEGER);
        INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES
            (1, 'Local (CLI)', 'Hostname', 619, '{ORION}'),
            (1, 'Local (CLI)', 'DeviceEnvironment', 610,
             'LOGNAME={GRACE};PLAIN=plantedvalue;MY_API_KEY=k3y-of-nobody;HOSTNAME={HOST};HOME=/home/{USER}');
        INSERT INTO META_DATA_CAPTURE VALUES
            ('PROCESS_0:ENVIRONMENT_VARIABLE', 'PLAIN=plantedvalue'), ('PROCESS_0:USER_NAME', '{USER}');
        INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_USER', '{GRACE}');
        INSERT INTO PROCESSES VALUES (1, 2, '/weird/{USER}/prog --password hunter2');
        INSERT INTO StringIds VALUES (900001, 'epoch of {GRACE} on {ORION}'), (900002, 'with k3y-of-nobody in it'),
            (900003, 'printed-by-the-program');
        INSERT INTO ProcessStreams VALUES (1, 900003, 900003);
        """
    )
    texts = [secret.text for secret in SECRETS]
    for number, text in enumerate([*texts, *texts], 1_000_000):
        connection.execute("INSERT INTO StringIds VALUES (?, ?)", (number, text))
    connection.execute(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, textId, globalTid)"
        " SELECT 5000, 6000, 59, id, 1 << 24 | 1 FROM StringIds"
        f" WHERE id IN (900001, 900002) OR id BETWEEN 1000000 AND {1_000_000 + len(texts) - 1}"
    )
    for text in texts:
        connection.execute(
            "INSERT INTO NVTX_EVENTS (start, end, eventType, text, globalTid) VALUES (5000, 6000, 59, ?, 1 << 24 | 1)",
            (text + " ",),
        )
    connection.execute(
        f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = {1_000_000 + len(texts)} WHERE rowid <= 3"
    )
    connection.commit()
    connection.close()


def kineto(path: Path) -> None:
    """Write a PyTorch trace with secrets in every place where Kineto has text."""
    events: list[dict[str, Any]] = []
    for number, secret in enumerate(SECRETS):
        ts = 1000 + 10 * number
        common = {"ph": "X", "pid": 7, "tid": 7, "dur": 2}
        events.append({**common, "cat": "user_annotation", "name": secret.text, "ts": ts})
        events.append({**common, "cat": "python_function", "name": f"{secret.text}(3): f", "ts": ts})
        arguments = {"External id": number, "Concrete Inputs": [secret.text], "Call stack": secret.text}
        events.append({**common, "cat": "cpu_op", "name": "aten::mm", "ts": ts + 1, "args": arguments})
        launch = {"correlation": number + 1, "External id": number}
        events.append({**common, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts + 1, "args": launch})
        on_gpu = {**launch, "device": 0, "stream": 7, "Collective name": "allreduce", "dtype": secret.text}
        events.append({**common, "cat": "kernel", "name": "ncclKernel", "pid": 0, "ts": ts + 3, "args": on_gpu})
    document = {
        "schemaVersion": 1,
        "traceEvents": events,
        "env": {"LOGNAME": GRACE, "PLAIN": "plantedvalue"},
        "command": ["python", "train.py", "--password", "printed-by-the-program"],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8, "hostname": ORION},
        "traceName": f"/weird/{USER}/logs/{HOST}_1234.1712345678901.pt.trace.json",
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def written(path: Path) -> bytes:
    """All bytes of a file or folder, unpacked where they are packed."""
    if path.is_dir():
        return b"\n".join(written(file) for file in sorted(path.rglob("*")) if file.is_file())
    if path.suffix == ".parquet":
        return str(pq.read_table(path).to_pydict()).encode("utf-8", "replace")
    raw = path.read_bytes()
    return gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw


@pytest.mark.parametrize("source", ["nsys.sqlite", "kineto.json"])
@pytest.mark.parametrize("target", ["copy.parquet", "copy.json.gz", "page.html"])
def test_no_secret_survives(source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / source, tmp_path / target
    if source == "nsys.sqlite":
        training(path)
        plant(path)
    else:
        kineto(path)
    command = ["report", str(path), "-o", str(out)] if target == "page.html" else ["convert", str(path), str(out)]
    assert cli.run(command) == 0
    err = capsys.readouterr().err
    assert "left out: environment, command lines" in err
    assert "replaced" in err
    hidden = [word for secret in SECRETS for word in secret.hidden]
    said = SAID if source == "nsys.sqlite" else (HOST, "plantedvalue", "printed-by-the-program")
    assert survivors(written(out), [*hidden, *said]) == []


def test_a_copy_answers_as_the_trace(tmp_path: Path) -> None:
    training(tmp_path / "t.sqlite", fault="sync")
    plant(tmp_path / "t.sqlite")
    before = nsightkit.load(tmp_path / "t.sqlite")
    store.write(before, tmp_path / "copy")
    after = nsightkit.load(tmp_path / "copy")
    assert before.summary() == after.summary()
    assert before.gaps().equals(after.gaps())
    names = ["count", "total_ns", "exclusive_ns", "gpu_ns", "kernel_count"]
    in_order = [trace.ranges().sort_values(names)[names].reset_index(drop=True) for trace in (before, after)]
    assert in_order[0].equals(in_order[1])
    assert before.verdict()["bottleneck"] == after.verdict()["bottleneck"]


def test_names_that_differed_still_differ_and_descriptions_stay_json() -> None:
    described = [json.dumps({"Collective name": "allreduce", "dtype": f"/home/{who}/x"}) for who in ("ann", "bob")]
    kernels = pd.DataFrame(
        {
            "start_ns": [0, 10],
            "end_ns": [5, 15],
            "name": pd.Categorical(["/home/ann/k.py", "/home/bob/k.py"]),
            "collective": pd.Categorical(described),
        }
    )
    cleaned = clean(Trace.from_frames({"kernels": kernels}, TraceMeta(tool="test")))["kernels"]
    assert cleaned["name"].tolist() == ["k.py", "k.py (2)"]
    assert [json.loads(text)["dtype"] for text in cleaned["collective"]] == ["[path]", "[path]"]


def test_a_clean_trace_is_its_own_copy_and_keeps_its_selection() -> None:
    ranges = {"start_ns": [0, 10], "end_ns": [9, 20], "name": pd.Categorical(["a", f"/home/{USER}/b.py"])}
    trace = Trace.from_frames({"ranges": pd.DataFrame(ranges)}, TraceMeta(tool="test", private={ORION: "host"}))
    cleaned = clean(trace)
    assert clean(cleaned) is cleaned
    assert cleaned.meta.private == {}
    assert clean_text(trace, f"run on {ORION}") == "run on [host]"
    part = trace.masked({"ranges": np.array([False, True])})
    assert clean(part)["ranges"]["name"].tolist() == ["b.py"]
    assert any("2 texts" in sentence for sentence in left_out([trace]))


def test_a_snapshot_keeps_what_pytorch_s_pages_read(tmp_path: Path) -> None:
    allocator = Allocator()
    for secret in SECRETS:
        frames = [
            {"name": secret.text, "filename": secret.text, "line": 3, "fx_original_trace": secret.text},
            {"name": "forward", "filename": f"/home/{USER}/model.py", "line": 9},
        ]
        allocator.malloc(5000, frames=frames, user_metadata=secret.text)
    taken = allocator.snapshot()
    taken["env"] = {"PLAIN": "plantedvalue"}
    with (tmp_path / "s.pickle").open("wb") as file:
        write_snapshot(clean_snapshot(taken), file)
    hidden = [word for secret in SECRETS for word in secret.hidden if word not in (HOST, USER)]
    assert survivors((tmp_path / "s.pickle").read_bytes(), [*hidden, "plantedvalue"]) == []
    read = snapshot.read(tmp_path / "s.pickle")
    assert (read.events["action"] == "alloc").sum() == len(SECRETS)
    assert memory.summary(read)["peak_bytes"] > 0


def test_names_of_real_traces_stay(shared_traces: Path) -> None:
    """Of the distinct names of public traces only frames change, whose paths are cut."""
    for path in [*sorted(shared_traces.rglob("*.sqlite"))[:6], *sorted(shared_traces.rglob("*.json.gz"))[:6]]:
        trace = nsightkit.load(path, cache=False)
        cleaner = TextCleaner({})
        for table in ("kernels", "ops", "calls", "ranges", "memops"):
            columns = trace[table]
            for column in ("name", "short_name", "kind"):
                if column in columns:
                    for name in columns[column].cat.categories:
                        assert cleaner.text(name) == name, (path, table, name)
