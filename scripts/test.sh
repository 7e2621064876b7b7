#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up, then every test. Arguments go to pytest, for instance -k canary, or the quick ones:
#   bash scripts/test.sh -m "not server and not docker"
# Without a Docker engine those of tests/stack are skipped. With COMPUTECACHE_TEST_ENGINE=1, or
# where CI is set, they start one of their own (root on Debian; docker.io is installed).
set -euo pipefail
cd "$(dirname "$0")/.."

# promtool checks the rules, Chromium opens the report; both are Debian packages.
missing=()
command -v promtool >/dev/null || missing+=(prometheus)
command -v chromium >/dev/null || missing+=(chromium)
if [ ${#missing[@]} -gt 0 ]; then
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "test.sh: not installed: ${missing[*]}. Install it (Debian: apt-get install" \
            "${missing[*]}) or run as root: the tests that need it fail without it" >&2
        exit 2
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

bash scripts/setup_env.sh serve tools peers lmcache test
bash scripts/lint.sh
# The policy and its safety suite need the standard library only.
python3 tests/v1/core/test_computecache_policy.py
[ $# -eq 0 ] || exec .venv/bin/python -m pytest "$@"
# What starts no server and no engine, side by side; then the rest, one after another.
.venv/bin/python -m pytest -n 2 --dist loadfile -m "not server and not docker"
exec .venv/bin/python -m pytest -m "server or docker"
