"""A random Llama and a tokenizer trained on the spot, small enough for any test."""

from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "the cat sat on the mat\nand the dog lay by the door\n\n  while it rained, they slept. " * 20


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with 300 tokens; every text has a spelling."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", model_max_length=64)


def tiny_llama() -> LlamaForCausalLM:
    """Two layers of width 16 with weights from a seed."""
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
        )
    )
    torch.random.set_rng_state(state)
    return model.eval()


def write_tiny_gguf(path: Path, kind: gguf.GGMLQuantizationType, file_type: int | None) -> np.ndarray:
    """A one-layer Llama of width 32 as a GGUF file; returns what its first up-projection stands for."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    if file_type is not None:
        writer.add_file_type(file_type)
    tokens = ["<unk>", "<bos>", "<eos>", *"abcdefghijklmnopqrstuvwxyz", "ab", "cd"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * 28)
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (31, 32),
        "output": (31, 32),
        "blk.0.attn_q": (32, 32),
        "blk.0.attn_k": (32, 32),
        "blk.0.attn_v": (32, 32),
        "blk.0.attn_output": (32, 32),
        "blk.0.ffn_gate": (64, 32),
        "blk.0.ffn_up": (64, 32),
        "blk.0.ffn_down": (32, 64),
    }
    for name, shape in shapes.items():
        packed = gguf.quantize(rng.standard_normal(shape).astype(np.float32), kind)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
        if name == "blk.0.ffn_up":
            up = gguf.dequantize(packed, kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return up
