#!/usr/bin/env bash
# Unpack Nsight Compute 2024.1 from Debian 13 (non-free) into a folder of its own, on Debian 12 or later.
# It needs no GPU to read reports, to list metrics and sets, and to say what a chip can measure.
#
#   tools/install_ncu.sh DIR      then DIR/bin/ncu runs; about 340 MB to fetch, 180 MB kept
tool=ncu
. "$(dirname "${BASH_SOURCE[0]}")/_debian13.sh"

begin 1500000 "$@"
# The program is in one package, its sections and rules in the other, whose window we leave out.
fetch "Nsight Compute" nsight-compute-target nsight-compute
for package in ./*.deb; do
    mkdir -p root
    dpkg-deb --fsys-tarfile "$package" | tar -x -C root ./usr/lib/x86_64-linux-gnu 2>"$log" || fail "unpacking failed: $(tail -n 1 "$log")"
    rm "$package"
done
rm -rf "$dir/usr"
mv root/usr "$dir/usr"
program=$dir/usr/lib/x86_64-linux-gnu/nsight-compute/target/linux-desktop-glibc_2_11_3-x64/ncu
[ -x "$program" ] || fail "the packages are not laid out as expected"

wrapper "$program"
timeout 60 "$work/ncu" --query-metrics --chips gh100 2>"$log" | grep -q sm__throughput || fail "ncu was unpacked to $dir and lists no metrics"
mv "$work/ncu" "$dir/bin/ncu"
