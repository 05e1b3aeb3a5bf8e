#!/usr/bin/env python3
# /// script
# dependencies = ["nox>=2026.10"]
# ///
"""Everything that is done to nsightkit: `nox -l` lists the targets, `nox -s docs` runs one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PROJECT = nox.project.load_toml()
ROOT = Path(__file__).parent
HTML = Path("docs/_build/html")
DOCTREES = "docs/_build/doctrees"  # not in the folder that is published
#: What a docs build makes; an old gallery can hide a failure (see CONTRIBUTING.md), so a build starts without it.
GENERATED = ("docs/_build", "docs/gallery", "docs/reference/generated", "docs/jupyter_execute")


def _install(session: nox.Session, *groups: str) -> None:
    """Install nsightkit and dependency groups, at the versions of constraints.txt."""
    constraints = ROOT / "constraints.txt"
    if os.environ.get("NSIGHTKIT_TORCH") == "installed":
        constraints = _use_installed_torch(session, constraints)
    session.install("-c", str(constraints), "-e", ".", *nox.project.dependency_groups(PROJECT, *groups))


def _use_installed_torch(session: nox.Session, constraints: Path) -> Path:
    """Let the session see the packages of the interpreter nox runs with, and hold torch at the version there."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        session.error(f"NSIGHTKIT_TORCH=installed, but {sys.executable} has no torch: install one there first")
    outer = dict.fromkeys(p for p in sys.path if Path(p).name in {"site-packages", "dist-packages"})
    # A .pth file puts them behind the session's own packages, which system-site-packages does only for the base
    # interpreter, not for the virtual environment that a person has installed torch into.
    purelib = sysconfig.get_path("purelib", vars={"base": str(session.virtualenv.location)})
    Path(purelib, "_outer_torch.pth").write_text("\n".join(outer) + "\n", encoding="utf-8")
    pins = [line for line in constraints.read_text(encoding="utf-8").splitlines() if not line.startswith("torch==")]
    held = Path(session.create_tmp(), "constraints.txt")
    held.write_text("\n".join([*pins, f"torch=={version}", ""]), encoding="utf-8")
    return held


def _build(session: nox.Session, *options: str, publish: bool = False) -> None:
    for made in GENERATED:
        shutil.rmtree(ROOT / made, ignore_errors=True)
    env = {"NSIGHTKIT_PUBLISH": "1"} if publish else {}
    session.run("python", "docs/_ext/page_lint.py")
    strict = ["-W", "-n", "-E", "--keep-going", "-j", "auto"]
    session.run("sphinx-build", "-c", ".", "-d", DOCTREES, "docs", str(HTML), *strict, *options, env=env)
    session.run("python", "docs/_ext/page_checks.py", str(HTML))


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the site from nothing and check it; `-- --publish` refuses stale recordings, `-- --only SLUG`: one page."""
    _install(session, "docs")
    options = list(session.posargs)
    if "--only" in options:
        at = options.index("--only")
        if len(options) == at + 1:
            session.error("--only takes the name of an investigation's page, such as hidden-synchronisation")
        _build_one(session, options[at + 1], *options[:at], *options[at + 2 :])
        return
    _build(session, *(o for o in options if o != "--publish"), publish="--publish" in options)


def _build_one(session: nox.Session, name: str, *options: str) -> None:
    """Build the page of one investigation into a folder of its own."""
    wanted = name.replace("-", "_").removesuffix(".py")
    found = [p for p in sorted(Path("examples").glob("[0-9]*.py")) if wanted in {p.stem, p.stem[3:], p.stem[:2]}]
    if len(found) != 1:
        pages = ", ".join(p.stem for p in sorted(Path("examples").glob("[0-9]*.py")))
        session.error(f"no page {name!r}; there are {pages}")
    out = Path("docs/_build/only")
    for made in (out, Path("docs/gallery")):
        shutil.rmtree(ROOT / made, ignore_errors=True)
    session.run("python", "docs/_ext/page_lint.py", str(found[0]))
    env = {"NSIGHTKIT_ONLY": found[0].stem}
    command = ("sphinx-build", "-c", ".", "-d", str(out / "doctrees"), "docs", str(out / "html"), "-W", "-E", "-q")
    session.run(*command, "--keep-going", *options, env=env)
    session.run("python", "docs/_ext/page_checks.py", str(out / "html"), "--only", found[0].stem)
    session.log(f"{out / 'html' / 'gallery' / found[0].stem}.html")


@nox.session(default=False)
def new(session: nox.Session) -> None:
    """Begin an investigation: `-- SLUG "Title?"` writes a page and a test that runs it small."""
    session.run("python", "tools/new_investigation.py", *session.posargs)


@nox.session(name="docs-live", default=False)
def docs_live(session: nox.Session) -> None:
    """Serve the site on localhost and rebuild what is edited; unchanged gallery scripts are not run again."""
    _install(session, "live")
    ignored = [option for made in (*GENERATED, "docs/recordings") for option in ("--ignore", str(ROOT / made / "*"))]
    watched = [option for folder in ("examples", "nsightkit") for option in ("--watch", folder)]
    session.run("sphinx-autobuild", "-c", ".", "-d", DOCTREES, "docs", str(HTML), *ignored, *watched, *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; arguments go to pytest."""
    _install(session, "test", "docs")
    # A file stays in one process, for what its tests share. Files go in their order: by the number of their tests, the
    # file with the slowest ones would come last and leave the other processes idle.
    # One process more than there are processors: many tests wait for a child or a server.
    processes = str((os.cpu_count() or 1) + 1)
    spread = ["-n", processes, "--dist", "loadfile", "--no-loadscope-reorder"]
    # nsys loses its helper process now and then where all processors are busy: that failure, and no other, is tried
    # again.
    again = ["--reruns", "2", "--only-rerun", "nsys wrote no report", "--only-rerun", "could not import its raw"]
    session.run("pytest", "-m", "not site", *spread, *again, *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, spelling and markup."""
    session.install("-c", "constraints.txt", *nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell")
    ignored = [option for made in GENERATED for option in ("--ignore", made)]
    session.run("sphinx-lint", *ignored, "docs", "examples", "README.md")
    session.run("python", "docs/_ext/page_lint.py")
    session.run("repo-review", ".")
    session.run("zizmor", "--offline", "--quiet", ".github")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of the package, strictly."""
    _install(session, "types")
    session.run("mypy", *session.posargs)


@nox.session(default=False)
def site(session: nox.Session) -> None:
    """Read the built site and use its timeline with a browser: errors, accessibility, width, links, weight."""
    if (ROOT / HTML / "index.html").is_file():
        _install(session, "site")
    else:
        _install(session, "site", "docs")
        _build(session)
    # Other files of tests need what is not installed here. Each process reads pages with a browser of its own, and half
    # of the time it waits for the page.
    processes = str(2 * (os.cpu_count() or 1))
    files = [str(p) for p in sorted(Path("tests").rglob("test_*.py")) if "pytest.mark.site" in p.read_text("utf-8")]
    session.run("pytest", "-m", "site", "-n", processes, *files, *session.posargs)


@nox.session(default=False)
def record(session: nox.Session) -> None:
    """Record the pages on a machine with a GPU; `-- 02 --budget-s 600` records one, and stops after ten minutes."""
    _install(session, "test")
    session.run("python", "tools/record.py", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Measure reading and analysing big traces against the alternatives."""
    _install(session, "test")
    session.run("python", "tests/bench/run.py", *session.posargs)


if __name__ == "__main__":
    nox.main()
