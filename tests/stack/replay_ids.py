# SPDX-License-Identifier: Apache-2.0
"""Print the block ids that vLLM's pool hands out in a short replay, for each mode named.

It runs inside an image, which need not have the policy.
"""

import hashlib
import json
import os
import random
import sys
from types import SimpleNamespace

from vllm.v1.core.block_pool import BlockPool

BLOCK_SIZE = 16


def replay(mode):
    os.environ["COMPUTECACHE_MODE"] = mode
    pool = BlockPool(96, enable_caching=True, hash_block_size=BLOCK_SIZE)
    draw = random.Random(12)
    running, handed_out = [], []
    for step in range(1500):
        name, count = draw.choice(("hot", "warm", f"once {step}")), draw.randrange(1, 20)
        while running and (count > pool.get_num_free_blocks() or draw.random() < 0.5):
            pool.free_blocks(reversed(running.pop(0)))
        hashes = [hashlib.sha256(f"{name}/{depth}".encode()).digest() for depth in range(count)]
        blocks = []
        for block_hash in hashes:
            if (found := pool.get_cached_block(block_hash, [0])) is None:
                break
            blocks.append(found[0])
        cached = len(blocks)
        pool.touch(blocks)
        if count - cached > pool.get_num_free_blocks():
            pool.free_blocks(reversed(blocks))
            continue
        blocks += pool.get_new_blocks(count - cached)
        request = SimpleNamespace(
            block_hashes=hashes,
            all_token_ids=[0] * count * BLOCK_SIZE,
            lora_request=None,
            mm_features=[],
            cache_salt=None,
            prompt_embeds=None,
            session_id=None,
            num_tokens=count * BLOCK_SIZE,
        )
        pool.cache_full_blocks(request, blocks, cached, count, BLOCK_SIZE, 0)
        running.append(blocks)
        handed_out.append([cached, *(block.block_id for block in blocks)])
    return handed_out


print(json.dumps({mode: replay(mode) for mode in sys.argv[1:]}))
