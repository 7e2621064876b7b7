#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The whole canary on this machine's CPU: set up, then lru, active, lru again, and a verdict.
# Further arguments go to scripts/canary.py, for instance --repeats 2.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup_env.sh serve tools
exec .venv/bin/python -u scripts/canary.py run --target embedded "$@"
