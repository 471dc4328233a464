#!/bin/sh
# Installs Debian's Chromium for the browser tests where that is possible; says what to do where it is not.
# Never fails: without a browser those tests skip with a reason.
set -u

for name in chromium chromium-browser google-chrome; do
    if path=$(command -v "$name"); then
        echo "browser: $path"
        exit 0
    fi
done
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser: none found; the browser tests will skip. On Debian: sudo apt-get install chromium"
    exit 0
fi
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium
}
log=$(mktemp)
if install >"$log" 2>&1 || { apt-get update -q >"$log" 2>&1 && install >"$log" 2>&1; }; then
    echo "browser: installed $(command -v chromium)"
else
    echo "browser: apt-get could not install chromium; the browser tests will skip. Its last words:"
    tail -n 3 "$log"
fi
rm -f "$log"
exit 0
