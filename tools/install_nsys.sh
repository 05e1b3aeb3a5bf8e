#!/usr/bin/env bash
# Unpack Nsight Systems 2023.4 from Debian 13 (non-free) into a folder of its own, on Debian 12 or later.
# It needs no GPU: profiling NVTX ranges and OS calls, export and stats all work without one.
#
#   tools/install_nsys.sh DIR      then DIR/bin/nsys runs; about 190 MB to fetch, 700 MB unpacked
#
# Run it as root: a few small libraries are installed with apt-get where they are absent.
tool=nsys
. "$(dirname "${BASH_SOURCE[0]}")/_debian13.sh"

begin 1200000 "$@"
[ "$(id -u)" = 0 ] || fail "run it as root, or with sudo"
fetch "Nsight Systems" nsight-systems nsight-systems-target
for package in ./*.deb; do
    quietly "unpacking $(basename "$package")" dpkg-deb -x "$package" root
done
rm -rf "$dir/usr"
mv root/usr "$dir/usr"
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

wrapper "$collector/target-linux-x64/nsys"
# Its exit code says little: what counts is the report.
timeout 120 "$work/nsys" profile -t osrt -s none --cpuctxsw=none -o "$work/probe" true >"$log" 2>&1 || true
[ -s "$work/probe.nsys-rep" ] || fail "nsys was unpacked to $dir and writes no report: $(tail -n 1 "$log")"
mv "$work/nsys" "$dir/bin/nsys"
