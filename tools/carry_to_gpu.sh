#!/usr/bin/env bash
# Fetch what a GPU machine without a network lacks: packages for its Python (3.12, x86-64), at the versions of
# constraints.txt, and the libraries without which the nsys inside Nsight Compute writes no report.
#
#   tools/carry_to_gpu.sh .carried [PACKAGE...]     here; the folder travels with the checkout, git ignores it
#   pip install --no-index --no-deps .carried/wheels/*.whl                  there
#   export NSIGHTKIT_NSYS_LIBRARIES=$PWD/.carried/lib                       there
#
# Without names it fetches what images for PyTorch do not have. `nsightkit doctor` names there what is missing.
set -euo pipefail

fail() {
    echo "carry_to_gpu.sh: $*" >&2
    exit 1
}

[ $# -ge 1 ] || fail "usage: tools/carry_to_gpu.sh DIR [PACKAGE...]"
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p -- "$1/wheels" "$1/lib" && dir=$(cd -- "$1" && pwd) || fail "cannot make the folder $1"
shift
[ $# -gt 0 ] || set -- msgspec adbc-driver-manager adbc-driver-sqlite nvtx
rm -f "$dir"/wheels/*.whl # two versions of one package cannot be installed

# pip takes each platform by its exact name; a wheel for an older glibc runs on a newer one.
platforms=(--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64)
python3 -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
    "${platforms[@]}" --constraint "$root/constraints.txt" --dest "$dir/wheels" "$@" ||
    fail "pip found no wheel of one of these for Python 3.12 on x86-64: $*"

# The importer of nsys needs libdw, and that libelf. Newer releases of Debian and Ubuntu call the packages otherwise.
if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then
    work=$(mktemp -d "$dir/.fetch.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    for kind in "" t64; do
        apt-get -qq -o APT::Sandbox::User=root download "libdw1$kind:amd64" "libelf1$kind:amd64" 2>"$work/log" && break
    done || fail "apt-get found no libdw1 and libelf1 for amd64: $(tail -n 1 "$work/log")"
    for package in "$work"/*.deb; do
        dpkg-deb -x "$package" "$work/root"
    done
    for name in libdw.so.1 libelf.so.1; do # files, for links may not travel
        cp -L "$work/root/usr/lib/x86_64-linux-gnu/$name" "$dir/lib/$name"
    done
else
    echo "carry_to_gpu.sh: no apt-get here, so $dir/lib lacks libdw.so.1 and libelf.so.1" >&2
fi
ls "$dir"/wheels "$dir"/lib
