# SPDX-License-Identifier: Apache-2.0
import re
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[2]
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<operator>:-|-|:\?)(?P<word>[^}]*)\}")
SECRETS = {"VLLM_API_KEY": "8c5f6a1e0b7d4c39", "GRAFANA_ADMIN_PASSWORD": "1f2e3d4c5b6a7988"}


def interpolate(node, variables: dict[str, str | None]):
    """What Compose substitutes in the strings of a parsed file, for the forms it uses here.

    KeyError: a required variable is unset or blank; the text is what Compose would print.
    """
    if isinstance(node, dict):
        return {key: interpolate(value, variables) for key, value in node.items()}
    if isinstance(node, list):
        return [interpolate(value, variables) for value in node]

    def value(match: re.Match) -> str:
        given = variables.get(match["name"])
        if match["operator"] == "-":
            return match["word"] if given is None else given
        if not given and match["operator"] == ":?":
            raise KeyError(f"{match['name']} {match['word']}")
        return given or match["word"]

    return VARIABLE.sub(value, node) if isinstance(node, str) else node


@pytest.fixture(scope="session")
def compose_text() -> str:
    return (REPO / "compose.yaml").read_text()


@pytest.fixture(scope="session")
def interpolated(compose_text):
    """stack(**variables) -> the parsed file with these variables and valid secrets."""
    parsed = yaml.safe_load(compose_text)

    def stack(**variables: str | None) -> dict:
        return interpolate(parsed, SECRETS | variables)

    return stack
