# SPDX-License-Identifier: Apache-2.0
"""Modules that are loaded from a file, not from where Python would look for them."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_module(name: str, path: Path) -> ModuleType:
    """Import a file as the module ``name``, which other imports then find.

    Raises OSError or ImportError when the file is none that Python can import.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
