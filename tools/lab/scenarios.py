# SPDX-License-Identifier: Apache-2.0
"""Two questions with a known right answer, asked of a real BlockPool.

Flood: does a hot prefix outlive one-use prompts? Drift: does a new hot set take over
from one that was hit many times and never comes back?
"""

from random import Random

from lab.pool import Driver, make_pool

_FLOOD_POOLS = 2  # a flood is this many pools' worth of blocks ...
_FLOOD_PROMPTS = 20  # ... and no fewer prompts than this
_PROMPT_BLOCKS = 20  # a prompt of the drifting sets
_OLD_ROUNDS = 100  # times the old set is used
_SETTLE_SETS = 3  # allocations until the new set must do well, in working sets
_MEASURED_ROUNDS = 5  # times the new set is used after that


def flood_kept(
    pool_blocks: int, hot_blocks: int, prompt_blocks: int, mode: str, settings: dict
) -> float:
    """Share of a hot prefix that is still a hit after a flood of one-use prompts.

    The prefix is prefilled once and hit once. Sizes are blocks; ``pool_blocks`` counts
    vLLM's null block, as num_gpu_blocks does. One request is in flight.
    """
    prompts = max(_FLOOD_PROMPTS, -(-_FLOOD_POOLS * pool_blocks // prompt_blocks))
    unique = hot_blocks + prompts * prompt_blocks
    driver = Driver(make_pool(pool_blocks - 1, mode, settings), unique, concurrency=1)
    hot = range(hot_blocks)
    driver.play(hot)
    driver.play(hot)
    for first in range(hot_blocks, unique, prompt_blocks):
        driver.play(range(first, first + prompt_blocks))
    driver.finish_all()
    return len(driver.cached_prefix(hot)) / hot_blocks


def drift_hit_ratio(
    pool_blocks: int, set_share: float, one_use_share: float, mode: str, settings: dict
) -> float:
    """Hit ratio of a new hot set, once three working sets' worth of blocks were allocated.

    Both sets hold ``set_share`` of the pool in prompts of 20 blocks, used in shuffled
    rounds; ``one_use_share`` of the prompts in between are used once. The old set is
    used 100 times, then the new one only. A policy under which the new set never costs
    that many allocations is measured after ten rounds.
    """
    random = Random(0)
    prompts = max(1, int(set_share * pool_blocks) // _PROMPT_BLOCKS)
    set_blocks = prompts * _PROMPT_BLOCKS
    rounds = _OLD_ROUNDS + 10 + _MEASURED_ROUNDS
    fillers = [random.random() < one_use_share for _ in range(2 * rounds * prompts)]
    driver = Driver(
        make_pool(pool_blocks - 1, mode, settings),
        2 * set_blocks + len(fillers) * _PROMPT_BLOCKS,
        concurrency=1,
    )
    unused = iter(range(2 * set_blocks, len(driver.keys), _PROMPT_BLOCKS))
    filler = iter(fillers)

    def use(first_block: int) -> int:
        """One round over a set; returns the blocks it hit."""
        hits = 0
        for prompt in random.sample(range(prompts), prompts):
            while next(filler):
                one_use = next(unused)
                driver.play(range(one_use, one_use + _PROMPT_BLOCKS))
            start = first_block + prompt * _PROMPT_BLOCKS
            hits += driver.play(range(start, start + _PROMPT_BLOCKS))
        return hits

    for _ in range(_OLD_ROUNDS):
        use(0)
    before = driver.allocated_blocks
    for _ in range(10):
        if driver.allocated_blocks - before >= _SETTLE_SETS * set_blocks:
            break
        use(set_blocks)
    hits = sum(use(set_blocks) for _ in range(_MEASURED_ROUNDS))
    return hits / (_MEASURED_ROUNDS * set_blocks)
