"""Tiny random models of every family the sites know, built from configurations: nothing is downloaded.

All widths differ (hidden 48, heads of 8, MLP 80), so that a tensor of the wrong place has the wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn

HIDDEN, MLP, VOCAB, LAYERS, HEADS, KV_HEADS, HEAD = 48, 80, 97, 2, 6, 2, 8

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WIDE = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
LLAMA = WIDE | {
    "intermediate_size": MLP,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
BERT = WIDE | {"intermediate_size": MLP, "max_position_embeddings": 66}


@dataclass(frozen=True)
class Family:
    """How to build a tiny model and call it."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    causal: bool = True  # a decoder with a cache


def _model(auto: str, config: str, **settings: Any) -> nn.Module:
    """A model in eval mode whose weights come from a seed; the global generator is left as found."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    try:
        built = getattr(transformers, config)(**settings)
        built._attn_implementation = "eager"
        model = getattr(transformers, auto).from_config(built)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:  # norms and biases away from the neutral 1 and 0
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif parameter.ndim < 4 and "embed" not in name:
                    parameter.mul_(5)  # from a deviation of 0.02 to one where attention is not flat
    finally:
        torch.random.set_rng_state(state)
    return model.eval()


def tokens(rows: int = 2, length: int = 7) -> dict[str, Any]:
    """Token ids (B, T) and a full mask."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCAB, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pixels() -> dict[str, Any]:
    """Two pictures of 16 × 16."""
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def decoder(config: str, **settings: Any) -> Family:
    """A causal language model of transformers."""
    return Family(partial(_model, "AutoModelForCausalLM", config, **IDS, **settings), tokens)


def encoder(config: str, **settings: Any) -> Family:
    """A model of transformers for text that is there whole."""
    return Family(partial(_model, "AutoModel", config, **settings), tokens, causal=False)


def vision(config: str, **settings: Any) -> Family:
    """A model of transformers for pictures."""
    return Family(partial(_model, "AutoModel", config, **settings), pixels, causal=False)


def _translation() -> dict[str, Any]:
    return tokens() | {"decoder_input_ids": tokens(2, 5)["input_ids"]}


FAMILIES: dict[str, Family] = {
    "llama": decoder("LlamaConfig", **LLAMA),
    "qwen2": decoder("Qwen2Config", **LLAMA),
    "qwen3": decoder("Qwen3Config", **LLAMA, head_dim=12),
    "mistral": decoder("MistralConfig", **LLAMA, sliding_window=None),
    "gemma2": decoder("Gemma2Config", **LLAMA, head_dim=12),
    "gemma3": decoder("Gemma3TextConfig", **LLAMA, head_dim=12),
    "gpt2": decoder(
        "GPT2Config", vocab_size=VOCAB, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_positions=64
    ),
    "gpt_neox": decoder("GPTNeoXConfig", **WIDE, intermediate_size=MLP, rotary_pct=0.5),
    "phi": decoder("PhiConfig", **LLAMA, partial_rotary_factor=0.5),
    "phi3": decoder("Phi3Config", **LLAMA),
    "mixtral": decoder("MixtralConfig", **LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": decoder("Qwen3MoeConfig", **LLAMA, **EXPERTS, head_dim=12),
    "qwen2_moe": decoder("Qwen2MoeConfig", **LLAMA, **EXPERTS, shared_expert_intermediate_size=24),
    "deepseek_v3": decoder(
        "DeepseekV3Config",
        **(LLAMA | {"num_key_value_heads": HEADS}),
        kv_lora_rank=16,
        q_lora_rank=20,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=10,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=20,
        first_k_dense_replace=1,
    ),
    "opt": decoder("OPTConfig", **WIDE, ffn_dim=MLP, word_embed_proj_dim=HIDDEN, max_position_embeddings=64),
    "bloom": decoder("BloomConfig", vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS),
    "falcon": decoder("FalconConfig", **WIDE, multi_query=True, alibi=False),
    "falcon_old": decoder("FalconConfig", **WIDE, multi_query=False, alibi=True),
    "falcon_new": decoder(
        "FalconConfig", **WIDE, new_decoder_architecture=True, num_kv_heads=KV_HEADS, alibi=False
    ),
    "olmo2": decoder("Olmo2Config", **LLAMA),
    "bert": encoder("BertConfig", **BERT),
    "roberta": encoder("RobertaConfig", **BERT),
    "distilbert": encoder(
        "DistilBertConfig", vocab_size=VOCAB, dim=HIDDEN, hidden_dim=MLP, n_layers=LAYERS, n_heads=HEADS
    ),
    "t5": Family(
        partial(
            _model,
            "AutoModel",
            "T5Config",
            vocab_size=VOCAB,
            d_model=HIDDEN,
            d_kv=HEAD,
            d_ff=MLP,
            num_layers=LAYERS,
            num_heads=HEADS,
            decoder_start_token_id=0,
        ),
        _translation,
        causal=False,
    ),
    "vit": vision(
        "ViTConfig",
        **{key: WIDE[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
        intermediate_size=MLP,
        image_size=16,
        patch_size=4,
    ),
    "convnext": vision(
        "ConvNextConfig", hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1], image_size=16, patch_size=2
    ),
    "resnet": vision(
        "ResNetConfig", embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic"
    ),
}
CAUSAL = [name for name, family in FAMILIES.items() if family.causal]


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model of one family and arguments to call it with."""
    family = FAMILIES[name]
    return family.build(), family.inputs()
