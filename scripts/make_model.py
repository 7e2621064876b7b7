# SPDX-License-Identifier: Apache-2.0
"""Write the tiny model of servers/tiny_model.py to a folder.

One JSON line on stdout says where the model is; exit 0, or 2 where it cannot be
written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from servers.tiny_model import make_model


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/model"), help="folder to write")
    options = parser.parse_args(argv)
    try:
        model = make_model(options.out)
    except OSError as error:
        say = f"--out {options.out} cannot be written ({error.strerror}): name another folder"
        print(f"make_model: {say}", file=sys.stderr)
        return 2
    print(json.dumps({"model": str(model)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
