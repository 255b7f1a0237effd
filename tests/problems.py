"""Small problems with a known truth, every solver on them, and what a certificate has to satisfy."""

import math
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import pca_torch as pt
from pca_torch import narrow
from pca_torch.bounds import constant_columns
from pca_torch.operators import OnDisk, Rows, Sparse, from_moments
from pca_torch.precision import unit_roundoff
from pca_torch.result import PCAResult
from pca_torch.solvers import krylov, randomized, tsqr

U64 = unit_roundoff(torch.float64)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True)
class Problem:
    """Samples, how many directions of what are asked for, and how exactly."""

    x: Tensor  # (N, D)
    k: int | None = None
    tol: float | None = None  # for the solvers that stop by it
    block: int = 4  # rows per product of the Krylov solvers: few, so that small problems take several
    seed: int = 0  # of the solvers that start at random
    matrix: dict = field(default_factory=dict)  # center, standardize, ddof
    name: str = ""  # of the spectrum

    @property
    def most(self) -> int:
        return min(self.x.shape)

    @property
    def wanted(self) -> int:
        return self.most if self.k is None else self.k

    def __str__(self) -> str:
        (n, d), kind = self.x.shape, str(self.x.dtype).removeprefix("torch.")
        return f"{self.name}, {kind} {n}×{d}, k={self.k}, tol={self.tol}, block={self.block}, {self.matrix}"


# ---------------------------------------------------------------- solvers
def _batches(x: Tensor) -> tuple[Tensor, ...]:
    """Three parts of different lengths, the first a single row."""
    n = len(x)
    return x.split([1, n // 3, n - 1 - n // 3])


def _decompose(solver: str, precision: str = "auto") -> Callable[[Problem], PCAResult]:
    return lambda p: pt.decompose(p.x, p.k, solver, precision=precision, **p.matrix)


def _covariance_streaming(p: Problem) -> PCAResult:
    moments = pt.Moments(p.x.shape[1], precision="float32")
    for part in _batches(p.x):
        moments.update(part).flush()
    return pt.decompose(moments, p.k, "covariance_eigh", **p.matrix)


def _tsqr_streaming(p: Problem) -> PCAResult:
    factor = pt.RFactor(p.x.shape[1])
    for part in _batches(p.x):
        factor.update(part).flush()  # every part a factorisation of its own
    return tsqr.solve(factor, p.k, **p.matrix)


def _randomized(p: Problem) -> PCAResult:
    n_iter = 4 if p.tol is None or p.tol < 1e-4 else 0
    return randomized.solve(Rows(p.x, **p.matrix), p.k, n_oversamples=3, n_iter=n_iter, random_state=p.seed)


def _iteration(op, p: Problem, **method) -> PCAResult:
    """Without the way out to a dense solver, and without the Gram matrix of wide samples."""
    small = {"DENSE_UP_TO": 0, "FEW": 1, "GRAM_BYTES": 0, "BLOCK": p.block}
    with mock.patch.multiple(krylov, **small | method.pop("constants", {})):
        return krylov.solve(op, p.wanted, tol=p.tol, random_state=p.seed, **method)


def _on_moments(method: str, precision: str = "auto") -> Callable[[Problem], PCAResult]:
    def solve(p: Problem) -> PCAResult:
        moments = pt.Moments(p.x.shape[1], precision=precision).update(p.x)
        return _iteration(from_moments(moments, **p.matrix), p, method=method)

    return solve


def _narrow(p: Problem) -> PCAResult:
    with mock.patch.object(narrow, "FEWEST", 2):  # of directions to spare, where there are few at all
        return _on_moments("narrow")(p)


def _rows(p: Problem) -> PCAResult:
    return _iteration(Rows(p.x, **p.matrix), p)


def _gram(p: Problem) -> PCAResult:
    return _iteration(Rows(p.x, **p.matrix), p, constants={"GRAM_BYTES": 2**30})


def _sparse(p: Problem) -> PCAResult:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        x = p.x.to_sparse_csr()
        return _iteration(Sparse(x, **p.matrix), p)


def _on_disk(p: Problem) -> PCAResult:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, (p.x.float() if p.x.dtype == torch.bfloat16 else p.x).numpy())
        return _iteration(OnDisk(pt.NpySource(path, block_rows=7), **p.matrix), p)


SOLVERS: dict[str, Callable[[Problem], PCAResult]] = {
    "full": _decompose("full"),
    "full float32": _decompose("full", "float32"),
    "covariance_eigh": _decompose("covariance_eigh"),
    "streaming": _covariance_streaming,  # float32 products
    "tsqr": _decompose("tsqr"),
    "tsqr float32": _decompose("tsqr", "float32"),
    "tsqr streaming": _tsqr_streaming,
    "randomized": _randomized,
    "lanczos": _on_moments("lanczos"),
    "lanczos float32": _on_moments("lanczos", "float32"),
    "chebyshev": _on_moments("chebyshev"),
    "narrow": _narrow,  # a float32 eigenproblem refined; in float64 where K is more than half
    "rows": _rows,  # Lanczos on the samples, a random proof
    "gram": _gram,  # of wide samples; else as "rows"
    "sparse": _sparse,
    "on disk": _on_disk,
}
PARTIAL = ("randomized", "lanczos", "lanczos float32", "chebyshev", "rows", "gram", "sparse", "on disk")
NARROW = ("full float32", "tsqr float32")  # a float32 factorisation
FLOAT32 = (*NARROW, "streaming", "lanczos float32")  # products in float32, whatever came


def solve(problem: Problem, solver: str) -> PCAResult:
    """One solver on one problem; what it warns of has its own tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SOLVERS[solver](problem)


# ---------------------------------------------------------------- truth
@dataclass(frozen=True)
class Truth:
    """Float64 SVD of the rows that are decomposed, which are centred twice."""

    rows: Tensor  # (N, D)
    variances: Tensor  # (M,) descending
    vectors: Tensor  # (M, D)
    divisor: float

    @property
    def relative(self) -> float:
        """Backward error of the SVD and of centring over σ₁."""
        return U64 * (4 * math.sqrt(len(self.variances)) + math.sqrt(max(self.rows.shape)))

    @property
    def error(self) -> Tensor:
        """(M,) what each variance is off by itself: s·σ₁ on its singular value."""
        s, values = self.relative, self.variances
        return 2 * s * (values * values[0]).sqrt() + s**2 * values[0]

    def angle(self, k: int) -> float:
        """Radians by which the K-subspace is off itself: its backward error across the gap of σ (Wedin).

        LAPACK's vectors of small matrices whose columns differ by 10³ and more are off by 70 u.
        """
        sigma = torch.cat([self.variances.sqrt(), self.variances.new_zeros(1)])
        off, gap = (self.relative + 64 * U64) * sigma[0].item(), (sigma[k - 1] - sigma[k]).item()
        if k in {0, self.rows.shape[1]}:
            return 0.0
        return math.asin(min(1.0, off / (gap - off))) if gap > off else math.pi / 2

    def captured(self, span: Tensor) -> float:
        """Variance in the span of orthonormal columns (D, K)."""
        return (self.rows @ span).square().sum().item() / self.divisor


def truth(
    x: Tensor, *, center: bool = True, standardize: bool = False, ddof: float = 1, **_: object
) -> Truth:
    """The truth of samples (N, D)."""
    z, divisor = x.double(), len(x) - ddof
    mean = torch.zeros(x.shape[1], dtype=torch.float64)
    if center:
        for _ in range(2):
            mean, z = mean + z.mean(0), z - z.mean(0)
    if standardize:
        variance = z.square().sum(0) / divisor
        z = z / torch.where(constant_columns(variance, mean), 1.0, variance.sqrt())
    tall = (
        z if len(z) >= z.shape[1] else z.mT.contiguous()
    )  # LAPACK's right vectors of wide rows are off by 50 u
    u, s, vh = torch.linalg.svd(tall, full_matrices=False)
    return Truth(z, s.square() / divisor, vh if tall is z else u.mT, divisor)


def missed_and_turned(want: Truth, span: Tensor) -> tuple[float, float, float, float]:
    """What orthonormal columns V (D, K) miss, how far they are turned, and what the truth of both is off by.

    Σ_{i≤K} λ_i - tr(VᵀCV) cancels at the rounding of λ₁. All terms of the same as
    Σ_{i≤K} λ_i‖(I - VVᵀ)u_i‖² - Σ_{j>K} λ_j‖Vᵀu_j‖² are small: with C off by e the first is off by Σe_i, the
    second by 2Ke times the angle.
    """
    d, k = span.shape
    leading, others = want.vectors[:k], want.vectors[k:]
    lost = leading - (leading @ span) @ span.mT
    gained = others @ span
    top, true = want.variances.max().item(), want.variances
    off = want.error[:k].sum().item() + U64 * k * top
    sine = torch.linalg.matrix_norm(span - leading.mT @ (leading @ span), 2).item() if k else 0.0
    own = want.angle(k) + 8 * math.sqrt(d) * U64
    finer = 2 * k * top * (2 * want.relative + 8 * math.sqrt(d) * U64) * (sine + own)
    if finer < off:
        missed = (true[:k] @ lost.square().sum(1) - true[k:] @ gained.square().sum(1)).item()
    else:
        missed, finer = true[:k].sum().item() - want.captured(span), off
    return max(0.0, missed), math.asin(min(1.0, sine)), finer, own


# ---------------------------------------------------------------- judgement
@dataclass
class Judgement:
    """Which promises of a certificate do not hold, and how far each bound is from what it bounds."""

    violations: dict[str, str] = field(default_factory=dict)
    looseness: dict[str, float] = field(default_factory=dict)

    def hold(self, promise: str, have: float, allowed: float, useful_from: float | None = None) -> None:
        """Note whether `have` is at most `allowed`; NaN is not.

        Args:
            promise: what the bound is of.
            have: the true value.
            allowed: its bound.
            useful_from: smallest value that the truth can tell; None where the bound is no measure.
        """
        if not have <= allowed:
            self.violations[promise] = f"{have:.4g} > {allowed:.4g}"
        if useful_from is not None:
            self.looseness[promise] = allowed / max(have, useful_from)


def judge(problem: Problem, want: Truth, result: PCAResult) -> Judgement:
    """Every promise of a result about the problem."""
    certificate, verdict = result.certificate, Judgement()
    k, d = result.components.shape
    components, have = result.components.double(), result.spectrum
    true, slack = want.variances[:k], want.error[:k]
    size = want.variances.max().item()
    u = unit_roundoff(result.components.dtype)

    square = components @ components.mT - torch.eye(k, dtype=torch.float64)
    verdict.hold("orthonormal", square.abs().max().item() if k else 0.0, 10 * u * math.sqrt(d))
    verdict.hold("not negative", -have.min().item() if len(have) else 0.0, 0.0)
    verdict.hold("descending", have.diff().max().item() if len(have) > 1 else 0.0, 0.0)
    error = torch.tensor(certificate.variance_error, dtype=torch.float64)
    if k:
        off = (have[:k] - true).abs()
        worst = int((off - slack - error).argmax())
        verdict.hold("variance", (off - slack)[worst].item(), error[worst].item())
        if size > 0:
            verdict.looseness["variance"] = (error.max() / torch.maximum(off, slack).max()).item()
        above = (off - slack - true)[: certificate.trusted]
        verdict.hold("trusted", above.max().item() if len(above) else 0.0, 0.0)
    total = result.total_variance.item()
    if total == 0:  # called constant: "variance" has what that hides
        return verdict
    verdict.hold("shares", result.explained_variance_ratio.sum().item(), 1 + error.sum().item() / total)
    span = torch.linalg.qr(components.mT).Q  # free of the rounding of the stored basis
    missed, turned, floor, own = missed_and_turned(want, span)
    verdict.hold("missed", missed - floor, certificate.missed_ratio_bound * total)
    if 0 < k < d:
        verdict.looseness["missed"] = certificate.missed_ratio_bound * total / max(missed, floor)
        verdict.hold("angle", turned - own, certificate.angle_bound)
        verdict.looseness["angle"] = certificate.angle_bound / max(turned, own, u)
    if certificate.solver in {"krylov", "randomized"} and 0 < k < d:  # proved, not computed
        following = want.variances[k].item() if k < len(want.variances) else 0.0
        apart = true[-1].item() - following
        verdict.hold("gap", certificate.gap - apart, 2 * want.error[0].item())
    return verdict


# ---------------------------------------------------------------- data
def rotated(variances, n: int, d: int, seed: int, turn: bool = True) -> Tensor:
    """(n, d) rows whose sample variances are those given, in a random frame or along the axes."""
    g = torch.Generator().manual_seed(seed)
    k = min(len(variances), d, n - 1)
    u = torch.randn(n, k, generator=g, dtype=torch.float64)
    u = torch.linalg.qr(u - u.mean(0)).Q
    v = torch.eye(d, k, dtype=torch.float64)
    if turn:
        v = torch.linalg.qr(torch.randn(d, k, generator=g, dtype=torch.float64)).Q
    return u * (torch.as_tensor(variances, dtype=torch.float64)[:k] * (n - 1)).sqrt() @ v.mT


def crossed(variances: Tensor) -> Tensor:
    """(2D, D) rows ±σ_i e_i: a tie is exact in any dtype."""
    sigma = variances.sqrt().diag()
    return torch.cat([sigma, -sigma])


class Dice:
    """Draws of one problem, from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def integer(self, low: int, high: int) -> int:
        """Uniform in low … high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def number(self, low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=self.generator, dtype=torch.float64).item()

    def one_of(self, choices):
        return choices[self.integer(0, len(choices) - 1)]


FAMILIES = (
    "power",
    "geometric",
    "flat",
    "identity",
    "few levels",
    "tied at K",
    "nearly tied at K",
    "rank r",
    "massive",
    "massive few",
    "decades",
    "kappa 1e8",
    "zero",
)


def family(name: str, d: int, k: int, dice: Dice) -> Tensor:
    """(D,) variances, descending."""
    i = torch.arange(1, d + 1, dtype=torch.float64)
    power = i ** -dice.number(0.2, 3)
    match name:
        case "power":
            return power
        case "geometric":
            return dice.number(0.05, 0.99) ** i
        case "flat":
            return (
                (1 + 1e-3 * torch.rand(d, generator=dice.generator, dtype=torch.float64))
                .sort()
                .values.flip(0)
            )
        case "identity":
            return torch.ones(d, dtype=torch.float64)
        case "few levels":
            levels = torch.randint(0, 4, (d,), generator=dice.generator)
            return (4.0**levels).double().sort(descending=True).values
        case "tied at K" | "nearly tied at K":
            first, last = max(0, k - dice.integer(1, 6)), min(d, k + dice.integer(1, 6))
            power[first:last] = power[first]
            if name == "nearly tied at K":
                power[k:] *= 1 - 10 ** dice.number(-12, -3)
            return power
        case "rank r":
            return torch.where(i <= dice.integer(1, d), power, 0.0)
        case "massive" | "massive few":
            power[: 1 if name == "massive" else dice.integer(1, 5)] *= 10 ** dice.number(3, 9)
            return power
        case "decades":
            return (
                (10.0 ** torch.randint(-8, 9, (d,), generator=dice.generator)).double().sort().values.flip(0)
            )
        case "kappa 1e8":
            return torch.logspace(0, -16, d, dtype=torch.float64)
        case "zero":
            return torch.zeros(d, dtype=torch.float64)
    raise ValueError(name)


def random_problem(seed: int, largest: int = 80) -> Problem:
    """A small problem of a random family, shape, dtype, offset and scale, the same for the same seed."""
    dice = Dice(seed)
    d = dice.one_of([dice.integer(1, 12), dice.integer(1, largest)])
    n = dice.one_of([2, 3, dice.integer(2, d + 2), dice.integer(d + 2, 3 * d + 4)])
    k = dice.one_of([0, 1, min(n, d), *[dice.integer(0, min(n, max(1, d // 3)))] * 5])
    name, seeds = dice.one_of(FAMILIES), dice.integer(0, 2**31)
    variances = family(name, d, k, dice)
    if dice.integer(0, 4) == 0:
        x = crossed(variances)
    elif dice.integer(0, 4) == 0:
        x = torch.randn(n, d, generator=dice.generator, dtype=torch.float64) * variances.sqrt()
    else:
        x = rotated(variances, n, d, seeds, turn=dice.integer(0, 3) > 0)
    x = x * 10.0 ** dice.one_of([0, 0, 0, -6, 6])
    if d > 2 and dice.integer(0, 5) == 0:
        x[:, 0], x[:, 2] = 2.5, x[:, 1]  # a constant column, and one twice
    size = x.abs().max().item()
    x = x + size * dice.one_of([0.0, 0.0, 1.0, 1e2, 1e4, 1e6])
    matrix = {"center": dice.integer(0, 5) > 0, "standardize": dice.integer(0, 5) == 0}
    matrix["ddof"] = dice.integer(0, 1)
    return Problem(
        x=x.to(dice.one_of(DTYPES)),
        k=min(k, *x.shape),
        tol=dice.one_of([None, 1e-10, 1e-6, 1e-4, 1e-2]),
        block=dice.integer(1, 8),
        seed=seed,
        matrix=matrix,
        name=name,
    )
