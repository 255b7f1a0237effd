"""The covariance of sparse samples, multiplied without centring an entry."""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from pca_torch._checks import as_tensor, divisor_of
from pca_torch.operators.columns import Columns, facts
from pca_torch.precision import exact_products, unit_roundoff
from pca_torch.problem import product_noise

__all__ = ["Sparse", "is_sparse"]

U64 = unit_roundoff(torch.float64)
COLUMNS = 16  # rows multiplied at a time
LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


class Sparse:
    """C = Xcᵀ Xc / divisor of sparse rows, centred by a projection; Xc, which is dense, is never formed.

    Xc = PX with P = I - rrᵀ/Σw and r = √w, so that Xc v = P(Xv) and Xcᵀq = Xᵀ(Pq). What a large mean
    costs is rounding of Xv, which is of the size of the uncentred rows; its constant part is projected
    out once more before it meets Xᵀ.

    Args:
        x: samples (N, D), a torch tensor in COO, CSR or CSC layout or a SciPy sparse array; entries that
            stand twice are summed.
        weights: (N,) float64, not negative; rows of weight zero do not count, so a mask serves too.
            None is 1.
        center: subtract the mean; without it the second moment is multiplied.
        standardize: divide each column by its standard deviation.
        ddof: delta degrees of freedom of the divisor.
        nonfinite: "raise" refuses NaN and inf, "drop" leaves out such rows.

    Raises:
        TypeError: complex entries, or integers that float64 cannot hold.
        ValueError: not a sparse matrix, NaN or inf, too few rows for `ddof`, or the total variance
            overflowed.

    Memory: the entries twice, by rows and by columns, in float64; those of a float64 CSR input are shared.
    """

    matrix: Tensor | None = None

    def __init__(
        self,
        x: Any,
        weights: Tensor | None = None,
        *,
        center: bool = True,
        standardize: bool = False,
        ddof: float = 1,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        with _beta_unsaid():
            by_rows, dtype = _as_csr(x)
            with exact_products(by_rows.device):
                self.n_rows = by_rows.shape[0]  # of what `gather` takes, rows of weight zero included
                w = by_rows.values().new_ones(self.n_rows) if weights is None else weights
                by_rows, w, dropped = _counted(by_rows, w, nonfinite)
                self._root = w.sqrt()[:, None]  # r
                self._weight = w.sum().item()
                divisor_of(int((w > 0).sum()), self._weight, w.square().sum().item(), ddof)
                by_columns = _transposed(by_rows)
                columns = _columns(by_columns, w, dtype)
                self.problem = facts(columns, center=center, standardize=standardize, ddof=ddof)
                self._center = center
                if weights is not None or dropped:
                    each = self._root[:, 0].repeat_interleave(by_rows.crow_indices().diff())
                    by_rows, by_columns = _with_values(by_rows, by_rows.values() * each), None
                self._by_rows = _narrow(by_rows)
                self._by_columns = _narrow(_transposed(by_rows) if by_columns is None else by_columns)
                self.noise = self._noise(columns)

    def apply(self, v: Tensor) -> Tensor:
        """Rows (b, D) → v C (b, D).

        Args:
            v: float64 rows.
        """
        parts = v.split(COLUMNS)  # the scores of N samples are the largest thing here
        return torch.cat([self.gather(self.scores(part)) for part in parts]).div_(self.problem.divisor)

    def scores(self, v: Tensor) -> Tensor:
        """Rows (b, D) → Xc vᵀ (N, b), each row times √w.

        Args:
            v: float64 rows.
        """
        return self._centred(self._by_rows @ self._scaled(v).mT.contiguous())

    def gather(self, q: Tensor) -> Tensor:
        """Columns (N, b) → qᵀ Xc (b, D), each row of Xc times √w.

        Args:
            q: float64 columns.
        """
        return self._scaled((self._by_columns @ self._centred(q).contiguous()).mT)

    def _centred(self, y: Tensor) -> Tensor:
        """Columns (N, b) → P y."""
        if not self._center:
            return y
        return torch.addmm(y, self._root, self._root.mT @ y, alpha=-1 / self._weight)

    def _scaled(self, v: Tensor) -> Tensor:
        return v if self.problem.scale is None else v / self.problem.scale

    def _noise(self, columns: Columns) -> float:
        """Rounding of one product over λ₁.

        P is exact up to second order, so y = P fl(Xv) is off by ε‖X‖ with ‖X‖² ≤ ‖Xc‖² + Σw‖m‖², and
        Xᵀy by as much of ‖X‖‖y‖, where ‖y‖ ≤ ‖Xc‖. Over ‖Xc‖² that is ε‖X‖/‖Xc‖ each, and
        λ₁ = ‖Xc‖²/divisor is at least the largest variance of a column.
        """
        problem = self.problem
        noise = product_noise(problem.n_samples) + product_noise(len(problem.mean))
        if not problem.centred:
            return noise
        mean = columns.mean if problem.scale is None else columns.mean / problem.scale
        cancelled = columns.weight / problem.divisor * mean.square().sum().item()
        largest = max(problem.variance.max().item(), noise**2 * cancelled)  # below that `error` has it
        return noise if cancelled == 0 else noise * (1 + cancelled / largest) ** 0.5


def is_sparse(x: Any) -> bool:
    """Whether `x` is a sparse tensor of any layout, or a SciPy sparse array.

    Args:
        x: anything.
    """
    return x.layout != torch.strided if isinstance(x, Tensor) else hasattr(x, "tocsr")


@contextmanager
def _beta_unsaid() -> Generator[None]:
    """Compressed layouts warn that they are in beta, once per process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR|CSC) tensor support is in beta")
        yield


def _as_csr(x: Any) -> tuple[Tensor, torch.dtype]:
    """Float64 CSR with every entry once, and the dtype that came.

    Raises:
        TypeError: complex entries, or integers that float64 cannot hold.
        ValueError: not a sparse matrix.
    """
    if isinstance(x, Tensor):
        if x.layout not in LAYOUTS or x.ndim != 2 or x.dense_dim():
            raise ValueError(
                f"`x` must be a matrix in COO, CSR or CSC layout, got {x.layout} of shape {tuple(x.shape)}; "
                "convert it by `x.to_sparse_csr()`."
            )
        x = x.detach()
    elif not hasattr(x, "tocsr"):
        raise ValueError(
            f"`x` must be sparse, a tensor or a SciPy array, got {type(x).__name__}; use `decompose`."
        )
    if x.shape[1] == 0:
        raise ValueError(f"`x` must have at least one column, got shape {tuple(x.shape)}.")
    if isinstance(x, Tensor) and x.layout == torch.sparse_coo:
        values = as_tensor(x._values())
        return _csr_of_coo(x._indices(), values, x.shape), values.dtype
    if isinstance(x, Tensor) and x.layout == torch.sparse_csc:
        values = as_tensor(x.values())
        flipped = _csr(x.ccol_indices(), x.row_indices(), values, (x.shape[1], x.shape[0]))
        return _transposed(flipped), values.dtype
    if isinstance(x, Tensor):
        starts, places, values = x.crow_indices(), x.col_indices(), as_tensor(x.values())
    else:
        x = x.tocsr()
        starts, places, values = as_tensor(x.indptr), as_tensor(x.indices), as_tensor(x.data)
    return _csr(starts, places, values, x.shape), values.dtype


def _csr(starts: Tensor, places: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """CSR in float64, its entries in order and each once."""
    if _ascending(starts, places):
        return torch.sparse_csr_tensor(
            starts, places, values.double(), tuple(shape), device=values.device, check_invariants=True
        )
    row = torch.arange(shape[0], device=starts.device).repeat_interleave(starts.diff())
    return _csr_of_coo(torch.stack([row, places.long()]), values, shape)


def _csr_of_coo(indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """CSR in float64; entries that stand twice are summed there."""
    return (
        torch
        .sparse_coo_tensor(
            indices, values.double(), tuple(shape), device=values.device, check_invariants=True
        )
        .coalesce()
        .to_sparse_csr()
    )


def _narrow(x: Tensor) -> Tensor:
    """The same CSR with 32-bit indices where they suffice: half the memory, and what MKL multiplies by."""
    if max(*x.shape, x.values().numel()) >= 2**31 or x.crow_indices().dtype == torch.int32:
        return x
    return _of_parts(x.crow_indices().int(), x.col_indices().int(), x.values(), x.shape)


def _ascending(starts: Tensor, places: Tensor) -> bool:
    """Whether the columns rise within every row, so that none stands twice."""
    if len(places) < 2:
        return True
    rises = places.diff() > 0
    into_rows = starts.long() - 1  # the step from the last entry of one row to the first of another
    rises[into_rows[(into_rows >= 0) & (into_rows < len(rises))]] = True
    return bool(rises.all())


def _counted(x: Tensor, w: Tensor, nonfinite: str) -> tuple[Tensor, Tensor, int]:
    """Rows of weight zero emptied, whatever they hold: 0·NaN is NaN.

    Returns:
        The rows, their weights, and how many were dropped.

    Raises:
        ValueError: a row that counts has NaN or inf; with the number of such rows.
    """
    if bool((w == 0).any()):
        left_out = (w == 0).repeat_interleave(x.crow_indices().diff())
        x = _with_values(x, x.values().masked_fill(left_out, 0))
    bad = ~x.values().isfinite()
    dropped = 0
    if bool(bad.any()):
        rows = torch.searchsorted(x.crow_indices().long(), bad.nonzero()[:, 0], right=True).unique()
        if nonfinite == "raise":
            raise ValueError(
                f"`x` has {len(rows)} of {x.shape[0]} samples with NaN or inf. Drop them (nonfinite='drop'), "
                "or capture in bfloat16: float16 overflows at 65504."
            )
        dropped, w = len(rows), w.clone()
        w[rows - 1] = 0
        x = _counted(x, w, "raise")[0]
    return x, w, dropped


def _transposed(x: Tensor) -> Tensor:
    """CSR of xᵀ. Products with a CSC view of the same entries take up to 60 times as long."""
    turned = x.to_sparse_csc()
    starts, places = turned.ccol_indices(), turned.row_indices()
    shape = (x.shape[1], x.shape[0])
    return _of_parts(starts, places, turned.values(), shape)


def _with_values(x: Tensor, values: Tensor) -> Tensor:
    """Other values in the places of a CSR."""
    return _of_parts(x.crow_indices(), x.col_indices(), values, x.shape)


def _of_parts(starts: Tensor, places: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    """A CSR that owns its parts: those of another are views, which would keep all of it alive."""
    starts, places, values = (part.detach() for part in (starts, places, values))
    return torch.sparse_csr_tensor(
        starts, places, values, tuple(shape), device=values.device, check_invariants=False
    )


def _columns(by_columns: Tensor, w: Tensor, dtype: torch.dtype) -> Columns:
    """Mean and squares of each column: those of its entries, and of its zeros, which are all the same.

    Σ w (x - m)² over the entries plus (Σw over the zeros) m²: nothing cancels. The mean is shifted twice,
    as the mean of what is left after the first.
    """
    start, values = by_columns.crow_indices(), by_columns.values()
    each, counts = w[by_columns.col_indices()], start.diff()
    weight = w.sum().item()
    empty = _left_over(w, by_columns)
    mean = torch.zeros(len(counts), dtype=torch.float64, device=w.device)
    for _ in range(2):
        left = values - mean.repeat_interleave(counts)
        mean = mean + (_segments(left.mul_(each), start) - empty * mean) / weight
    left = values - mean.repeat_interleave(counts)
    scatter = _segments(left.square_().mul_(each), start) + empty * mean.square()
    n, d = len(w), len(counts)
    slip = (product_noise(n) + product_noise(d)) * mean.abs()
    depth = int(counts.max()) + 2
    n_samples = int((w > 0).sum())
    return Columns(n_samples, weight, w.square().sum().item(), mean, scatter, slip, depth, dtype)


def _left_over(w: Tensor, by_columns: Tensor) -> Tensor:
    """(D,) Σw over the zeros of each column, as what the entries leave of the whole.

    The leading parts of the weights are multiples of one unit, so few that their sums are exact: a column
    without zeros is left with none, not with a rounding that its mean squared would multiply.
    """
    big = 2.0 ** math.ceil(math.log2(w.sum().item()) + 1)
    head = (w + big) - big
    parts = (
        part.sum() - _segments(part[by_columns.col_indices()], by_columns.crow_indices())
        for part in (head, w - head)
    )
    return torch.stack(list(parts)).sum(0).clamp_min(0)


def _segments(values: Tensor, start: Tensor) -> Tensor:
    """(D,) sums of the entries of each column, in a fixed order on every device."""
    return torch.segment_reduce(values, "sum", offsets=start)
