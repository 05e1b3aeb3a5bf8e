#!/usr/bin/env python3
"""Ask for the bottleneck of every trace whose cause is known, and write the confusion table of the definitions page.

``python tools/confusion.py`` answers the corpus of ``tests/corpus`` and writes ``docs/judgement.json``. Real traces
that are not at hand keep the answer they have there. ``python tools/confusion.py extract OWNER/NAME CLONE FOLDER``
copies the labelled captures out of a clone of a public repository; NSIGHTKIT_PUBLIC then names FOLDER.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import corpus  # noqa: E402

TABLE = ROOT / "docs" / "judgement.json"
GOLDEN = ROOT / "tests" / "corpus" / "golden.json"


def extract(repository: str, clone: str, folder: str) -> int:
    """Copy the labelled captures of a repository out of a clone.

    Parameters
    ----------
    repository : str
        Its name as in labels.toml, owner/name.
    clone, folder : str
    """
    labels = tomllib.loads((ROOT / "tests" / "corpus" / "labels.toml").read_text(encoding="utf-8"))["trace"]
    wanted = [label for label in labels if label.get("repository") == repository]
    for label in wanted:
        target = Path(folder, f"{label['file']}{label['suffix']}")
        target.parent.mkdir(parents=True, exist_ok=True)
        content = subprocess.run(
            ["git", "-C", clone, "cat-file", "blob", label["blob"]], capture_output=True, check=True
        )
        target.write_bytes(content.stdout)
        print(target)
    return 0 if wanted else 1


def answers() -> tuple[dict[str, Any], dict[str, Any]]:
    """Answer the corpus: the rows of the table, and all of each answer."""
    table: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    golden: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    entries = [*corpus.planted(), *corpus.played(), *corpus.real()]
    rows: dict[str, Any] = {"planted": {}, "played": {}, "real": {}, "random": table["random"]}
    for entry in entries:
        with tempfile.TemporaryDirectory() as scratch:
            path = entry.write(Path(scratch))
            if path is None:
                if entry.name in table[entry.source]:
                    rows[entry.source][entry.name] = table[entry.source][entry.name]
                continue
            answer = corpus.answer(path)
        kind = corpus.judge(entry, answer.bottleneck, answer.confidence)
        rows[entry.source][entry.name] = [entry.truth, answer.bottleneck, answer.confidence, answer.is_refused, kind]
        golden[f"{entry.source}: {entry.name}"] = {"gaps": answer.gaps, "gains": answer.gains}
        if kind != "right":
            print(f"{kind}: {entry.source} {entry.name} is {entry.truth}, answered {answer.bottleneck}")
    names = {f"{source}: {name}" for source, members in rows.items() for name in members}
    return rows, {name: golden[name] for name in sorted(names & set(golden))}


def written(sections: dict[str, dict[str, Any]]) -> str:
    """Write JSON with a line for each trace.

    Parameters
    ----------
    sections : dict
    """
    parts = []
    for section, members in sections.items():
        lines = [f"  {json.dumps(name)}: {json.dumps(members[name])}" for name in sorted(members)]
        parts.append(f" {json.dumps(section)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    """Write the table; see the module's text."""
    if sys.argv[1:2] == ["extract"]:
        return extract(*sys.argv[2:])
    rows, golden = answers()
    TABLE.write_text(written(rows), encoding="utf-8")
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in golden.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for source in ("planted", "played", "real"):
        print(source, dict(Counter(row[4] for row in rows[source].values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
