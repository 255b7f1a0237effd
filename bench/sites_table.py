"""What the shortcuts find in each family of models, on tiny models built from configurations."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pca_torch.sites import SHORTCUTS, find_sites  # ruff: ignore[module-import-not-at-top-of-file]
from tests.families import FAMILIES, build  # ruff: ignore[module-import-not-at-top-of-file]

NAMES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX",
    "phi": "Phi",
    "phi3": "Phi-3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "qwen2_moe": "Qwen2-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "opt": "OPT",
    "bloom": "BLOOM",
    "falcon": "Falcon",
    "olmo2": "OLMo 2",
    "bert": "BERT, MiniLM",
    "roberta": "RoBERTa",
    "distilbert": "DistilBERT",
    "t5": "T5",
    "vit": "ViT",
    "convnext": "ConvNeXt",
    "resnet": "ResNet",
}


def found_in(family: str) -> tuple[str, ...]:
    """The shortcuts that find something."""
    model, words = build(family)[0], []
    for word in SHORTCUTS:
        try:
            find_sites(model, word)
        except ValueError:
            continue
        words.append(word)
    return tuple(words)


def main() -> None:
    """Print a Markdown table, families that have the same in one row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for family, name in NAMES.items():
        assert family in FAMILIES
        groups.setdefault(found_in(family), []).append(name)
    print("| families | shortcuts |\n|---|---|")
    for words, names in groups.items():
        told = " ".join(f"`{word}`" for word in words) or "none: name convolutions, `encoder.stages.*:map`"
        print(f"| {', '.join(names)} | {told} |")


if __name__ == "__main__":
    main()
