"""The covariance of samples on disk, multiplied by reading them again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from pca_torch._checks import as_tensor, check_choice, select_rows
from pca_torch.linalg import two_sum
from pca_torch.operators.columns import Columns, facts
from pca_torch.precision import exact_products, unit_roundoff
from pca_torch.problem import product_noise
from pca_torch.sources import Source, check_same_width

__all__ = ["OnDisk"]

PART_BYTES = 2**24  # of float64 rows at a time
U64 = unit_roundoff(torch.float64)


class OnDisk:
    """C = Xcᵀ Xc / divisor of the rows of one or several files; one pass over them a product.

    Memory is that of one block and of what is multiplied; the products are float64.

    Args:
        sources: arrays with the same D, read in this order.
        center: subtract the mean; without it the second moment is multiplied.
        standardize: divide each column by its standard deviation.
        ddof: delta degrees of freedom of the divisor.
        nonfinite: "raise" refuses NaN and inf, "drop" skips and counts such rows, in every pass alike.

    Raises:
        ValueError: no source, different D, NaN or inf under "raise", too few rows for `ddof`, or a
            file that changed since it was opened.
    """

    matrix: Tensor | None = None

    def __init__(
        self,
        sources: Source | Sequence[Source],
        *,
        center: bool = True,
        standardize: bool = False,
        ddof: float = 1,
        nonfinite: Literal["raise", "drop"] = "raise",
    ) -> None:
        check_choice(nonfinite, "nonfinite", ("raise", "drop"))
        self._sources = _checked([sources] if isinstance(sources, Source) else list(sources))
        self._nonfinite = nonfinite
        self._step = max(1, PART_BYTES // (8 * self._sources[0].n_features))
        self.n_dropped = 0  # rows skipped under nonfinite="drop"
        self.passes = 0  # over all files so far
        with exact_products(torch.device("cpu")):
            self.problem = facts(self._columns(), center=center, standardize=standardize, ddof=ddof)

    @property
    def noise(self) -> float:
        """Rounding of one product over λ₁: that of sums over D, then over N."""
        return product_noise(len(self.problem.mean)) + product_noise(self.problem.n_samples)

    def apply(self, v: Tensor) -> Tensor:
        """Rows (b, D) → v C (b, D), in one pass over the files.

        Args:
            v: float64 rows.
        """
        out = torch.zeros_like(v)
        for rows in self._blocks():
            z = rows if not self.problem.centred else rows - self.problem.mean
            z = z if self.problem.scale is None else z / self.problem.scale
            out.addmm_(v @ z.mT, z)
        return out.div_(self.problem.divisor)

    def _blocks(self) -> Iterator[Tensor]:
        """Float64 rows that count; they may be a view that the next overwrites.

        Yields:
            rows (n, D) with n ≥ 1.

        Raises:
            ValueError: NaN or inf under "raise", with the file.
        """
        self.passes += 1
        for source in self._sources:
            for block in source:
                try:
                    rows, _, dropped = select_rows(as_tensor(block), None, None, self._nonfinite)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{source.path}: {error}") from error
                self.n_dropped += dropped if self.passes == 1 else 0
                for start in range(0, len(rows), self._step):
                    yield rows[start : start + self._step].double()

    def _columns(self) -> Columns:
        """Mean and squares in one pass (Chan, Golub & LeVeque, Am. Stat. 37(3), 1983).

        Means are sums of two numbers: a shift δ between two of them that is off by t = u·|mean| would change
        the squares by 2δt, u·|mean|/std of them.
        """
        n, depth, blocks = 0, 0, 0
        mean = torch.zeros(self._sources[0].n_features, dtype=torch.float64, device="cpu")
        rest, scatter, largest = torch.zeros_like(mean), torch.zeros_like(mean), torch.zeros_like(mean)
        for rows in self._blocks():
            first = rows.mean(0)
            second = (rows - first).mean(0)
            delta = (first - mean) + (second - rest)
            total = n + len(rows)
            scatter += (rows - first - second).square_().sum(0) + delta.square() * (n * len(rows) / total)
            if n:
                largest = torch.maximum(largest, delta.abs())
            low = rest + delta * (len(rows) / total) if n else second
            mean, rest = two_sum(mean if n else first, low)
            n, blocks, depth = total, blocks + 1, max(depth, len(rows))
        spread = (scatter / max(n, 1)).sqrt() + largest
        slip = (depth + blocks) * U64 * spread + 2 * U64 * mean.abs()  # `rest` is left out of the products
        depth = 3 * depth + blocks  # of the squares, and twice of the means in the shifts
        return Columns(n, float(n), float(n), mean, scatter, slip, depth, _coarsest(self._sources))


def _checked(sources: list[Source]) -> list[Source]:
    """The sources, if they have one D.

    Raises:
        ValueError: there is none, or one has another D.
    """
    if not sources:
        raise ValueError("`sources` is empty; give at least one `NpySource` or other source.")
    check_same_width(sources)
    return sources


def _coarsest(sources: list[Source]) -> torch.dtype:
    """The dtype that rounds most; integers count as float64."""
    floats = [source.dtype for source in sources if source.dtype.is_floating_point]
    return max(floats, key=unit_roundoff, default=torch.float64)
