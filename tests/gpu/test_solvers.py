"""Every solver on the device keeps the word of its certificate, whatever its caller left switched on.

The table is that of tests/test_equivalence.py with one seed, for each solve is a few hundred small kernels:
offsets of 0 and 10⁴, all components and three; bfloat16, which is widened before anything else happens, on
two spectra.
"""

from dataclasses import replace

import pytest
import torch

import pca_torch as pt
from bench.gpu.record import spectral_norm
from tests import problems
from tests.gpu.callers import CALLERS, settings, tf32
from tests.problems import NARROW, SOLVERS, Problem, judge, truth
from tests.test_equivalence import SPECTRA, one_thread, spectrum_of  # ruff: ignore[unused-import]

pytestmark = pytest.mark.gpu

ON_DEVICE = [solver for solver in SOLVERS if solver != "on disk"]  # files are multiplied on the CPU
TABLE = [
    *((name, dtype) for dtype in (torch.float32, torch.float64) for name in SPECTRA),
    *((name, torch.bfloat16) for name in ("power", "massive")),
]
TENSORS = ("mean", "components", "spectrum", "total_variance")


def solved(problem, solver, device):
    """The result of samples on the device, which has to lie there, brought to the CPU to be judged."""
    result = problems.solve(replace(problem, x=problem.x.to(device)), solver)
    assert {getattr(result, name).device.type for name in TENSORS} == {device.type}
    return result.to("cpu")


def violations(problem, solver, device):
    return judge(problem, truth(problem.x, **problem.matrix), solved(problem, solver, device)).violations


@pytest.mark.parametrize(("name", "dtype"), TABLE)
@pytest.mark.parametrize("solver", ON_DEVICE)
def test_each_solver_keeps_its_word(solver, name, dtype, device):
    for shape, offset, k in (
        ((200, 12), 0.0, None),
        ((200, 12), 0.0, 3),
        ((200, 12), 1e4, None),
        ((200, 12), 1e4, 3),
        ((9, 12), 0.0, None),
    ):
        x = (spectrum_of(name, *shape, 0) + offset).to(dtype)
        problem = Problem(x, k=k, block=2, name=f"{name} + {offset:g}")
        assert violations(problem, solver, device) == {}, problem


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("solver", ON_DEVICE)
def test_what_the_caller_left_on_changes_nothing(solver, caller, device):
    for name, dtype in (("power", torch.float32), ("massive", torch.float32), ("power", torch.bfloat16)):
        problem = Problem(spectrum_of(name, 200, 12, 0).to(dtype), k=3, name=name)
        plain = solved(problem, solver, device)
        with CALLERS[caller](device):
            before = settings()
            result = solved(problem, solver, device)
            assert settings() == before
        assert judge(problem, truth(problem.x), result).violations == {}, problem
        assert torch.equal(result.spectrum, plain.spectrum)
        assert torch.equal(result.components, plain.components)


def test_tf32_would_be_noticed(device):
    """Control: products under the caller's switch are further off than a statistic says that it is."""
    x = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).to(device)
    want = torch.cov(x.double().mT)
    with tf32(device):
        z = x - x.mean(0)
        if device.type != "cuda":  # no other has such a mode: the ten bits after the point that it keeps
            z = (z.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
        bare = spectral_norm(z.mT @ z / 4095 - want)
        ours = pt.Moments(256, precision="float32").update(x)
        off = spectral_norm(ours.covariance() - want)
    allowed = ours.scatter_error() / ours.divisor()
    assert off <= allowed < bare


@pytest.mark.parametrize("solver", ON_DEVICE)
def test_random_problems(solver, device):
    for seed in range(25):
        problem = problems.random_problem(seed, largest=40)
        assert violations(problem, solver, device) == {}, (seed, str(problem))


@pytest.mark.parametrize("solver", ON_DEVICE)
def test_a_wrong_answer_would_be_noticed(solver, device):
    """Control of the tables above: the variances of N instead of N - 1, and a component that is turned."""
    problem = Problem(spectrum_of("power", 200, 12, 0), name="power")
    result, want = solved(problem, solver, device), truth(problem.x)
    wrong = replace(result, spectrum=result.spectrum * 199 / 200)
    assert set(judge(problem, want, wrong).violations) == {"variance"}
    few = replace(problem, k=3)
    result = solved(few, solver, device)
    turned = result.components.clone()
    turned[0] = want.vectors[-1].to(turned)
    assert "missed" in judge(few, want, replace(result, components=turned)).violations


@pytest.mark.parametrize("solver", ["full", "tsqr"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_small_variances_survive_where_nothing_is_squared(solver, precision, device):
    """σ falls to 10⁻⁸: every variance that the certificate trusts is right to the last tenth."""
    name = f"{solver} float32" if precision == "float32" else solver
    assert name in NARROW or precision == "float64"
    problem = Problem(spectrum_of("kappa 1e8", 200, 12, 0), name="kappa 1e8")
    result, want = solved(problem, name, device), truth(problem.x)
    trusted = result.certificate.trusted
    assert trusted == 12 if precision == "float64" else 3 <= trusted < 12
    error = torch.tensor(result.certificate.variance_error[:trusted], dtype=torch.float64)
    assert bool(((result.spectrum - want.variances).abs()[:trusted] <= error + want.error[:trusted]).all())
