# SPDX-License-Identifier: Apache-2.0
"""What the pages say about files is so: paths and links exist, README's map misses no command."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PAGES = sorted([*REPO.glob("*.md"), *(REPO / "docs").glob("*.md")])
IMAGES = {"vllm/vllm-openai"}
FOLDERS = "docker|docs|monitoring|scripts|tests|tools|vllm"
TRACKED = [
    REPO / line
    for line in subprocess.run(
        ["git", "-C", REPO, "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
]
SOURCES = [p for p in TRACKED if p.suffix in (".py", ".sh") and p.exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_link_of_a_page_exists(page):
    text = page.read_text()
    paths = set(re.findall(rf"`((?:{FOLDERS})/[\w./*-]*[\w/*-])(?=[` ])", text)) - IMAGES
    missing = sorted(path for path in paths if not list(REPO.glob(path)))
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)}
    missing += sorted(
        link for link in links if link and "://" not in link and not (page.parent / link).exists()
    )
    assert not missing


def test_readmes_map_names_every_command_and_every_wing():
    _, _, where = (REPO / "README.md").read_text().partition("## Where things are")
    for folder in ("scripts", "tools"):
        for path in sorted((REPO / folder).iterdir()):
            name = path.relative_to(REPO).as_posix() + ("/" if path.is_dir() else "")
            if path in TRACKED or any(path in tracked.parents for tracked in TRACKED):
                assert f"`{name}`" in where, name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPO)))
def test_every_source_file_says_whose_it_is_and_what_it_is_for(path):
    text = path.read_text()
    assert "SPDX-License-Identifier: Apache-2.0" in text[:120]
    if path.suffix == ".py" and "tests" not in path.relative_to(REPO).parts:
        assert ast.get_docstring(ast.parse(text))
