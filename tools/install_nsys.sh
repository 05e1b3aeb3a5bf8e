#!/usr/bin/env bash
# Unpack Nsight Systems 2023.4 from Debian 13 (non-free) into a folder of its own, on Debian 12 or later.
# It needs no GPU: profiling NVTX ranges and OS calls, export and stats all work without one.
#
#   tools/install_nsys.sh DIR      then DIR/bin/nsys runs; about 190 MB to fetch, 700 MB unpacked
#
# Packages come from the Debian mirror that this machine's apt already uses, checked with Debian's keys.
# Run it as root: a few small libraries are installed with apt-get where they are absent.
set -euo pipefail

fail() {
    echo "install_nsys.sh: $*" >&2
    exit 1
}

[ $# -eq 1 ] && [ -n "$1" ] || fail "usage: tools/install_nsys.sh DIR"
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian machine (no apt-get)"
[ "$(dpkg --print-architecture)" = amd64 ] || fail "only amd64 is supported, this is $(dpkg --print-architecture)"
mkdir -p -- "$1" 2>/dev/null && dir=$(cd -- "$1" && pwd) || fail "cannot make the folder $1"
case $dir in *[[:space:]]*) fail "nsys cannot run from a folder with blanks in its name: $dir" ;; esac

# Done already, and whole: the wrapper is written last.
if [ -x "$dir/bin/nsys" ] && timeout 60 "$dir/bin/nsys" --version; then
    exit 0
fi
[ "$(id -u)" = 0 ] || fail "run it as root, or with sudo"
[ "$(df --output=avail -k "$dir" | tail -n 1)" -gt 1200000 ] || fail "$dir has less than 1.2 GB free"

work=$(mktemp -d "$dir/.install.XXXXXX")
trap 'rm -rf "$work"' EXIT
log=$work/log
quietly() {
    local what=$1
    shift
    "$@" >"$log" 2>&1 || fail "$what failed: $(grep -E '^(E|W):|error' "$log" | tail -n 1)"
}

# A private view of Debian 13's non-free packages: the machine's own lists and sources stay as they are.
mirrors=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | sed 's#/*$##' | grep -E '/debian$' | sort -u) || true
[ -n "$mirrors" ] || fail "apt's sources name no Debian mirror (none ends in /debian)"
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -r "$keys" ] || fail "Debian's keys are absent: apt-get install debian-archive-keyring"
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
private=(
    -o "Dir::Etc::sourcelist=$work/sources.list" -o Dir::Etc::sourceparts=/dev/null
    -o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache"
    -o APT::Sandbox::User=root -o Acquire::Retries=3
)
found=
for mirror in $mirrors; do
    echo "deb [signed-by=$keys] $mirror trixie non-free" >"$work/sources.list"
    if apt-get "${private[@]}" -qq update >"$log" 2>&1 && apt-cache "${private[@]}" show nsight-systems >/dev/null 2>&1; then
        found=$mirror
        break
    fi
done
[ -n "$found" ] || fail "no Debian mirror of apt's sources has nsight-systems of Debian 13: $(tail -n 1 "$log")"
cd "$work"
quietly "fetching Nsight Systems" apt-get "${private[@]}" -qq download nsight-systems nsight-systems-target

for package in "$work"/*.deb; do
    quietly "unpacking $(basename "$package")" dpkg-deb -x "$package" "$work/root"
done
rm -rf "$dir/usr"
mv "$work/root/usr" "$dir/usr"
host=$dir/usr/lib/nsight-systems/host-linux-x64
collector=$dir/usr/lib/x86_64-linux-gnu/nsight-systems
[ -x "$collector/target-linux-x64/nsys" ] && [ -x "$host/QdstrmImporter" ] || fail "the packages are not laid out as expected"

# nsys looks for its importer beside the collector, and for the modules of its reports beside the importer.
# Without the importer it leaves no report, and exits with 0 all the same.
ln -sfn "$host" "$collector/host-linux-x64"
mkdir -p "$host/python/lib"
cp "$collector"/target-linux-x64/python/lib/*.py "$host/python/lib/"

# Libraries that Debian packages apart.
missing() {
    LD_LIBRARY_PATH=$host ldd "$host/QdstrmImporter" "$collector/target-linux-x64/nsys" | awk '/not found/ {print $1}' | sort -u
}
# Its own link to libssh points to where Debian 13 has it.
ln -sfn /usr/lib/x86_64-linux-gnu/libssh.so.4 "$host/libssh.so.4"
if [ ! -e "$host/libssh.so.4" ] || [ -n "$(missing)" ]; then
    export DEBIAN_FRONTEND=noninteractive
    quietly "apt-get update" apt-get -qq update
    quietly "installing libraries" apt-get -qq install -y --no-install-recommends libelf1 libpfm4 libssh-4 libstdc++6 zlib1g
fi
[ -z "$(missing)" ] || fail "libraries are still missing: $(missing | tr '\n' ' ')"

mkdir -p "$dir/bin"
printf '#!/bin/sh\nexec "%s/target-linux-x64/nsys" "$@"\n' "$collector" >"$work/nsys"
chmod +x "$work/nsys"
timeout 60 "$work/nsys" --version || fail "nsys was unpacked to $dir and does not answer"
# Its exit code says little: what counts is the report.
timeout 120 "$work/nsys" profile -t osrt -s none --cpuctxsw=none -o "$work/probe" true >"$log" 2>&1 || true
[ -s "$work/probe.nsys-rep" ] || fail "nsys was unpacked to $dir and writes no report: $(tail -n 1 "$log")"
mv "$work/nsys" "$dir/bin/nsys"
