# SPDX-License-Identifier: Apache-2.0
"""ComputeCache: a bounded eviction policy beside vLLM's BlockPool.

BlockPool owns reference counts, hash maps, KV events and block tables. This
module only changes the order of blocks that are already free, just before
BlockPool pops its victims from the front of the free queue.
"""

import logging
import os
from array import array
from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from typing import Any

logger = logging.getLogger(__name__)

MODES = ("lru", "active")
MAX_SCAN_LIMIT = 4096
MAX_WEIGHT = 1_000_000_000
MAX_HITS = 255


@dataclass(frozen=True)
class Settings:
    """Effective settings of one policy; the defaults are the safe ones.

    mode: ``lru`` leaves the queue alone, ``active`` reorders it.
    scan_limit: candidates for each victim, 1 (plain LRU) to 4096 blocks.
    reuse_weight, depth_weight, age_weight: weights of the keep value (no unit).
    quick_demote_penalty: subtracted from the keep value of a never reused block.
    log_every: decisions between two summary lines in the log; 0 means none.
    """

    mode: str = "lru"
    scan_limit: int = 64
    reuse_weight: int = 64
    depth_weight: int = 1
    age_weight: int = 1
    quick_demote_penalty: int = 4096
    log_every: int = 256

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> "Settings":
        """Read ``COMPUTECACHE_*``; an invalid value keeps the default and warns once."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = f"COMPUTECACHE_{field.name.upper()}"
            raw = environ.get(name, "")
            text = raw.strip(" \t\r\n\"'").lower()
            if not text:
                if raw.strip():
                    logger.warning("%s=%r is empty: using %r.", name, raw, field.default)
                continue
            if field.name == "mode":
                if text in MODES:
                    values["mode"] = text
                else:
                    logger.warning(
                        "%s=%r is not one of %s: using %r.",
                        name, raw, " | ".join(MODES), field.default,
                    )
                continue
            low = 1 if field.name == "scan_limit" else 0
            high = MAX_SCAN_LIMIT if field.name == "scan_limit" else MAX_WEIGHT
            if not (text.isascii() and text.isdigit()) or int(text) < low:
                logger.warning(
                    "%s=%r is not a whole number from %d to %d: using %d.",
                    name, raw, low, high, field.default,
                )
                continue
            if int(text) > high:
                logger.warning("%s=%r is above the upper bound: using %d.", name, raw, high)
            values[field.name] = min(int(text), high)
        return cls(**values)


@dataclass
class Counters:
    """What the policy did since it was built; read by the metrics collector."""

    decisions: int = 0
    reordered_decisions: int = 0
    inspected_blocks: int = 0
    fallbacks: int = 0
    victims_unhashed: int = 0
    victims_never_reused: int = 0
    victims_reused: int = 0
    victims_protected: int = 0
    protected_hits: int = 0


class ComputeCachePolicy:
    """First version: bounded window, one-use blocks before reused ones."""

    def __init__(
        self,
        settings: Settings,
        num_blocks: int,
        hash_block_size: int,
        enable_caching: bool = True,
    ) -> None:
        self.settings = settings
        self.num_blocks = num_blocks
        self.hash_block_size = hash_block_size
        self.enabled = settings.mode == "active" and enable_caching
        self.counters = Counters()
        self._hits = array("B", bytes(num_blocks))

    @classmethod
    def from_environ(
        cls, num_blocks: int, hash_block_size: int, enable_caching: bool = True
    ) -> "ComputeCachePolicy":
        policy = cls(Settings.from_environ(), num_blocks, hash_block_size, enable_caching)
        logger.info("ComputeCache: %s, %d blocks", policy.settings, num_blocks)
        if os.environ.get("COMPUTECACHE_METRICS_PORT"):
            try:
                from vllm.v1.core.computecache_metrics import serve_policy

                serve_policy(policy)
            except Exception:
                logger.exception("ComputeCache metrics are not served; serving goes on.")
        return policy

    @property
    def decisions(self) -> int:
        return self.counters.decisions

    @property
    def reordered_decisions(self) -> int:
        return self.counters.reordered_decisions

    @property
    def fallbacks(self) -> int:
        return self.counters.fallbacks

    def on_access(self, block: Any) -> None:
        hits = self._hits
        if hits[block.block_id] < MAX_HITS:
            hits[block.block_id] += 1

    def on_evicted(self, block: Any) -> None:
        self._hits[block.block_id] = 0

    def reset(self) -> None:
        self._hits = array("B", bytes(self.num_blocks))

    def reorder_free_queue(
        self, queue: Any, num_blocks: int, protected_block_ids: Container[int]
    ) -> None:
        if not self.enabled or num_blocks < 1:
            return
        self.counters.decisions += 1
        hits = self._hits
        head = queue.fake_free_list_head
        tail = queue.fake_free_list_tail
        block = head.next_free_block
        clean: list[Any] = []
        rest: list[Any] = []
        protected: list[Any] = []
        for _ in range(num_blocks + self.settings.scan_limit - 1):
            if block is tail or len(clean) == num_blocks:
                break
            if protected_block_ids and block.block_id in protected_block_ids:
                protected.append(block)
            elif block._block_hash is None or not hits[block.block_id]:
                clean.append(block)
            else:
                rest.append(block)
            block = block.next_free_block
        self.counters.inspected_blocks += len(clean) + len(rest) + len(protected)
        self.counters.victims_never_reused += len(clean)
        if not rest and not protected:
            return
        victims = (clean + rest + protected)[:num_blocks]
        self.counters.reordered_decisions += 1
        for victim in victims:
            queue.remove(victim)
        queue.prepend_n(victims)
