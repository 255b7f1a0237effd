"""The SVD that checks its answer: the chain of algorithms, what is noted, and what is not caught."""

import math
import re

import numpy as np
import pytest
import torch

from pca_torch import svd
from pca_torch.precision import unit_roundoff
from pca_torch.svd import LinAlgError, robust_svd
from tests.support import samples

TRUE_SVD = torch.linalg.svd
CPU_CHAIN = ["gesdd", "gesdd in float64", "gesvd in float64"]


def bound(a, dtype):
    """A few roundings of σ₁ along the longer side, backward stable (LAPACK Users' Guide §4.9)."""
    return 4 * unit_roundoff(dtype) * max(a.shape) * torch.linalg.matrix_norm(a.double(), 2)


def check(a, s, vh, dtype):
    """AVᵀ has orthogonal columns of length σ: with orthonormal V that defines the answer."""
    m = min(a.shape)
    assert (s.shape, vh.shape) == ((m,), (m, a.shape[1]))
    assert bool((s.diff() <= 0).all())
    image = a.double() @ vh.double().mT
    off = image.mT @ image - torch.diag(s.double().square())
    assert off.abs().max() <= 2 * bound(a, dtype) * s[0].double() + 1e-300
    gram = vh.double() @ vh.double().mT - torch.eye(m, dtype=torch.float64)
    assert gram.abs().max() <= 12 * unit_roundoff(dtype) * max(a.shape)  # 10, and the rounding of the check


class Broken:
    """`torch.linalg.svd` that fails in one way on its first calls."""

    def __init__(self, failure, times=1):
        self.failure, self.times, self.calls = failure, times, []

    def __call__(self, a, full_matrices=True, *, driver=None):
        self.calls.append((a.dtype, driver))
        if len(self.calls) > self.times:
            return TRUE_SVD(a, full_matrices=full_matrices)
        u, s, vh = TRUE_SVD(a, full_matrices=full_matrices)
        match self.failure:
            case Exception():
                raise self.failure
            case "nan":
                s = s * torch.nan
            case "inf vectors":
                vh = vh / 0
            case "not orthonormal":
                vh = vh + 1e-3 * vh.roll(1, 0)
            case "too long":
                vh = vh * (1 + 30 * max(a.shape) * torch.finfo(a.dtype).eps)
        return u, s, vh


FAILURES = {
    "nan": "NaN or inf in the answer",
    "inf vectors": "NaN or inf in the answer",
    "not orthonormal": "vectors orthonormal to 1.0e-03 only",
    "too long": "vectors orthonormal to",
    LinAlgError("failed to converge\nat step 3"): "failed to converge",
    RuntimeError("svd_cuda: gesvdj did not converge"): "svd_cuda: gesvdj did not converge",
    RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR"): "cusolver error",
    LinAlgError(): "no reason given",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (7, 1), (5, 5), (40, 9), (9, 40), (3, 2000)])
def test_nothing_fails_on_ordinary_matrices(shape, dtype):
    a = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    before = a.clone()
    s, vh, tried = robust_svd(a)
    assert tried == ()
    assert (s.dtype, vh.dtype) == (dtype, dtype)
    assert torch.equal(a, before)
    check(a, s, vh, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["zero", "ones", "rank one", "graded", "tied", "wide rank one"])
def test_nothing_fails_on_hard_spectra(kind, dtype):
    """These lose the most orthonormality: a bound of √D instead of D would refuse a right answer."""
    g = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(120, 120, generator=g, dtype=torch.float64)).Q
    a = {
        "zero": torch.zeros(120, 120),
        "ones": torch.ones(120, 120),
        "rank one": torch.outer(q[0], torch.ones(120, dtype=torch.float64)),
        "graded": q * 10.0 ** -torch.linspace(0, 12, 120, dtype=torch.float64),
        "tied": q,
        "wide rank one": torch.outer(q[0], torch.ones(900, dtype=torch.float64)),
    }[kind].to(dtype)
    s, vh, tried = robust_svd(a)
    assert tried == ()
    check(a, s, vh, dtype)


@pytest.mark.parametrize("n", [(0, 4), (4, 0)])
def test_an_empty_matrix_has_an_empty_answer(n):
    s, vh, tried = robust_svd(torch.zeros(n))
    assert (s.shape, vh.shape, tried) == ((0,), (0, n[1]), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_failure_the_next_algorithm_answers(monkeypatch, failure, dtype):
    pytest.importorskip("scipy")
    a = samples(30, 8, dtype=dtype)
    broken = Broken(failure)
    monkeypatch.setattr(torch.linalg, "svd", broken)
    s, vh, tried = robust_svd(a)
    assert len(tried) == 1
    assert tried[0].startswith(f"gesdd: {FAILURES[failure]}")
    assert "\n" not in tried[0]
    assert (s.dtype, vh.dtype) == (torch.float64, torch.float64)
    assert broken.calls == [(dtype, None)] + [(torch.float64, None)] * (dtype == torch.float32)
    check(a, s, vh, torch.float64)


def test_scipy_answers_when_torch_fails_twice(monkeypatch):
    pytest.importorskip("scipy")
    monkeypatch.setattr(torch.linalg, "svd", Broken("nan", times=2))
    a = samples(30, 8, dtype=torch.float32)
    s, vh, tried = robust_svd(a)
    assert [failure.split(":")[0] for failure in tried] == CPU_CHAIN[:2]
    check(a, s, vh, torch.float64)


def test_when_all_fail_the_error_names_each_and_a_remedy(monkeypatch):
    scipy_linalg = pytest.importorskip("scipy.linalg")

    def no_answer(*_, **__):
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(torch.linalg, "svd", Broken("nan", times=2))
    message = (
        "no SVD of the 30 × 8 matrix succeeded (gesdd: NaN or inf in the answer; "
        "gesdd in float64: NaN or inf in the answer; gesvd in float64: SVD did not converge); "
        "use `svd_solver='covariance_eigh'`."
    )
    monkeypatch.setattr(scipy_linalg, "svd", no_answer)
    with pytest.raises(LinAlgError, match=re.escape(message)):
        robust_svd(samples(30, 8, dtype=torch.float32))


def test_without_scipy_the_chain_is_shorter(monkeypatch):
    monkeypatch.setattr(svd, "find_spec", lambda _: None)
    monkeypatch.setattr(torch.linalg, "svd", Broken("nan", times=9))
    with pytest.raises(LinAlgError, match=r"\(gesdd: NaN or inf in the answer\); use"):
        robust_svd(samples(30, 8))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of memory while the SVD did not converge"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"),
        RuntimeError("expected a tensor"),
    ],
)
def test_failures_that_are_not_numerical_are_not_hidden(monkeypatch, error):
    monkeypatch.setattr(torch.linalg, "svd", Broken(error))
    with pytest.raises(type(error), match=re.escape(str(error))):
        robust_svd(samples(5, 3))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_matrix_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="`a` must be finite, got NaN or inf; drop those rows"):
        robust_svd(torch.tensor([[1.0, bad]]))


class OnCuda(torch.Tensor):
    """A CPU tensor that says it is on CUDA."""

    is_cuda = True


def test_on_cuda_the_jacobi_driver_comes_first_and_the_approximate_one_never(monkeypatch):
    a = samples(30, 8, dtype=torch.float32).as_subclass(OnCuda)
    names = [name for name, _ in svd._algorithms(a)]
    assert names == ["gesvdj", "gesvd", "float64", "float64 on the CPU"]
    broken = Broken("nan", times=3)
    monkeypatch.setattr(torch.linalg, "svd", broken)
    _, _, tried = robust_svd(a)
    assert [failure.split(":")[0] for failure in tried] == names[:3]
    single, double = torch.float32, torch.float64
    assert broken.calls == [(single, "gesvdj"), (single, "gesvd"), (double, None), (double, None)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_on_a_gpu_the_answer_is_that_of_the_cpu(dtype):
    a = samples(200, 50, dtype=dtype)
    s, vh, tried = robust_svd(a.cuda())
    assert tried == ()
    assert vh.is_cuda
    check(a, s.cpu(), vh.cpu(), dtype)


def test_what_lapack_cannot_index_is_refused(monkeypatch):
    monkeypatch.setattr(svd, "LARGEST", 3)
    with pytest.raises(ValueError, match=r"an SVD of 9 × 4 is beyond LAPACK's 3; ask for few components"):
        svd.robust_svd(torch.ones(9, 4))
    svd.robust_svd(torch.ones(9, 3))
