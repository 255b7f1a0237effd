"""The κ² study: its truth, what each route makes of it, and how that is shown."""

import io
import json
import math
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from rich.console import Console

import pca_torch as pt
from pca_torch import kappa
from pca_torch.kappa import routes
from pca_torch.kappa.shifts import OFFSETS, shifted, uncentred_covariance
from pca_torch.kappa.squared import SQUARING
from pca_torch.kappa.truth import MOST_FEATURES, exact_variances
from pca_torch.operators import Dense, from_moments
from pca_torch.precision import unit_roundoff
from tests.support import GOLDEN, samples

E = GOLDEN["kappa_squared"]
CLOSE = E["tolerance_smallest_variance_relative"]
ROUNDED = 4 * unit_roundoff(torch.float64)  # a quotient and a root of numbers that were rounded themselves
TRUSTED = {"covariance": 4, "krylov": 4, "SVD": 5, "TSQR": 5}  # of float64, as in test_golden.py


@pytest.fixture(scope="module")
def built_in():
    return kappa.study()


def by_route(study):
    return {(route.precision, route.method): route for route in study.routes}


def shown(study, width=80):
    text = io.StringIO()
    Console(file=text, width=width).print(kappa.table(study, width))
    return text.getvalue()


# --- the truth -------------------------------------------------------------------------------------


def test_the_stored_matrix_is_that_of_the_worked_examples():
    want = np.array(E["X"])
    have = kappa.example().numpy()
    assert have.dtype == want.dtype == np.float64
    assert have.tobytes() == want.tobytes()


def test_the_truth_is_the_one_of_sixty_digits(built_in):
    assert built_in.truth_digits == 60
    assert built_in.truth == pytest.approx(E["exact_variances_ddof0"], rel=ROUNDED, abs=0)
    sigma = [math.sqrt(200 * value) for value in built_in.truth]
    assert sigma == pytest.approx(E["exact_singular_values_60_digits"], rel=ROUNDED, abs=0)
    assert built_in.kappa == pytest.approx(E["quoted"]["cond_X"], rel=1e-3)  # quoted to four digits
    plain = torch.linalg.eigvalsh(torch.cov(kappa.example().mT, correction=0)).flip(0).tolist()
    assert plain != pytest.approx(E["exact_variances_ddof0"], rel=CLOSE, abs=0)  # what the truth must not be


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_the_truth_agrees_with_a_singular_value_decomposition_in_many_digits(offset):
    mpmath = pytest.importorskip("mpmath")
    x = samples(9, 4, decay=1e-5, offset=offset, seed=3)
    with mpmath.workdps(120):
        rows = mpmath.matrix(x.tolist())
        for j in range(4):
            mean = mpmath.fsum(rows[i, j] for i in range(9)) / 9
            for i in range(9):
                rows[i, j] -= mean
        want = [float(s**2 / 9) for s in mpmath.svd_r(rows, compute_uv=False)]
    assert exact_variances(x)[0] == pytest.approx(want, rel=ROUNDED, abs=0)


def test_a_zero_is_told_from_the_smallest_variance():
    x = samples(40, 3)
    tiny = torch.cat([x, 1e-60 * samples(40, 1, seed=1)], 1)
    twice = torch.cat([x, x[:, :1] + x[:, 1:2] * 2], 1)  # exact, or rounded: small but not zero
    copied = torch.cat([x, 4 * x[:, :1]], 1)
    assert 1e-122 < exact_variances(tiny)[0][-1] < 1e-118
    assert 0 < exact_variances(twice)[0][-1] < 1e-30
    values, digits = exact_variances(copied)
    assert values[-1] == 0 < values[-2]
    assert digits > 60
    assert exact_variances(samples(3, 5))[0][2:] == (0.0, 0.0, 0.0)  # three centred samples have rank two
    assert exact_variances(torch.ones(4, 2, dtype=torch.float64))[0] == (0.0, 0.0)


def test_where_digits_are_too_dear_the_truth_is_an_svd(monkeypatch):
    assert exact_variances(samples(50, MOST_FEATURES)) is not None
    assert exact_variances(samples(50, MOST_FEATURES + 1)) is None
    assert exact_variances(torch.zeros(4_000_001, 1, dtype=torch.float64)) is None
    exact = kappa.study(samples(60, 4, decay=1e-2))
    monkeypatch.setitem(sys.modules, "mpmath", None)
    rounded = kappa.study(samples(60, 4, decay=1e-2))
    assert exact.truth_digits is not None
    assert rounded.truth_digits is None
    assert exact.truth_error == (0.0,) * 4
    for have, error, want in zip(rounded.truth, rounded.truth_error, exact.truth, strict=True):
        assert 0 < error < 1e-6 * want
        assert abs(have - want) <= error


# --- the routes ------------------------------------------------------------------------------------


def test_the_covariance_loses_the_smallest_variance_and_its_certificate_says_so(built_in):
    found, smallest = by_route(built_in), built_in.truth[-1]
    for method, trusted in TRUSTED.items():
        route = found["float64", method]
        assert route.trusted == trusted
        error = abs(route.variances[-1] - smallest)
        if method in SQUARING:  # lost: no digit is right by more than chance, and the bound admits it
            assert error > CLOSE * smallest
            assert route.variance_error[-1] > smallest
        else:
            assert error <= CLOSE * smallest
            assert route.right == 5
    for method in TRUSTED:
        route = found["float32", method]
        assert route.trusted < TRUSTED[method]
        assert built_in.truth[route.trusted] <= route.rounding_floor + route.variance_error[route.trusted]


MATRICES = {
    "built-in": kappa.example,
    "offset": lambda: samples(500, 6, decay=1e-2, offset=1e4),
    "rotated": lambda: samples(300, 40, decay=0.5, seed=1),
    "flat": lambda: samples(200, 12, decay=1.0, seed=2),
    "wide": lambda: samples(7, 30, decay=0.5, seed=3),
    "two rows": lambda: samples(2, 3),
    "one column": lambda: samples(30, 1),
    "ranks": lambda: torch.cat([samples(50, 3), samples(50, 3)], 1),
}


@pytest.mark.parametrize("name", MATRICES)
def test_every_number_is_within_its_certificate(name):
    found = kappa.study(MATRICES[name](), count=1000)
    assert found.last == min(found.n_samples - 1, found.n_features)
    assert [(r.precision, r.method) for r in found.routes] == [
        (p, m) for p in ("float32", "float64") for m in ("covariance", "krylov", "SVD", "TSQR")
    ]
    for route in found.routes:
        assert route.trusted <= route.right or found.truth_digits is None
        columns = (route.variances, found.truth, route.variance_error, found.truth_error)
        for have, want, error, doubt in zip(*columns, strict=True):
            assert abs(have - want) <= error + doubt


def test_a_route_that_squares_breaks_the_bound_of_one_that_does_not(built_in):
    """The control of the test above: these bounds tell the routes apart."""
    found = by_route(built_in)
    for precision in ("float32", "float64"):
        have, bound = found[precision, "covariance"].variances, found[precision, "SVD"].variance_error
        assert abs(have[-1] - built_in.truth[-1]) > bound[-1]


@pytest.mark.parametrize("method", SQUARING)
def test_a_negative_variance_is_shown_as_it_came(method):
    moments = pt.Moments(3).update(samples(50, 3))
    op = replace(
        from_moments(moments, ddof=0), matrix=torch.tensor([1, 1e-3, -1e-9], dtype=torch.float64).diag()
    )
    raw, certificate = SQUARING[method](op, 3)
    off = certificate.rounding_floor
    assert raw.tolist() == pytest.approx([1, 1e-3, -1e-9], rel=0, abs=8 * unit_roundoff(torch.float64))
    assert certificate.trusted == 2
    assert off < 1e-9


def test_the_iteration_iterates(monkeypatch):
    seen = []
    apply = Dense.apply

    def counted(op, v):
        seen.append(len(v))
        return apply(op, v)

    op = from_moments(pt.Moments(64).update(samples(200, 64)), ddof=0)
    with monkeypatch.context() as patch:
        patch.setattr(Dense, "apply", counted)
        SQUARING["krylov"](op, 64)
    steps = seen[: seen.index(64)] if 64 in seen else seen  # the last product is of the certificate
    assert sum(steps) == 64
    assert max(steps) == 8


@pytest.mark.parametrize("dtype", ["<f2", "<f4", ">f8", "i4", "u1"])
def test_a_file_of_any_numbers_is_read_exactly(dtype, tmp_path):
    x = (np.random.default_rng(0).standard_normal((40, 2, 3)) * 50 + 100).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    found = kappa.study(kappa.read(tmp_path / "x.npy"), name="x.npy")
    assert (found.n_samples, found.n_features, found.name) == (80, 3, "x.npy")
    want = exact_variances(torch.from_numpy(x.reshape(80, 3).astype("f8")))
    assert found.truth == want[0]


def test_only_the_last_variances_are_shown():
    every, some = kappa.study(samples(60, 7), count=7), kappa.study(samples(60, 7), count=2)
    assert (some.first, some.last) == (6, 7)
    assert some.truth == every.truth[-2:]
    assert [r.variances for r in some.routes] == [r.variances[-2:] for r in every.routes]
    assert (some.kappa, some.largest) == (every.kappa, every.truth[0])


def test_the_caller_finds_everything_as_it_was():
    x, threads = samples(50, 4).requires_grad_(), torch.get_num_threads()
    before, state, seen = x.detach().clone(), torch.get_rng_state(), []
    first, again = kappa.study(x, progress=seen.append), kappa.study(x)
    assert first == again
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    assert sum(seen) == kappa.STEPS


@pytest.mark.parametrize("exponent", [-60, -45, -30, 17, 36, 60])
def test_the_scale_of_the_samples_changes_no_lesson(built_in, exponent):
    """All of it is relative, and powers of two round nothing."""
    found = kappa.study(kappa.example() * 2.0 ** round(exponent * math.log2(10)))
    assert found.shifts == built_in.shifts
    assert [r.trusted for r in found.routes] == [r.trusted for r in built_in.routes]


def test_columns_of_any_scale_are_studied():
    x = samples(40, 4)
    found = kappa.study(x * torch.tensor([1e60, 1.0, 1.0, 1.0], dtype=torch.float64))
    assert all(math.isfinite(shift.uncentred + shift.centred) for shift in found.shifts)


def test_a_study_inside_inference_mode(built_in):
    with torch.inference_mode():
        assert kappa.study() == built_in


def test_a_condition_that_float64_cannot_tell_is_no_number():
    """Twenty columns that are ten, twice: κ is infinite, and only exact sums could know."""
    x = samples(60, 10)
    found = kappa.study(torch.cat([x, x], 1))
    assert found.truth_digits is None
    assert found.kappa is None
    least = float(found.condition.split("κ(X) ≥ ")[1].split(":")[0])
    assert 1e6 < least < 1e20
    assert "float64 cannot tell λ20 from zero" in shown(found)


def test_a_study_survives_json():
    found = kappa.study(MATRICES["ranks"]())
    assert found.kappa is None  # infinite, which JSON cannot hold
    assert found.routes[0].relative_errors[-1] is None
    again = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert again == found.to_dict()
    assert again["version"] == 1
    assert tuple(again["truth"]) == found.truth
    assert (
        routes.Route(**{
            key: tuple(value) if isinstance(value, list) else value
            for key, value in again["routes"][3].items()
        })
        == found.routes[3]
    )


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.ones(1, 3), ValueError, "at least 2 samples, got 1"),
        (torch.ones(0, 3), ValueError, "at least 2 samples, got 0"),
        (torch.full((5, 3), math.inf), ValueError, "5 of 5 samples with NaN or inf"),
        (torch.full((5, 3), 7.1), ValueError, "does not vary"),
        (torch.arange(5.0), ValueError, "at least two dimensions"),
        (torch.ones(2, kappa.MOST_FEATURES + 1), ValueError, "at most 2048 features"),
        (torch.ones(4, 3, dtype=torch.complex64), TypeError, "must be real"),
    ],
)
def test_samples_that_cannot_be_studied_are_refused(x, error, words):
    with pytest.raises(error, match=words):
        kappa.study(x)


def test_a_count_and_a_file_out_of_range_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="`count` must be a positive integer, got 0"):
        kappa.study(count=0)
    np.save(tmp_path / "x.npy", np.ones((1, 3)))
    with pytest.raises(ValueError, match=r"x\.npy: `x` must hold at least 2 samples"):
        kappa.read(tmp_path / "x.npy")
    with pytest.raises(FileNotFoundError, match="no such file"):
        kappa.read(tmp_path / "none.npy")
    monkeypatch.setattr(routes, "free_memory", lambda _: 2**20)
    with pytest.raises(ValueError, match=r"needs 0\.1 GiB for this study, 0\.0 GiB is free"):
        kappa.study(torch.ones(10_000, 300))


# --- offsets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_an_offset_costs_its_square_where_sums_are_not_centred(precision):
    """Uncentred: |E| ≤ γ Σ|x||x|ᵀ / n entrywise (Higham 2002, §3.5), γ = (n + 4)u for the sum, the mean and
    their difference; every entry is below (offset + s)² times the largest variance, s the largest centred
    entry over the largest standard deviation. So the error grows as offset²·u at most, and, were it less
    than a hundredth of offset²·u, no lesson. Centred: the floor of the certificate, whatever the offset.
    """
    x = samples(400, 6, decay=0.7)
    (n, d), dtype = x.shape, getattr(torch, precision)
    u, z = unit_roundoff(dtype), x - x.mean(0)
    variance = z.square().mean(0).max()
    s = (z.abs().max() / variance.sqrt()).item()
    found = [shift for shift in shifted(x, lambda _: None) if shift.precision == precision]
    assert [shift.offset for shift in found] == list(OFFSETS)
    for shift in found:
        moved = (z + shift.offset * variance.sqrt()).to(dtype)
        result = pt.decompose(pt.Moments(d, precision=precision).update(moved), svd_solver="covariance_eigh")
        centred = result.certificate.rounding_floor / result.explained_variance[0].item() + shift.judge
        worst = 2 * (n + 4) * d * u * (shift.offset + s + 1) ** 2
        assert shift.centred <= centred
        assert shift.uncentred <= worst + shift.judge
        assert shift.centred_rank == shift.true_rank
        if shift.offset >= 1e3:  # the control: the bound of centred sums rejects the other formula
            assert shift.uncentred > centred
            assert shift.uncentred > 1e-2 * u * shift.offset**2


def test_the_uncentred_formula_is_a_covariance_all_the_same():
    x = samples(300, 5, offset=2.0)
    torch.testing.assert_close(uncentred_covariance(x), torch.cov(x.mT, correction=0), rtol=1e-13, atol=1e-13)


def test_far_away_the_uncentred_formula_reports_another_rank():
    found = shifted(samples(400, 30, decay=0.9), lambda _: None)
    far = max((shift for shift in found if shift.precision == "float32"), key=lambda shift: shift.offset)
    assert far.uncentred > 1
    assert far.uncentred_rank != far.true_rank == far.centred_rank


# --- how it is shown -------------------------------------------------------------------------------


def cells(text, label):
    return [line.split()[1:] for line in text.splitlines() if line.split()[:1] == [label]]


def test_the_table_says_it_all_in_eighty_columns(built_in):
    text = shown(built_in)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    truth, first, second = *cells(text, "truth"), *cells(text, "covariance")[:2]
    assert truth == [f"{value:.1e}" for value in built_in.truth]
    for row, precision in ((first, "float32"), (second, "float64")):
        route = by_route(built_in)[precision, "covariance"]
        assert row[:2] == [str(route.trusted), str(route.right)]
        marked = [cell.endswith("*") for cell in row[2:]]
        assert marked == [i > route.trusted for i in range(1, 6)]
        assert [cell.rstrip("*") for cell in row[2:]] == [f"{value:.1e}" for value in route.variances]
    assert "κ(X) = 9.96e+07, κ(X)² = 9.92e+15" in text
    assert "1e-08·σ₁ in float64" in text  # √u
    assert "60 digits" in text


def test_the_table_of_many_features_fits_too(built_in):
    wide = replace(
        built_in,
        name="[red]" + "long" * 40 + "\x1b[31m",
        first=2044,
        last=2048,
        n_features=2048,
        n_samples=10**7,
        truth_digits=None,
        truth_error=(1e-300, 1e-10, 1e-10, 1e-10, 1e-10),
        routes=tuple(replace(r, trusted=2044, right=2044) for r in built_in.routes),
    )
    text = shown(wide)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert text.startswith("[red]longlong")
    assert "± at most" in text
    assert "?" in cells(text, "off")[0]  # beyond what the truth itself is known to
    assert "…" not in text.split("\n", 1)[1]
    many = kappa.study(samples(60, 12), count=12)
    text = shown(many)
    assert max(map(len, text.splitlines())) <= 80
    assert {f"λ{i}" for i in range(1, 13)} <= set(text.split())


@pytest.mark.parametrize("width", [40, 60, 120])
def test_a_narrow_terminal_shows_whole_numbers(width):
    found = kappa.study(samples(60, 12), count=12)
    text = shown(found, width)
    assert "…" not in text
    assert {f"λ{i}" for i in range(1, 13)} <= set(text.split())
    for value in found.routes[0].variances:
        assert f"{value:.1e}" in text
    assert max(map(len, text.splitlines())) <= max(width, 80)
    for shift in found.shifts:
        assert f"{shift.offset:,.0f}" in text


def test_no_variance_has_no_relative_error():
    text = shown(kappa.study(MATRICES["ranks"]()))
    assert "κ(X) is infinite: λ6 is zero" in text
    assert cells(text, "off")[0][-1] == "-"


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """A function that plots a study and hands out the figure behind the PNG."""
    agg = pytest.importorskip("matplotlib.backends.backend_agg")
    drawn, save = [], agg.FigureCanvasAgg.print_figure

    def keep(canvas, *args, **kwargs):
        drawn.append(canvas.figure)
        return save(canvas, *args, **kwargs)

    monkeypatch.setattr(agg.FigureCanvasAgg, "print_figure", keep)

    def draw(study):
        kappa.plot(study, tmp_path / "kappa.png")
        assert (tmp_path / "kappa.png").read_bytes().startswith(b"\x89PNG")
        return drawn[-1]

    return draw


def test_the_picture_shows_every_number(built_in, figure):
    drawn = figure(built_in)
    single, double, offsets = drawn.axes
    for axes, precision in ((single, "float32"), (double, "float64")):
        lines = {line.get_label(): line for line in axes.get_lines()}
        for method in TRUSTED:
            route = by_route(built_in)[precision, method]
            for i, value in enumerate(route.variances, 1):
                line = lines[f"{method} λ{i}"]
                assert line.get_ydata()[0] == abs(value)
                assert line.get_marker() == ("v" if value < 0 else "o")
                assert (line.get_markerfacecolor() == "white") == (i > route.trusted)
        floor = by_route(built_in)[precision, "covariance"].rounding_floor
        assert [floor, floor] in [list(line.get_ydata()) for line in axes.get_lines()]
        assert any("rounding floor of the covariance" in text.get_text() for text in axes.texts)
        truth = [tuple(path.vertices[:, 1]) for path in axes.collections[0].get_paths()]
        assert truth == [(value, value) for value in built_in.truth]
    curves = {line.get_label(): list(line.get_ydata()) for line in offsets.get_lines()}
    want = [shift.uncentred for shift in built_in.shifts if shift.precision == "float32"]
    assert curves["XᵀX - nmmᵀ, float32"] == want


@pytest.mark.parametrize("name", ["built-in", "rotated", "two rows", "ranks"])
def test_the_picture_is_legible(name, figure):
    drawn = figure(kappa.study(MATRICES[name](), name="a $ and another $"))
    renderer = drawn.canvas.get_renderer()
    for axes in drawn.axes:
        frame = axes.get_window_extent(renderer)
        for inside in (axes.get_legend(), *axes.texts):
            box = inside.get_window_extent(renderer)
            assert frame.x0 <= box.x0 + 1
            assert box.x1 <= frame.x1 + 1
        ticks = [label.get_window_extent(renderer) for label in axes.get_xticklabels()]
        assert not any(a.overlaps(b) for a, b in pairwise(ticks))
        key = axes.get_legend().get_window_extent(renderer)
        points = [axes.transData.transform(line.get_xydata()[0]) for line in axes.get_lines()]
        assert not any(key.contains(*point) for point in points)


def test_a_zero_stands_at_the_bottom(built_in, figure):
    nothing = replace(built_in, routes=tuple(replace(r, variances=(0.0,) * 5) for r in built_in.routes))
    axes = figure(nothing).axes[0]
    line = next(line for line in axes.get_lines() if line.get_label() == "SVD λ5")
    assert line.get_ydata()[0] == axes.get_ylim()[0]


def test_without_matplotlib_the_picture_says_what_to_install(built_in, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pca-torch\[plot\]"):
        kappa.plot(built_in, tmp_path / "kappa.png")
    assert list(tmp_path.iterdir()) == []
