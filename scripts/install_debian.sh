#!/bin/sh
# install_debian.sh LABEL PACKAGE TESTS: installs a Debian package for some tests where that is possible; says what to do
# where it is not. Never fails: without it those TESTS skip with a reason.
set -u
label=$1 package=$2 tests=$3

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "$label: none found; $tests will skip. On Debian: sudo apt-get install $package"
    exit 0
fi
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$package"
}
log=$(mktemp)
if install >"$log" 2>&1 || { apt-get update -q >"$log" 2>&1 && install >"$log" 2>&1; }; then
    echo "$label: installed"
else
    echo "$label: apt-get could not install $package; $tests will skip. Its last words:"
    tail -n 3 "$log"
fi
rm -f "$log"
exit 0
