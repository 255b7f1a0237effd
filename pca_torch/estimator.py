"""`PCA`: the decomposition as a torch module, with scikit-learn's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pca_torch._checks import (
    as_components,
    as_rows,
    check_choice,
    check_ddof,
    check_flag,
    check_positive,
    check_seed,
    check_whole,
)
from pca_torch.moments import Moments
from pca_torch.precision import Precision
from pca_torch.result import Certificate, PCAResult
from pca_torch.rfactor import RFactor
from pca_torch.solvers import SOLVERS, STREAMING, decompose

__all__ = ["PCA"]

BUFFERS = ("components_", "mean_", "scale_", "spectrum_", "total_variance_", "facts_")
DERIVED = {
    "explained_variance_": lambda r: r.explained_variance,
    "explained_variance_ratio_": lambda r: r.explained_variance_ratio,
    "singular_values_": lambda r: r.singular_values,
    "noise_variance_": lambda r: r.noise_variance,
    "n_components_": lambda r: r.n_components,
    "n_samples_": lambda r: r.n_samples,
    "n_features_in_": lambda r: r.n_features,
    "certificate_": lambda r: r.certificate,
}


class PCA(nn.Module):
    """Principal component analysis that is exact, streams, and says how right it is.

    Arguments are stored untouched. Learned values end in an underscore; tensors among them are
    buffers, so `to`, `state_dict`, `deepcopy` and pickle carry them. They are worked out when first
    read after `partial_fit`.

    Args:
        n_components: K, a share of the variance in (0, 1] as a float, or None for min(N, D).
        svd_solver: "auto", "full", "covariance_eigh", "tsqr", "randomized" or "krylov"; `choose_solver` tells
            what "auto" takes.
        whiten: scores have unit variance; directions that are null to rounding are dropped.
        center: subtract the mean.
        standardize: divide each feature by its standard deviation, or root mean square if not centred.
        ddof: delta degrees of freedom of the divisor N - ddof.
        tol: share of the total variance that "krylov" may miss; None is 1e-6.
        n_oversamples: directions that "randomized" sketches beyond K.
        n_iter: its power iterations.
        precision: arithmetic of the products, "auto", "float32" or "float64".
        random_state: seed or generator of "randomized" and "krylov"; None is a fixed seed.
        nonfinite: "raise" refuses data with NaN or inf, "drop" skips such rows.

    Raises:
        ValueError: an argument is out of range.

    Attributes:
        components_: (K, D) orthonormal rows, descending variance, largest entry of each positive.
        explained_variance_: (K,) float64, activation units squared.
        explained_variance_ratio_: (K,) shares of the variance of all D directions.
        singular_values_: (K,) of the centred data.
        mean_: (D,) float64. scale_: (D,) float64, or None.
        total_variance_: () float64, of all D directions.
        noise_variance_: mean variance of the dropped directions.
        n_components_, n_samples_, n_features_in_: ints.
        result_: the frozen `PCAResult`; its certificate is also `certificate_`.
    """

    def __init__(
        self,
        n_components: float | None = None,
        *,
        svd_solver: str = "auto",
        whiten: bool = False,
        center: bool = True,
        standardize: bool = False,
        ddof: float = 1,
        tol: float | None = None,
        n_oversamples: int = 10,
        n_iter: int = 4,
        precision: Precision = "auto",
        random_state: int | torch.Generator | None = None,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        super().__init__()
        as_components(n_components)
        check_choice(svd_solver, "svd_solver", ("auto", *SOLVERS))
        check_choice(precision, "precision", ("auto", "float32", "float64"))
        check_choice(nonfinite, "nonfinite", ("raise", "drop"))
        for name, flag in (("center", center), ("standardize", standardize), ("whiten", whiten)):
            check_flag(flag, name)
        check_ddof(ddof)
        check_positive(tol, "tol")
        check_whole(n_oversamples, "n_oversamples", 0)
        check_whole(n_iter, "n_iter", 0)
        check_seed(random_state)
        self.n_components = n_components
        self.svd_solver = svd_solver
        self.whiten = whiten
        self.center = center
        self.standardize = standardize
        self.ddof = ddof
        self.tol = tol
        self.n_oversamples = n_oversamples
        self.n_iter = n_iter
        self.precision: Precision = precision
        self.random_state = random_state
        self.nonfinite: Literal["raise", "drop"] = nonfinite
        self._statistic: Moments | RFactor | None = None

    # --- learning ----------------------------------------------------------------------------------

    def fit(self, x: Any, y: Any = None, *, mask: Any = None, weights: Any = None) -> PCA:
        """Learn from `x` alone; what was learned before is forgotten.

        Args:
            x: samples (..., D), a tensor or array of any real dtype, or a sparse matrix; not changed.
            y: ignored, for pipelines.
            mask: 0/1 with the leading shape of `x`; rows at 0 do not count.
            weights: importance ≥ 0 of each row, same shape.

        Returns:
            `self`.

        Raises:
            ValueError: bad data; what was learned before then stays.
        """
        del y
        result = self._decompose(x, mask=mask, weights=weights)
        self._statistic = None
        self._store(result)
        return self

    def partial_fit(self, x: Any, y: Any = None, *, mask: Any = None, weights: Any = None) -> PCA:
        """Add the rows of `x` to the statistic; exact, whatever the batches and their order.

        Only the statistic is updated; what is learned is worked out when it is read. After `fit`
        it starts over, for the samples of `fit` were not kept.

        Args:
            x: samples (..., D).
            y: ignored, for pipelines.
            mask: 0/1 with the leading shape of `x`.
            weights: importance ≥ 0 of each row, same shape.

        Returns:
            `self`.

        Raises:
            ValueError: bad data, which then left no trace; or a solver that needs all samples at once.
        """
        del y
        if self.svd_solver not in STREAMING:
            raise ValueError(
                f"`svd_solver` = {self.svd_solver!r} needs all samples at once; "
                f"`partial_fit` takes {', '.join(map(repr, STREAMING))}."
            )
        statistic = self._statistic
        if statistic is None:
            rows, _ = as_rows(x)
            kind = RFactor if self.svd_solver == "tsqr" else Moments
            statistic = kind(rows.shape[1], precision=self.precision, nonfinite=self.nonfinite)
        statistic.update(x, mask=mask, weights=weights)
        self._statistic = statistic
        self._forget()
        return self

    def fit_transform(self, x: Any, y: Any = None, *, mask: Any = None, weights: Any = None) -> Tensor:
        """`fit(x)`, then the scores of every row of `x`, masked ones included.

        Args:
            x: samples (..., D).
            y: ignored, for pipelines.
            mask: 0/1 with the leading shape of `x`.
            weights: importance ≥ 0 of each row, same shape.
        """
        return self.fit(x, y, mask=mask, weights=weights).transform(x)

    # --- using -------------------------------------------------------------------------------------

    def transform(self, x: Any) -> Tensor:
        """Scores (..., K) of `x` (..., D), in the dtype of `x`; see `PCAResult.transform`.

        Args:
            x: samples (..., D).
        """
        return self._result().transform(x)

    def inverse_transform(self, z: Any) -> Tensor:
        """Samples (..., D) whose scores are `z` (..., K), in the dtype of `z`.

        Args:
            z: scores (..., K).
        """
        return self._result().inverse_transform(z)

    def forward(self, x: Any) -> Tensor:
        """`transform`, so that a PCA can stand in a `torch.nn.Sequential`.

        Args:
            x: samples (..., D).
        """
        return self.transform(x)

    def extra_repr(self) -> str:
        """How the module prints."""
        return f"n_components={self.n_components}, svd_solver={self.svd_solver!r}"

    # --- inside ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Learned values, solved for when they are read."""
        if name == "result_":  # here and not a property, whose AttributeError would lose its text
            return self._result()
        if name in DERIVED:
            return DERIVED[name](self._result())
        if name in BUFFERS:
            self._solve()
        return super().__getattr__(name)

    def _result(self) -> PCAResult:
        """Everything that was learned; it shares its tensors with the buffers."""
        self._solve()
        learned: dict[str, Any] = {name.removesuffix("_"): self._buffers[name] for name in BUFFERS}
        facts = json.loads(bytes(learned.pop("facts").tolist()))
        certificate = Certificate.from_dict(facts.pop("certificate"))
        return PCAResult(certificate=certificate, **learned, **facts)

    def _decompose(self, data: Any, **rows: Any) -> PCAResult:
        return decompose(
            data,
            self.n_components,
            self.svd_solver,
            center=self.center,
            standardize=self.standardize,
            whiten=self.whiten,
            ddof=self.ddof,
            tol=self.tol,
            n_oversamples=self.n_oversamples,
            n_iter=self.n_iter,
            precision=self.precision,
            random_state=self.random_state,
            nonfinite=self.nonfinite,
            **rows,
        )

    def _solve(self) -> None:
        """Work out what is learned, if the statistic moved on.

        Raises:
            AttributeError: nothing was fitted.
        """
        if "facts_" in self._buffers:
            return
        if self._statistic is None:
            raise AttributeError("this PCA is not fitted; call `fit` or `partial_fit` first.")
        self._store(self._decompose(self._statistic))

    def _store(self, result: PCAResult) -> None:
        facts = {
            "n_samples": result.n_samples,
            "divisor": result.divisor,
            "centred": result.centred,
            "whiten": result.whiten,
            "certificate": result.certificate.to_dict(),
        }
        # Set directly: `register_buffer` asks whether the name is taken, and asking solves. The facts are
        # a tensor so that a state_dict fits in a safetensors file.
        for name in ("components", "mean", "scale", "spectrum", "total_variance"):
            self._buffers[f"{name}_"] = getattr(result, name)
        with torch.inference_mode(False):  # a buffer made inside a caller's could not be updated later
            text = list(json.dumps(facts).encode())
            self._buffers["facts_"] = torch.tensor(text, dtype=torch.uint8, device="cpu")

    def _forget(self) -> None:
        for name in BUFFERS:
            self._buffers.pop(name, None)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._statistic is not None:
            self._solve()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Shapes are not known before fitting: take the buffers that come, all or none."""
        found = {name: state_dict[prefix + name] for name in BUFFERS if prefix + name in state_dict}
        missing = [prefix + name for name in BUFFERS if name != "scale_" and name not in found]
        if found and missing:
            missing_keys.extend(missing)
            return
        if found:
            self._statistic = None
            for name in BUFFERS:
                value = found.get(name)
                self._buffers[name] = None if value is None else torch.empty_like(value)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PCA:
        """Follow a change of device everywhere, and one of dtype in the components alone."""
        if self._statistic is not None:
            self._solve()  # what is not worked out yet would miss the change
        exact = {name: b for name, b in self._buffers.items() if b is not None and name != "components_"}
        super()._apply(fn, recurse)
        for name, before in exact.items():
            self._buffers[name] = before.to(self._buffers[name].device)  # pyright: ignore[reportOptionalMemberAccess]
        return self
