"""Scrubbing: no planted secret survives, no number changes, no harmless name is touched, nothing half-written."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pickle
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from make_secrets import GRACE, HARMLESS, HOST, ORION, USER, Secret, secrets, survivors, tokens, words
from make_snapshot import Allocator
from synthetic.planted import Export, training

import nsightkit
from nsightkit.analysis.memory import snapshot as memory
from nsightkit.errors import NsightkitError, TraceError, UsageError
from nsightkit.trace import Trace, TraceMeta, chrome, snapshot, store
from nsightkit.trace import kineto as kineto_reader
from nsightkit.trace import share as scrub
from nsightkit.trace.model import EVENT_TABLES, TABLES, FrameSource, Gpu
from nsightkit.trace.nsys import quoted
from nsightkit.trace.share import files
from nsightkit.trace.share.secrets import PLACEHOLDER, Scrubber

PLANTED = secrets()


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSIGHTKIT_NO_CACHE", "1")


def written(path: Path) -> bytes:
    """All bytes of a file or folder, unpacked where they are packed."""
    if path.is_dir():
        return b"\n".join(written(file) for file in sorted(path.rglob("*")) if file.is_file())
    raw = path.read_bytes()
    if raw.startswith(b"\x1f\x8b"):
        return gzip.decompress(raw)
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        frame = pq.read_table(path)
        return raw + "\n".join(str(frame[name].to_pylist()) for name in frame.column_names).encode("utf-8", "replace")
    return raw


def assert_same(before: Trace, after: Trace, changed: Callable[[str], bool] = lambda _: False) -> None:
    """Every number is the same, and every name that `changed` does not excuse; samples of call stacks stay behind."""
    assert before.t0_ns == after.t0_ns
    for table in EVENT_TABLES:
        columns, one, other = TABLES[table], before.table(table), after.table(table)
        assert len(one) == len(other), table
        for column, dtype in columns.items():
            if dtype != "category":
                assert one[column].equals(other[column]), (table, column)
                continue
            old, new = one[column].astype(str), other[column].astype(str)
            touched = dict.fromkeys(old[(old != new).to_numpy()])
            assert not [name for name in touched if not changed(name)], (table, column)
            assert one[column].nunique() == other[column].nunique(), (table, column)
    for field in ("tool", "tool_version", "schema", "driver", "missing", "window_ns"):
        assert getattr(before.meta, field) == getattr(after.meta, field), field


# ---------------------------------------------------------------- what is a secret


def test_every_usual_form_is_recognised() -> None:
    for secret in PLANTED:
        clean = Scrubber(machine=False).text(secret.text)
        assert not survivors(clean.encode(), [secret]), secret
        assert PLACEHOLDER.search(clean), secret
        assert Scrubber(machine=False).text(clean) == clean, secret


def test_what_only_looks_like_a_secret_stays() -> None:
    for name in HARMLESS:
        scrubber = Scrubber(machine=False)
        assert scrubber.text(name) is name
        assert scrubber.removed == []


def test_the_same_secret_is_the_same_placeholder_and_another_is_another() -> None:
    scrubber = Scrubber(machine=False)
    texts = ["/home/ann/a.py", "/home/bob/a.py", "/home/ann/b.py", "/home/ann/a.py", "/home/bob/x y", "/home/bob/x z"]
    assert [scrubber.text(t) for t in texts] == [
        *("[path]/a.py", "[path 2]/a.py", "[path]/b.py", "[path]/a.py", "[path 3] y", "[path 3] z"),
    ]  # fmt: skip
    assert scrubber.removed == ["path"] * 6


def test_versions_and_json_in_texts() -> None:
    scrubber = Scrubber(machine=False)
    packages = {"name": "nvidia-cublas", "version": "12.4.5.8", "where": "12.4.5.8", "more": '{"hostname": "orion"}'}
    clean = scrubber.value(packages)
    assert clean == packages | {"where": "[address]", "more": '{"hostname":"[host]"}'}


def test_placeholders_of_an_earlier_scrub_are_not_given_again() -> None:
    scrubber = Scrubber(machine=False)
    assert scrubber.text("[path]/a.py and [path 3]") == "[path]/a.py and [path 3]"
    assert scrubber.text("/home/ann/a.py") == "[path 4]/a.py"
    assert scrubber.removed == ["path"]


def test_text_of_a_private_plane_is_no_placeholder() -> None:
    odd = "a\U000f0000b /home/ann/x \U000f0001"
    assert Scrubber(machine=False).text(odd) == odd.replace("/home/ann/x", "[path]")


def test_a_name_is_learnt_where_it_is_said_and_found_elsewhere() -> None:
    scrubber = Scrubber(machine=False)
    run = f"run by {GRACE} on {ORION}.example.org, {ORION.upper()}"
    assert scrubber.text(run) == run
    scrubber.learn(f"{ORION}.example.org", "hostname")
    scrubber.learn([f"LOGNAME={GRACE}", "WANDB_API_KEY=k3y-very-secret", 'HOME="/weird/place/here"'], "env")
    assert scrubber.text(run) == "run by [user] on [host], [host 2]"
    assert scrubber.text(f"{GRACE}_kernel and x{GRACE}") == f"[user]_kernel and x{GRACE}"
    assert scrubber.text("key k3y-very-secret!") == "key [secret]!"
    scrubber.learn({"env": {"my_token": "t0k3n-1"}, "environ": ["their_token=t0k3n-2"], "a_token": "t0k3n-3"})
    assert scrubber.text("t0k3n-1 t0k3n-2 t0k3n-3") == "[secret 2] [secret 3] t0k3n-3"
    assert scrubber.text("/weird/place/here/below") == "[path]"


def test_a_letter_that_only_looks_like_another_ends_no_scrub() -> None:
    scrubber = Scrubber(machine=False)
    scrubber.learn("gracess", "user")
    assert scrubber.text("gracess and grace\u017fs") == "[user] and [user 2]"  # a long s matches an s


@pytest.mark.parametrize(
    "word", ["max", "root", "Volta", "adam", "vm", "12345", "localhost", "attention", "[host]", ""]
)
def test_common_words_are_never_learnt(word: str) -> None:
    scrubber = Scrubber(machine=False)
    for key in ("hostname", "user", "API_TOKEN"):
        scrubber.learn(word, key)
    text = f"aten::{word} {word}_kernel {word}"
    assert scrubber.text(text) == text


def test_this_machine_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: f"{ORION}.example.org")
    monkeypatch.setattr("getpass.getuser", lambda: GRACE)
    monkeypatch.setenv("PLANTED_API_TOKEN", "s3cr3t-value")
    monkeypatch.setenv("PLANTED_LABEL", "only-a-label")
    text = f"{GRACE} {ORION} s3cr3t-value only-a-label"
    assert Scrubber().text(text) == "[user] [host] [secret] only-a-label"
    assert Scrubber(machine=False).text(text) == text


@pytest.mark.parametrize("host", ["h200", "H200.example.org", "nvidia-h200"])
def test_a_host_called_after_its_card_does_not_cost_the_card_its_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    clean = Scrubber().value({"gpu": "NVIDIA H200", "hostname": host, "said": f"ran on {host}, an H200"})
    assert (clean["gpu"], clean["hostname"]) == ("NVIDIA H200", "[host]")
    assert clean["said"] == ("ran on h200, an H200" if host == "h200" else "ran on [host], an H200")


def test_values_that_only_their_key_gives_away() -> None:
    scrubber = Scrubber(machine=False)
    given = {
        "hostname": ORION, "user": GRACE, "env": {"A": "b"}, "environ": ["A=b"], "client_secret": "plain",
        "pwd": "word", "cwd": "/weird/place", "password": 12345, "api_key": None, "commit": "0" * 40, "sha1": "0" * 40,
        "other": "0" * 40,
        "argv": ["prog", "--token", "plain", "--batch", "32", "-u", "ann:plain", "--user", "ann"], "n": 3, "x": [True],
        "token": "Xy12Zz34Qq56", "tokens": "many words", "host": "", "user_id": 7, 5: "five",
    }  # fmt: skip
    assert scrubber.value(given) == {
        "hostname": "[host]", "user": "[user]", "env": {}, "environ": [], "client_secret": "[secret]",
        "pwd": "[secret 2]", "cwd": "[path]", "password": "[secret 3]", "api_key": None, "commit": "0" * 40,
        "sha1": "0" * 40,
        "other": "[secret 4]", "argv": ["prog", "--token", "[secret]", "--batch", "32", "-u", "[secret 5]", "--user",
        "[user 2]"], "n": 3, "x": [True], "token": "[secret 6]", "tokens": "many words", "host": "", "user_id": 7,
        5: "five",
    }  # fmt: skip
    clean = scrubber.value(given)
    assert Scrubber(machine=False).value(clean) == clean


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("/home/ann/p/train.py", "[path]/train.py"),
        ("/home/ann", "[path]"),
        ("/home/ann/", "[path]/"),
        ("/weird/ann/prog", "[path]"),
        ("/usr/lib/libc.so.6", "/usr/lib/libc.so.6"),
        ("/dev/shm/ann/x", "[path]"),
        ("C:\\Users\\ann b\\x y.py", "[path]\\x y.py"),
        ("C:\\Windows\\System32\\nvcuda.dll", "C:\\Windows\\System32\\nvcuda.dll"),
        ("/home/ann/.venv/lib/python3.11/site-packages/torch/a.py", "[path]/site-packages/torch/a.py"),
        ("/opt/ann/lib/python3.12/runpy.py", "[path]/lib/python3.12/runpy.py"),
        ("/home/ann/src/torch/optim/adamw.py", "[path]/torch/optim/adamw.py"),
        ("/home/ann/torch/fit.py", "[path]/fit.py"),
        ("/home/ann/t/src/transformers/cache_utils.py", "[path]/transformers/cache_utils.py"),
        ("/tmp/torchinductor_ann/ab/c.py", "[path]/torchinductor_/ab/c.py"),
        ("<string>", "<string>"),
        ("??", "??"),
        ("relative/train.py", "relative/train.py"),
        ("[path]/train.py", "[path]/train.py"),
    ],
)
def test_paths(path: str, clean: str) -> None:
    assert Scrubber(machine=False).path(path) == clean
    assert Scrubber(machine=False).path(clean) == clean


@pytest.mark.parametrize(
    "piece", ["a-", "/a", "/home/", "A=1\n", "\n", "key-", "--token ", "\\", "C:\\a ", "://a", "x@"]
)
def test_a_hostile_text_takes_no_longer_than_others(piece: str) -> None:
    """A rule that looked from each place to the end of the text would still be at it tomorrow."""
    Scrubber(machine=False).text(piece * 200_000)


# ---------------------------------------------------------------- Nsight Systems: SQLite


def columns_of(connection: sqlite3.Connection, table: str) -> list[tuple[str, str, int]]:
    return [(r[1], r[2].upper(), r[5]) for r in connection.execute(f'PRAGMA table_info("{table}")')]


def plant(path: Path, planted: list[Secret]) -> int:
    """Put every secret into every column of every table that can hold a text; returns how many columns."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE IF NOT EXISTS SOMETHING_NEW (a TEXT, b BLOB, c INTEGER, d)")
    tables = [
        name
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        if not name.startswith("sqlite_")
    ]
    number, count = 10**6, 0
    for table in tables:
        columns = columns_of(connection, table)
        open_to_text = [c for c, kind, _ in columns if kind in ("TEXT", "BLOB", "") or table == "SOMETHING_NEW"]
        for target in open_to_text:
            count += 1
            rows = []
            for secret in planted:
                number += 1
                other = {"TEXT": "planted", "REAL": 0.5, "BLOB": b"planted"}
                text: Any = secret.text.encode() if target == "b" else secret.text
                rows.append([text if c == target else other.get(kind, number) for c, kind, _ in columns])
            marks = ", ".join("?" * len(columns))
            connection.executemany(f'INSERT INTO "{table}" VALUES ({marks})', rows)
    # Strings that nothing refers to are left out: what is printed (900003) and a program (900004) are of no event.
    connection.execute(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, textId, globalTid)"
        " SELECT 5000, 6000, 59, id, 1 << 24 | 1 FROM StringIds WHERE id IN (900001, 900002, 900005) OR id >= 1000000"
    )
    connection.commit()
    connection.close()
    return count


def identify(path: Path) -> None:
    """Say in the places where nsys does who and where it was."""
    connection = sqlite3.connect(path)
    connection.executescript(
        f"""
        CREATE TABLE IF NOT EXISTS TARGET_INFO_SYSTEM_ENV
            (globalVid INTEGER, devStateName TEXT NOT NULL, name TEXT NOT NULL, nameEnum INTEGER NOT NULL, value TEXT);
        CREATE TABLE IF NOT EXISTS PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT);
        CREATE TABLE IF NOT EXISTS ProcessStreams (globalPid INTEGER, filenameId INTEGER, contentId INTEGER);
        CREATE TABLE IF NOT EXISTS OSRT_CALLCHAINS (id INTEGER, symbol INTEGER, module INTEGER, stackDepth INTEGER);
        CREATE TABLE IF NOT EXISTS TARGET_INFO_NIC_INFO (GUID INTEGER, stateName TEXT, name TEXT);
        INSERT INTO TARGET_INFO_NIC_INFO VALUES (1234567890123, '{HOST}', 'mlx5_0');
        INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES
            (1, 'Local (CLI)', 'Hostname', 619, '{ORION}'),
            (1, 'Local (CLI)', 'DeviceEnvironment', 610, 'LOGNAME={GRACE};PLAIN=plantedvalue;MY_KEY=k3y-of-nobody'),
            (1, '{HOST}', 'NvDriverVersion', 205, '570.1.2'),
            (1, 'Local (CLI)', 'GpuInfo', 897, '{{"Gpus":[{{"Name":"GPU X","Uuid":"6161e0f3-67ae-555b"}}]}}'),
            (1, 'Local (CLI)', 'CpuCores', 1, '8');
        INSERT INTO META_DATA_CAPTURE VALUES
            ('PROCESS_0:ENVIRONMENT_VARIABLE', 'PLAIN="plantedvalue"'), ('DEVICE_DISPLAY_NAME', '{ORION}'),
            ('PROCESS_0:COMMAND', '/weird/{USER}/prog'), ('PROCESS_0:ARGUMENT_0', '--api-token'),
            ('PROCESS_0:ARGUMENT_1', 'plaintext'), ('PROCESS_0:ARGUMENT_2', 'batch=8'),
            ('PROCESS_0:WORKING_DIR', '/somewhere/{USER}/deep'), ('PROCESS_0:USER_NAME', '{USER}');
        INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_HOST', '{ORION}'), ('EXPORT_USER', '{GRACE}'),
            ('EXPORT_PARAM_INPUT_PATH_ABS', '/weird/{USER}/in.nsys-rep');
        INSERT INTO PROCESSES VALUES (1, 2, '/weird/{USER}/prog');
        INSERT INTO StringIds VALUES (900001, 'epoch of {GRACE} on {ORION}'), (900002, 'with k3y-of-nobody in it'),
            (900003, 'what was printed: anything' || char(10)), (900004, '/weird/{USER}/prog'),
            (900005, '/somewhere/{USER}/deep/er');
        INSERT INTO ProcessStreams VALUES (1, 900004, 900003);
        INSERT INTO OSRT_CALLCHAINS VALUES (1, 900002, 900004, 0);
        """
    )
    connection.commit()
    connection.close()


SAID = [Secret("", (ORION, GRACE, HOST, USER, "plantedvalue", "k3y-of-nobody", "plaintext", "anything", "6161e0f3"))]


@pytest.fixture(scope="module")
def planted_export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "planted.sqlite"
    training(path)
    identify(path)
    assert plant(path, PLANTED) >= 10
    return path


@pytest.fixture(scope="module")
def copied(planted_export: Path, tmp_path_factory: pytest.TempPathFactory) -> scrub.Copied:
    return scrub.copy(planted_export, tmp_path_factory.mktemp("copy") / "clean.sqlite")


def test_no_secret_survives_in_any_column_of_any_table(planted_export: Path, copied: scrub.Copied) -> None:
    assert (
        len(survivors(planted_export.read_bytes(), PLANTED + SAID)) == len(words(PLANTED + SAID)) > 45
    )  # or the search could not fail
    out = copied.out
    assert survivors(out.read_bytes(), PLANTED + SAID) == []
    assert [p.name for p in out.parent.iterdir()] == ["clean.sqlite"]
    kinds = {row["kind"] for row in copied.removed}
    assert kinds == {
        *("environment", "secret", "path", "host", "user", "email", "address", "table", "column", "property", "text")
    }
    left = {row["place"] for row in copied.removed if row["kind"] == "table"}
    assert {"SOMETHING_NEW", "ProcessStreams", "OSRT_CALLCHAINS"} <= left
    assert not left & set(content(out))
    assert all(row["count"] > 0 for row in copied.removed)
    assert survivors(json.dumps(copied.removed).encode(), PLANTED + SAID) == []
    connection = sqlite3.connect(out)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA freelist_count").fetchone() == (0,)
    connection.close()


def test_an_export_analyses_as_before(planted_export: Path, copied: scrub.Copied) -> None:
    hidden = {word for secret in PLANTED + SAID for word in secret.hidden}
    planted = {secret.text for secret in PLANTED}

    def excused(name: str) -> bool:
        return name in planted or any(word in name for word in hidden)

    before, after = nsightkit.load(planted_export), nsightkit.load(copied.out)
    assert_same(before, after, excused)
    from nsightkit.analysis.timeline import gaps, kernels, overview

    assert overview.summary(before) == overview.summary(after)
    for question in (gaps.summary, kernels.summary):
        assert question(before).equals(question(after))


def test_known_places_are_treated_by_their_meaning(copied: scrub.Copied) -> None:
    connection = sqlite3.connect(copied.out)

    def one(query: str) -> Any:
        return connection.execute(query).fetchone()

    properties = dict(
        connection.execute(
            "SELECT name, value FROM META_DATA_CAPTURE UNION ALL SELECT name, value FROM META_DATA_EXPORT"
            " UNION ALL SELECT name, value FROM TARGET_INFO_SYSTEM_ENV"
        )
    )
    assert properties["NvDriverVersion"] == "570.1.2"
    assert properties["CpuCores"] == "8"
    said = ("ENVIRON", "Environment", "Hostname", "DISPLAY", "COMMAND", "ARGUMENT", "WORKING", "USER", "HOST", "PATH")
    assert not [name for name in properties if any(word in name for word in said)]
    assert connection.execute("SELECT * FROM TARGET_INFO_NIC_INFO WHERE name = 'mlx5_0'").fetchall() == [("mlx5_0",)]
    assert re.fullmatch(r"\[path( \d+)?\]", one("SELECT name FROM PROCESSES WHERE pid = 2")[0])
    strings = dict(connection.execute("SELECT id, value FROM StringIds WHERE id BETWEEN 900001 AND 900005"))
    assert re.fullmatch(r"epoch of \[user( \d+)?\] on \[host( \d+)?\]", strings[900001])
    assert list(strings) == [900001, 900002, 900005]
    assert strings[900005].startswith("[path")
    connection.close()


def content(path: Path) -> dict[str, list[Any]]:
    """What a database says, table by table."""
    connection = sqlite3.connect(path)
    connection.text_factory = bytes
    names = [n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    found = {n.decode(): connection.execute(f"SELECT * FROM {quoted(n.decode())}").fetchall() for n in names}
    connection.close()
    return found


def test_a_scrubbed_export_is_scrubbed_already(copied: scrub.Copied, tmp_path: Path) -> None:
    again = scrub.copy(copied.out, tmp_path / "again.sqlite")
    assert again.removed == []
    assert again.out.read_bytes() == copied.out.read_bytes()


@pytest.mark.parametrize("encoding", ["UTF-16le", "UTF-16be"])
def test_an_export_in_utf_16(encoding: str, tmp_path: Path) -> None:
    path, out = tmp_path / "wide.sqlite", tmp_path / "clean.sqlite"
    narrow = tmp_path / "narrow.sqlite"
    training(narrow)
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA encoding = '{encoding}'")
    source = sqlite3.connect(narrow)
    for line in source.iterdump():
        connection.execute(line) if not line.startswith(("BEGIN", "COMMIT")) else None
    source.close()
    connection.commit()
    connection.close()
    identify(path)
    plant(path, PLANTED)
    assert len(survivors(path.read_bytes(), PLANTED)) > 40
    scrub.copy(path, out)
    assert survivors(out.read_bytes(), PLANTED + SAID) == []
    assert sqlite3.connect(out).execute("PRAGMA encoding").fetchone() == (encoding,)
    assert_same(nsightkit.load(narrow).masked({}), nsightkit.load(narrow))  # the reader itself
    assert scrub.copy(out, tmp_path / "again.sqlite").removed == []


def test_odd_values(tmp_path: Path) -> None:
    """Bytes that are not a text, texts where numbers belong, columns that are computed, a table with another key."""
    path, out = tmp_path / "odd.sqlite", tmp_path / "clean.sqlite"
    training(path)
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE COUNTED (id INTEGER PRIMARY KEY AUTOINCREMENT, a TEXT);
        CREATE INDEX BY_TEXT ON COUNTED (lower(a));
        CREATE VIEW KERNEL_NAMES AS SELECT value FROM StringIds;
        CREATE TABLE CUDNN_EVENTS (
            start INTEGER, end BLOB, nameId, "quoted "" name" TEXT, eventClass TEXT AS ('/home/ann/' || start) STORED,
            globalTid TEXT GENERATED ALWAYS AS ('/home/ann') VIRTUAL
        );
        CREATE TABLE MPI_RANKS (globalTid INTEGER, rank INTEGER);
        INSERT INTO COUNTED (id, a) VALUES (41, '/home/ann/x'), (7, NULL);
        INSERT INTO CUDNN_EVENTS VALUES (1, x'2f686f6d65', '/home/ann', 'x'), (9223372036854775807, 0.5, NULL, NULL);
        INSERT INTO MPI_RANKS VALUES ('/home/ann', 'text'), (1, 1e300);
        """
    )
    nothing = b"caf\xe9 /home/ann/d \xff"  # not UTF-8
    add = "INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, text) VALUES (1, 2, 59, 1, "
    for marks, value in (
        ("CAST(? AS TEXT)", nothing),
        ("CAST(? AS TEXT)", b"\xfe\xfd plain"),
        ("?", b"/home/ann"),
        ("?", 7),
    ):
        connection.execute(f"{add}{marks})", (value,))
    connection.execute("INSERT INTO META_DATA_CAPTURE VALUES (?, CAST(? AS TEXT))", ("RATE_HZ", b"\xfe plain"))
    connection.commit()
    connection.close()
    copied = scrub.copy(path, out)
    after = content(out)
    assert b"/home" not in out.read_bytes()
    assert after["CUDNN_EVENTS"] == [(1, None, None), (9223372036854775807, 0.5, None)]
    assert after["MPI_RANKS"] == [(None, None), (1, 1e300)]
    connection = sqlite3.connect(out)
    connection.text_factory = bytes
    names = [text for (text,) in connection.execute("SELECT text FROM NVTX_EVENTS WHERE end = 2")]
    assert names[0].startswith(b"caf\xe9 [path")
    assert names[0].endswith(b" \xff")
    assert names[1:3] == [b"\xfe\xfd plain", None]
    assert (b"RATE_HZ", b"\xfe plain") in after["META_DATA_CAPTURE"]
    said = {(row["kind"], row["place"]): row["count"] for row in copied.removed}
    assert said["table", "COUNTED"] == 2
    assert said["index", "BY_TEXT"] == said["view", "KERNEL_NAMES"] == said["column", 'CUDNN_EVENTS.quoted " name'] == 1
    kept = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert not kept & {b"COUNTED", b"BY_TEXT", b"KERNEL_NAMES"}
    (key,) = connection.execute("SELECT pk FROM pragma_table_info('StringIds') WHERE name = 'id'").fetchone()
    connection.close()
    assert key == sqlite3.connect(path).execute("SELECT pk FROM pragma_table_info('StringIds')").fetchone()[0]


def test_nothing_of_a_hostile_schema_runs(tmp_path: Path) -> None:
    path, out = tmp_path / "hostile.sqlite", tmp_path / "clean.sqlite"
    training(path)
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE FIRED (x TEXT);
        CREATE TRIGGER a AFTER INSERT ON StringIds BEGIN INSERT INTO FIRED VALUES (new.value); END;
        CREATE TRIGGER b AFTER UPDATE ON StringIds BEGIN INSERT INTO FIRED VALUES (old.value); END;
        CREATE TRIGGER c AFTER DELETE ON META_DATA_CAPTURE BEGIN INSERT INTO FIRED VALUES (old.value); END;
        CREATE VIEW CUBLAS_EVENTS AS SELECT '/home/ann' AS nameId, 1 AS start;
        """
    )
    virtual = 0
    try:
        connection.execute("CREATE VIRTUAL TABLE words USING fts5(body)")
        connection.execute("CREATE VIRTUAL TABLE MPI_RANKS USING fts5(value)")
        connection.execute("INSERT INTO words VALUES ('/home/ann/indexed')")
        virtual = 1
    except sqlite3.OperationalError:
        pass  # an SQLite without it
    connection.commit()
    connection.close()
    copied = scrub.copy(path, out)
    assert not set(content(out)) & {"FIRED", "CUBLAS_EVENTS", "words", "MPI_RANKS"}
    said = {(row["kind"], row["place"]): row["count"] for row in copied.removed}
    assert said["trigger", "a"] == said["trigger", "b"] == said["trigger", "c"] == said["view", "CUBLAS_EVENTS"] == 1
    assert said.get(("table", "words"), 0) == said.get(("table", "MPI_RANKS"), 0) == virtual
    assert b"ann" not in out.read_bytes()


@pytest.mark.parametrize("sql", ["CREATE TABLE x(a); ATTACH 'evil' AS e", "DROP TABLE StringIds"])
def test_a_schema_that_is_none_is_inert(sql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "hostile.sqlite", tmp_path / "clean.sqlite"
    monkeypatch.chdir(tmp_path)
    training(path)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE x (a)")
    connection.execute("INSERT INTO x VALUES ('/home/ann')")
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'x'", (sql,))
    connection.commit()
    connection.close()
    before = path.read_bytes()
    if sql.startswith("DROP"):
        with pytest.raises(TraceError):
            scrub.copy(path, out)
    else:
        assert {"kind": "table", "place": "x", "count": 1} in scrub.copy(path, out).removed
        assert "x" not in content(out)
        assert b"/home" not in out.read_bytes()
    assert path.read_bytes() == before
    assert not [p for p in tmp_path.iterdir() if p not in (path, out)]


def test_what_was_deleted_or_waits_in_the_log_is_not_copied_as_it_was(tmp_path: Path) -> None:
    path, out = tmp_path / "log.sqlite", tmp_path / "clean.sqlite"
    training(path)
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("CREATE TABLE GONE (a TEXT)")
    connection.executemany("INSERT INTO GONE VALUES (?)", [(f"deleted-remnant-{i}" * 20,) for i in range(200)])
    connection.commit()
    connection.execute("DELETE FROM GONE")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("INSERT INTO StringIds VALUES (77001, 'waiting /home/ann/x.py')")
    connection.execute("INSERT INTO NVTX_EVENTS (start, end, eventType, textId, globalTid) VALUES (1, 2, 59, 77001, 1)")
    connection.commit()
    assert b"deleted-remnant" in path.read_bytes()
    try:
        scrub.copy(path, out)
    finally:
        connection.close()
    assert b"deleted-remnant" not in out.read_bytes()
    assert (77001, b"waiting [path]/x.py") in content(out)["StringIds"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("clean.sqlite-")]


def test_tables_and_columns_whose_name_holds_a_secret(tmp_path: Path) -> None:
    path, out = tmp_path / "named.sqlite", tmp_path / "clean.sqlite"
    secret = tokens()["AWS"]
    training(path)
    connection = sqlite3.connect(path)
    for name in ("of /home/ann/x", f"ENUM_{secret}"):  # the second is like one that is known
        connection.execute(f'CREATE TABLE "{name}" (id INTEGER, label TEXT)')
        connection.execute(f'INSERT INTO "{name}" VALUES (1, "x")')
    connection.execute('ALTER TABLE NVTX_EVENTS ADD COLUMN "of /home/ann/x" TEXT')
    connection.execute('UPDATE NVTX_EVENTS SET "of /home/ann/x" = 1')
    connection.commit()
    connection.close()
    copied = scrub.copy(path, out)
    assert survivors(out.read_bytes() + json.dumps(copied.removed).encode(), [Secret("", ("/home", secret))]) == []
    places = [row["place"] for row in copied.removed if row["kind"] in ("table", "column")]
    assert sorted(place.replace(" 2]", "]") for place in places) == [
        "ENUM_[secret]",
        "NVTX_EVENTS.of [path]",
        "of [path]",
    ]


def test_other_databases_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.sqlite"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.commit()
    connection.close()
    whole = tmp_path / "whole.sqlite"
    training(whole)
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(whole.read_bytes()[:-5000])
    broken = tmp_path / "broken.sqlite"
    raw = bytearray(whole.read_bytes())
    raw[4096 * 3 : 4096 * 9] = os.urandom(4096 * 6)
    broken.write_bytes(raw)
    for path in (foreign, cut, broken):
        with pytest.raises(TraceError):
            scrub.copy(path, tmp_path / "clean.sqlite")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "broken.sqlite",
        "cut.sqlite",
        "foreign.sqlite",
        "whole.sqlite",
    ]


def test_a_read_only_export_in_a_read_only_folder(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir()
    training(folder / "x.sqlite")
    (folder / "x.sqlite").chmod(0o444)
    folder.chmod(0o555)
    try:
        scrub.copy(folder / "x.sqlite", tmp_path / "clean.sqlite")
    finally:
        folder.chmod(0o755)
    assert_same(nsightkit.load(folder / "x.sqlite"), nsightkit.load(tmp_path / "clean.sqlite"))
    assert (tmp_path / "clean.sqlite").stat().st_mode & 0o200


# ---------------------------------------------------------------- Nsight Systems: Parquet


def as_parquetdir(path: Path, folder: Path) -> Path:
    """What ``nsys export --type parquetdir`` makes of an export."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    connection = sqlite3.connect(path)
    for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        if table == "SOMETHING_NEW":
            continue
        frame = pd.read_sql(f'SELECT * FROM "{table}"', connection)
        schema = pa.Table.from_pandas(frame, preserve_index=False)
        pq.write_table(schema, folder / f"{table}.parquet", compression="zstd", row_group_size=300)
    connection.close()
    return folder


def test_no_secret_survives_in_a_parquetdir(planted_export: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = as_parquetdir(planted_export, tmp_path / "export")
    text = "/home/ann/nested"
    labels = pa.table(
        {
            "id": pa.array([text, "x"]),
            "name": pa.array([text, None]).dictionary_encode(),
            "label": pa.array([text, "y"], pa.large_string()),
            "value": pa.array([[text], None]),
            "size": pa.array([text.encode(), None]),
        }
    )
    pq.write_table(labels.replace_schema_metadata({"by": "/home/ann"}), folder / "ENUM_NESTED.parquet")
    nested = pa.table(
        {
            "list": pa.array([[text, None], None, []]),
            "struct": pa.array([{"a": text, "b": 1}, None, {"a": None, "b": 2}]),
            "dictionary": pa.array([text, "x", None]).dictionary_encode(),
            "binary": pa.array([text.encode(), b"\x00\x01", None]),
            "large": pa.array([text, None, "y"], pa.large_string()),
            "number": pa.array([1.5, None, 3.25]),
        }
    )
    pq.write_table(nested.replace_schema_metadata({"by": "/home/ann"}), folder / "NESTED.parquet", compression="snappy")
    (folder / "notes.txt").write_text("/home/ann")
    assert len(survivors(written(folder), PLANTED)) > 40
    out = tmp_path / "clean"
    copied = scrub.copy(folder, out)
    assert survivors(written(out), PLANTED + SAID + [Secret("", ("/home/ann", "nested"))]) == []
    assert {"kind": "other file", "place": "notes", "count": 1} in copied.removed
    left = {row["place"] for row in copied.removed if row["kind"] == "table"}
    assert {"NESTED", "ProcessStreams", "OSRT_CALLCHAINS"} <= left
    assert {p.stem for p in out.iterdir()} == {p.stem for p in folder.iterdir() if p.suffix == ".parquet"} - left
    hidden = {word for secret in PLANTED + SAID for word in secret.hidden} | {s.text for s in PLANTED}
    assert_same(nsightkit.load(folder), nsightkit.load(out), lambda name: any(word in name for word in hidden))
    clean = pq.read_table(out / "ENUM_NESTED.parquet")
    assert clean.column_names == ["name", "label"]
    assert clean["name"].type == labels["name"].type
    assert clean["label"].to_pylist()[0].startswith("[path")
    assert scrub.copy(out, tmp_path / "again").removed == []


def test_a_damaged_parquetdir_is_refused(tmp_path: Path) -> None:
    training(tmp_path / "x.sqlite")
    folder = as_parquetdir(tmp_path / "x.sqlite", tmp_path / "export")
    (folder / "NVTX_EVENTS.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(TraceError, match="NVTX_EVENTS"):
        scrub.copy(folder, tmp_path / "clean")
    assert not (tmp_path / "clean").exists()


# ---------------------------------------------------------------- JSON


def kineto(planted: list[Secret]) -> dict[str, Any]:
    """A trace with secrets wherever Kineto can have them."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": f"python of {GRACE}"}},
        {"ph": "M", "name": "process_labels", "pid": 7, "tid": 0, "args": {"labels": f"CPU of {ORION}"}},
    ]
    for i, secret in enumerate(planted):
        ts = 1000.001 + 10 * i
        events += [
            {"ph": "X", "cat": "user_annotation", "name": secret.text, "pid": 7, "tid": 7, "ts": ts, "dur": 8.250},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 7, "tid": 7, "ts": ts + 1, "dur": 5.125,
             "args": {"External id": i, "Input Dims": [[2, 3], [3, 4]], "Concrete Inputs": ["", secret.text],
                      "Call stack": secret.text, secret.text: 1}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 7, "ts": ts + 2, "dur": 1.0,
             "args": {"correlation": i + 1, "External id": i}},
            {"ph": "X", "cat": "kernel", "name": "void gemm<float, 0x01>(int)", "pid": 0, "tid": 7, "ts": ts + 3,
             "dur": 2.5, "args": {"correlation": i + 1, "device": 0, "stream": 7, "External id": i, "grid": [1, 2, 3],
                                  "block": [32, 1, 1], "note": secret.text}},
        ]  # fmt: skip
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "GPU X", "totalGlobalMem": 17179869184, "numSms": 10}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8, "hostname": ORION, "user": GRACE},
        "with_metadata": [s.text for s in planted],
        "command": ["python", "train.py", "--password", "plaintext", "--lr", "3e-4"],
        "env": {"LOGNAME": GRACE, "PLAIN": "plantedvalue", "MY_KEY": "k3y-of-nobody", "nested": {"a": ["{", "}"]}},
        "environment": ["PLAIN=plantedvalue"],
        "db_password": 4711471147,
        "empty": {"env": {}, "environ": [ ]},
        "note": f"of {GRACE} on {ORION} with k3y-of-nobody",
        "traceEvents": events,
        "traceName": f"/weird/{USER}/logs/{HOST}_1234.1712345678901.pt.trace.json",
    }  # fmt: skip


IN_JSON = [Secret("", (ORION, GRACE, HOST, USER, "plantedvalue", "k3y-of-nobody", "plaintext", "4711471147"))]
LAYOUTS: dict[str, Callable[[Any], str]] = {
    "dense": lambda d: json.dumps(d, separators=(",", ":")),
    "kineto": lambda d: json.dumps(d, indent=2, ensure_ascii=False),
    "escaped": lambda d: json.dumps(d).replace("/", "\\/"),
    "lines": lambda d: json.dumps(d).replace("}, {", "},\n{"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_secret_survives_in_a_kineto_trace(layout: str, tmp_path: Path) -> None:
    text = LAYOUTS[layout](kineto(PLANTED))
    path, out = tmp_path / "t.json", tmp_path / "clean.json"
    path.write_text(text)
    assert len(survivors(text.encode(), PLANTED + IN_JSON)) > 40
    copied = scrub.copy(path, out)
    assert survivors(out.read_bytes(), PLANTED + IN_JSON) == []
    found = json.loads(out.read_bytes())
    assert set(found) == {"schemaVersion", "deviceProperties", "distributedInfo", "traceEvents", "traceName"}
    given = json.loads(text)["traceEvents"]
    assert [list(event) for event in found["traceEvents"]] == [list(event) for event in given]
    hidden = {word for secret in PLANTED for word in secret.hidden} | {s.text for s in PLANTED}
    assert_same(nsightkit.load(path), nsightkit.load(out), lambda name: any(word in name for word in hidden))
    assert {"name", "Call stack", "traceName"} <= {row["place"] for row in copied.removed}
    left = {row["place"] for row in copied.removed if row["kind"] == "field"}
    assert {"env", "environment", "command", "db_password", "note", "empty", "with_metadata"} <= left
    assert survivors(json.dumps(copied.removed).encode(), PLANTED + IN_JSON) == []
    again = tmp_path / "again.json"
    assert scrub.copy(out, again).removed == []
    assert again.read_bytes() == out.read_bytes()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_do_not_change_the_answer(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_text(LAYOUTS[layout](kineto(PLANTED[:12])))
    found = set()
    for size in (1 << 20, 777, 64, 7):
        monkeypatch.setattr(kineto_reader, "CHUNK_BYTES", size)
        out = tmp_path / f"{size}.json"
        scrub.copy(path, out)
        found.add(out.read_bytes())
    assert len(found) == 1


def test_numbers_are_the_same_digits(tmp_path: Path) -> None:
    """A float64 has too few of them for microseconds since 1970."""
    text = json.dumps(kineto(PLANTED[:5]), indent=3).replace('"ts": 1000.001', '"ts": 1712345678901234.567')
    text = re.sub(r'"dur": 8.25\b', '"dur":  8.250e0 ', text).replace('"rank": 3', '"rank":\t-0.0')
    path, out = tmp_path / "t.json", tmp_path / "clean.json"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    scrub.copy(path, out)
    for number in (rb'"(?:ts|dur)": *([^,\s}]+)', rb'"rank":\s*([^,\s]+)'):
        assert re.findall(number, out.read_bytes()) == re.findall(number, path.read_bytes()) != []


def test_json_without_secrets_says_the_same(tmp_path: Path) -> None:
    from make_kineto import write

    path = tmp_path / "t.json"
    write(path, kernels=2000)
    out = tmp_path / "clean.json"
    assert scrub.copy(path, out).removed == []
    assert json.loads(out.read_bytes()) == json.loads(path.read_bytes())
    packed = tmp_path / "clean.json.gz"
    scrub.copy(path, packed)
    assert gzip.decompress(packed.read_bytes()) == out.read_bytes()
    assert packed.read_bytes()[4:10] == b"\0\0\0\0\0\xff" or packed.read_bytes()[3] == 0  # no time, no name
    scrub.copy(packed, tmp_path / "unpacked.json")
    assert (tmp_path / "unpacked.json").read_bytes() == out.read_bytes()
    scrub.copy(packed, tmp_path / "copy")  # no name that tells: as it was
    assert (tmp_path / "copy").read_bytes()[:2] == b"\x1f\x8b"


def test_numbers_of_placeholders_do_not_depend_on_hashes(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(kineto([Secret(f"/home/u{i}/x.py", ()) for i in range(40)])))
    program = "import sys; from nsightkit.trace import share; share.copy(*sys.argv[1:])"
    found = set()
    for seed in ("1", "2"):
        out = tmp_path / f"{seed}.json"
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program, str(path), str(out)], env=environment, check=True, timeout=300)
        found.add(out.read_bytes())
    assert len(found) == 1


def test_json_that_is_none_is_cleaned_as_text_or_refused(tmp_path: Path) -> None:
    good = json.dumps(kineto(PLANTED[:5]), indent=1)
    event = '{"ph": "X", "cat": "cpu_op", "name": "of "quoted" /home/ann/x", "pid": 7, "tid": 7, "ts": 1.0, "dur": 1.0}'
    mended = {
        "nan.json": good.replace('"dur": 8.25,', '"dur": nan,').replace('"dur": 8.25\n', '"dur": nan\n'),
        "escape.json": good.replace("void gemm", "C:\\Users\\ann\\gemm\\q"),
        "trailing.json": good + "\n]} and /home/ann\\x",
        "open list.json": json.dumps(kineto(PLANTED[:5])["traceEvents"])[:-1],
        "comma.json": good.replace('"traceEvents": [', '"traceEvents": [').replace("\n ],\n", ",\n ],\n", 1),
    }
    for name, text in mended.items():
        path, out = tmp_path / name, tmp_path / f"clean {name}"
        path.write_text(text)
        before = nsightkit.load(path)
        scrub.copy(path, out)
        assert b"ann\\" not in out.read_bytes(), name
        assert survivors(out.read_bytes(), PLANTED[:5]) == [], name
        assert len(nsightkit.load(out)["kernels"]) == len(before["kernels"]), name
    refused = {
        "unquoted.json": good.replace('"traceEvents": [', f'"traceEvents": [{event},'),
        "cut.json": good[: len(good) // 2],
        "cut in a string.json": good[: good.index("void gemm") + 4],
        "cut after an event.json": good[: good.rindex("},\n") + 1],
        "other.json": '{"a": 1}',
    }
    for name, text in refused.items():
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(TraceError, match=re.escape(name)):
            scrub.copy(path, tmp_path / "never.json")
        assert not (tmp_path / "never.json").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_damaged_and_endless_gzip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gzip.compress(json.dumps(kineto(PLANTED[:5])).encode())
    for name, raw in (("cut.json.gz", whole[:-20]), ("bad.json.gz", whole[:30] + b"\0" * 50 + whole[80:])):
        path = tmp_path / name
        path.write_bytes(raw)
        with pytest.raises(TraceError, match=name):
            scrub.copy(path, tmp_path / "never.json.gz")
    monkeypatch.setattr(kineto_reader, "SMALL_BYTES", 1 << 20)
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (8 << 20) + b"]}", 9))
    with pytest.raises(TraceError, match="unpacks"):
        scrub.copy(bomb, tmp_path / "never.json.gz")
    assert not (tmp_path / "never.json.gz").exists()


# ---------------------------------------------------------------- snapshots, ncu's pages, our own folders


def snapshot_with(planted: list[Secret]) -> dict[str, Any]:
    allocator = Allocator()
    for secret in planted:
        frames = [
            {"name": secret.text, "filename": secret.text, "line": 3, "fx_original_trace": secret.text},
            {"name": "forward", "filename": f"/home/{USER}/model.py", "line": 9},
            {"name": "_call_impl", "filename": f"/home/{USER}/lib/site-packages/torch/nn/modules/module.py", "line": 1},
        ]
        allocator.malloc(5000, frames=frames, user_metadata=secret.text)
    found = allocator.snapshot()
    found["allocator_settings"]["note"] = f"of {USER}"
    found["env"] = {"PLAIN": "plantedvalue"}
    return found


def test_no_secret_survives_in_a_snapshot(tmp_path: Path) -> None:
    path, out = tmp_path / "s.pickle", tmp_path / "clean.pickle"
    path.write_bytes(pickle.dumps(snapshot_with(PLANTED), 2))
    hidden = [*PLANTED, Secret("", (USER, "plantedvalue"))]
    assert len(survivors(path.read_bytes(), hidden)) > 40
    copied = scrub.copy(path, out)
    assert survivors(out.read_bytes(), hidden) == []
    places = {row["place"] for row in copied.removed}
    assert {
        "frames.fx_original_trace",
        "frames.filename",
        "frames.name",
        "device_traces.user_metadata",
        "env",
    } <= places
    before, after = snapshot.read(path), snapshot.read(out)
    numbers = ["device", "action", "address", "size_bytes", "stream", "time_ns"]
    assert before.events[numbers].equals(after.events[numbers])
    assert before.blocks.equals(after.blocks)
    assert np.array_equal(before.stack_bounds, after.stack_bounds)
    one, other = memory.summary(before), memory.summary(after)
    assert one["by_category"] == other["by_category"]
    assert {k: v for k, v in one.items() if isinstance(v, int)} == {
        k: v for k, v in other.items() if isinstance(v, int)
    }
    assert scrub.copy(out, tmp_path / "again.pickle").removed == []
    assert (tmp_path / "again.pickle").read_bytes() == out.read_bytes()


def test_bytes_and_odd_keys_in_a_snapshot() -> None:
    odd = {"segments": [], "device_traces": [[]], "extra": {b"/home/ann/x": 1}, b"/home/ann": 1, ("a", 2): 1}
    event = {"action": b"\x00/home/ann", "user_metadata": {"password": "plain", "n": (1, "/home/ann/x")}, "size": 7}
    assert scrub.clean_snapshot(odd | {"device_traces": [[event]]}) == {
        "segments": [],
        "device_traces": [[{"action": None, "user_metadata": {"password": "[secret]", "n": [1, "[path]"]}, "size": 7}]],
    }
    assert scrub.clean_snapshot([]) == []


def test_two_files_of_one_name_stay_two(tmp_path: Path) -> None:
    frames = [[{"name": "f", "filename": f"/home/{u}/train.py", "line": 1}] for u in ("ann1", "bob2")]
    allocator = Allocator()
    for stack in frames:
        allocator.malloc(512, frames=stack)
    clean = scrub.clean_snapshot(allocator.snapshot())
    names = {f["filename"] for event in clean["device_traces"][0] for f in event["frames"]}
    assert names == {"[path]/train.py", "[path 2]/train.py"}


def test_a_hostile_pickle_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, ("touch pwned",)

    whole = pickle.dumps(snapshot_with(PLANTED[:3]), 4)
    for name, raw in (
        *(("evil.pickle", pickle.dumps({"segments": [Evil()]}, 4)), ("cut.pickle", whole[: len(whole) // 2])),
        *(("other.pickle", pickle.dumps({"a": 1}, 4)), ("deep.pickle", b"\x80\x04" + b"(" * 100_000 + b"t." * 9)),
    ):
        path = tmp_path / name
        path.write_bytes(raw)
        with pytest.raises(TraceError, match=name):
            scrub.copy(path, tmp_path / "never.pickle")
    assert not (tmp_path / "never.pickle").exists()


SHAPE = '"1","7","(32, 1, 1)","(1, 1, 1)","0","9.0"'
NCU = f"""==PROF== Connected to process 4242 (/weird/{USER}/prog.py)
token {tokens()["GitHub"]}
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"gpu__time_duration.sum"
"","","","","","","","","","","","ns"
"0","4242","/home/{USER}/prog","{ORION}.example.org","void f<1, 2>(const char *, ""x"")",{SHAPE},"1,234"
"1","4242","prog","{ORION}.example.org","kernel on {ORION}",{SHAPE},"5"
"""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_a_page_of_ncu(encoding: str, tmp_path: Path) -> None:
    from nsightkit.trace import ncu

    path, out = tmp_path / "ncu.csv", tmp_path / "clean.csv"
    path.write_bytes(NCU.encode(encoding))
    scrub.copy(path, out)
    text = out.read_bytes().decode(encoding)
    assert survivors(text.encode(), [Secret("", (USER, ORION, tokens()["GitHub"]))]) == []
    assert '"void f<1, 2>(const char *, ""x"")","1","7","(32, 1, 1)"' in text
    assert '"1,234"' in text
    before, after = ncu.read(path), ncu.read(out)
    assert before.metrics == after.metrics
    assert after.launches["kernel"].tolist() == ['void f<1, 2>(const char *, "x")', "kernel on [host 2]"]
    assert scrub.copy(out, tmp_path / "again.csv").removed == []


def planted_trace() -> Trace:
    names = [s.text for s in PLANTED]
    at = pd.Series(np.arange(len(names)) * 100 + 5000)
    thread = 7 << 24 | 9
    kernel = {"start_ns": at + 20, "end_ns": at + 60, "process": 7, "name": pd.Categorical(names)}
    frames = {
        "kernels": pd.DataFrame(kernel | {"short_name": pd.Categorical(names)}),
        "ranges": pd.DataFrame(
            {"start_ns": at, "end_ns": at + 90, "process": 7, "thread": thread, "name": pd.Categorical(names),
             "domain": pd.Categorical(names), "kind": pd.Categorical(["pushpop"] * len(names))}
        ),
        "ops": pd.DataFrame(
            {"start_ns": at, "end_ns": at + 90, "process": 7, "thread": thread, "name": pd.Categorical(names),
             "inputs": pd.Categorical([json.dumps([[], [], [n]]) for n in names])}
        ),
    }  # fmt: skip
    for table in ("calls", "os_calls", "overhead", "frames"):
        columns = {"start_ns": at, "end_ns": at + 9, "process": 7, "thread": thread, "name": pd.Categorical(names)}
        frames[table] = pd.DataFrame(columns)
    frames["calls"]["kernel"] = pd.Categorical(names)
    meta = TraceMeta(
        tool="planted", notes=names, thread_names={thread: "; ".join(names[:50])}, driver=f"of {USER}",
        gpus=[Gpu(0, name=f"GPU of /home/{USER}")], distributed={"hostname": ORION, "env": {"PLAIN": "plantedvalue"}},
    )  # fmt: skip
    return Trace.from_frames(frames, meta)


@pytest.mark.parametrize("target", ["folder", "t.json", "t.json.gz"])
def test_no_secret_survives_a_conversion(target: str, tmp_path: Path) -> None:
    trace = planted_trace()
    out = tmp_path / target
    (chrome.write if ".json" in target else store.write)(trace, out)
    hidden = [*PLANTED, Secret("", (ORION, "plantedvalue"))]
    assert survivors(written(out), hidden) == []
    back = nsightkit.load(out)
    assert back.size("kernels") == len(PLANTED)
    assert back["ranges"]["name"].nunique() == trace["ranges"]["name"].nunique()
    assert scrub.copy(out, tmp_path / "again.json" if ".json" in target else tmp_path / "again").removed == []


def test_no_secret_survives_clean() -> None:
    trace = planted_trace()
    clean = scrub.clean(trace)
    texts = [str(name) for table in TABLES for _, column in clean.table(table).items()
             if isinstance(column.dtype, pd.CategoricalDtype) for name in column.cat.categories]  # fmt: skip
    everything = "\n".join([*texts, str(dataclasses.asdict(clean.meta))])
    assert survivors(everything.encode(), [*PLANTED, Secret("", (ORION, "plantedvalue"))]) == []
    for table, columns in TABLES.items():
        for column, dtype in columns.items():
            if dtype == "category":
                assert clean.table(table)[column].nunique() == trace.table(table)[column].nunique()
                assert np.array_equal(
                    pd.factorize(clean.table(table)[column])[0], pd.factorize(trace.table(table)[column])[0]
                )


def test_clean_is_lazy_shares_what_it_can_and_keeps_the_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsightkit.analysis.timeline.selection import select

    trace, asked, read = planted_trace(), [], FrameSource.read

    def watched(source: FrameSource, table: str, columns: Sequence[str]) -> pd.DataFrame:
        asked.extend((table, column) for column in columns)
        return read(source, table, columns)

    monkeypatch.setattr(FrameSource, "read", watched)
    clean = scrub.clean(trace)
    assert scrub.clean(trace) is clean
    assert scrub.clean(clean) is clean
    assert clean.whole is clean
    assert clean.t0_ns == trace.t0_ns
    assert asked == []
    assert clean.table("kernels", ["duration_ns"])["duration_ns"].tolist() == [40] * len(PLANTED)
    assert ("kernels", "name") not in asked
    first = int(trace["kernels"]["start_ns"].min())
    chosen = select(trace, time_ns=(None, first + 500))
    part = scrub.clean(chosen)
    assert part.whole is clean
    assert part.size("kernels") == chosen.size("kernels") < len(PLANTED)
    assert part["kernels"]["start_ns"].equals(chosen["kernels"]["start_ns"])
    assert "[" in part["kernels"]["name"].iloc[0]


def test_clean_knows_what_the_file_says_about_itself(tmp_path: Path) -> None:
    """No pattern knows that a word is a host's name: the export says so, in a table that no Trace has."""
    path = tmp_path / "x.sqlite"
    export = Export()
    thread = export.thread(7, 7)
    names = [f"epoch on {ORION}", f"by {GRACE}", "with k3y-of-nobody", "plain"]
    for i, name in enumerate(names):
        export.range(name, thread, 1000 * i, 1000 * i + 500)
    export.write(path)
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE IF EXISTS TARGET_INFO_SYSTEM_ENV")
    connection.commit()
    connection.close()
    identify(path)
    expected = ["epoch on [host]", "by [user]", "with [secret]", "plain"]
    assert scrub.clean(nsightkit.load(path))["ranges"]["name"].tolist() == expected
    folder = as_parquetdir(path, tmp_path / "export")
    assert scrub.clean(nsightkit.load(folder))["ranges"]["name"].tolist() == expected
    document = kineto([Secret(f"epoch on {ORION}", ()), Secret(f"on {HOST}", ())])
    (tmp_path / "t.json").write_text(json.dumps(document))
    named = scrub.clean(nsightkit.load(tmp_path / "t.json"))["ranges"]["name"].tolist()
    assert named == ["epoch on [host]", "on [host 2]"]


def test_a_folder_of_ours(tmp_path: Path) -> None:
    trace = planted_trace()
    dirty = tmp_path / "dirty"
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:  # as an older version wrote it
        patched.setattr(store, "clean", lambda t: t)
        store.write(trace, dirty)
    assert len(survivors(written(dirty), PLANTED)) > 40
    out = tmp_path / "clean"
    copied = scrub.copy(dirty, out)
    assert survivors(written(out), [*PLANTED, Secret("", (ORION, "plantedvalue"))]) == []
    assert {row["place"] for row in copied.removed} == {"names"}
    excused = {word for secret in PLANTED for word in secret.hidden} | {s.text for s in PLANTED} | {USER}
    before, after = nsightkit.load(dirty), nsightkit.load(out)
    before.meta.driver = after.meta.driver
    assert_same(before, after, lambda name: any(word in name for word in excused))
    assert scrub.copy(out, tmp_path / "again").removed == []


# ---------------------------------------------------------------- where the copy goes


def test_the_input_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sqlite"
    training(path)
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    os.link(path, tmp_path / "hard")
    monkeypatch.chdir(tmp_path)
    for out in (path, Path("x.sqlite"), tmp_path / "sub" / ".." / "x.sqlite", tmp_path / "link", tmp_path / "hard"):
        (tmp_path / "sub").mkdir(exist_ok=True)
        for overwrite in (False, True):
            with pytest.raises(UsageError, match="trace itself"):
                scrub.copy(path, out, overwrite=overwrite)
    with pytest.raises(UsageError, match="trace itself"):
        scrub.copy(tmp_path / "link", path, overwrite=True)
    folder = as_parquetdir(path, tmp_path / "export")
    for out in (folder, folder / "inside", tmp_path):
        with pytest.raises(UsageError):
            scrub.copy(folder, out, overwrite=True)
    assert path.read_bytes() == before


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path, out = tmp_path / "x.sqlite", tmp_path / "out.sqlite"
    training(path)
    out.write_text("mine")
    with pytest.raises(UsageError, match="--overwrite"):
        scrub.copy(path, out)
    assert out.read_text() == "mine"
    Path(f"{out}-wal").write_text("a log of another database")
    scrub.copy(path, out, overwrite=True)
    assert not Path(f"{out}-wal").exists()
    assert_same(nsightkit.load(path), nsightkit.load(out))
    Path(f"{tmp_path / 'other.sqlite'}-wal").write_text("a log of another database")
    with pytest.raises(UsageError, match="-wal"):
        scrub.copy(path, tmp_path / "other.sqlite")
    target = tmp_path / "target.sqlite"
    target.write_text("kept")
    (tmp_path / "link").symlink_to(target)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is a link"):
            scrub.copy(path, tmp_path / "link", overwrite=overwrite)
    assert target.read_text() == "kept"
    folder = as_parquetdir(path, tmp_path / "export")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    for place in (tmp_path / "home", target):
        with pytest.raises(UsageError):
            scrub.copy(folder, place, overwrite=True)
    with pytest.raises(UsageError, match="folder"):
        scrub.copy(path, tmp_path / "home", overwrite=True)
    scrub.copy(folder, tmp_path / "copy")
    with pytest.raises(UsageError, match="did not write"):  # a folder of Parquet files may be anybody's
        scrub.copy(folder, tmp_path / "copy", overwrite=True)
    with pytest.raises(UsageError, match="make it first"):
        scrub.copy(path, tmp_path / "no" / "such" / "x.sqlite")
    assert (tmp_path / "home" / "thesis.tex").read_text() == "mine"
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_nothing_is_left_behind_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sqlite"
    training(path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        scrub.copy(path, tmp_path / "out.sqlite")
    assert [p.name for p in tmp_path.iterdir()] == ["x.sqlite"]


def test_a_full_disk_is_not_the_traces_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sqlite"
    training(path)
    folder = as_parquetdir(path, tmp_path / "export")
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    for what, given, error in (
        ("_copy_table", path, full),
        ("_copy_table", path, OSError(28, "No space left on device")),
        ("pq.ParquetWriter", folder, OSError(28, "No space left on device")),
    ):

        def fail(*_: Any, _error: Exception = error, **__: Any) -> None:
            raise _error

        with monkeypatch.context() as patched:
            patched.setattr(f"nsightkit.trace.share.nsys.{what}", fail)
            with pytest.raises(UsageError, match=r"out: cannot be written \(No space left"):
                scrub.copy(given, tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("x.nsys-rep", b"\x00binary", "nsys export --type sqlite"),
        ("x y.ncu-rep", b"NVR\0", "ncu '--import=x y.ncu-rep'"),
        ("x.qdstrm", b"\x00binary", "nsys-rep"),
        ("x.txt", b"hello", "not a trace"),
        ("x.sqlite", b"", "is empty"),
    ],
)
def test_what_cannot_be_scrubbed_says_what_to_do(name: str, raw: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(raw)
    with pytest.raises(TraceError, match=re.escape(says)):
        scrub.copy(path, tmp_path / "out")
    with pytest.raises(TraceError, match="no such file"):
        scrub.copy(tmp_path / "absent", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- real files


def real_files(shared: Path) -> Iterator[Path]:
    for path in sorted(shared.glob("*/*")):
        if path.name.endswith((".sqlite", ".json.gz", ".pickle")):
            yield path


def test_no_name_of_a_real_trace_is_taken_for_a_secret(shared_traces: Path) -> None:
    """Names of kernels, operators, calls and ranges in all of them, read without their readers."""
    scrubber = Scrubber(machine=False)
    seen = 0
    for path in real_files(shared_traces):
        if path.suffix == ".gz":
            names = set(re.findall(r'"name": ?"((?:[^"\\]|\\.)*)"', gzip.decompress(path.read_bytes()).decode()))
        elif path.suffix == ".sqlite":
            connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            names = set()
            for table, columns in (
                ("CUPTI_ACTIVITY_KIND_KERNEL", ("demangledName", "shortName", "mangledName")),
                ("CUPTI_ACTIVITY_KIND_RUNTIME", ("nameId",)),
                ("OSRT_API", ("nameId",)),
                ("NVTX_EVENTS", ("textId", "text")),
            ):
                for column in columns:
                    have = table in tables and column in [c for c, _, _ in columns_of(connection, table)]
                    if have and column == "text":
                        names |= {n for (n,) in connection.execute("SELECT text FROM NVTX_EVENTS") if n}
                    elif have:
                        query = f"SELECT DISTINCT value FROM {table} JOIN StringIds ON StringIds.id = {column}"
                        names |= {n for (n,) in connection.execute(query)}
            connection.close()
        else:
            continue
        assert [name for name in names if scrubber.text(name) != name] == [], path.name
        seen += len(names)
    assert seen > 20_000


@pytest.mark.parametrize(
    "name",
    [
        *("StellaWava/report1.sqlite", "cs336-zx3xyy/result_2_7B_nvtx.sqlite", "memfusion/report1.sqlite"),
        *(
            "nsys-ai/mfu_2gpu_before.sqlite",
            "pipit/saxpy-mpi-cuda_nsys_perlmutter0.sqlite",
            "tutorial_vqe/report1.sqlite",
        ),
        *("hta/cpu_only__rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", "hta/trace_filter__sampled_rank-0.json.gz"),
        *(
            "hta/triton_example__triton_example.json.gz",
            "hta/distributed_info_unavailable__distributed_info_not_found.json.gz",
        ),
        "kineto/resnet50_num_workers_4__worker0.1623212756351.pt.trace.json.gz",
        "tracelens/h100__facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    ],
)
def test_a_real_trace_analyses_as_before(name: str, shared_traces: Path, tmp_path: Path) -> None:
    path, out = shared_traces / name, tmp_path / Path(name).name
    if path.stat().st_size > 1 << 20 and name.startswith("kineto"):  # its call stacks matter, not how many there are
        document = json.loads(gzip.decompress(path.read_bytes()))
        document["traceEvents"] = document["traceEvents"][:6000]
        path = tmp_path / "part.json.gz"
        path.write_bytes(gzip.compress(json.dumps(document).encode(), 1))
    scrub.copy(path, out)
    raw = written(out)
    assert not re.search(rb"/home/(?!runner)\w|/Users/|ENVIRONMENT_VARIABLE\b.{0,9}[A-Z_]+=", raw)
    assert_same(nsightkit.load(path), nsightkit.load(out))
    assert scrub.copy(out, tmp_path / f"again.{out.name}").removed == []


def test_real_snapshots_analyse_as_before(shared_traces: Path, tmp_path: Path) -> None:
    for path in real_files(shared_traces):
        if path.suffix == ".pickle":
            out = tmp_path / path.name
            scrub.copy(path, out)
            assert memory.summary(snapshot.read(path)) == memory.summary(snapshot.read(out))
            assert b"/root/" not in out.read_bytes()
            assert b"/home/" not in out.read_bytes()


PROGRAM = """
import time, nvtx
for i in range(3):
    with nvtx.annotate(f"step {i}"):
        time.sleep(0.005)
print("printed by the program: 4711-0815")
"""


def ordinary(value: str) -> bool:
    """Whether a variable's value is a word, a number or a place that every such machine has."""
    return re.fullmatch(r"[\d.,:]+|[A-Za-z]+|/(usr|bin|etc|sbin|lib|dev)(/[\w.\-]+)*", value) is not None


def test_a_real_report_of_this_machine(nsys: Path, tmp_path: Path) -> None:
    """nsys copies this very environment into its report; nothing of it is in the copy, in any format nsys exports."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    secret = tokens()["GitHub"]
    environment = {**os.environ, "PLANTED_SECRET": secret, "PLANTED_LABEL": "planted-label-4711"}
    report = tmp_path / "r.nsys-rep"
    command = [str(nsys), "profile", "-t", "nvtx,osrt", "-s", "none", "--cpuctxsw=none", "-o", str(tmp_path / "r")]
    done = subprocess.run(
        [*command, sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if not report.is_file():
        pytest.skip(f"nsys wrote no report here: {(done.stdout + done.stderr)[-300:]}")
    entries = {name: value for name, value in environment.items() if len(value) > 8 and not ordinary(value)}
    for kind, name in (("sqlite", "r.sqlite"), ("parquetdir", "r_pqtdir")):
        path, out = tmp_path / name, tmp_path / f"clean-{name}"
        export = [str(nsys), "export", "--type", kind, "--force-overwrite", "true", "-o", str(path), str(report)]
        subprocess.run(export, capture_output=True, timeout=120, check=True)
        assert secret.encode() in written(path)
        scrub.copy(path, out)
        raw = written(out)
        assert [n for n, value in entries.items() if value.encode() in raw] == []
        assert [n for n in entries if len(n) > 6 and f"{n}=".encode() in raw] == []
        for text in (secret, "planted-label-4711", "4711-0815", str(tmp_path), os.uname().nodename + ".", "PLANTED_"):
            assert text.encode() not in raw, text
        assert_same(nsightkit.load(path), nsightkit.load(out))
        assert scrub.copy(out, tmp_path / f"again-{name}").removed == []
    assert_same(nsightkit.load(report), scrub.clean(nsightkit.load(report)), lambda text: "/" in text or "=" in text)


def test_a_copy_of_an_export_opens_in_nsys(nsys: Path, shared_traces: Path, tmp_path: Path) -> None:
    """NVIDIA's own statistics read the copy, and say the same."""
    path = shared_traces / "cs336-zx3xyy" / "result_2_7B_compile_ro.sqlite"
    said = []
    for name, source in (("before.sqlite", path), ("after.sqlite", None)):
        target = tmp_path / name
        shutil.copyfile(path, target) if source else scrub.copy(path, target)
        command = [str(nsys), "stats", "-q", "--format", "csv", "--report", "cuda_gpu_kern_sum", str(target)]
        said.append(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout)
    assert "Name" in said[0]
    assert said[0] == said[1]


def test_errors_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NsightkitError):
        scrub.copy(tmp_path, tmp_path / "out")

    def locked(_: Path) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "kind_of", locked)
    with pytest.raises(TraceError, match="Permission denied"):
        scrub.copy(tmp_path, tmp_path / "out")
