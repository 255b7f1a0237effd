"""Every solver on every spectrum: within what its certificate says of the float64 truth."""

import math
import warnings

import pytest
import torch

import pca_torch as pt
from pca_torch.precision import component_dtype, unit_roundoff

SOLVERS = ("full", "covariance_eigh", "streaming")
U64 = unit_roundoff(torch.float64)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rotated(variances, n, d, seed):
    """(n, d) rows whose sample variances are those given, in a random frame."""
    g = torch.Generator().manual_seed(seed)
    k = min(len(variances), d, n - 1)
    u = torch.randn(n, k, generator=g, dtype=torch.float64)
    u = torch.linalg.qr(u - u.mean(0)).Q
    v = torch.linalg.qr(torch.randn(d, k, generator=g, dtype=torch.float64)).Q
    return u * (torch.as_tensor(variances, dtype=torch.float64)[:k] * (n - 1)).sqrt() @ v.mT


def spectrum_of(name, n, d, seed):
    """Data of a named spectrum (power law, flat, rank 3, tied at 4, massive, κ = 10⁸, odd columns)."""
    i = torch.arange(1, d + 1, dtype=torch.float64)
    g = torch.Generator().manual_seed(100 + seed)
    match name:
        case "power":
            return rotated(i**-1.4, n, d, seed)
        case "flat":
            return torch.randn(n, d, generator=g, dtype=torch.float64)
        case "rank 3":
            return rotated([3.0, 2.0, 1.0], n, d, seed)
        case "tied at 4":
            return rotated([5.0, 4.0, 3.0, *[2.0] * 4, *[1.0] * d][:d], n, d, seed)
        case "massive":
            return rotated([1e9, *(1 / i[1:])], n, d, seed)
        case "kappa 1e8":
            return rotated(torch.logspace(0, -16, d, dtype=torch.float64), n, d, seed)
        case "constant and duplicated columns":
            x = torch.randn(n, d, generator=g, dtype=torch.float64)
            x[:, 0], x[:, 2] = 2.5, x[:, 1]
            return x
        case "zero":
            return torch.zeros(n, d, dtype=torch.float64)
    raise ValueError(name)


SPECTRA = [
    "power",
    "flat",
    "rank 3",
    "tied at 4",
    "massive",
    "kappa 1e8",
    "constant and duplicated columns",
    "zero",
]


def truth(x):
    """Centred rows, variances, components: float64 SVD of float64-centred data, centred twice."""
    z = x.double()
    z = z - z.mean(0)
    z = z - z.mean(0)
    _, s, vh = torch.linalg.svd(z, full_matrices=False)
    return z, s.square() / (len(x) - 1), vh


def own_error(variances, n):
    """What the truth is off by itself: a backward error of √n·u·σ₁ on each singular value."""
    s = 4 * U64 * math.sqrt(n)
    return 2 * s * (variances * variances[0]).sqrt() + s**2 * variances[0]


def solve(x, solver, k=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "total variance is zero" has its own tests
        if solver != "streaming":
            return pt.decompose(x, k, solver)
        moments = pt.Moments(x.shape[1], precision="float32")
        for part in x.split([1, len(x) // 3, len(x) - 1 - len(x) // 3]):
            moments.update(part)
        return pt.decompose(moments, k)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
@pytest.mark.parametrize("shape", [(200, 12), (9, 12)], ids=["tall", "wide"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16], ids=["fp32", "fp64", "bf16"]
)
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("solver", SOLVERS)
def test_each_solver_keeps_its_word(solver, name, dtype, shape, offset, seed):
    n, d = shape
    x = (spectrum_of(name, n, d, seed) + offset).to(dtype)
    z, want, _ = truth(x)
    result = solve(x, solver)
    m, certificate = min(shape), result.certificate
    components, variance = result.components.double(), result.spectrum
    assert bool(components.isfinite().all())
    assert result.components.dtype == component_dtype(dtype)
    u = unit_roundoff(result.components.dtype)
    square = components @ components.mT - torch.eye(m, dtype=torch.float64)
    assert square.abs().max() <= 10 * u * math.sqrt(shape[1])
    assert bool((variance >= 0).all())
    assert bool((variance.diff() <= 0).all())
    off, allowed = (variance - want).abs(), torch.tensor(certificate.variance_error) + own_error(want, m)
    if result.total_variance > 0:  # what is constant to rounding is called zero, not noise
        assert bool((off <= allowed).all())
        assert result.explained_variance_ratio.sum().item() == pytest.approx(
            1, abs=1e-6 if solver == "streaming" else 1e-12
        )
    trusted = want[: certificate.trusted]
    assert bool((off[: certificate.trusted] <= trusted).all())
    for k in {1, 3, m - 1}:
        kept = solve(x, solver, k)
        v = torch.linalg.qr(kept.components.double().mT).Q  # the span, free of the rounding of its basis
        captured = (z @ v).square().sum().item() / (len(x) - 1)
        missed = want[:k].sum().item() - captured
        slack = own_error(want, m)[:k].sum().item()
        assert missed <= kept.certificate.missed_ratio_bound * result.total_variance.item() + slack


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["power", "flat", "tied at 4", "massive"])
def test_angles_are_within_their_bound_and_ties_are_named(solver, dtype, name):
    x = spectrum_of(name, 200, 12, 0).to(dtype)
    _, want, vh = truth(x)
    for k in range(1, 12):
        certificate, result = solve(x, solver, k).certificate, solve(x, solver, k)
        cosines = torch.linalg.svdvals(result.components.double() @ vh[:k].mT).clamp(max=1)
        residual = result.components.double() - result.components.double() @ vh[:k].mT @ vh[:k]
        sine = torch.linalg.matrix_norm(residual, 2).item()
        assert cosines.min() > 0.5 or not certificate.unique
        assert math.asin(min(1.0, sine)) <= certificate.angle_bound + 1e-12
        if name == "tied at 4" and dtype == torch.float64:  # float32 rounds the data, and the tie away
            assert certificate.unique is (k not in {4, 5, 6, 8, 9, 10, 11})
    assert want[0] > 0


@pytest.mark.parametrize("solver", ["full", "covariance_eigh"])
def test_a_wrong_answer_would_be_noticed(solver):
    """Control of the tables above: the variances of N instead of N - 1 lie outside every bound."""
    x = spectrum_of("power", 200, 12, 0)
    result, want = solve(x, solver), truth(x)[1]
    wrong = result.spectrum * 199 / 200
    allowed = torch.tensor(result.certificate.variance_error) + own_error(want, 12)
    assert bool(((wrong - want).abs() > allowed).all())


def small_problem(seed):
    """A random tiny matrix with ties, zeros, low rank, large ratios or an offset."""
    g = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=g))

    n, d = integer(2, 40), integer(1, 12)
    values = 10.0 ** torch.randint(-8, 9, (d,), generator=g).double() if integer(0, 2) else torch.ones(d)
    values[integer(0, d + 1) :] = 0
    x = rotated(values.sort(descending=True).values, n, d, seed) + [0.0, 1.0, 1e3, 1e6][integer(0, 4)]
    return x.to([torch.float32, torch.float64, torch.bfloat16][integer(0, 3)])


@pytest.mark.parametrize("block", range(10))
def test_bounds_hold_on_many_tiny_problems(block):
    ratios = []
    for seed in range(40 * block, 40 * block + 40):
        x = small_problem(seed)
        _, want, _ = truth(x)
        for solver in SOLVERS:
            result = solve(x, solver)
            if result.total_variance == 0:
                continue
            off = (result.spectrum - want).abs()
            allowed = torch.tensor(result.certificate.variance_error) + own_error(want, len(want))
            assert bool((off <= allowed).all()), (seed, solver)
            ratios.append((allowed.max() / off.max().clamp_min(U64 * want[0])).item())
    assert sorted(ratios)[len(ratios) // 2] < 1e4  # a bound of everything would hold too


def own_angle(variances, k, d):
    """Radians the float64 truth may be turned by: its own backward error across the gap of σ (Wedin)."""
    sigma = torch.cat([variances.sqrt(), variances.new_zeros(1)])
    off, gap = 4 * U64 * math.sqrt(len(variances)) * sigma[0].item(), (sigma[k - 1] - sigma[k]).item()
    if k == d:
        return 0.0
    return math.asin(min(1.0, off / (gap - off))) if gap > off else math.pi / 2


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("block", range(4))
def test_shares_and_angles_hold_on_tiny_problems(block, solver):
    for seed in range(50 * block, 50 * block + 50):
        x = small_problem(seed)
        z, want, vh = truth(x)
        m, d = len(want), x.shape[1]
        for k in sorted({1, m // 2, m} - {0}):
            result = solve(x, solver, k)
            certificate, total = result.certificate, result.total_variance.item()
            if total == 0:
                continue
            v = torch.linalg.qr(result.components.double().mT).Q
            missed = want[:k].sum().item() - (z @ v).square().sum().item() / (len(x) - 1)
            slack = own_error(want, m)[:k].sum().item()
            assert missed <= certificate.missed_ratio_bound * total + slack, (seed, k)
            sine = torch.linalg.matrix_norm(v - vh[:k].mT @ (vh[:k] @ v), 2).item()
            allowed = certificate.angle_bound + own_angle(want, k, d) + 1e-12
            assert math.asin(min(1.0, sine)) <= allowed, (seed, k)


@pytest.mark.parametrize("solver", SOLVERS)
def test_ranks_are_those_of_the_truth_but_for_ties(solver):
    """Another rank only where the true share is as close to the one asked for as the errors add up to."""
    compared = 0
    for seed in range(150):
        x = small_problem(seed)
        _, want, _ = truth(x)
        result = solve(x, solver)
        if result.total_variance == 0:
            continue
        shares = want.cumsum(0) / want.sum()
        doubt = (torch.tensor(result.certificate.variance_error) + own_error(want, len(want))).cumsum(0)
        for share in (0.5, 0.9, 0.95, 0.99, 0.999):
            right = int((shares < share - 1e-12).sum()) + 1
            have = pt.spectrum.rank(result, share)
            compared += 1
            if have == right:
                continue
            near = min(have, right) - 1
            assert abs(have - right) == 1, (seed, share)
            assert abs(shares[near] - share) <= 2 * doubt[near] / want.sum() + 1e-12, (seed, share)
    assert compared > 300
