"""Every route to the leading or to all directions, on samples that lie on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import pca_torch as pt
from bench.gpu.data import NAMES, Data
from bench.gpu.record import Recorder, Row, Verdict, spectral_norm
from bench.gpu.samples import Truth, samples, truth_of
from bench.spectra import SPECTRA
from bench.truth import covariance, eigenvalues
from pca_torch.operators import Dense, from_moments
from pca_torch.precision import factor_noise, unit_roundoff
from pca_torch.result import PCAResult
from pca_torch.solvers import krylov

DRIVERS = ("gesvda", "gesvdj", "gesvd")  # of torch.linalg.svd on CUDA, the quickest first
U64 = unit_roundoff(torch.float64)


@dataclass(frozen=True)
class Scale:
    """What is run: sizes, and the steps that lead up to what may not fit."""

    sizes: tuple[tuple[int, int], ...]
    steps: tuple[tuple[int, int], ...]  # smaller sizes from which the time of the slow routes is estimated
    k: int
    reserve: float  # seconds that the first size leaves to the larger ones


FULL = Scale(((8192, 4096), (65536, 4096), (262144, 4096)), ((2048, 1024), (4096, 2048)), 128, 90.0)
SMALL = Scale(
    ((640, 520), (800, 520), (1040, 520)), ((128, 96), (256, 192)), 10, 0.0
)  # krylov iterates from 513 on


# ---------------------------------------------------------------- rows
def leading(data: Data) -> Iterator[Row]:
    """The K leading directions by whole jobs.

    Yields:
        rows, the quickest first.
    """
    x, k, (n, d) = data.x, data.k, data.size
    sketch = 2.0 * n * d * (k + 10) * 10  # four power iterations multiply by the samples ten times

    yield Row(
        "leading",
        "torch svd_lowrank, niter=4",
        lambda: _lowrank(x, k),
        lambda v: data.truth.of_directions(v, None),
        data.facts,
        sketch,
        "float32",
        "2·N·D·(K+10)·10",
    )
    iterated = Row(
        "leading",
        "krylov",
        partial(pt.decompose, x, k, "krylov"),
        data.leading,
        data.facts,
        1.0 * n * d**2,
        "float64",
        "N·D², the sums alone",
    )
    yield iterated
    single = partial(pt.decompose, x, k, "krylov", precision="float32")
    yield replace(iterated, case="krylov, float32 products", run=single, limit="float32")
    yield replace(
        iterated,
        case="randomized",
        run=partial(pt.decompose, x, k, "randomized"),
        flops=sketch,
        model="2·N·D·(K+10)·10",
    )


def iterations(data: Data) -> Iterator[Row]:
    """The K leading directions of a covariance that is there already.

    Yields:
        rows of each iteration, with the rows it multiplied.
    """
    k = data.k
    op = Counted.of(pt.Moments(data.x.shape[1]).update(data.x))
    for method in ("lanczos", "chebyshev"):

        def iterate(method: krylov.Method = method) -> PCAResult:
            op.rows.clear()
            return krylov.solve(op, k, method=method)

        def judge(result: PCAResult) -> Verdict:
            verdict = data.leading(result)
            return Verdict(verdict.error, verdict.bound, {**verdict.facts, "products": sum(op.rows)})

        yield Row("leading", f"{method} on C", iterate, judge, data.facts)


def sums(data: Data) -> Iterator[Row]:
    """What a stream is reduced to: the scatter in either arithmetic, and the triangular factor.

    Yields:
        rows of statistics alone.
    """
    x, (n, d) = data.x, data.size
    c = data.truth.covariance
    allowance = 2 * data.truth.slack
    model = "N·D²"

    def moments(precision: pt.precision.Precision) -> pt.Moments:
        statistic = pt.Moments(d, precision=precision).update(x)
        statistic.flush()
        return statistic

    def off(statistic: pt.Moments) -> Verdict:
        error = spectral_norm(statistic.covariance() - c)
        bound = statistic.scatter_error() / statistic.divisor() + allowance
        return Verdict(error, bound, {"kind": "2-norm of the covariance"})

    for precision in ("float64", "float32"):
        case = f"Moments, {precision} products"
        yield Row(
            "sums", case, partial(moments, precision), off, data.facts, 1.0 * n * d**2, precision, model
        )

    def factor() -> pt.RFactor:
        statistic = pt.RFactor(d).update(x)
        statistic.flush()
        return statistic

    def factor_off(statistic: pt.RFactor) -> Verdict:
        error = spectral_norm(statistic.covariance() - c)
        top = data.truth.values[0].item()
        bound = (2 * statistic.error + 8 * d**0.5 * U64) * top + allowance
        return Verdict(error, bound, {"kind": "2-norm of the covariance"})

    yield Row("sums", "RFactor", factor, factor_off, data.facts, 2.0 * n * d**2, "float64", "2·N·D²")


def everything(data: Data) -> Iterator[Row]:
    """All variances and directions by way of the covariance.

    Yields:
        one row.
    """
    x, (n, d) = data.x, data.size
    flops, model = n * d**2 + 9.0 * d**3, "N·D² + 9·D³"
    repeats = 3 if data.spectrum == SPECTRA[0] else 1

    def job() -> PCAResult:
        return pt.decompose(x, None, "covariance_eigh")

    yield Row("all", "covariance_eigh", job, data.every, data.facts, flops, "float64", model, repeats=repeats)


def eigenproblem(data: Data) -> Iterator[Row]:
    """The eigenproblem alone.

    Yields:
        a row for each arithmetic.
    """
    d = data.size[1]
    for dtype in (torch.float32, torch.float64):
        matrix, name = data.truth.covariance.to(dtype), str(dtype).removeprefix("torch.")
        bound = (d + 8) * unit_roundoff(dtype) * data.truth.values[0].item()
        yield Row(
            "all",
            "torch eigh of C",
            lambda m=matrix: torch.linalg.eigh(m),
            lambda answer, bound=bound: data.truth.of_values(answer[0].flip(0), bound),
            {**data.facts, "dtype": name},
            9.0 * d**3,
            name,
            "9·D³",
            repeats=3,
        )


def factorised(data: Data) -> Iterator[Row]:
    """All variances without squaring: what may take longer than a row is given.

    Yields:
        rows of `tsqr`, then of each driver of torch.linalg.svd on the centred float32 samples.
    """
    x, (n, d) = data.x, data.size
    yield Row(
        "all",
        "tsqr",
        lambda: pt.decompose(x, None, "tsqr"),
        data.every,
        data.facts,
        2.0 * n * d**2 + 20.0 * d**3,
        "float64",
        "2·N·D² + 20·D³",
        repeats=3,
    )
    top = data.truth.values[0].item()
    relative = factor_noise(n, d, torch.float32) + 4 * unit_roundoff(torch.float32)  # and centring in float32
    bound = (2 * relative + relative**2) * top
    for driver in DRIVERS if x.is_cuda else (None,):
        name = driver or "of LAPACK"
        yield Row(
            "all",
            f"torch svd {name}",
            lambda driver=driver: _svd(x, driver),
            lambda s, name=name: data.truth.of_values(s, None if name == "gesvda" else bound),
            data.facts,
            6.0 * n * d**2 + 20.0 * d**3,
            "float32",
            "6·N·D² + 20·D³",
            repeats=3,
        )


def wrong(data: Data) -> Iterator[Row]:
    """Answers that are wrong on purpose: a check that calls them right is worth nothing.

    Yields:
        rows that must be called wrong.
    """
    x, k, (n, _) = data.x, data.k, data.size
    bound = 2 * data.truth.slack

    def divided_by_n() -> Tensor:
        return data.truth.values * ((n - 1) / n)

    def turned() -> PCAResult:
        result = pt.decompose(x, k, "krylov")
        random = torch.randn(x.shape[1], generator=torch.Generator().manual_seed(0))
        result.components[-1] = (random / torch.linalg.vector_norm(random)).to(result.components)
        return result

    def judge(values: Tensor) -> Verdict:
        return data.truth.of_values(values, bound)

    yield Row("control", "divisor N", divided_by_n, judge, data.facts, control=True, repeats=1)
    yield Row("control", "a random direction", turned, data.leading, data.facts, control=True, repeats=1)


# ---------------------------------------------------------------- runs
def before(device: torch.device, scale: Scale) -> Iterator[Row]:
    """What comes before the others: libraries are loaded, and the truth is held against that of the CPU.

    Yields:
        two rows on the smallest step.
    """
    n, d = scale.steps[0]
    x = samples("power", n, d, scale.k, dtype=torch.float32, device=device)
    facts = {"n": n, "d": d, "dtype": "float32", "spectrum": "power"}
    yield Row("truth", "warm-up", lambda: _warm_up(x), lambda _: Verdict(0.0, 0.0), facts, repeats=0)
    want = eigenvalues(covariance(x.cpu()))

    def judge(truth: Truth) -> Verdict:
        off = (truth.values.cpu() - want).abs().max().item()
        return Verdict(off, 2 * truth.slack, {"kind": "variance"})

    yield Row("truth", "float64 on the device", lambda: truth_of(x), judge, facts, repeats=1)


def _warm_up(x: Tensor) -> None:
    """Load every library and make its handles: the first call of each would be measured too."""
    for solver in ("krylov", "randomized", "covariance_eigh", "tsqr"):
        pt.decompose(x, 4, solver)
    _lowrank(x, 4)
    truth_of(x)


def run_first(recorder: Recorder, scale: Scale) -> None:
    """The steps to the smallest size, then all of it: every spectrum, iteration and factorisation.

    The other spectra are left out where the time that is left belongs to the larger sizes.
    """
    for n, d in scale.steps:
        data = _data(recorder, SPECTRA[0], n, d, min(scale.k, d // 8), torch.float32)
        _measure(recorder, data, [factorised])
    size = scale.sizes[0]
    data = _data(recorder, SPECTRA[0], *size, scale.k, torch.float32)
    _measure(recorder, data, [leading, iterations, sums, wrong, everything, eigenproblem, factorised])
    data = _data(recorder, SPECTRA[0], *size, scale.k, torch.bfloat16)
    _measure(recorder, data, [leading, iterations, sums, everything])
    for spectrum in SPECTRA[1:]:
        for dtype, parts in ((torch.float32, [leading, iterations, everything]), (torch.bfloat16, [leading])):
            if recorder.left < scale.reserve:
                facts = {"n": size[0], "d": size[1], "dtype": NAMES[dtype], "spectrum": spectrum}
                recorder.skip("time is for larger", part="leading", case="all routes", **facts)
                continue
            _measure(recorder, _data(recorder, spectrum, *size, scale.k, dtype), parts)


def run_larger(recorder: Recorder, scale: Scale) -> None:
    """The power law on the sizes that follow, and last on each what may need more than there is."""
    for n, d in scale.sizes[1:]:
        for dtype, slow in ((torch.bfloat16, []), (torch.float32, [factorised])):
            data = _data(recorder, SPECTRA[0], n, d, scale.k, dtype)
            _measure(recorder, data, [leading, sums, everything, *slow])


def _data(recorder: Recorder, spectrum: str, n: int, d: int, k: int, dtype: torch.dtype) -> Data | None:
    """Samples and their truth, if there is time to make them; making them is a row of its own."""
    made: list[Data] = []

    def make() -> Data:
        made[:] = [Data.make(spectrum, n, d, k, dtype, recorder.device)]
        return made[0]

    facts = {"n": n, "d": d, "k": k, "dtype": NAMES[dtype], "spectrum": spectrum}
    flops, model = 2.0 * n * d**2 + 4 / 3 * d**3, "2·N·D² + 4/3·D³"
    recorder.measure(Row("truth", "samples and truth", make, _judge_trace, facts, flops, "float64", model, 0))
    return made[0] if made else None


def _judge_trace(data: Data) -> Verdict:
    """The eigenvalues of the truth add up to its trace."""
    off = abs(data.truth.values.sum().item() - data.truth.total)
    return Verdict(off, len(data.truth.values) * data.truth.slack, {"kind": "trace"})


def _measure(recorder: Recorder, data: Data | None, parts: Sequence[Callable[[Data], Iterator[Row]]]) -> None:
    for part in parts if data is not None else ():
        recorder.measure_all(part.__name__, part(data))


# ---------------------------------------------------------------- routes
class Counted(Dense):
    """A covariance that counts the rows it is multiplied by."""

    @classmethod
    def of(cls, moments: pt.Moments) -> Counted:
        """The covariance of a statistic.

        Args:
            moments: the statistic.
        """
        plain = from_moments(moments)
        return cls(plain.problem, plain.matrix)

    @property
    def rows(self) -> list[int]:
        """Rows of each product so far."""
        return self.__dict__.setdefault("_rows", [])

    def apply(self, v: Tensor) -> Tensor:
        """Rows (b, D) → v C (b, D).

        Args:
            v: float64 rows.
        """
        self.rows.append(len(v))
        return super().apply(v)


def _lowrank(x: Tensor, k: int) -> Tensor:
    """Directions (K, D) of the float32 samples."""
    x = x.float()
    devices = [x.device] if x.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        _, _, v = torch.svd_lowrank(x - x.mean(0), q=k + 10, niter=4)
    return v[:, :k].mT


def _svd(x: Tensor, driver: str | None) -> Tensor:
    """Variances (M,) of the float32 samples."""
    x = x.float()
    _, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False, driver=driver)
    return s.double().square() / (len(x) - 1)
