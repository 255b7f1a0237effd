"""What capturing every layer of a language model costs beside the forward pass itself."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

import pca_torch as pt
from bench.gpu.record import Recorder, free, say, spectral_norm
from bench.gpu.samples import truth_of
from bench.pairs import timed

PAIRS = 3
FULL = {"layers": 32, "width": 4096, "inner": 11008, "heads": 32, "batch": 8, "length": 512}
SMALL = {"layers": 4, "width": 64, "inner": 128, "heads": 4, "batch": 3, "length": 100}
VOCABULARY = 512
SYNCHRONISED = "called a synchronizing"  # how the warning of each begins


def run(recorder: Recorder, small: bool) -> None:
    """Every layer into `Moments`, then into `TokenViews` of them, each beside a plain forward.

    A fault is recorded and the run goes on.
    """
    shape = SMALL if small else FULL
    if recorder.left < 20 and not small:
        recorder.skip("the time is up", part="capture", case="every layer")
        return
    try:
        model = llama(shape, recorder.device)
        generator = torch.Generator(recorder.device).manual_seed(0)
        size = (shape["batch"], shape["length"])
        ids = torch.randint(0, VOCABULARY, size, generator=generator, device=recorder.device)
        for case, make in (("Moments", _moments), ("TokenViews", _views)):
            _measure(recorder, case, model, ids, partial(make, shape["width"], recorder.device), shape)
    except Exception as error:
        recorder.fault(error, part="capture", case="every layer")
    finally:
        free(recorder.device)


def llama(shape: dict[str, int], device: torch.device) -> nn.Module:
    """A Llama without its head, random weights in bfloat16, made on the device.

    Args:
        shape: its sizes.
        device: where; nothing of it goes through the host.
    """
    from transformers import LlamaConfig, LlamaModel

    gc.freeze()  # what was imported is not gone through before each timed run

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape["width"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        max_position_embeddings=2048,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            return LlamaModel(config).eval()
    finally:
        torch.set_default_dtype(before)


def _measure(
    recorder: Recorder,
    case: str,
    model: nn.Module,
    ids: Tensor,
    make: Callable[[], pt.Moments | pt.TokenViews],
    shape: dict[str, int],
) -> None:
    sinks = {name: make() for name in pt.match_sites(model, "layers.*")}
    device, tokens = recorder.device, ids.numel()

    def plain() -> None:
        model(ids)

    def captured() -> None:
        with pt.capture(model, sinks):
            model(ids)

    with torch.no_grad():
        error, bound = _off(model, ids, shape["layers"] // 2)
        plain(), captured()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        pairs = [(timed(captured, recorder.wait)[0], timed(plain, recorder.wait)[0]) for _ in range(PAIRS)]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        with _synchronisations(device) as seen:
            captured()
    ratio = statistics.median(a / b for a, b in pairs)
    seconds, alone = (statistics.median(side) for side in zip(*pairs, strict=True))
    ok = error <= bound
    recorder.counts["rows"] += 1
    recorder.counts["wrong"] += not ok
    recorder.line(
        **{"part": "capture", "case": case, "dtype": "bfloat16", "seconds": seconds, "times": pairs},
        **{"ratio": ratio, "tokens": tokens, "tokens_per_second": tokens / seconds, "plain_seconds": alone},
        **{"synchronisations": None if seen is None else len(seen), "peak_bytes": peak, **shape},
        **{"error": error, "bound": bound, "ok": ok},
    )
    say(f"capture: {case}: {seconds:.3g} s, {ratio:.2f} of a plain forward, off {error:.1e}")


def _off(model: nn.Module, ids: Tensor, layer: int) -> tuple[float, float]:
    """How far the captured covariance of one layer is from that of the hidden states themselves.

    Both see one forward pass. The bound is what the statistic says of its own sums, and what the truth is
    off by.
    """
    kept: list[Tensor] = []
    name = f"layers.{layer}"
    module = model.get_submodule(name)
    handle = module.register_forward_hook(lambda _m, _i, out: kept.append(_first(out).detach().clone()))
    try:
        with pt.capture(model, {name: (statistic := pt.Moments(_width(model)))}):
            model(ids)
    finally:
        handle.remove()
    truth = truth_of(kept[0].flatten(0, -2))
    off = spectral_norm(statistic.covariance() - truth.covariance)
    bound = statistic.scatter_error() / statistic.divisor() + 2 * truth.slack
    return off / truth.total, bound / truth.total


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _width(model: nn.Module) -> int:
    return int(model.config.hidden_size)


def _moments(d: int, device: torch.device) -> pt.Moments:
    return pt.Moments(d, device=device)


def _views(d: int, device: torch.device) -> pt.TokenViews:
    """As the main job makes them."""
    return pt.TokenViews(
        partial(pt.Moments, d, device=device),
        partial(pt.Moments, d, precision="float64", device=device),
        max_held=256,
    )


@contextmanager
def _synchronisations(device: torch.device) -> Generator[list[str] | None]:
    """What torch warns of while the host waits for the device; None where there is nothing to wait for."""
    if device.type != "cuda":
        yield None
        return
    seen: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
            seen += [str(w.message) for w in caught if SYNCHRONISED in str(w.message)]
