# SPDX-License-Identifier: Apache-2.0
"""Make a tiny Qwen3-shaped model with a tokenizer, offline and the same on every machine.

The weights are random, so its text means nothing. They are drawn at a scale at which
attention decides the output: a block of the prefix cache that held another request's
tokens would show as a different answer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SEED = 20260
VOCAB_SIZE = 1024
LAYERS = 2
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
HIDDEN_SIZE = 256
MLP_SIZE = 768
MAX_TOKENS = 4096
END_OF_TEXT = "<|endoftext|>"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "head_dim": HEAD_SIZE,
    "hidden_act": "silu",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": MLP_SIZE,
    "max_position_embeddings": MAX_TOKENS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "vocab_size": VOCAB_SIZE,
}


def make_tokenizer() -> Tokenizer:
    """Train a byte-level BPE on made-up words; VOCAB_SIZE entries, the end-of-text token is 0."""
    rng = np.random.default_rng(SEED)
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    words = ["".join(rng.choice(syllables, size=rng.integers(1, 5))) for _ in range(6000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words)], trainer)
    return tokenizer


def make_weights() -> dict[str, np.ndarray]:
    """Draw every tensor of CONFIG's shape as float32 from SEED."""
    rng = np.random.default_rng(SEED)
    queries, keys = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, dtype=np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, HIDDEN_SIZE),
        "model.norm.weight": ones(HIDDEN_SIZE),
    }
    for layer in range(LAYERS):
        weights |= {
            f"model.layers.{layer}.{name}.weight": value
            for name, value in {
                "self_attn.q_proj": matrix(queries, HIDDEN_SIZE),
                "self_attn.k_proj": matrix(keys, HIDDEN_SIZE),
                "self_attn.v_proj": matrix(keys, HIDDEN_SIZE),
                "self_attn.o_proj": matrix(HIDDEN_SIZE, queries),
                # Three times as sharp as trained ones start: each answer hangs on few tokens.
                "self_attn.q_norm": 3 * ones(HEAD_SIZE),
                "self_attn.k_norm": ones(HEAD_SIZE),
                "mlp.gate_proj": matrix(MLP_SIZE, HIDDEN_SIZE),
                "mlp.up_proj": matrix(MLP_SIZE, HIDDEN_SIZE),
                "mlp.down_proj": matrix(HIDDEN_SIZE, MLP_SIZE),
                "input_layernorm": ones(HIDDEN_SIZE),
                "post_attention_layernorm": ones(HIDDEN_SIZE),
            }.items()
        }
    return weights


def make_model(folder: Path) -> Path:
    """Write the model to `folder`, or leave it when this very file already wrote it there."""
    made_by = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    stamp = folder / "made_by.sha256"
    if stamp.is_file() and stamp.read_text() == made_by:
        return folder
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    make_tokenizer().save(str(partial / "tokenizer.json"))
    (partial / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END_OF_TEXT,
                "pad_token": END_OF_TEXT,
                "model_max_length": MAX_TOKENS,
            }
        )
    )
    (partial / "config.json").write_text(json.dumps(CONFIG, indent=1))
    save_file(make_weights(), partial / "model.safetensors", metadata={"format": "pt"})
    (partial / stamp.name).write_text(made_by)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder
