# SPDX-License-Identifier: Apache-2.0
"""Requests to a server with the OpenAI completions API: what is sent, how, and what came of it."""

import sys
from importlib.util import find_spec

_PACKAGES = ("dotenv", "httpx", "numpy", "prometheus_client")
if _missing := [name for name in _PACKAGES if find_spec(name) is None]:
    # An ImportError would end a command with 1, which says REJECT.
    print(
        f"{sys.executable} has no {', '.join(_missing)}: run `bash scripts/setup_env.sh`, then "
        "the command with .venv/bin/python",
        file=sys.stderr,
    )
    sys.exit(2)
