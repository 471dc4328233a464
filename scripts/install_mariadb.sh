#!/bin/sh
# Sees to a MariaDB for the tests of shared studies on a mysql:// storage, which start a server of their own.
set -u
if path=$(PATH="$PATH:/usr/sbin" command -v mariadbd); then
    echo "mariadb: $path"
    exit 0
fi
exec "$(dirname "$0")/install_debian.sh" mariadb mariadb-server-core "the tests with MySQL"
