#!/bin/sh
# Installs Debian's PostgreSQL for the tests of shared studies where that is possible; says what to do where it is not.
# Never fails: without a server those tests skip with a reason. The tests start a server of their own.
set -u

for path in /usr/lib/postgresql/*/bin/initdb "$(command -v initdb || true)"; do
    if [ -x "$path" ]; then
        echo "postgres: $path"
        exit 0
    fi
done
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "postgres: none found; the tests with PostgreSQL will skip. On Debian: sudo apt-get install postgresql"
    exit 0
fi
install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends postgresql
}
log=$(mktemp)
if install >"$log" 2>&1 || { apt-get update -q >"$log" 2>&1 && install >"$log" 2>&1; }; then
    echo "postgres: installed"
else
    echo "postgres: apt-get could not install postgresql; the tests with it will skip. Its last words:"
    tail -n 3 "$log"
fi
rm -f "$log"
exit 0
