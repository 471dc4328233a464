#!/bin/sh
# Sees to a PostgreSQL for the tests of shared studies, which start a server of their own.
set -u
for path in /usr/lib/postgresql/*/bin/initdb "$(command -v initdb || true)"; do
    if [ -x "$path" ]; then
        echo "postgres: $path"
        exit 0
    fi
done
exec "$(dirname "$0")/install_debian.sh" postgres postgresql "the tests with PostgreSQL"
