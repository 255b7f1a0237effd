"""The main job: a model and tokens in; spectra and ranks of each site, in both views, out."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pca_torch import export, plots, report, texts
from pca_torch._checks import as_components, as_mask, check_choice, check_number
from pca_torch.hooks import capture, match_sites
from pca_torch.models import load_model
from pca_torch.moments import Moments
from pca_torch.precision import Precision
from pca_torch.result import PCAResult, SiteReport
from pca_torch.solvers import decompose
from pca_torch.sources import open_sources
from pca_torch.tokens import TokenViews

__all__ = ["analyse", "decoder_layers", "fit_files", "run", "write_outputs"]

Progress = Callable[[int], object]  # is told how many tokens or rows were just done

WHOLE = "covariance_eigh"  # a report shows every variance, also of those directions that are not kept
HELD = 256  # rows a site holds aside at most: with D = 4096 in float32 that is 4 MiB


def analyse(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any] | Tensor],
    sites: str | Sequence[str] | None = None,
    *,
    n_components: float | None = 0.95,
    drop_first: int = 0,
    precision: Precision = "auto",
    progress: Progress | None = None,
) -> dict[str, SiteReport]:
    """How many dimensions each site of a model uses: all tokens, and the tokens of typical norm.

    Activations are reduced inside the hook; per site it keeps two D×D sums and a bounded number of
    rows, however many batches come. The head of a language model is not run.

    Args:
        model: any module; it is put in eval mode while this runs.
        batches: arguments for the model, as keyword arguments or one tensor. `attention_mask` (B, T)
            of 0 and 1 says which tokens count.
        sites: names or patterns of submodules (`model.layers.*`); None is every decoder layer.
        n_components: directions kept per site, a share of the variance as a float, or None for all.
        drop_first: leave out the first tokens of each sequence, this many, in every site.
        precision: arithmetic of the products.
        progress: called after each batch with its number of tokens.

    Returns:
        Per site a `SiteReport`, in the order of the model.

    Raises:
        ValueError: no such site, no batch, too few tokens, or NaN in a site.
    """
    check_number(drop_first, "drop_first", "an integer ≥ 0", isinstance(drop_first, int) and drop_first >= 0)
    n_components = as_components(n_components)
    names = match_sites(model, decoder_layers(model) if sites is None else sites)
    views = {name: _Views(drop_first, precision, n_components) for name in names}
    body = _body(model, names)
    modes, seen = {module: module.training for module in model.modules()}, 0
    model.eval()
    try:
        with torch.no_grad(), capture(model, views, mask=partial(_kept_tokens, drop_first)):
            for batch in batches:
                body(**batch) if isinstance(batch, Mapping) else body(batch)
                seen += 1
                if progress is not None:
                    progress(_count(batch))
            if not seen:
                raise ValueError("`batches` must hold at least one batch, got none.")
    finally:
        for (
            module,
            training,
        ) in modes.items():  # one by one: a frozen part of a model in training stays frozen
            module.training = training
    return {name: _site_report(name, views.pop(name), n_components) for name in names}


def decoder_layers(model: nn.Module) -> str:
    """Pattern of the blocks of a model: the longest list of modules of one class that is in no other list.

    Args:
        model: the model.

    Raises:
        ValueError: it has no such list.
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    lists = [
        (len(module), name)
        for name, module in found.items()
        if len({type(child) for child in module}) == 1
        and not any(name.startswith(f"{other}.") for other in found)  # experts inside a block
    ]
    if not lists:
        raise ValueError(
            "`sites` must be given: this model has no list of equal blocks; see `model.named_modules()`."
        )
    longest = max(length for length, _ in lists)
    return next(f"{name}.*" if name else "*" for length, name in lists if length == longest)


def run(
    model: str = "smollm2",
    *,
    text: Sequence[str | Path] = (),
    tokens: str | Path | None = None,
    sites: Sequence[str] | None = None,
    seq_len: int = 512,
    max_tokens: int = 8192,
    batch_size: int = 4,
    n_components: float | None = 0.95,
    drop_first: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    progress: Callable[[str, int], Progress] | None = None,
) -> tuple[dict[str, Any], dict[str, SiteReport]]:
    """Load a language model, read tokens, analyse; the report and the results behind it.

    Args:
        model: "smollm2", a local folder, a `.gguf` file, or a hub id.
        text: plain text or jsonl files; none is the embedded text.
        tokens: a `.npy` file of token ids, instead of text.
        sites: names or patterns; None is every decoder layer.
        seq_len: tokens per sequence.
        max_tokens: tokens to run at most.
        batch_size: sequences per forward pass.
        n_components: directions kept per site.
        drop_first: tokens left out at the start of each sequence.
        device: "auto" or a torch device.
        dtype: "auto" or a torch dtype by name.
        revision: of a hub model.
        progress: makes, from a description and a total of tokens, what is told each step.

    Raises:
        ValueError: an argument or a file is at fault, in one sentence.
    """
    check_number(batch_size, "batch_size", "an integer ≥ 1", batch_size >= 1)
    n_components = as_components(n_components)
    pieces = texts.read_texts(text) if text else [texts.default_text()]  # says at once what is missing
    if text and tokens is not None:
        raise ValueError("`text` and `tokens` exclude each other; give one of them.")
    ids = None if tokens is None else texts.read_tokens(Path(tokens), seq_len, max_tokens)
    _check_drop(drop_first, seq_len if ids is None else ids.seq_len)
    language_model = load_model(
        model, device=device, dtype=dtype, revision=revision, with_tokenizer=ids is None
    )
    if ids is None:
        ids = texts.token_windows(pieces, language_model.tokenizer, seq_len, max_tokens)
    embedding: Any = language_model.model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    texts.check_ids(ids.ids, embedding.num_embeddings)
    where = next(language_model.model.parameters()).device
    batches = (
        {key: value.to(where) for key, value in batch.items()} for batch in texts.batches(ids.ids, batch_size)
    )
    step = None if progress is None else progress("capturing", ids.seen + ids.padding)
    results = analyse(
        language_model.model, batches, sites, n_components=n_components, drop_first=drop_first, progress=step
    )
    counts = ids.counts() | {
        "text": [str(f) for f in text] or ("tokens file" if tokens else "pydoc_data.topics")
    }
    settings = {
        "sites": list(sites) if sites else None,
        "batch_size": batch_size,
        "n_components": n_components,
        "drop_first": drop_first,
        "point": "output of the module",
    }
    return report.report_dict(results, language_model.provenance, counts, settings), results


def fit_files(
    files: Sequence[str | Path],
    *,
    n_components: float | None = 0.95,
    precision: Precision = "auto",
    progress: Callable[[str, int], Progress] | None = None,
) -> tuple[dict[str, Any], dict[str, SiteReport]]:
    """The same report for arrays on disk, read by blocks: rows are samples, all files are one site.

    Args:
        files: `.npy` files (..., D), in natural order whatever the order given.
        n_components: directions kept.
        precision: arithmetic of the products.
        progress: makes, from a description and a total of rows, what is told each step.

    Raises:
        ValueError: a file is not an array of numbers, or the files differ in D.
    """
    n_components = as_components(n_components)
    sources = open_sources(list(map(Path, files)))
    views = _Views(0, precision, n_components)
    step = None if progress is None else progress("reading", sum(source.n_rows for source in sources))
    for source in sources:
        for block in source:
            try:
                views.update(block)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{source.path}: {error}") from error
            if step is not None:
                step(len(block))
    name = sources[0].path.stem if len(sources) == 1 else "data"
    results = {name: _site_report(name, views, n_components)}
    model = {
        "name": ", ".join(source.path.name for source in sources[:3]) + (" …" if len(sources) > 3 else "")
    }
    settings = {"n_components": n_components, "files": [source.path.name for source in sources]}
    rows = {"rows": sum(source.n_rows for source in sources)}
    return report.report_dict(results, model, rows, settings), results


def write_outputs(
    out: str | Path,
    summary: Mapping[str, Any],
    results: Mapping[str, SiteReport],
    view: Literal["typical", "all"] = "typical",
) -> list[Path]:
    """Write `report.json`, `basis.safetensors` and, where matplotlib is there, `spectra.png`.

    Each file is written whole or not at all.

    Args:
        out: the folder; made if need be.
        summary: the report.
        results: the results behind it.
        view: which tokens the basis is of.

    Returns:
        The files written.

    Raises:
        ValueError: `view` is neither, or `out` is a file.
    """
    check_choice(view, "view", ("typical", "all"))
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`out` must be a folder, {folder} is a file; give another.")
    folder.mkdir(parents=True, exist_ok=True)
    bases: dict[str, PCAResult] = {
        name: site.typical if view == "typical" else site.all_tokens for name, site in results.items()
    }
    metadata = {key: summary[key] for key in ("model", "tokens", "settings")} | {"view": view}
    written = [folder / "report.json", folder / "basis.safetensors"]
    report.write_report(written[0], summary)
    export.save(written[1], bases, metadata)
    try:
        plots.plot_spectra(summary, folder / "spectra.png")
        written.append(folder / "spectra.png")
    except ImportError as error:  # the picture is an extra; the numbers are not
        warnings.warn(f"{folder / 'spectra.png'} is not written: {error}", stacklevel=2)
    return written


class _Views:
    """The sink of one site: `TokenViews`, made when the first activation says how wide it is."""

    def __init__(self, drop_first: int, precision: Precision, n_components: float | None) -> None:
        self.drop_first = drop_first
        self.n_components = n_components
        self.precision: Precision = precision
        self.views: TokenViews[Moments] | None = None

    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Count the rows of one activation.

        Raises:
            ValueError: more components are wanted than there are features.
        """
        if self.views is None:
            d = x.shape[-1]
            if isinstance(self.n_components, int) and self.n_components > d:  # now, not after the work
                raise ValueError(f"`n_components` must be in 0..{d}, got {self.n_components}.")
            typical = partial(Moments, d, precision=self.precision, device=x.device)
            extreme = partial(
                Moments, d, precision="float64" if x.device.type != "mps" else "auto", device=x.device
            )
            self.views = TokenViews(typical, extreme, max_held=HELD)
        positions = None
        if self.drop_first and mask is not None and mask.ndim == 2:
            positions = mask.long().cumsum(1) - 1 + self.drop_first  # places in the whole sequence
        self.views.update(x, mask=mask, positions=positions)


def _site_report(name: str, sink: _Views, n_components: float | None) -> SiteReport:
    """Solve both views of one site.

    Raises:
        ValueError: the site saw too few tokens.
    """
    if sink.views is None or sink.views.n_samples == 0:
        raise ValueError(
            f"site {name!r} saw no token that counts; check the attention mask and `drop_first`."
        )
    everything, typical, extreme = sink.views.result()
    try:
        all_tokens = decompose(everything, n_components, WHOLE)
        if typical is everything:
            return SiteReport(all_tokens, all_tokens, extreme)
        return SiteReport(all_tokens, decompose(typical, n_components, WHOLE), extreme)
    except ValueError as error:
        raise ValueError(f"site {name!r}: {error}") from error


def _body(model: nn.Module, sites: Sequence[str]) -> Callable[..., object]:
    """The forward to call: a language model without its head if no site needs it, and without a cache."""
    is_transformer = isinstance(getattr(model, "base_model_prefix", None), str)  # not any `base_model`
    body = getattr(model, "base_model", model) if is_transformer else model
    inside = set(body.modules()) if isinstance(body, nn.Module) else set()
    hooked = dict(model.named_modules())
    if not all(hooked.get(site) in inside for site in sites):
        body = model
    accepts = inspect.signature(body.forward).parameters
    return partial(body, use_cache=False) if "use_cache" in accepts else body


def _kept_tokens(
    drop_first: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """The attention mask without the first tokens of each sequence.

    Raises:
        ValueError: nothing says where sequences start.
    """
    mask = kwargs.get("attention_mask")
    if not drop_first:
        return mask
    if mask is None:
        first = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim >= 2), None)
        if first is None:
            raise ValueError(
                "`drop_first` needs sequences (B, T); pass an `attention_mask` with the batches."
            )
        mask = torch.ones(first.shape[:2], dtype=torch.bool, device=first.device)
    kept = as_mask(mask, tuple(mask.shape), mask.device)
    return (
        None
        if kept is None
        else (kept.reshape(mask.shape) & (kept.reshape(mask.shape).cumsum(1) > drop_first))
    )


def _check_drop(drop_first: int, seq_len: int) -> None:
    check_number(
        drop_first, "drop_first", f"in 0..{seq_len - 1}, less than a sequence", 0 <= drop_first < seq_len
    )


def _count(batch: Mapping[str, Any] | Tensor) -> int:
    """Tokens of a batch, padding included."""
    first = (
        next((v for v in batch.values() if isinstance(v, Tensor)), None)
        if isinstance(batch, Mapping)
        else batch
    )
    if first is None:
        return 0
    return first.numel() if not first.is_floating_point() else first.shape[:-1].numel()
