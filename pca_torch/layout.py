"""How the results of one site lie in a file: tensors over G groups, and the facts of each group.

`components` (G, K, D), `explained_variance` (G, M), `mean` (G, D), `total_variance` (G,), `n_samples` (G,);
`scale` (G, D) when standardised; `rank` (G,) when the groups keep different K. K and M are the largest of
the site: shorter groups are padded with zeros, and `rank` and the fact `n_variances` say where each ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from pca_torch._checks import check_number
from pca_torch._dtypes import FLOATING
from pca_torch.result import Certificate, PCAResult

__all__ = ["KINDS", "check_site", "pack_site", "unpack_site"]

REQUIRED = frozenset({"components", "explained_variance", "mean", "total_variance", "n_samples"})
KINDS = REQUIRED | {"scale", "rank"}
LEAST = {"n_samples": 1, "rank": 0, "total_variance": 0, "explained_variance": 0}
FACTS = {"divisor": float, "centred": bool, "whiten": bool, "n_variances": int, "certificate": dict}
CERTIFICATE = get_type_hints(Certificate)
PER_COMPONENT = ("variance_error", "residual_norms", "quantisation_floor")
PROBES = 8  # random vectors that test the components


def pack_site(results: list[PCAResult]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Fresh CPU tensors by kind, so that a view costs its rows and not the buffer behind them, and the facts.

    Args:
        results: one per group, at least one.

    Raises:
        ValueError: the groups do not fit into common tensors.
    """
    common = {(r.n_features, r.components.dtype, r.scale is not None) for r in results}
    if len(common) > 1:
        raise ValueError("all groups must have the same features and dtype, and all or none be standardised.")
    d, dtype, standardised = common.pop()
    ranks = [r.n_components for r in results]
    components = torch.zeros(len(results), max(ranks), d, dtype=dtype, device="cpu")
    most = max(len(r.spectrum) for r in results)
    spectrum = torch.zeros(len(results), most, dtype=torch.float64, device="cpu")
    for g, r in enumerate(results):
        components[g, : ranks[g]] = r.components.detach()
        spectrum[g, : len(r.spectrum)] = r.spectrum.detach()
    tensors = {"components": components, "explained_variance": spectrum}
    for kind in ("mean", "total_variance", "scale")[: 3 if standardised else 2]:
        tensors[kind] = torch.stack([getattr(r, kind).detach().to("cpu", torch.float64) for r in results])
    tensors["n_samples"] = torch.tensor([r.n_samples for r in results], device="cpu")
    if len(set(ranks)) > 1:
        tensors["rank"] = torch.tensor(ranks, device="cpu")
    return tensors, [_facts(r) for r in results]


def unpack_site(tensors: Mapping[str, Tensor], facts: list[dict[str, Any]]) -> tuple[PCAResult, ...]:
    """Inverse of `pack_site` for what `check_site` accepted; the results own their tensors.

    Args:
        tensors: by kind.
        facts: one per group.
    """
    scale = tensors.get("scale")
    return tuple(
        PCAResult(
            mean=tensors["mean"][g].clone(),
            components=tensors["components"][g, :rank].clone(),
            spectrum=tensors["explained_variance"][g, : fact["n_variances"]].clone(),
            total_variance=tensors["total_variance"][g].clone(),
            n_samples=int(tensors["n_samples"][g]),
            divisor=fact["divisor"],
            certificate=Certificate.from_dict(fact["certificate"]),
            scale=None if scale is None else scale[g].clone(),
            centred=fact["centred"],
            whiten=fact["whiten"],
        )
        for g, (rank, fact) in enumerate(zip(_ranks(tensors), facts, strict=True))
    )


def check_site(tensors: Mapping[str, Tensor], facts: Any) -> None:
    """Refuse a site unless every tensor and every fact is what a decomposition can produce.

    Args:
        tensors: by kind.
        facts: one per group, as JSON gave them.

    Raises:
        ValueError: the first thing that is wrong.
    """
    if missing := REQUIRED - tensors.keys():
        raise ValueError(f"lacks {sorted(missing)}.")
    _check_shapes(tensors)
    for kind, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"`{kind}` holds NaN or inf.")
        if kind in LEAST and tensor.numel():
            least = tensor.min().item()
            check_number(least, kind, f"at least {LEAST[kind]}", least >= LEAST[kind])
    if "scale" in tensors and not (tensors["scale"] > 0).all():
        raise ValueError("`scale` must be positive.")
    groups, k, _ = tensors["components"].shape
    m, ranks = tensors["explained_variance"].shape[1], _ranks(tensors)
    check_number(max(ranks), "rank", f"{k} at its largest, the components stored", max(ranks) == k)
    if not isinstance(facts, list) or len(facts) != groups:
        raise ValueError(f"must have a list with the facts of its {groups} groups, got {facts!r:.80}.")
    for g, (rank, fact) in enumerate(zip(ranks, facts, strict=True)):
        try:
            _check_facts(fact, rank, m)
            _check_group({kind: tensor[g] for kind, tensor in tensors.items()}, fact, rank)
        except ValueError as error:
            raise ValueError(f"group {g}: {error}") from error
    longest = max(fact["n_variances"] for fact in facts)
    check_number(longest, "n_variances", f"{m} at its largest, the variances stored", longest == m)


def _facts(result: PCAResult) -> dict[str, Any]:
    return {
        "divisor": result.divisor,
        "centred": result.centred,
        "whiten": result.whiten,
        "n_variances": len(result.spectrum),
        "certificate": result.certificate.to_dict(),
    }


def _ranks(tensors: Mapping[str, Tensor]) -> list[int]:
    groups, k, _ = tensors["components"].shape
    return tensors["rank"].tolist() if "rank" in tensors else [k] * groups


def _check_shapes(tensors: Mapping[str, Tensor]) -> None:
    shape, dtype = tuple(tensors["components"].shape), tensors["components"].dtype
    if len(shape) != 3 or dtype not in FLOATING.values() or not shape[0] or not shape[2]:
        raise ValueError(f"`components` must be floating (groups, K, features), got {dtype} {shape}.")
    groups, k, d = shape
    m = (tensors["explained_variance"].shape or [0])[-1]
    check_number(m, "explained_variance", f"between K = {k} and D = {d} long", k <= m <= d)
    tails = {"explained_variance": (m,), "mean": (d,), "scale": (d,)}
    for kind in tensors.keys() - {"components"}:
        got = tensors[kind].dtype, tuple(tensors[kind].shape)
        want = torch.int64 if kind in ("n_samples", "rank") else torch.float64, (groups, *tails.get(kind, ()))
        if got != want:
            raise ValueError(f"`{kind}` must be {want[0]} {want[1]}, got {got[0]} {got[1]}.")


def _check_facts(facts: Any, rank: int, m: int) -> None:
    _check_fields(facts, FACTS, "facts")
    certificate, divisor, length = facts["certificate"], facts["divisor"], facts["n_variances"]
    _check_fields(certificate, CERTIFICATE, "certificate")
    check_number(divisor, "divisor", "positive and finite", 0 < divisor < math.inf)
    check_number(length, "n_variances", f"in {rank}..{m}", rank <= length <= m)
    for name in PER_COMPONENT:
        got = rank if certificate[name] is None else len(certificate[name])
        if got != rank:
            raise ValueError(f"`{name}` must have one value for each of {rank} components, got {got}.")


def _check_fields(values: Any, hints: Mapping[str, Any], what: str) -> None:
    if not isinstance(values, dict) or values.keys() != hints.keys():
        raise ValueError(f"`{what}` must have exactly the fields {', '.join(hints)}, got {values!r:.80}.")
    for name, hint in hints.items():
        if not _fits(values[name], hint):
            raise ValueError(f"`{name}` must be {getattr(hint, '__name__', hint)}, got {values[name]!r:.80}.")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of the type of a field; JSON has lists for tuples, and writes 1.0 as 1."""
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(_fits(item, get_args(hint)[0]) for item in value)
    if get_origin(hint) is UnionType:
        return any(_fits(value, each) for each in get_args(hint))
    return type(value) in ((float, int) if hint is float else (hint,))


def _check_group(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], rank: int) -> None:
    components, spectrum, m = tensors["components"], tensors["explained_variance"], facts["n_variances"]
    if components[rank:].any() or spectrum[m:].any():
        raise ValueError("what lies beyond `rank` and `n_variances` must be zero.")
    eps = torch.finfo(components.dtype).eps
    # a variance is a sum of D products, off by at most D·u of the largest; two of them swap within twice that
    if (spectrum[:m].diff() > components.shape[1] * eps * spectrum[:1]).any():
        raise ValueError("`explained_variance` must be in descending order.")
    # a route that loses half of its digits certifies nothing; noise clamped at zero adds its own error
    noise = m * max(facts["certificate"]["variance_error"], default=0.0)
    if spectrum.sum() > tensors["total_variance"] * (1 + math.sqrt(eps)) + noise:
        raise ValueError("`explained_variance` must not add up to more than `total_variance`.")
    if facts["whiten"] and not spectrum[:rank].all():
        raise ValueError("`explained_variance` must be positive where `whiten` divides by it.")
    _check_orthonormal(components[:rank])


def _check_orthonormal(components: Tensor) -> None:
    """Freivalds' check of V Vᵀ = I: (V Vᵀ - I) w, for random w, shows a wrong row without the K²·D products.

    A row of V Vᵀ - I of norm e turns w into a normal number of deviation e, so e = 10 tolerances passes all
    eight probes once in 10⁹ files. The tolerance: √D for a random walk of D rounding errors of size u,
    100 for the constants of LAPACK and cuSOLVER.

    Raises:
        ValueError: some row is not of length 1, or not orthogonal to the others.
    """
    k, d = components.shape
    v = components.double()
    generator = torch.Generator("cpu").manual_seed(0)
    w = torch.randn(k, PROBES, generator=generator, dtype=torch.float64, device="cpu")
    off = (v @ (v.mT @ w) - w).abs()
    if (off > 100 * torch.finfo(components.dtype).eps / 2 * math.sqrt(d)).any():
        raise ValueError(f"`components` must have orthonormal rows, they are off by {off.max().item():.1e}.")
