#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Evaluates the installed policy; writes docs/results/policy.json and the tables in
# docs/policy.md. Options are those of tools/evaluate_policy.py (--help lists them).
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" tools/evaluate_policy.py "$@"
