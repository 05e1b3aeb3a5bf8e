"""What this machine is and has: provenance, the doctor; and what importing capture loads."""

import json
import subprocess
import sys

import pytest
import stand_in_nsight

from nsightkit.capture import children, doctor, provenance


def test_importing_capture_loads_nothing_heavy():
    program = "import sys, nsightkit.capture; print({'torch', 'pandas', 'numpy', 'nvtx'} & set(sys.modules))"
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, env=children.child_environment(), text=True) == "set()\n"


def test_provenance_names_machine_versions_and_code():
    facts = provenance.collect(device="cpu", kind="small", counts={"warm-up": 1, "timed": 2}, load=None)
    assert {"format", "kind", "utc", "commit", "dirty", "gpu", "cpu", "software"} <= facts.keys()
    assert {"os", "python", "torch", "triton", "nsys", "ncu", "nsightkit"} <= facts["software"].keys()
    json.dumps(facts)
    rows = dict(provenance.provenance_rows(facts))
    assert (rows["counts warm-up"], rows["counts timed"]) == ("1", "2")
    assert rows["software python"] == sys.version.partition(" ")[0]
    assert not {"gpu", "load"} & rows.keys()
    assert provenance.slug("NVIDIA H200 / PCIe") == "nvidia-h200-pcie"


@pytest.mark.parametrize(
    ("given", "commit"), [("0123abc", ("0123abc", False)), ("0123abcdef-dirty", ("0123abcdef", True))]
)
def test_a_tree_without_git_may_be_told_its_commit(monkeypatch, given, commit):
    monkeypatch.setenv("NSIGHTKIT_COMMIT", given)
    facts = provenance.collect(device="cpu")
    assert (facts["commit"], facts["dirty"]) == commit


def _checks():
    """The doctor's rows, by the first word of a check."""
    return {row["check"].split()[0]: row for row in doctor.check_machine()}


def test_the_doctor_has_a_remedy_for_what_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    checks = _checks()
    for row in checks.values():
        assert row.keys() == {"check", "status", "found", "remedy"}
        assert bool(row["remedy"]) == (row["status"] != "ok"), row
        assert "\n" not in "".join(row.values())
    assert checks["nsys"]["status"] == "missing"
    assert "nsightkit[ncu]" in checks["ncu-report"]["remedy"]


def test_the_doctor_names_libraries_that_the_importer_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(stand_in_nsight.nsys(tmp_path, "exit 1")))
    monkeypatch.setattr(doctor, "importer", lambda nsys: nsys.with_name("QdstrmImporter"))
    monkeypatch.setattr(doctor, "output_of", lambda *_, **__: "libdw.so.1 => not found\nlibz.so => /lib/libz.so")
    row = _checks()["nsys"]  # of two, the importer's comes second
    assert (row["status"], row["found"]) == ("missing", f"{tmp_path}/QdstrmImporter lacks libdw.so.1")
    assert "NSIGHTKIT_NSYS_LIBRARIES" in row["remedy"]


@pytest.mark.nsys
def test_the_doctor_approves_of_a_real_nsys(nsys, monkeypatch):
    monkeypatch.setenv("NSIGHTKIT_NSYS", str(nsys))
    rows = [row for row in doctor.check_machine() if row["check"].startswith("nsys")]
    assert [row["status"] for row in rows] == ["ok", "ok"]
