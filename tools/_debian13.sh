# What the install scripts share: a folder to unpack into, and packages of Debian 13 (non-free) without touching the
# machine's own lists and sources. Sourced, with `tool` set to the program's name; sets dir, work and log.
# shellcheck shell=bash disable=SC2154
set -euo pipefail

fail() {
    echo "install_$tool.sh: $*" >&2
    exit 1
}

# begin FREE_KB DIR: check the machine, go no further where it is done already, and make a work folder.
begin() {
    [ $# -eq 2 ] && [ -n "$2" ] || fail "usage: tools/install_$tool.sh DIR"
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "this is no Debian machine (no apt-get)"
    [ "$(dpkg --print-architecture)" = amd64 ] || fail "only amd64 is supported, this is $(dpkg --print-architecture)"
    mkdir -p -- "$2" 2>/dev/null && dir=$(cd -- "$2" && pwd) || fail "cannot make the folder $2"
    case $dir in *[[:space:]]*) fail "$tool cannot run from a folder with blanks in its name: $dir" ;; esac
    # Done already, and whole: the wrapper is written last.
    if [ -x "$dir/bin/$tool" ] && timeout 60 "$dir/bin/$tool" --version; then
        exit 0
    fi
    [ "$(df --output=avail -k "$dir" | tail -n 1)" -gt "$1" ] || fail "$dir has less than $(($1 / 1000)) MB free"
    work=$(mktemp -d "$dir/.install.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    log=$work/log
}

# quietly WHAT COMMAND...: its output goes to the log, and its last complaint into the message.
quietly() {
    local what=$1
    shift
    "$@" >"$log" 2>&1 || fail "$what failed: $({ grep -E '^(E|W):|error' "$log" || cat "$log"; } | tail -n 1)"
}

# fetch NAME PACKAGE...: the packages as .deb files in the work folder, which becomes the current one. They come from
# the Debian mirror that this machine's apt already uses, checked with Debian's keys.
fetch() {
    local name=$1 mirrors keys private mirror found=
    shift
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
    for mirror in $mirrors; do
        echo "deb [signed-by=$keys] $mirror trixie non-free" >"$work/sources.list"
        if apt-get "${private[@]}" -qq update >"$log" 2>&1 && apt-cache "${private[@]}" show "$1" >/dev/null 2>&1; then
            found=$mirror
            break
        fi
    done
    [ -n "$found" ] || fail "no Debian mirror of apt's sources has $1 of Debian 13: $(tail -n 1 "$log")"
    cd "$work"
    quietly "fetching $name" apt-get "${private[@]}" -qq download "$@"
}

# wrapper PROGRAM: write the wrapper beside, to be moved to its place when it was seen to work.
wrapper() {
    mkdir -p "$dir/bin"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$1" >"$work/$tool"
    chmod +x "$work/$tool"
    timeout 60 "$work/$tool" --version || fail "$tool was unpacked to $dir and does not answer"
}
