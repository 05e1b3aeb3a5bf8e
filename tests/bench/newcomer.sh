#!/usr/bin/env bash
# How long a newcomer waits, in a fresh clone with fresh environments: the times that the README and CONTRIBUTING.md give.
#
#   tests/bench/newcomer.sh TRACE      such as a .sqlite or .json.gz of one's own
set -euo pipefail
[ $# -eq 1 ] && [ -r "$1" ] || { echo "usage: newcomer.sh TRACE" >&2; exit 2; }
trace=$(realpath -- "$1")
repository=$(realpath -- "$(dirname "${BASH_SOURCE[0]}")/../..")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 XDG_CACHE_HOME=$work/cache PIP_CACHE_DIR=$work/cache/pip

timed() { # timed WHAT COMMAND...
    local what=$1 begun
    shift
    begun=${EPOCHREALTIME/./}
    "$@" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; echo "$what failed" >&2; exit 1; }
    printf '%4d.%d s  %s\n' $(((${EPOCHREALTIME/./} - begun) / 1000000)) $(((${EPOCHREALTIME/./} - begun) / 100000 % 10)) "$what"
}

timed "clone" git clone -q "$repository" "$work/nsightkit"
cd "$work/nsightkit"
echo "From nothing to an answer:"
timed "a virtual environment" python3 -m venv .venv
timed "pip install ." .venv/bin/pip install -q .
timed "nsightkit verdict, the first time" .venv/bin/nsightkit verdict "$trace"
timed "nsightkit gaps, a second question" .venv/bin/nsightkit gaps "$trace"

echo "From an idea to its page:"
timed "pip install nox" .venv/bin/pip install -q nox
PATH=$work/nsightkit/.venv/bin:$PATH
timed "nox -s new" nox -s new -- pinned-copies "Does pinned memory pay?"
timed "nox -s docs -- --only, the first time: it installs what pages need" nox -s docs -- --only pinned-copies
page=$(echo examples/*pinned_copies.py)
printf '\n# %%%%\n# A sentence more.\n' >>"$page"
timed "nox -s docs -- --only, after an edit" nox -s docs -- --only pinned-copies
timed "its test" nox -s tests -- -q -n 0 tests/workloads/test_pinned_copies.py
