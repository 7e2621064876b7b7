# SPDX-License-Identifier: Apache-2.0
"""What a target says of itself: the installed files, and that only Compose can be promoted."""

import pytest

from drills.targets import INSTALLED, EmbeddedTarget, TargetError, UrlTarget, installation
from install_computecache import CORE, EDITS, MODULES


def test_every_file_that_the_installer_writes_is_looked_at():
    edited = [path.relative_to(CORE).as_posix() for path in EDITS]
    assert sorted(INSTALLED) == sorted([*edited, *MODULES])


@pytest.mark.parametrize("name", INSTALLED)
def test_another_text_in_any_installed_file_is_another_installation(tmp_path, name):
    (tmp_path / "sched").mkdir()
    for each in INSTALLED:
        (tmp_path / each).write_text("installed")
    before = installation(tmp_path)
    (tmp_path / name).write_text("edited")
    after = installation(tmp_path)
    assert {n for n in before if before[n] != after[n]} == {name}


def test_an_embedded_visit_names_the_installation_of_the_vllm_that_it_starts(tmp_path):
    target = EmbeddedTarget(
        tmp_path, tmp_path, lambda **values: None, scan_limit=64, blocks=64, max_model_len=1024
    )
    assert set(target.identity()["installation"]) == set(INSTALLED)


def test_only_compose_can_be_promoted(tmp_path):
    embedded = EmbeddedTarget(
        tmp_path, tmp_path, lambda **values: None, scan_limit=64, blocks=64, max_model_len=1024
    )
    for target in (embedded, UrlTarget(("a", []), ("b", []))):
        with pytest.raises(TargetError, match=f"cannot promote on {target.name}"):
            target.promote()
