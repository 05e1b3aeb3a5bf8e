#!/usr/bin/env bash
# Unpack Nsight Compute 2024.1 from Debian 13 (non-free) into a folder of its own, on Debian 12 or later.
# It needs no GPU to read reports, to list metrics and sets, and to say what a chip can measure.
#
#   tools/install_ncu.sh DIR      then DIR/bin/ncu runs; about 340 MB to fetch, 180 MB kept
#
# Packages come from the Debian mirror that this machine's apt already uses, checked with Debian's keys.
set -euo pipefail

fail() {
    echo "install_ncu.sh: $*" >&2
    exit 1
}

[ $# -eq 1 ] && [ -n "$1" ] || fail "usage: tools/install_ncu.sh DIR"
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian machine (no apt-get)"
[ "$(dpkg --print-architecture)" = amd64 ] || fail "only amd64 is supported, this is $(dpkg --print-architecture)"
mkdir -p -- "$1" 2>/dev/null && dir=$(cd -- "$1" && pwd) || fail "cannot make the folder $1"
case $dir in *[[:space:]]*) fail "ncu cannot run from a folder with blanks in its name: $dir" ;; esac

# Done already, and whole: the wrapper is written last.
if [ -x "$dir/bin/ncu" ] && timeout 60 "$dir/bin/ncu" --version; then
    exit 0
fi
[ "$(df --output=avail -k "$dir" | tail -n 1)" -gt 1500000 ] || fail "$dir has less than 1.5 GB free"

work=$(mktemp -d "$dir/.install.XXXXXX")
trap 'rm -rf "$work"' EXIT
log=$work/log

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
    if apt-get "${private[@]}" -qq update >"$log" 2>&1 && apt-cache "${private[@]}" show nsight-compute-target >/dev/null 2>&1; then
        found=$mirror
        break
    fi
done
[ -n "$found" ] || fail "no Debian mirror of apt's sources has nsight-compute of Debian 13: $(tail -n 1 "$log")"
cd "$work"
# The program is in one package, its sections and rules in the other, whose window we leave out.
apt-get "${private[@]}" -qq download nsight-compute nsight-compute-target >"$log" 2>&1 || fail "fetching failed: $(tail -n 1 "$log")"
for package in ./*.deb; do
    mkdir -p root
    dpkg-deb --fsys-tarfile "$package" | tar -x -C root ./usr/lib/x86_64-linux-gnu 2>"$log" || fail "unpacking failed: $(tail -n 1 "$log")"
    rm "$package"
done
rm -rf "$dir/usr"
mv root/usr "$dir/usr"
program=$dir/usr/lib/x86_64-linux-gnu/nsight-compute/target/linux-desktop-glibc_2_11_3-x64/ncu
[ -x "$program" ] || fail "the packages are not laid out as expected"
mkdir -p "$dir/bin"
printf '#!/bin/sh\nexec "%s" "$@"\n' "$program" >"$work/ncu"
chmod +x "$work/ncu"
timeout 60 "$work/ncu" --version || fail "ncu was unpacked to $dir and does not answer"
timeout 60 "$work/ncu" --query-metrics --chips gh100 2>"$log" | grep -q sm__throughput || fail "ncu was unpacked to $dir and lists no metrics"
mv "$work/ncu" "$dir/bin/ncu"
