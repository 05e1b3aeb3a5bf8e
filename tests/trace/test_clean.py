"""Copies of a trace identify no person."""

from __future__ import annotations

import gzip
import json
import pickle
import random
import sqlite3
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from make_snapshot import Allocator
from synthetic.planted import training

import nsightkit
from nsightkit import cli
from nsightkit.analysis.memory import snapshot as memory
from nsightkit.trace import Trace, TraceMeta, snapshot
from nsightkit.trace.clean import TextCleaner, clean, clean_snapshot, clean_text, removed_by_cleaning

HOST, USER = "planted-node17", "plantedperson"
#: What identifies without a form of its own, and stands only where a profiler says so.
ORION, GRACE = "orionstation", "gracehopper9"
#: What only the file says, in places made for it.
SAID = (HOST, USER, ORION, GRACE, "k3y-of-nobody", "plantedvalue", "printed-by-the-program")

# None is real: the tokens are made from a seed, so no file holds one.
RANDOM = random.Random(5)
LETTERS = string.ascii_letters + string.digits
WORD = "hunter2-planted"


def some(count: int, letters: str = LETTERS) -> str:
    return "".join(RANDOM.choice(letters) for _ in range(count))


#: Keys as their providers make them.
TOKENS = (
    "AKIA" + some(16, string.ascii_uppercase + string.digits),
    "ASIA" + some(16, string.ascii_uppercase + string.digits),
    "ghp_" + some(36),
    "github_pat_" + some(22) + "_" + some(59),
    "glpat-" + some(20),
    "hf_" + some(34, string.ascii_letters),
    "sk-" + some(48),
    "sk-ant-api03-" + some(80),
    "AIza" + some(35),
    "xoxb-" + some(12, string.digits) + "-" + some(24),
    "npm_" + some(36),
    "pypi-AgEIcHlwaS5vcmc" + some(60),
    "nvapi-" + some(64),
    "eyJ" + some(17) + ".eyJ" + some(40) + "." + some(43),
)
#: Texts, and what in them must not survive.
SECRETS = (
    *[(f"step with {token} in it", token) for token in TOKENS],
    (f"password={WORD}", WORD),
    (f'DB_PASSWORD="{WORD}"', WORD),
    (f"api_key: {WORD}", WORD),
    (f"prog --client-secret {WORD} x", WORD),
    (f"prog -password {WORD}", WORD),
    (f"'aws_secret_access_key': '{WORD}'", WORD),
    (f"https://host/x?token={TOKENS[2]}&y=1", TOKENS[2]),
    (f"Authorization: Bearer {TOKENS[5]}", TOKENS[5]),
    ("Basic dXNlcjpwYXNzd29yZA", "dXNlcjpwYXNzd29yZA"),
    (f"https://{USER}:{WORD}@example.com/x", USER, WORD),
    (f"postgresql://app:{WORD}@db.internal:5432/x", WORD),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIEplanted0\n-----END RSA PRIVATE KEY-----", "MIIEplanted0"),
    (f"/home/{USER}/proj/train.py", USER),
    (f"open /scratch/{USER}/run: no such file", USER),
    (f"C:\\Users\\{USER}\\x.py", USER),
    (f"~{USER}/x", USER),
    (f"/tmp/torchinductor_{USER}/ab/c.py", USER),
    (f"/opt/{USER}/lib/python3.12/runpy.py", USER),
    (f"/weird/{USER}/train.py", USER),
    (f"file:///Users/{USER}/x", USER),
    (f"mail jane.{USER}@example.com now", USER, "jane."),
    (f"{USER}@{HOST}:~/x$ python train.py", USER, HOST),
    (f"ssh {USER}@{HOST} nvidia-smi", USER, HOST),
    ("connect to 10.41.52.63 now, tcp://192.168.41.7:29500", "10.41.52.63", "192.168.41.7"),
    ("[2001:db8:85a3::8a2e:370:7334] 00:1a:2b:3c:4d:5e", "2001:db8:85a3::8a2e:370:7334", "00:1a:2b:3c:4d:5e"),
    ("ip-10-41-52-63.ec2.internal", "10-41-52"),
    (f"step_{HOST}_3 on gpu17.cluster.corp", HOST, "gpu17.cluster"),
    ("PLAIN=plantedvalue\0OTHER=x\0", "plantedvalue"),
)
#: Names that look like a secret and are none.
HARMLESS = (
    "BATCH=32",
    "token=12",
    "decode token=first",
    "key=value, query=x",
    "cache_key=attn_3",
    "--num-key-value-heads 8",
    "auth=none",
    "/layer1/Conv + /layer1/relu/Relu",
    "/model/layers.0/MatMul",
    "kernel<0x0123456789abcdef0123456789abcdef01234567>",
    "gemm<ABCDEFabcdef0123456789ABCDEFabcdef0123456789ab==>",
    "void f<secret_t, password_hash>(int)",
    "_ZN2at6native40_GLOBAL__N__0f1a8107_8_Shape_cu_49f7391c30CatArrayBatchedCopy_vectorizedINS1_10OpaqueTypeILj2EEEjLi1E",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Array<char*, 3> >",
    "triton_poi_fused_add_mul_0d1d2d3de",
    "## Call CompiledFxGraph fuz3rzd5abcdefghijklmnopqrstuvwxyz234567abcdef ##",
    "cuDNN 9.1.0.70",
    "nvidia-cublas-cu12==12.4.5.8",
    "version 10.2.1.243",
    "clock_nanosleep@@GLIBC_2",
    "A @ B",
    "measure@*",
    "dead::beef",
    "2025-11-21T10:00:00",
    "0000:57:00.0",
    "~Foo",
    "commit 0123456789abcdef0123456789abcdef01234567",
    "torch/nn/modules/module.py(1501): f",
    "kworker/0:0H-kblockd",
    "CPU IP/backtrace",
    "GB/s",
    "pass=2",
    "bypass=fast",
    "bearer of news",
    "sk-learn",
    "hf_model_forward",
    "token_embedding: (32, 128)",
    "secret: ",
    "signature: aten::add(Tensor)",
    "http://localhost:8080",
    "127.0.0.1",
    "[lambda(float)]",
)


def survivors(written: bytes, hidden: Iterable[str]) -> list[str]:
    """Hidden texts that are in some bytes all the same."""
    return [word for word in hidden if word.encode() in written]


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NSIGHTKIT_NO_CACHE", "1")


@pytest.mark.parametrize("secret", SECRETS, ids=[text[:30] for text, *_ in SECRETS])
def test_every_form_is_recognised(secret: tuple[str, ...]):
    text, *hidden = secret
    cleaner = TextCleaner({HOST: "host", USER: "user"})
    cleaned = cleaner.text(text)
    assert not survivors(cleaned.encode(), hidden)
    assert cleaner.text(cleaned) == cleaned


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_like_a_secret_stays(name: str):
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
def test_paths(path: str, cleaned: str):
    assert TextCleaner({}).text(path) == cleaned


def plant(path: Path):
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
    texts = [text for text, *_ in SECRETS]
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


def kineto(path: Path):
    """Write a PyTorch trace with secrets in every place where Kineto has text."""
    events: list[dict[str, Any]] = []
    for number, (text, *_) in enumerate(SECRETS):
        ts = 1000 + 10 * number
        common = {"ph": "X", "pid": 7, "tid": 7, "dur": 2}
        events.append({**common, "cat": "user_annotation", "name": text, "ts": ts})
        events.append({**common, "cat": "python_function", "name": f"{text}(3): f", "ts": ts})
        arguments = {"External id": number, "Concrete Inputs": [text], "Call stack": text}
        events.append({**common, "cat": "cpu_op", "name": "aten::mm", "ts": ts + 1, "args": arguments})
        launch = {"correlation": number + 1, "External id": number}
        events.append({**common, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": ts + 1, "args": launch})
        on_gpu = {**launch, "device": 0, "stream": 7, "Collective name": "allreduce", "dtype": text}
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
def test_no_secret_survives(source: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, out = tmp_path / source, tmp_path / target
    said = SAID
    if source == "nsys.sqlite":
        training(path)
        plant(path)
    else:
        kineto(path)
        said = (HOST, "plantedvalue", "printed-by-the-program")
    command = ["report", str(path), "-o", str(out)] if target == "page.html" else ["convert", str(path), str(out)]
    assert cli.run(command) == 0
    err = capsys.readouterr().err
    assert "left out: environment, command lines" in err
    assert "replaced" in err
    content = written(out)
    for _, *hidden in [*SECRETS, ("", *said)]:
        assert survivors(content, hidden) == []
    if (source, target) == ("nsys.sqlite", "copy.parquet"):
        assert nsightkit.load(out).summary() == nsightkit.load(path).summary()


def test_names_that_differed_still_differ_and_descriptions_stay_json():
    described = [json.dumps({"Collective name": "allreduce", "dtype": f"/home/{who}/x"}) for who in ("ann", "bob")]
    names = pd.Categorical(["/home/ann/k.py", "/home/bob/k.py"])
    kernels = {"start_ns": [0, 10], "end_ns": [5, 15], "name": names, "collective": pd.Categorical(described)}
    cleaned = clean(Trace.from_frames({"kernels": pd.DataFrame(kernels)}))["kernels"]
    assert cleaned["name"].tolist() == ["k.py", "k.py (2)"]
    assert [json.loads(text)["dtype"] for text in cleaned["collective"]] == ["[path]", "[path]"]


def test_a_clean_trace_is_its_own_copy_and_keeps_its_selection():
    ranges = {"start_ns": [0, 10], "end_ns": [9, 20], "name": pd.Categorical(["a", f"/home/{USER}/b.py"])}
    trace = Trace.from_frames({"ranges": pd.DataFrame(ranges)}, TraceMeta(tool="test", private={ORION: "host"}))
    cleaned = clean(trace)
    assert clean(cleaned) is cleaned
    assert cleaned.meta.private == {}
    assert clean_text(trace, f"run on {ORION}") == "run on [host]"
    part = trace.masked({"ranges": np.array([False, True])})
    assert clean(part)["ranges"]["name"].tolist() == ["b.py"]
    assert any("replaced: 2" in sentence for sentence in removed_by_cleaning([trace]))


def test_a_snapshot_keeps_what_pytorch_s_pages_read(tmp_path: Path):
    allocator = Allocator()
    for text, *_ in SECRETS:
        frames = [
            {"name": text, "filename": text, "line": 3, "fx_original_trace": text},
            {"name": "forward", "filename": f"/home/{USER}/model.py", "line": 9},
        ]
        allocator.malloc(5000, frames=frames, user_metadata=text)
    taken = allocator.snapshot()
    taken["env"] = {"PLAIN": "plantedvalue"}
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(clean_snapshot(taken)))
    for _, *hidden in [*SECRETS, ("", "plantedvalue")]:
        words = [word for word in hidden if word not in (HOST, USER)]  # of other machines
        assert survivors((tmp_path / "s.pickle").read_bytes(), words) == []
    read = snapshot.read(tmp_path / "s.pickle")
    assert (read.events["action"] == "alloc").sum() == len(SECRETS)
    assert memory.summary(read)["peak_bytes"] > 0


def test_names_of_real_traces_stay(shared_traces: Path):
    """Of the distinct names of public traces only frames change, whose paths are cut."""
    for path in [*sorted(shared_traces.rglob("*.sqlite"))[:3], *sorted(shared_traces.rglob("*.json.gz"))[:3]]:
        trace = nsightkit.load(path, cache=False)
        cleaner = TextCleaner({})
        for table in ("kernels", "ops", "calls", "ranges", "memops"):
            columns = trace[table]
            for column in ("name", "short_name", "kind"):
                if column in columns:
                    for name in columns[column].cat.categories:
                        assert cleaner.text(name) == name, (path, table, name)
