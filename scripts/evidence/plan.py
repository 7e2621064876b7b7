# SPDX-License-Identifier: Apache-2.0
"""Which servers gpu_evidence.py starts and how much it sends: on an H200, and in rehearsal."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from servers.fleet import EAGER, Spec
from serving.traces import TraceRow


def _connector(extra: dict) -> tuple[str, str]:
    config = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
    return "--kv-transfer-config", json.dumps(config | {"kv_connector_extra_config": extra})


TIER_GIB = 20
_SIMPLE = {"cpu_bytes_to_use": TIER_GIB * 2**30}
# A CPU tier, by what follows "+" in a server's name, and the arguments that turn it on.
TIERS = {
    "offload": ("--kv-offloading-size", str(TIER_GIB)),
    "simple": _connector(_SIMPLE),
    "lazy": _connector(_SIMPLE | {"lazy_offload": True}),
}
# Those that are compared run side by side; active64 is in both, beside every tier.
TIER_GROUPS = (
    ("offload", ("lru", "active64", "lru+offload", "active64+offload")),
    ("simple", ("active64", "lru+simple", "active64+simple", "lru+lazy", "active64+lazy")),
)
BYTES_PER_ELEMENT = 2  # bfloat16
# Qwen3-8B's shape; the rest of its config.json is the 0.6B one's.
LARGE_SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Sizes:
    """Tokens, blocks, counts and seconds of every part; names end in their unit.

    planned_s: seconds each part may take, start-up of its servers left out.
    floods_per_use: one-use prompts between two uses of the same hot prefix, on average.
    rates, agents_load: arrivals, as a share of what the lru server can just serve.
    agents_share: of the distinct blocks of the first agents_tokens of a trace, those of the pool.
    """

    block_size: int = 16
    budget_gib: float = 126.0

    small_blocks: int = 128
    small_names: tuple[str, ...] = ("unpatched", "lru", "active16", "active32", "active64")
    drill_hot_tokens: tuple[int, ...] = (300, 600, 900)
    drill_flood_tokens: tuple[int, ...] = (160, 320, 600, 900)
    drill_floods: int = 20
    drill_step: int = 5
    drill_seeds: int = 2

    mid_blocks: int = 4096
    mid_names: tuple[str, ...] = ("unpatched", "lru", "active16", "active32", "active64")
    mid_timed: tuple[str, ...] = ("unpatched", "lru", "active64")
    mid_max_len: int = 16384
    long_hot_tokens: int = 8000
    long_flood_tokens: int = 6000
    long_floods: int = 20
    long_step: int = 10
    long_survival: tuple[int, ...] = (20, 40)
    long_seeds: int = 2

    cost_requests: int = 256
    cost_max_tokens: int = 160
    cost_rounds: int = 12
    fill_tokens: int = 1000
    bench: tuple[str, ...] = ("--rounds", "20", "--calls", "100")

    control_rounds: int = 14
    control_requests: int = 48
    control_tokens: int = 1000
    control_hot_tokens: int = 2000

    trace_block_tokens: int = 64
    trace_cell_s: float = 30.0
    trace_load: float = 0.6
    trace_order: tuple[str, ...] = ("lru", "active64", "active64", "lru")

    large_blocks: int = 2625
    roomy_blocks: int = 9000
    large_names: tuple[str, ...] = ("unpatched", "lru", "active64", "roomy")
    large_max_len: int = 33600
    hot_set_tokens: int = 32768
    hot_tokens: tuple[int, ...] = (8192, 16384, 32768)
    question_tokens: int = 64
    flood_tokens: int = 4096
    floods_per_use: float = 6.0
    rates: tuple[float, ...] = (0.4, 0.8, 1.3)
    extra_rate: float = 0.8
    load_s: tuple[float, ...] = (18.0, 12.0, 12.0)
    ttft_rounds: int = 3
    ttft_repeats: int = 2
    limit_hits: int = 10

    tier_groups: tuple[tuple[str, tuple[str, ...]], ...] = TIER_GROUPS
    tier_rounds: tuple[int, ...] = (3, 3, 1)
    tier_turns: int = 2
    tier_cell_s: float = 8.0

    agents_tokens: int = 3_000_000
    agents_share: float = 0.08
    agents_in_flight: int = 8
    agents_load: float = 0.8
    agents_cell_s: float = 60.0
    agents_order: tuple[str, ...] = ("lru", "active64", "active64", "lru")

    planned_s: tuple[tuple[str, float], ...] = (
        ("smoke", 240),
        ("drill", 150),
        ("long", 60),
        ("ttft", 560),
        ("cost", 110),
        ("controls", 180),
        ("trace", 150),
        ("prestart", 10),
        ("dp2", 300),
        ("dp2gpu", 240),
        ("tiers", 350),
        ("agents", 240),
    )


GPU = Sizes()
REHEARSAL = Sizes(
    block_size=32,
    budget_gib=2.0,
    small_blocks=64,
    small_names=("unpatched", "active64"),
    drill_hot_tokens=(640,),
    drill_flood_tokens=(320, 640),
    drill_floods=8,
    drill_step=4,
    drill_seeds=1,
    mid_blocks=128,
    mid_names=("lru", "active64"),
    mid_timed=("lru", "active64"),
    mid_max_len=2048,
    long_hot_tokens=1280,
    long_flood_tokens=960,
    long_floods=8,
    long_step=4,
    long_survival=(6,),
    long_seeds=1,
    cost_requests=12,
    cost_max_tokens=64,
    cost_rounds=3,
    fill_tokens=512,
    bench=("--rounds", "2", "--calls", "5"),
    control_rounds=3,
    control_requests=6,
    control_tokens=256,
    control_hot_tokens=320,
    trace_block_tokens=32,
    trace_cell_s=6.0,
    large_blocks=64,
    roomy_blocks=256,
    large_names=("lru", "active64"),
    large_max_len=1600,
    hot_set_tokens=1280,
    hot_tokens=(640, 1280),
    question_tokens=32,
    flood_tokens=320,
    rates=(0.5, 1.1),
    extra_rate=0.5,
    load_s=(5.0, 5.0),
    ttft_rounds=2,
    ttft_repeats=1,
    limit_hits=4,
    tier_groups=(("offload", ("active64", "lru+offload")),),  # the CPU server has no tier
    tier_rounds=(1, 1),
    tier_turns=1,
    agents_tokens=40_000,
    agents_share=0.2,
)


def modes(name: str) -> tuple[str | None, int]:
    """Return COMPUTECACHE_MODE and COMPUTECACHE_SCAN_LIMIT of a server called `name`."""
    if name == "unpatched":
        return None, 0
    name = name.partition("+")[0]
    return ("active", int(name[6:])) if name.startswith("active") else ("lru", 64)


def block_bytes(config: dict, block_size: int) -> int:
    """Return the bytes of one block of keys and values."""
    heads = 2 * config["num_hidden_layers"] * config["num_key_value_heads"]
    return heads * config["head_dim"] * BYTES_PER_ELEMENT * block_size


def weight_bytes(config: dict) -> int:
    """Return the bytes of a Qwen3's weights, norms left out."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = hidden * head * heads + 3 * hidden * config["intermediate_size"]
    ends = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return BYTES_PER_ELEMENT * (config["num_hidden_layers"] * layer + ends)


def make_large_model(small: Path, folder: Path) -> Path:
    """Copy `small` (config and tokenizer) to `folder` with the 8B shape; weights are random."""
    if not (folder / "config.json").exists():
        shutil.copytree(small, folder, dirs_exist_ok=True)
        config = json.loads((small / "config.json").read_text()) | LARGE_SHAPE
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def agents_slice(sizes: Sizes, rows: list[TraceRow]) -> list[TraceRow]:
    """Return the first requests of a trace that fit a server and agents_tokens together.

    Each hash id becomes one block of the server, whatever its size was.
    """
    left = sizes.agents_tokens // sizes.block_size
    longest = (sizes.large_max_len - 2) // sizes.block_size  # 2 tokens are generated
    taken: list[TraceRow] = []
    for row in rows:
        if not 0 < len(row.hash_ids) <= longest:
            continue
        left -= len(row.hash_ids)
        if left < 0 and taken:
            break
        taken.append(row)
    return taken


def agents_pool_blocks(sizes: Sizes, taken: list[TraceRow]) -> int:
    """Return the blocks of the part's pool: its share, and never less than one request takes."""
    distinct = len({number for row in taken for number in row.hash_ids})
    longest = -(-sizes.large_max_len // sizes.block_size) + 1  # one block is never given out
    return max(round(sizes.agents_share * distinct), longest)


def specs(
    sizes: Sizes, small: Path, large: Path, rehearse: bool, agents_blocks: int = 0
) -> list[Spec]:
    """Return every server: small and mid pools of 0.6B, the large model, its tiers, its agents.

    agents_blocks: the pool of the part `agents`, 0 without a trace.
    """
    agents = tuple(dict.fromkeys(sizes.agents_order)) if agents_blocks else ()
    found = []
    for group, names, blocks, model, max_len, more in (
        ("small", sizes.small_names, sizes.small_blocks, small, 1024, ("--max-num-seqs", "16")),
        ("mid", sizes.mid_names, sizes.mid_blocks, small, sizes.mid_max_len, _mid(rehearse)),
        ("large", sizes.large_names, sizes.large_blocks, large, sizes.large_max_len, _LARGE),
        *(
            (group, names, sizes.large_blocks, large, sizes.large_max_len, _LARGE)
            for group, names in sizes.tier_groups
        ),
        ("agents", agents, agents_blocks, large, sizes.large_max_len, _LARGE),
    ):
        config = json.loads((model / "config.json").read_text())
        for name in names:
            mode, scan_limit = modes(name)
            count = sizes.roomy_blocks if name == "roomy" else blocks
            cache_bytes = count * block_bytes(config, sizes.block_size)
            timed = group in ("large", "agents", *dict(sizes.tier_groups)) or (
                group == "mid" and name in sizes.mid_timed
            )
            args = ("--max-model-len", str(max_len), "--block-size", str(sizes.block_size), *more)
            args += TIERS.get(name.partition("+")[2], ())
            if rehearse:
                gib = 1.0  # the budget then counts servers
                args += ("--dtype", "float32")
            else:
                gib = (cache_bytes + weight_bytes(config)) / 2**30 + (3.0 if timed else 2.0)
                args += ("--load-format", "dummy", "--kv-cache-memory-bytes", str(cache_bytes))
                # Checked against free memory at the start; the cache's size is given above.
                args += ("--gpu-memory-utilization", "0.04")
            execution = 0 if timed and not rehearse else EAGER
            found.append(
                Spec(group, name, mode, scan_limit, count, str(model), args, gib, execution)
            )
    return found


def _mid(rehearse: bool) -> tuple[str, ...]:
    seqs = ("--max-num-seqs", "16") if rehearse else ("--max-num-seqs", "256")
    return (*seqs, "--max-num-batched-tokens", "2048" if rehearse else "8192")


# A step of 2,048 tokens: what a hit has to wait for when it arrives during a prefill.
_LARGE = ("--max-num-seqs", "64", "--max-num-batched-tokens", "2048")
