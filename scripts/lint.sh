#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The checks that run nothing: style, complexity, types. Needs .venv (scripts/setup_env.sh test).
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/ruff check .
.venv/bin/ruff format --check .
# What runs inside the serving image is held to mypy's strict rules.
.venv/bin/python -m mypy --strict vllm/v1/core/*.py tools/install_computecache.py
.venv/bin/python -m mypy scripts tools
