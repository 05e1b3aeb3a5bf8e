"""The key of a recording: what changes it, and what does not."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nsightkit
from nsightkit.investigations import parts as investigations
from nsightkit.investigations import recordings
from nsightkit.investigations.what_runs import closure, key

PART = investigations.find("starved-input", "before")

SOURCE = '''
"""A module."""
import numpy
from nsightkit.workloads import phases

SIZE = 3
UNUSED = 4


class Model:
    """A docstring."""

    width = SIZE

    def run(self, x):
        # a comment
        return _helper(x) + self.width


def _helper(x):
    with phases.phase("a"):
        return x * 2


def other(x):
    return x


def start(device, **parameters):
    """Begin."""
    return Model()
'''


PHASES = """
def phase(name):
    return name
"""


def key_of(source: str, root: Path, **parameters: object) -> str:
    """Key of a workload with this source, in a package that looks like ours; `root` can be asked once."""
    folder = root / "nsightkit" / "workloads"
    folder.mkdir(parents=True)
    (folder / "phases.py").write_text(PHASES)
    (folder / "fresh.py").write_text(source)
    return key(["nsightkit.workloads.fresh:start"], {"size": 1, **parameters}, {"warmup": 1}, root)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another comment"),
        ('"""A docstring."""', '"""Other words."""\n    # more'),
        ('    """Begin."""\n', ""),
        ("return x * 2", "return (\n            x\n            * 2\n        )"),
        ("UNUSED = 4", "UNUSED = 5"),
        ("def other(x):\n    return x", "def other(x):\n    return x + 1"),
        ("import numpy", "import numpy\nimport json"),
    ],
)
def test_what_does_not_decide_the_figures_keeps_the_key(tmp_path: Path, old: str, new: str) -> None:
    assert old in SOURCE
    before = key_of(SOURCE, tmp_path / "before")
    assert key_of(SOURCE.replace(old, new), tmp_path / "after") == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * 2", "x * 3"),  # a function that is called
        ("SIZE = 3", "SIZE = 4"),  # a constant that is read
        ("+ self.width", "- self.width"),  # a method
        ('phase("a")', 'phase("b")'),
        ("return Model()", "return None"),
    ],
)
def test_what_decides_the_figures_changes_the_key(tmp_path: Path, old: str, new: str) -> None:
    before = key_of(SOURCE, tmp_path / "before")
    assert key_of(SOURCE.replace(old, new), tmp_path / "after") != before


def test_parameters_are_part_of_the_key(tmp_path: Path) -> None:
    assert key_of(SOURCE, tmp_path / "one") != key_of(SOURCE, tmp_path / "two", size=2)
    assert recordings.part_key(PART) != recordings.part_key(dataclasses.replace(PART, active=PART.active + 1))
    by_key: dict[str, list[investigations.Part]] = {}
    for part in investigations.parts():
        by_key.setdefault(recordings.part_key(part), []).append(part)
    for alike in by_key.values():  # what is measured more than once, to see how runs differ
        of_first = (alike[0].investigation, alike[0].workload, alike[0].gpu, alike[0].counts("live"))
        assert all((p.investigation, p.workload, p.gpu, p.counts("live")) == of_first for p in alike)
    assert len(by_key) > 0.9 * len(list(investigations.parts()))


def test_the_key_covers_the_measuring_and_the_workload() -> None:
    covered = closure(PART.code)
    for name in (
        "nsightkit.investigations.ways_to_measure:timed",
        "nsightkit.capture.timing:time_calls",
        "nsightkit.capture.timing:_between_marks",
        "nsightkit.capture.torch_profiler:profile_steps",
        "nsightkit.capture._under_profiler:profiler",
        "nsightkit.workloads.phases:phase",
        "nsightkit.workloads.training:Training",
        "nsightkit.workloads.training:TrainingConfig",
        "nsightkit.workloads.training:_ElementaryAdamW",
        "nsightkit.workloads.models:rotated",
    ):
        assert name in covered
    # A module that is chosen at run time and passed on counts as a whole.
    covered |= closure(["nsightkit.workloads.layer:start", "nsightkit.workloads.limiters:start"])
    for name in ("layer_triton:Decode", "layer_triton:_row_kernel", "limiters_triton:_walk_kernel"):
        assert f"nsightkit.workloads.{name}" in covered
    for name in covered:  # what only describes must not make recordings stale
        assert not name.startswith(("nsightkit.capture.provenance", "nsightkit.investigations.measurement"))
    with pytest.raises(LookupError):
        closure(["nsightkit.workloads.training:nothing"])


def test_the_key_of_an_observed_part_covers_the_observing() -> None:
    part = investigations.find("autocast", "before")
    covered = closure(part.code)
    for name in ("nsightkit.investigations.ways_to_measure:observed", "nsightkit.workloads.autocast:saved"):
        assert name in covered
    assert "nsightkit.investigations.ways_to_measure:timed" not in covered
    assert recordings.part_key(part) != recordings.part_key(dataclasses.replace(part, measured="timed"))


def test_the_key_is_the_same_on_other_pythons() -> None:
    """Recordings are made under another Python than the pages."""
    arguments = f"{PART.code}, {PART.parameters('live')}, {PART.counts('live')}"
    program = f"from nsightkit.investigations.what_runs import key; print(key({arguments}))"
    others = [p for v in range(11, 16) if v != sys.version_info[1] and (p := shutil.which(f"python3.{v}"))]
    compared = 0
    for other in others:
        done = subprocess.run(
            [other, "-c", program], env={**os.environ, "PYTHONPATH": str(Path(nsightkit.__file__).parents[1])},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if done.returncode == 0:  # a launcher may have no Python behind it
            assert done.stdout.strip() == recordings.part_key(PART)
            compared += 1
    if not compared:
        pytest.skip("only one Python here")
