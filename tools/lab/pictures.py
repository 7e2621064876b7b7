# SPDX-License-Identifier: Apache-2.0
"""How the tools' pictures look: one style, and SVG text that is the same for the same numbers.

Importing it takes matplotlib; a command that may draw nothing imports it where it draws.
"""

import io
from contextlib import AbstractContextManager
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot, style
from matplotlib.figure import Figure

STYLE: dict[str, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 10,
    "grid.alpha": 0.3,
    "svg.fonttype": "none",
    "svg.hashsalt": "computecache",
}


def styled() -> AbstractContextManager[None]:
    """The style, for the pictures that are made in this block."""
    return style.context(STYLE)


def svg_of(figure: Figure) -> str:
    """The figure as SVG text, which closes it."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    # Lines that end in a space would come back in every diff.
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())
