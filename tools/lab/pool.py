# SPDX-License-Identifier: Apache-2.0
"""A real BlockPool of the installed vLLM, with and without the hooks, and requests played on it."""

import contextlib
import hashlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

from lab.modules import load_module


def quiet_vllm() -> None:
    """vLLM logs every pool to stdout by default; call before it is imported."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


@contextlib.contextmanager
def policy_environment(mode: str, settings: Mapping[str, object]) -> Iterator[None]:
    """Set COMPUTECACHE_MODE and ``settings`` (names without the prefix) for a pool's birth.

    The caller's own COMPUTECACHE_* weights stay; no metrics endpoint is started.
    """
    before = {k: v for k, v in os.environ.items() if k.startswith("COMPUTECACHE_")}
    os.environ.pop("COMPUTECACHE_METRICS_PORT", None)
    os.environ["COMPUTECACHE_MODE"] = mode
    for name, value in settings.items():
        os.environ[f"COMPUTECACHE_{name.upper()}"] = str(value)
    try:
        yield
    finally:
        for name in [k for k in os.environ if k.startswith("COMPUTECACHE_")]:
            del os.environ[name]
        os.environ.update(before)


def make_pool(capacity_blocks: int, mode: str, settings: Mapping[str, object]):
    """A real BlockPool with that many usable blocks (block 0 is vLLM's null block).

    Raises RuntimeError when vLLM or the active policy is not installed, ValueError
    when the policy replaces a setting by another value.
    """
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ImportError as error:
        raise RuntimeError(
            f"vLLM cannot be imported ({error}): run scripts/setup_env.sh"
        ) from error

    with policy_environment(mode, settings):
        pool = BlockPool(capacity_blocks + 1, enable_caching=True, hash_block_size=1)
    enabled = getattr(getattr(pool, "computecache", None), "enabled", False)
    if enabled != (mode == "active"):
        raise RuntimeError(
            f"mode {mode} was asked for, but the BlockPool's policy is "
            f"{'on' if enabled else 'off or missing'}: run tools/install_computecache.py"
        )
    for name, value in settings.items() if enabled else ():
        if (used := getattr(pool.computecache.settings, name)) != value:
            raise ValueError(f"COMPUTECACHE_{name.upper()} is {value}, but the policy takes {used}")
    return pool


def unpatched_block_pool() -> ModuleType:
    """vLLM's block_pool module without the hooks, from the bytes the installer reverts to."""
    import install_computecache as installer

    return _block_pool("unpatched_block_pool", installer.undo)


def block_pool_with(policy: Path) -> ModuleType:
    """vLLM's patched block_pool module with another policy file than the installed one."""
    module = _block_pool("block_pool_beside", bytes)
    other = load_module("policy_beside", policy)
    vars(module)["ComputeCachePolicy"] = other.ComputeCachePolicy
    return module


def _block_pool(name: str, edit: Callable[[bytes], bytes | None]) -> ModuleType:
    """A second copy of the installed block_pool module, its bytes put through `edit`."""
    import vllm.v1.core.block_pool as patched

    path = Path(patched.__file__)
    source = edit(path.read_bytes())
    if source is None:
        raise RuntimeError(f"{path} is not patched: run tools/install_computecache.py")
    module = ModuleType(name)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def try_policy(path: Path) -> None:
    """Use a policy file in place of the installed one, in this process only.

    Raises RuntimeError when it is too late for that, OSError or ImportError as load_module does.
    """
    name = "vllm.v1.core.computecache_policy"
    if "vllm.v1.core.block_pool" in sys.modules:
        raise RuntimeError("a policy file has to be named before vLLM's BlockPool is imported")
    load_module(name, path)


class Driver:
    """Plays requests on one pool; the counts cover everything played so far.

    Block hashes are SHA-256 digests, as vLLM's own are; ``hash_seed`` makes others of the
    same blocks. The policy follows a sample of hashes, so it chooses that sample.
    """

    def __init__(self, pool, unique_blocks: int, concurrency: int, hash_seed: int = 0) -> None:
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self.pool = pool
        self.concurrency = concurrency
        names = (b"%d/%d" % (hash_seed, number) for number in range(unique_blocks))
        self.hashes = [hashlib.sha256(name).digest() for name in names]
        self.keys = [make_block_hash_with_group_id(h, 0) for h in self.hashes]
        self.running: deque[list] = deque()
        self.hit_blocks = self.decisions = self.allocated_blocks = 0
        self.decision_s = 0.0

    def cached_prefix(self, request: Sequence[int]) -> list:
        """The request's longest run of cached blocks, from its first block on."""
        lookup = self.pool.cached_block_hash_to_block.get_one_block
        keys = self.keys
        blocks = []
        for block_id in request:
            block = lookup(keys[block_id])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def finish_oldest(self) -> None:
        """End the request that has been in flight the longest."""
        self.pool.free_blocks(reversed(self.running.popleft()))

    def play(self, request: Sequence[int]) -> int:
        """Start one request, which must fit the pool; returns the blocks it hit."""
        pool = self.pool
        if len(self.running) == self.concurrency:
            self.finish_oldest()
        blocks = self.cached_prefix(request)
        hits = len(blocks)
        self.hit_blocks += hits
        pool.touch(blocks)
        missing = len(request) - hits
        if missing:
            # A full pool makes vLLM wait for running requests to end.
            while missing > pool.get_num_free_blocks():
                self.finish_oldest()
            start = time.perf_counter()
            new_blocks = pool.get_new_blocks(missing)
            self.decision_s += time.perf_counter() - start
            self.decisions += 1
            self.allocated_blocks += missing
            blocks += new_blocks
            hashes = self.hashes
            # All of a vLLM Request that cache_full_blocks reads.
            stub = SimpleNamespace(block_hashes=[hashes[i] for i in request])
            pool.cache_full_blocks(stub, blocks, hits, len(request), 1, 0)
        self.running.append(blocks)
        return hits

    def finish_all(self) -> None:
        """End every request in flight, oldest first."""
        while self.running:
            self.finish_oldest()
