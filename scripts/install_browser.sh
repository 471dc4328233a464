#!/bin/sh
# Sees to a Chromium for the browser tests.
set -u
for name in chromium chromium-browser google-chrome; do
    if path=$(command -v "$name"); then
        echo "browser: $path"
        exit 0
    fi
done
exec "$(dirname "$0")/install_debian.sh" browser chromium "the browser tests"
