#!/usr/bin/env bash
# A Redis server for the tests of RedisConnector, from Debian's packages: 2 MB to fetch, 8 MB on disk; nothing to do the
# second time. The tests start their own, so the one that the package starts is stopped again. Where it cannot be had
# this says so and goes on: the tests are skipped, with the reason.
set -uo pipefail

if ! command -v redis-server >/dev/null; then
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        export DEBIAN_FRONTEND=noninteractive
        # The package would start a server, which nobody needs.
        export RUNLEVEL=1
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server; } >/dev/null ||
            echo "install-redis: apt-get did not install redis-server" >&2
        if command -v service >/dev/null; then
            service redis-server stop >/dev/null 2>&1
        fi
    else
        echo "install-redis: the tests need redis-server; install it as root" >&2
    fi
fi

if command -v redis-server >/dev/null; then
    echo "install-redis: $(redis-server --version | cut -d ' ' -f 1-3) is there"
else
    echo "install-redis: redis-server is missing, and its tests are skipped"
fi
