"""What a decomposition hands out: the frozen result, its certificate, and the report of one site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import as_rows
from pca_torch.precision import exact_arithmetic

__all__ = ["Certificate", "ExtremeRows", "PCAResult", "SiteReport"]

CHUNK_ROWS = 8192  # rows centred in float64 at a time: bounds the temporary, not the answer


@dataclass(frozen=True)
class Certificate:
    """What a result knows about its own accuracy; computed for the data at hand, not assumed.

    Variances are in activation units squared. Everything here is plain Python, so that it can be
    written to a file and read back unchanged. Bounds are "deterministic" where nothing was drawn at random
    for them, "measured" where the rounding of float32 products was probed, or hold with the probability
    they name. Roundings are taken to add like a random walk (Higham & Mary, SIAM J. Sci. Comput. 41(5),
    2019); bounds that assume the worst of each are a million times larger.
    """

    captured_ratio: float  # tr(V C Vᵀ) / tr C of the components as they are stored
    missed_ratio_bound: float  # a better K-subspace captures at most this much more of tr C
    bound_kind: str  # "deterministic", "measured" or "probability 1-1e-10"
    variance_error: tuple[float, ...] = field(
        repr=False
    )  # (K,) |computed - true| of each variance is at most this
    rounding_floor: float  # variances at or below this are rounding noise of the route
    trusted: int  # how many leading variances stand above `rounding_floor`
    quantisation_floor: tuple[float, ...] | None = field(
        repr=False
    )  # (K,) noise of a 16-bit input along each component
    residual_norms: tuple[float, ...] = field(repr=False)  # (K,) ‖C v - λ v‖₂
    gap: float  # λ_K - λ_{K+1}; where only K are known, at least this
    angle_bound: float  # radians by which the K-subspace may be turned, π/2 = no bound
    unique: bool  # the K-subspace is determined by the data: `angle_bound` < 0.5
    solver: str  # the route that gave the answer
    precision: str  # arithmetic of the products and of the factorisation
    fallbacks: tuple[str, ...] = ()  # what was tried before, what to rerun with

    def to_dict(self) -> dict[str, Any]:
        """Fields as JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Certificate:
        """Inverse of `to_dict`; unknown fields are a TypeError."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)


@dataclass(frozen=True, eq=False)  # comparing tensors has no single truth value
class PCAResult:
    """K principal directions of N samples with D features; owns its tensors.

    `spectrum` holds every variance that was computed (M of them, M ≥ K), so ranks beyond the kept
    components can still be read off.
    """

    mean: Tensor  # (D,)   float64, activation units; zeros for an uncentred decomposition
    components: Tensor  # (K, D) working dtype, orthonormal rows, largest entry of each positive
    spectrum: Tensor  # (M,)   float64, activation units squared, descending, K ≤ M ≤ min(N, D)
    total_variance: Tensor  # ()     float64, trace of the whole covariance, dropped directions included
    n_samples: int  # N, rows that were counted
    divisor: float  # N - ddof; Σw - ddof·Σw²/Σw with weights
    certificate: Certificate
    scale: Tensor | None = None  # (D,)   float64, standard deviations when standardised
    centred: bool = True
    whiten: bool = False

    @property
    def n_components(self) -> int:
        """K."""
        return self.components.shape[0]

    @property
    def n_features(self) -> int:
        """D."""
        return self.components.shape[1]

    @property
    def explained_variance(self) -> Tensor:
        """(K,) variances of the kept components."""
        return self.spectrum[: self.n_components]

    @property
    def explained_variance_ratio(self) -> Tensor:
        """(K,) share of the total variance of all D directions; zeros when the total is zero."""
        total = self.total_variance
        return self.explained_variance / total if total > 0 else torch.zeros_like(self.explained_variance)

    @property
    def singular_values(self) -> Tensor:
        """(K,) singular values of the centred data, σ² = λ · divisor."""
        return (self.explained_variance * self.divisor).sqrt()

    @property
    def noise_variance(self) -> float:
        """Mean variance of the dropped directions, over min(N, D) as scikit-learn counts them."""
        rest = min(self.n_samples, self.n_features) - self.n_components
        if rest <= 0:
            return 0.0
        if len(self.spectrum) == self.n_components + rest:  # all known: no subtraction, no cancellation
            return self.spectrum[self.n_components :].mean().item()
        return max(0.0, (self.total_variance - self.explained_variance.sum()).item() / rest)

    def to(self, device: torch.device | str) -> PCAResult:
        """The same result with its tensors on `device`."""
        moved = {
            name: value.to(device)
            for name in ("mean", "components", "spectrum", "total_variance", "scale")
            if (value := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def transform(self, x: Any) -> Tensor:
        """Scores of `x` in the basis of the fit.

        Args:
            x: samples (..., D), any floating dtype or integers.

        Returns:
            Scores (..., K) in the dtype of `x` (integers: the dtype of the components), centred by
            the mean of the fit, never by that of `x`.

        Raises:
            ValueError: `x` does not end in D features.
        """
        rows, shape = as_rows(x, self.n_features)
        dtype, work = self._dtypes(rows)
        basis = self.components.to(work).mT
        if self.whiten:
            basis = basis / self.explained_variance.sqrt().to(work)
        with exact_arithmetic(rows.device):  # a caller's autocast would round the scores to 16 bits
            scores = [self._standard(part).to(work) @ basis for part in rows.split(CHUNK_ROWS)]
        return torch.cat(scores).to(dtype).reshape(*shape, self.n_components)

    def inverse_transform(self, z: Any) -> Tensor:
        """Samples (..., D) whose scores are `z` (..., K), in the dtype of `z`.

        Args:
            z: scores (..., K).

        Raises:
            ValueError: `z` does not end in K scores.
        """
        rows, shape = as_rows(z, self.n_components, name="z", what="scores")
        dtype, work = self._dtypes(rows)
        if self.whiten:
            rows = rows * self.explained_variance.sqrt()
        with exact_arithmetic(rows.device):
            back = (rows.to(work) @ self.components.to(work)).double()
        if self.scale is not None:
            back = back * self.scale
        return (back + self.mean).to(dtype).reshape(*shape, self.n_features)

    def reconstruction_error(self, x: Tensor, per: Literal["table", "sample", "scalar"] = "table") -> float:
        """Squared error of rebuilding `x` from its K scores, in the units of `x` squared.

        Args:
            x: samples (..., D).
            per: "table" sums over everything, "sample" divides by the rows, "scalar" by the entries.

        Raises:
            ValueError: `per` is none of the three, or `x` does not end in D features.
        """
        rows, _ = as_rows(x, self.n_features)
        counts = {"table": 1, "sample": len(rows), "scalar": rows.numel()}
        if per not in counts:
            raise ValueError(f"`per` must be one of {sorted(counts)}, got {per!r}.")
        if not len(rows):
            raise ValueError("`x` has no rows; give at least one sample.")
        basis = self.components.double()
        error = 0.0
        for part in rows.split(CHUNK_ROWS):
            z = self._standard(part)
            lost = z - z @ basis.mT @ basis
            error += (lost if self.scale is None else lost * self.scale).square().sum().item()
        return error / counts[per]

    def storage(self, n: int) -> dict[str, int]:
        """Numbers kept for `n` samples: n·K scores, K·D directions, D means, against n·D.

        Args:
            n: samples to store.
        """
        k, d = self.n_components, self.n_features
        kept = {"scores": n * k, "directions": k * d, "mean": d}
        if self.scale is not None:
            kept["scale"] = d
        return {**kept, "total": sum(kept.values()), "original": n * d}

    def _standard(self, rows: Tensor) -> Tensor:
        """Rows minus the mean, over the scale, in float64: a rounded mean would shift every score."""
        rows = rows.double() - self.mean
        return rows if self.scale is None else rows / self.scale

    def _dtypes(self, x: Tensor) -> tuple[torch.dtype, torch.dtype]:
        """Dtype of what is returned, and that of the products: float64 alone holds every integer."""
        if not x.is_floating_point():
            return self.components.dtype, torch.float64
        return x.dtype, torch.promote_types(x.dtype, self.components.dtype)


@dataclass(frozen=True)
class ExtremeRows:
    """The rows of one site whose norm stands far above the median (attention sinks and their kin)."""

    count: int  # rows with norm > `threshold`
    n_samples: int  # rows seen, the extreme ones included
    threshold: float  # median + 10 · 1.4826 · MAD of the row norms
    positions: Mapping[int, int] = field(default_factory=dict)  # place in the sequence → extreme rows there
    trace_share: float = 0.0  # their share of Σ‖x - mean‖² over all rows
    heavy_tailed: bool = False  # above 5 % of the rows: not outliers, both views are the same
    exact: bool = True  # no row was assigned before the threshold that would have moved it


@dataclass(frozen=True)
class SiteReport:
    """What the main job says about one site: every token, the typical ones, and what lies between."""

    all_tokens: PCAResult
    typical: PCAResult
    extreme: ExtremeRows
