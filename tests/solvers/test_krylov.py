"""`krylov`: K directions or a share of the variance, certified, by an iteration or where it does not pay."""

import pytest
import torch

import pca_torch as pt
from pca_torch.complement import STATED
from pca_torch.operators import Rows, Sparse, from_moments
from pca_torch.solvers import krylov
from tests.matrices import U64
from tests.problems import Problem, judge, rotated, truth


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Matrices this small stall threaded LAPACK when the cores are busy: ten times the work's own time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def global_rng_is_left_alone():
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def iterating(monkeypatch):
    """No way out to a dense solver for being small; blocks of four rows."""
    for name, value in {"DENSE_UP_TO": 0, "FEW": 1, "BLOCK": 4}.items():
        monkeypatch.setattr(krylov, name, value)


def law(d, exponent=1.4):
    return torch.arange(1, d + 1, dtype=torch.float64) ** -exponent


def dense(x, **options):
    return from_moments(pt.Moments(x.shape[1]).update(x), **options)


def unformed(x, **options):
    return Rows(x, **options)


def sparse(x, **options):
    return Sparse(x.to_sparse(), **options)


OPERATORS = pytest.mark.parametrize("op", [dense, unformed, sparse])


def check(x, result, **options):
    problem = Problem(x, result.n_components, matrix=options)
    assert judge(problem, truth(x, **options), result).violations == {}
    return result


# ---------------------------------------------------------------- what is found
@pytest.mark.usefixtures("iterating")
@pytest.mark.parametrize("method", ["lanczos", "chebyshev"])
@pytest.mark.parametrize("tol", [1e-2, 1e-6, 1e-10])
def test_no_more_is_missed_than_was_asked_for(method, tol):
    x = rotated(law(150), 400, 150, 0)
    for k in (1, 6, 15):
        result = check(x, krylov.solve(dense(x), k, method=method, tol=tol))
        certificate = result.certificate
        assert certificate.solver == "krylov"
        assert certificate.bound_kind == "deterministic"
        assert certificate.fallbacks == ()
        assert certificate.missed_ratio_bound <= 1.1 * tol + 2 * k * certificate.rounding_floor
        of_the_last = certificate.missed_ratio_bound * result.total_variance / result.spectrum[-1]
        assert of_the_last <= 1.1e4 * tol


@pytest.mark.usefixtures("iterating")
def test_how_sure_a_bound_is():
    x = rotated(law(150), 400, 150, 0)
    assert krylov.solve(dense(x), 3).certificate.bound_kind == "deterministic"
    assert krylov.solve(Rows(x), 3).certificate.bound_kind == STATED
    narrow = pt.Moments(150, precision="float32").update(x)
    assert krylov.solve(from_moments(narrow), 3).certificate.bound_kind == "measured"


@pytest.mark.usefixtures("iterating")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"standardize": True}, {"center": False}, {"ddof": 0}])
def test_wide_samples_go_by_their_gram_matrix(monkeypatch, dtype, options):
    x = (rotated(law(40), 40, 900, 0) + 3).to(dtype)
    shapes = recorded(monkeypatch)
    result = check(x, krylov.solve(Rows(x, **options), 5, tol=1e-8), **options)
    assert result.certificate.bound_kind == "deterministic"  # the Gram matrix is formed
    assert result.components.shape == (5, 900)
    assert max(shapes) <= 40
    monkeypatch.setattr(krylov, "GRAM_BYTES", 0)
    by_rows = check(x, krylov.solve(Rows(x, **options), 5, tol=1e-8), **options)
    assert by_rows.certificate.bound_kind == STATED
    doubt = torch.tensor(by_rows.certificate.variance_error) + torch.tensor(result.certificate.variance_error)
    assert bool(((by_rows.spectrum - result.spectrum).abs() <= doubt).all())


@pytest.mark.usefixtures("iterating")
@OPERATORS
def test_a_tie_at_k_is_named(op):
    x = rotated([9.0, *[4.0] * 12, *[1.0] * 40], 200, 60, 0)
    for k in (1, 5, 12, 13):
        result = check(x, krylov.solve(op(x), k))
        assert result.explained_variance.tolist() == pytest.approx([9.0, *[4.0] * 12][:k], rel=1e-5)
        assert result.certificate.unique is (k in {1, 13})


@pytest.mark.usefixtures("iterating")
@pytest.mark.parametrize("shape", [(200, 60), (30, 60)], ids=["tall", "wide"])
@OPERATORS
def test_more_directions_than_the_rank_have_no_variance(op, shape):
    x = rotated([3.0, 2.0, 1.0], *shape, 0)
    result = check(x, krylov.solve(op(x), 8))
    assert result.n_components == 8
    assert bool((result.spectrum[3:] <= result.certificate.rounding_floor).all())
    assert result.certificate.trusted == 3
    assert krylov.solve(op(x), 8, whiten=True).n_components == 3


@pytest.mark.usefixtures("iterating")
@OPERATORS
def test_equal_variances_everywhere(op):
    eye = torch.eye(50, dtype=torch.float64)
    x = torch.cat([eye, -eye])
    for k in (1, 10, 50):
        result = check(x, krylov.solve(op(x), k))
        assert result.explained_variance.tolist() == pytest.approx([2 / 99] * k, rel=1e-12)
        assert result.certificate.unique is (k == 50)


@OPERATORS
@pytest.mark.parametrize("fill", [0.0, 7.25])
def test_data_that_do_not_vary(op, fill):
    x = torch.full((60, 8), fill)
    with pytest.warns(UserWarning, match="total variance is zero"):
        result = krylov.solve(op(x), 3)
    assert result.spectrum.tolist() == [0, 0, 0]
    assert torch.equal(result.components @ result.components.mT, torch.eye(3))
    for wanted, k in ((None, 8), (0.9, 0)):
        with pytest.warns(UserWarning, match="total variance is zero"):
            assert krylov.solve(op(x), wanted).n_components == k


# ---------------------------------------------------------------- shares
@pytest.mark.usefixtures("iterating")
@pytest.mark.parametrize("shape", [(400, 160), (160, 400)], ids=["tall", "wide"])
@pytest.mark.parametrize("name", ["steep", "power", "massive", "levels"])
@OPERATORS
def test_a_share_takes_the_right_number_of_directions(op, name, shape):
    m = min(shape) - 1
    values = {
        "steep": law(m, 3.0),
        "power": law(m, 1.6),
        "massive": torch.cat([torch.tensor([1e6], dtype=torch.float64), law(m - 1, 2.0)]),
        "levels": torch.tensor([*[4.0] * 4, *[1.0] * 4, *[1e-3] * (m - 8)], dtype=torch.float64),
    }[name]
    x = rotated(values, *shape, 0)
    shares = values.cumsum(0) / values.sum()
    for share in (0.3, 0.5, 0.8, 0.9, 0.95, 0.9999, 1 - 1e-7):
        right = int((shares < share - 1e-12).sum()) + 1
        if right > m // 8:
            continue
        result = check(x, krylov.solve(op(x), share))
        assert (result.n_components, result.certificate.solver) == (right, "krylov")
        assert pt.spectrum.rank(result, share) == right


@pytest.mark.usefixtures("iterating")
def test_one_direction_less_would_be_too_few_however_close():
    """The share is reached by a hair: K must be proved, not read off values that are still too small."""
    values = law(160, 1.6)
    x = rotated(values, 400, 160, 0)
    shares = values.cumsum(0) / values.sum()
    for k in (3, 7, 12):
        for hair, right in ((-1e-8, k), (1e-8, k + 1)):
            result = krylov.solve(dense(x), shares[k - 1].item() + hair)
            assert result.n_components == right
            assert result.certificate.solver == "krylov"


def test_a_share_of_many_directions_goes_to_the_dense_solver(monkeypatch):
    x = rotated(law(600, 0.3), 700, 600, 0)
    shares = (values := law(600, 0.3)).cumsum(0) / values.sum()
    result = check(x, krylov.solve(dense(x), 0.8))
    assert result.certificate.solver == "covariance_eigh"
    assert "krylov: 0.8 takes too many directions" in result.certificate.fallbacks
    assert result.n_components == int((shares < 0.8).sum()) + 1
    wide = check(x.mT, krylov.solve(Rows(x.mT), 0.8))
    assert "takes too many directions" in wide.certificate.fallbacks[0]
    z = x.mT - x.mT.mean(0)
    of_wide = torch.linalg.svdvals(z).square()
    assert wide.n_components == int((of_wide.cumsum(0) / of_wide.sum() < 0.8).sum()) + 1
    of_sparse = check(x, krylov.solve(sparse(x), 0.8))
    assert of_sparse.n_components == result.n_components
    monkeypatch.setattr(krylov, "GRAM_BYTES", 0)  # as if no square fitted
    for op in (sparse, unformed):
        with pytest.raises(
            ValueError, match=r"`n_components` = 0\.8 takes more directions than an iteration"
        ):
            krylov.solve(op(x), 0.8)


def recorded(monkeypatch):
    """The smaller side of every matrix that is decomposed from here on."""
    sizes = [0]

    def spy(name):
        original = getattr(torch.linalg, name)

        def recording(a, *args, **options):
            sizes.append(min(a.shape[-2:]))
            return original(a, *args, **options)

        monkeypatch.setattr(torch.linalg, name, recording)

    for name in ("eigh", "eigvalsh", "svd", "svdvals"):
        spy(name)
    return sizes


@OPERATORS
def test_a_share_of_few_directions_decomposes_nothing_large(op, monkeypatch):
    d = 640
    x = rotated(law(d), 800, d, 0)
    shares = law(d).cumsum(0) / law(d).sum()
    sizes = recorded(monkeypatch)
    for share in (0.5, 0.8):
        result = krylov.solve(op(x), share)
        assert result.n_components == int((shares < share).sum()) + 1 <= d // 8
        assert result.certificate.solver == "krylov"
    assert 0 < max(sizes) <= 3 * d // 8 + 2 * krylov.BLOCK
    assert krylov.solve(op(x), 20).certificate.solver == "krylov"
    assert max(sizes) < d // 2
    krylov.solve(dense(x), 300)  # control: the dense solver is seen
    assert max(sizes) == d


# ---------------------------------------------------------------- the way out
@pytest.mark.parametrize(
    ("k", "dimensions", "worth"),
    [(10, 512, False), (51, 513, True), (52, 513, False), (0.9, 513, True), (1.0, 513, False)],
)
def test_when_an_iteration_pays(k, dimensions, worth):
    assert krylov.pays(k, dimensions) is worth
    assert not krylov.pays(None, dimensions)


def test_small_problems_and_many_directions_go_to_the_dense_solver():
    small, large = rotated(law(30), 90, 30, 0), rotated(law(520), 600, 520, 0)
    for x, k in ((small, 3), (small, None), (large, 100)):
        result = check(x, krylov.solve(dense(x), k))
        assert result.certificate.solver == "covariance_eigh"
        assert "an iteration does not pay" in result.certificate.fallbacks[0]
        assert len(result.spectrum) == min(x.shape)
    assert krylov.solve(dense(large), 20).certificate.solver == "krylov"


@pytest.mark.usefixtures("iterating")
def test_an_iteration_that_does_not_converge_is_handed_on(monkeypatch):
    x = rotated(torch.linspace(1.0, 0.9, 60, dtype=torch.float64), 200, 60, 0)
    monkeypatch.setattr(krylov, "_search", lambda *_: None)
    result = check(x, krylov.solve(dense(x), 5))
    assert result.certificate.precision == "float64 products, float32 eigenproblem refined in float64"
    monkeypatch.setattr(krylov, "_narrow", lambda *_: None)
    result = check(x, krylov.solve(dense(x), 5))
    assert result.certificate.solver == "covariance_eigh"
    assert result.certificate.fallbacks == ("krylov: 5 takes too many directions",)
    wide = rotated(torch.linspace(1.0, 0.9, 60, dtype=torch.float64), 40, 60, 0)
    result = check(wide, krylov.solve(Rows(wide), 5))
    assert result.certificate.fallbacks == ("krylov: 5 takes too many directions",)


@pytest.mark.usefixtures("iterating")
def test_rounding_beside_a_massive_direction_is_said():
    x = rotated(torch.cat([torch.tensor([1e12], dtype=torch.float64), law(79)]), 200, 80, 0)
    notes = check(x, krylov.solve(dense(x), 5)).certificate.fallbacks
    assert any("was asked for; rounding beside λ₁ hides more" in note for note in notes)
    assert krylov.solve(dense(rotated(law(80), 200, 80, 0)), 5).certificate.fallbacks == ()


# ---------------------------------------------------------------- chance, memory, errors
@pytest.mark.usefixtures("iterating")
@pytest.mark.parametrize("method", ["lanczos", "chebyshev"])
def test_the_same_seed_gives_the_same_bits(method):
    x = rotated(law(150), 400, 150, 0)
    op = dense(x)

    def components(seed):
        return krylov.solve(op, 4, method=method, tol=1e-2, random_state=seed).components

    assert torch.equal(components(1), components(1))
    assert torch.equal(components(None), components(None))
    assert not torch.equal(components(1), components(2))
    generator = torch.Generator().manual_seed(1)
    first, second = components(generator), components(generator)  # it moves on
    assert torch.equal(first, components(1))
    assert not torch.equal(first, second)


@pytest.mark.usefixtures("iterating")
def test_nothing_is_shared_with_the_statistic():
    x = rotated(law(60), 600, 60, 0)
    moments = pt.Moments(60).update(x)
    result = krylov.solve(from_moments(moments), 3)
    before = result.mean.clone(), result.components.clone(), result.total_variance.clone()
    moments.update(5 + 3 * x)
    assert all(map(torch.equal, before, (result.mean, result.components, result.total_variance)))


@pytest.mark.parametrize("method", ["Lanczos", None, ""])
def test_methods_that_do_not_exist(method):
    with pytest.raises(
        ValueError, match="`method` must be one of 'auto', 'lanczos', 'chebyshev', 'narrow', got"
    ):
        krylov.solve(dense(rotated(law(9), 30, 9, 0)), 2, method=method)


@OPERATORS
def test_counts_and_shares_out_of_range(op):
    x = rotated(law(9), 30, 9, 0)
    with pytest.raises(ValueError, match=r"0\.\.9, the smaller of 30 samples and 9 features, got 10"):
        krylov.solve(op(x), 10)
    for share in (0.0, 1.5, -0.5):
        with pytest.raises(ValueError, match=r"a share in \(0, 1\] as a float, or None, got"):
            krylov.solve(op(x), share)
    for tol in (0.0, -1e-6):
        with pytest.raises(ValueError, match="`tol` must be a number > 0 or None, got"):
            krylov.solve(op(x), 2, tol=tol)


@pytest.mark.usefixtures("iterating")
def test_a_basis_that_does_not_fit_is_refused_with_its_size(monkeypatch):
    x = rotated(law(200), 400, 200, 0)
    op = Rows(x)
    monkeypatch.setattr(krylov, "free_memory", lambda device: 24 * 80 * 200 - 1)
    with pytest.raises(ValueError, match=r"basis of 80 rows of 200 features, which needs 0\.0 GiB, 0\.0"):
        krylov.solve(op, 20)
    monkeypatch.setattr(krylov, "free_memory", lambda device: 24 * 80 * 200)
    assert krylov.solve(op, 20).n_components == 20
    monkeypatch.setattr(krylov, "free_memory", lambda device: None)  # nobody says
    assert krylov.solve(op, 20).n_components == 20


@pytest.mark.usefixtures("iterating")
def test_none_and_all():
    x = rotated(law(12), 40, 12, 0)
    none = krylov.solve(dense(x), 0)
    assert none.components.shape == (0, 12)
    assert none.certificate.captured_ratio == 0
    every = check(x, krylov.solve(Rows(x), None))
    assert every.n_components == 12
    assert every.certificate.captured_ratio == pytest.approx(1, abs=100 * U64)


@pytest.mark.usefixtures("iterating")
@pytest.mark.parametrize("op", [dense, unformed])
def test_what_a_gpu_would_do_keeps_its_word(monkeypatch, op):
    """Filtered subspace iteration of a covariance that was formed, wider blocks of one that was not."""
    x, sizes, seen = rotated(law(90), 300, 90, 0), [], []
    monkeypatch.setattr(krylov, "_on_gpu", lambda _: True)
    monkeypatch.setattr(krylov, "NARROW_UP_TO", 0)
    chebyshev, made = krylov.chebyshev, op(x)
    monkeypatch.setattr(krylov, "chebyshev", lambda *a, **o: seen.append(1) or chebyshev(*a, **o))
    apply = type(made).apply
    monkeypatch.setattr(type(made), "apply", lambda self, v: sizes.append(len(v)) or apply(self, v))
    check(x, krylov.solve(made, 6))
    assert bool(seen) == (op is dense)
    if op is unformed:
        assert sizes[0] == krylov.WIDER * 4
