# SPDX-License-Identifier: Apache-2.0
"""The settings stand in one table, the fields of `Settings`; every other place agrees with it."""

import re
from pathlib import Path

import pytest
import yaml
from dotenv import dotenv_values

import check_env
import settings_table
from serving import metrics as served

REPO = Path(__file__).resolve().parents[1]
SETTINGS = settings_table.settings()
VARIABLES = {settings_table.variable(setting): setting for setting in SETTINGS}
# Where the policy's counters are served: no settings of the policy.
ENDPOINT = {"COMPUTECACHE_METRICS_HOST", "COMPUTECACHE_METRICS_PORT"}
# Read by the tests' own set-up.
FOR_TESTS = {"COMPUTECACHE_TEST_ENGINE"}


def test_readme_and_the_example_of_env_are_what_the_table_says():
    assert settings_table.main(["--check"]) == 0


def test_a_changed_default_or_meaning_is_noticed(tmp_path, monkeypatch, capsys):
    readme, example = tmp_path / "README.md", tmp_path / ".env.example"
    readme.write_bytes((REPO / "README.md").read_bytes())
    example.write_text((REPO / ".env.example").read_text().replace("WEIGHT=64", "WEIGHT=65"))
    options = ["--readme", str(readme), "--env-example", str(example)]
    assert settings_table.main(["--check", *options]) == 1
    assert str(example) in capsys.readouterr().err
    assert settings_table.main(options) == 0
    assert example.read_bytes() == (REPO / ".env.example").read_bytes()


def test_files_without_markers_are_refused_and_left_alone(tmp_path, capsys):
    other = tmp_path / "README.md"
    other.write_text("nothing generated here\n")
    assert settings_table.main(["--readme", str(other)]) == 2
    assert "generated: settings" in capsys.readouterr().err
    assert other.read_text() == "nothing generated here\n"


def test_the_example_of_env_sets_every_setting_to_its_default():
    example = dotenv_values(REPO / ".env.example")
    found = {name: value for name, value in example.items() if name.startswith("COMPUTECACHE_")}
    assert found == {name: str(setting.default) for name, setting in VARIABLES.items()}


def test_compose_passes_every_setting_with_its_default():
    passed = yaml.safe_load((REPO / "compose.yaml").read_text())["x-policy"]
    assert passed == {
        name: f"${{{name}:-{setting.default}}}" for name, setting in VARIABLES.items()
    }


@pytest.mark.parametrize("name", VARIABLES)
def test_check_env_has_the_same_bounds(name):
    metadata = VARIABLES[name].metadata
    if choices := metadata.get("choices"):
        assert tuple(choices) == check_env.MODES
    else:
        assert check_env.WHOLE_NUMBERS[name] == (metadata["low"], metadata["high"])


def test_check_env_knows_no_other_setting():
    known = {name for name in check_env.KNOWN if name.startswith("COMPUTECACHE_")}
    assert known == set(VARIABLES)


def test_the_canary_reads_every_setting_from_the_metrics():
    assert tuple(s.name for s in SETTINGS if s.name != "mode") == served.POLICY_SETTINGS


def test_no_page_names_a_variable_that_does_not_exist():
    pages = [*REPO.glob("*.md"), *(REPO / "docs").glob("*.md"), REPO / "compose.yaml"]
    pages += [REPO / ".env.example", *(REPO / "monitoring").rglob("*.yml")]
    for page in pages:
        named = set(re.findall(r"COMPUTECACHE_[A-Z_]*[A-Z]", page.read_text()))
        assert named <= VARIABLES.keys() | ENDPOINT | FOR_TESTS, page
