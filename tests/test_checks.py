"""The checks at the door: what passes, and one sentence for what does not."""

import re

import numpy as np
import pytest
import torch

import pca_torch as pt
from pca_torch import _checks as checks

CPU = torch.device("cpu")


def literally(text):
    return re.escape(text)


# ---------------------------------------------------------------- as_tensor
DTYPES = ["bool", "int8", "uint8", "uint16", "int32", "uint64", "float16", "float32", "float64"]


@pytest.mark.parametrize("dtype", [*DTYPES, ">f4", ">i2", ">f8"])
def test_arrays_of_every_dtype_keep_their_values(dtype):
    array = np.array([[0, 1], [1, 1]]).astype(dtype)
    x = checks.as_tensor(array)
    assert x.tolist() == array.tolist()
    assert x.element_size() == array.itemsize


@pytest.mark.parametrize(
    "view",
    [lambda a: a[::-1], lambda a: a[:, ::2], lambda a: a.T, np.asfortranarray],
    ids=["backwards", "strided", "transposed", "fortran"],
)
def test_arrays_of_every_layout_keep_their_values(view):
    array = view(np.arange(12.0).reshape(3, 4))
    assert checks.as_tensor(array).tolist() == array.tolist()


def test_read_only_arrays_are_taken_without_a_warning():
    array = np.arange(6.0).reshape(3, 2)
    array.flags.writeable = False
    x = checks.as_tensor(array)  # a warning is an error here
    x += 1
    assert array[0, 0] == 0


def test_tensors_pass_as_they_are():
    x = torch.randn(3, 2, dtype=torch.bfloat16)
    assert checks.as_tensor(x) is x


def test_nested_numbers_are_an_array():
    assert checks.as_tensor([[1, 2], [3, 4]]).dtype == torch.int64


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ("abc", "`x` must be a numeric array or tensor of at most 64 bits, got str of <U3."),
        (None, "`x` must be a numeric array or tensor of at most 64 bits, got NoneType of object."),
        ({"a": 1}, "got dict of object."),
        (np.zeros(2, "datetime64[s]"), "got ndarray of datetime64[s]."),
        (
            np.zeros(2, complex),
            "must be real, got complex128; pass `np.concatenate([np.real(x), np.imag(x)], -1)`.",
        ),
        ([[1 + 2j, 3]], "`x` must be real, got complex128; pass `np.concatenate"),
        (np.zeros(2, np.longdouble), f"got ndarray of {np.dtype(np.longdouble)}."),
        (torch.zeros(2, dtype=torch.complex64), "pass `torch.view_as_real(x).flatten(-2)`."),
    ],
    ids=["text", "none", "mapping", "dates", "complex_array", "complex_list", "wide", "complex_tensor"],
)
def test_what_is_not_real_is_refused(x, message):
    if getattr(x, "dtype", None) == np.longdouble and np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("long double is float64 on this platform")
    with pytest.raises(TypeError, match=literally(message)):
        checks.as_tensor(x)


def test_the_remedy_for_complex_data_is_taken():
    x = torch.tensor([[1 + 2j, 3 - 1j]])
    assert checks.as_tensor(torch.view_as_real(x).flatten(-2)).tolist() == [[1, 2, 3, -1]]
    for form in (x.numpy(), x.tolist()):
        real = np.concatenate([np.real(form), np.imag(form)], -1)
        assert checks.as_tensor(real).tolist() == [[1, 3, 2, -1]]


# ---------------------------------------------------------------- integers
TOP = 2**53
ROUNDED = "`x` holds integers beyond 2^53, which float64 cannot hold exactly; subtract an offset as integers"


@pytest.mark.parametrize("value", [TOP, TOP - 1, -TOP, 0])
def test_every_integer_that_float64_holds_passes_unchanged(value):
    want = [[value, 1]]
    kinds = ["int64", "uint64"] if value >= 0 else ["int64"]
    forms = [want, *(np.array(want, kind) for kind in kinds)]
    forms += [torch.tensor(want, dtype=getattr(torch, kind)) for kind in kinds]
    for x in forms:
        assert checks.as_tensor(x).tolist() == want
        assert [int(v) for v in checks.as_tensor(x).double()[0]] == want[0]


@pytest.mark.parametrize("value", [TOP + 1, -TOP - 1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1])
def test_integers_that_float64_would_round_are_refused(value):
    kind = "uint64" if value >= 2**63 else "int64"
    forms = {
        "list": [[1, value]],
        "array": np.array([[1, value]], kind),
        "tensor": torch.tensor([[1, value]], dtype=getattr(torch, kind)),
        "swapped": np.array([[1, value]], kind).astype(np.dtype(kind).newbyteorder(">")),
        "strided": torch.tensor([[1, 2], [value, 3]], dtype=getattr(torch, kind)).mT,
        "single": torch.tensor(value, dtype=getattr(torch, kind)),
    }
    for form in forms.values():
        with pytest.raises(TypeError, match=literally(ROUNDED)):
            checks.as_tensor(form)


@pytest.mark.parametrize("x", [[[TOP + 1, 0.5]], [[2**63, -1]], ([1.0], [np.int64(TOP + 1)])])
def test_integers_that_numpy_would_round_among_floats_are_refused(x):
    assert np.asarray(x).dtype == np.float64  # control: numpy says nothing
    with pytest.raises(TypeError, match=literally(ROUNDED)):
        checks.as_tensor(x)


def test_floats_of_any_size_and_integers_beside_them_pass():
    for x in ([[1e300, 3]], [[2.0**60, 0.5]], [[float(TOP), TOP]], [[float("inf"), float("nan")]]):
        assert checks.as_tensor(x).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_no_integers_pass(dtype):
    assert checks.as_tensor(torch.zeros(0, 3, dtype=dtype)).shape == (0, 3)


def test_other_parameters_are_named():
    with pytest.raises(TypeError, match="`weights` holds integers beyond"):
        checks.as_weights([TOP + 1], (1,), CPU)
    with pytest.raises(TypeError, match="`mask` holds integers beyond"):
        checks.as_mask([TOP + 1], (1,), CPU)
    with pytest.raises(TypeError, match="`spectrum` holds integers beyond"):
        pt.spectrum.rank([TOP + 1, 1], 0.5)


KINDS = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


def whole(kind):
    """(40, 3) integers up to the largest of their dtype, or to 2⁵³, and the same as float64."""
    most = 1 if kind == "bool" else min(np.iinfo(kind).max, TOP)
    array = np.random.default_rng(0).integers(0, most, (40, 3), np.int64, endpoint=True)
    return array.astype(kind), array.astype(np.float64)


@pytest.mark.parametrize("form", ["array", "tensor", "file"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_door_takes_every_integer_exactly(kind, form, tmp_path):
    array, same = whole(kind)
    rows = torch.from_numpy(array) if form == "tensor" else array
    if form == "file":
        np.save(tmp_path / "x.npy", array)
        source = pt.NpySource(tmp_path / "x.npy", block_rows=7)
        rows = torch.cat([block.clone() for block in source])
        assert torch.equal(pt.decompose(source).spectrum, pt.decompose(pt.Moments(3).update(same)).spectrum)
    mask = (np.arange(40) % 3 > 0).astype(kind)
    have, want = pt.Moments(3).update(rows, mask=mask), pt.Moments(3).update(same, mask=mask)
    assert torch.equal(have.covariance(), want.covariance())
    have, want = pt.Moments(3).update(rows, weights=mask), pt.Moments(3).update(same, weights=mask)
    assert torch.equal(have.covariance(), want.covariance())
    assert torch.equal(pt.subspace.captured(rows, np.eye(3)), pt.subspace.captured(same, np.eye(3)))
    pca = pt.PCA(2, svd_solver="full").fit(rows)
    result = pt.PCA(2, svd_solver="full").fit(same).result_
    assert torch.equal(pca.components_, result.components)
    assert torch.equal(pca.transform(rows), result.transform(same))
    assert torch.equal(pca.inverse_transform(rows[:, :2]), result.inverse_transform(same[:, :2]))
    assert pca.result_.reconstruction_error(rows) == result.reconstruction_error(same)


FITTED = pt.PCA(2).fit(np.random.default_rng(0).standard_normal((9, 3)))
DOORS = {
    "fit": lambda x: pt.PCA().fit(x),
    "partial_fit": lambda x: pt.PCA().partial_fit(x),
    "decompose": pt.decompose,
    "Moments": lambda x: pt.Moments(3).update(x),
    "captured": lambda x: pt.subspace.captured(x, [1, 0, 0]),
    "basis": lambda x: pt.subspace.captured(np.eye(3), x),
    "transform": FITTED.transform,
    "inverse_transform": lambda x: FITTED.inverse_transform(x[:2] if len(x) > 2 else x),
    "reconstruction_error": FITTED.result_.reconstruction_error,
    "mask": lambda x: pt.Moments(3).update(np.eye(3), mask=x),
    "weights": lambda x: pt.Moments(3).update(np.eye(3), weights=x),
    "spectrum": lambda x: pt.spectrum.rank(x, 0.9),
}


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
@pytest.mark.parametrize("door", DOORS)
def test_every_door_refuses_complex_numbers_and_rounded_integers(door, form):
    with pytest.raises(TypeError, match=r"must be real, got (torch\.)?complex\d+; pass"):
        DOORS[door](form([[1j, 2, 3]] * 3))
    with pytest.raises(TypeError, match="holds integers beyond 2\\^53, which float64 cannot hold exactly"):
        DOORS[door](form([[TOP + 1, 2, 3]] * 3))


def test_files_of_complex_numbers_or_rounded_integers_are_refused(tmp_path):
    np.save(tmp_path / "complex.npy", np.ones((4, 2), np.complex64))
    with pytest.raises(ValueError, match="must hold real numbers of at most 64 bits, got complex64"):
        pt.NpySource(tmp_path / "complex.npy")
    np.save(tmp_path / "long.npy", np.array([[1, TOP + 1], [0, 1]]))
    for solver in ("covariance_eigh", "tsqr"):  # a file at fault is a ValueError that names it
        with pytest.raises(ValueError, match=r"long\.npy: `x` holds integers beyond 2\^53"):
            pt.decompose(pt.NpySource(tmp_path / "long.npy"), svd_solver=solver)


# ---------------------------------------------------------------- as_rows
@pytest.mark.parametrize(
    ("shape", "d", "rows", "leading"),
    [
        ((5, 3), None, (5, 3), (5,)),
        ((2, 5, 3), None, (10, 3), (2, 5)),
        ((2, 1, 5, 3), 3, (10, 3), (2, 1, 5)),
        ((0, 3), None, (0, 3), (0,)),
        ((3,), 3, (1, 3), ()),
        ((4, 0), 0, (4, 0), (4,)),
    ],
)
def test_leading_dimensions_are_rows(shape, d, rows, leading):
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    found, lead = checks.as_rows(x, d)
    assert (tuple(found.shape), lead) == (rows, leading)
    assert found.flatten().tolist() == x.flatten().tolist()


@pytest.mark.parametrize(
    ("shape", "d", "message"),
    [
        ((3,), None, "`z` must have shape (..., D) with at least two dimensions, got (3,)."),
        ((), 3, "`z` must have shape (..., D) with at least two dimensions, got ()."),
        ((4, 0), None, "`z` must have at least one column, got shape (4, 0)."),
        ((8, 4), 5, "`z` must end in 5 scores, got shape (8, 4)."),
        ((2, 5, 7), 5, "got shape (2, 5, 7). If scores come first, pass `z.mT`."),
    ],
)
def test_other_shapes_are_refused(shape, d, message):
    with pytest.raises(ValueError, match=literally(message) + "$"):
        checks.as_rows(torch.zeros(shape), d, name="z", what="scores")


# ---------------------------------------------------------------- as_mask, as_weights
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64])
def test_a_mask_of_any_dtype_is_flat_booleans(dtype):
    mask = checks.as_mask(torch.tensor([[1, 0], [0, 1]], dtype=dtype), (2, 2), CPU)
    assert mask is not None
    assert mask.dtype == torch.bool
    assert mask.tolist() == [True, False, False, True]


def test_no_mask_and_no_weights_are_none():
    assert checks.as_mask(None, (2,), CPU) is None
    assert checks.as_weights(None, (2,), CPU) is None


@pytest.mark.parametrize("values", [[1, 2], [0.5, 1], [float("nan"), 1], [-1, 0]])
def test_a_mask_with_other_values_names_weights(values):
    with pytest.raises(
        ValueError, match=r"`mask` must hold 0 and 1 only.*fractional importance goes in `weights`"
    ):
        checks.as_mask(values, (2,), CPU)


@pytest.mark.parametrize(("check", "name"), [(checks.as_mask, "mask"), (checks.as_weights, "weights")])
def test_the_leading_shape_is_asked_for(check, name):
    message = f"`{name}` must have the leading shape of `x`, (2, 3), got (3, 2)."
    with pytest.raises(ValueError, match=literally(message)):
        check(torch.ones(3, 2), (2, 3), CPU)


def test_weights_are_flat_float64():
    weights = checks.as_weights(torch.tensor([[0, 2], [1, 3]]), (2, 2), CPU)
    assert weights is not None
    assert weights.dtype == torch.float64
    assert weights.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
def test_weights_are_finite_and_not_negative(bad):
    with pytest.raises(
        ValueError, match="`weights` must be finite and not negative; select rows with `mask`"
    ):
        checks.as_weights([1.0, bad], (2,), CPU)


# ---------------------------------------------------------------- select_rows
def test_rows_are_selected_by_mask_and_by_weight():
    rows = torch.arange(8.0).reshape(4, 2)
    mask, weights = torch.tensor([True, True, True, False]), torch.tensor([2.0, 0.0, 1.0, 1.0]).double()
    have, w, dropped = checks.select_rows(rows, mask, weights, "raise")
    assert have.tolist() == [[0, 1], [4, 5]]
    assert w is not None
    assert (w.tolist(), dropped) == ([2, 1], 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_that_are_not_finite(bad, dtype):
    rows = torch.ones(5, 3, dtype=dtype)
    rows[1, 2], rows[3, 0], rows[3, 1] = bad, bad, -bad  # the last two cancel or give NaN in a sum
    message = "`x` has 2 of 5 samples with NaN or inf. Drop them (nonfinite='drop')"
    with pytest.raises(ValueError, match=literally(message)):
        checks.select_rows(rows, None, None, "raise")
    weights = torch.arange(1.0, 6.0).double()
    have, w, dropped = checks.select_rows(rows, None, weights, "drop")
    assert w is not None
    assert (len(have), w.tolist(), dropped) == (3, [1, 3, 5], 2)
    assert bool(have.isfinite().all())


def test_rows_left_out_may_hold_anything():
    rows = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]])
    mask = torch.tensor([False, True])
    assert checks.select_rows(rows, mask, None, "raise")[0].tolist() == [[2, 3]]
    assert checks.select_rows(rows, None, mask.double(), "raise")[0].tolist() == [[2, 3]]


def test_finite_rows_whose_squares_overflow_are_refused():
    rows = torch.full((3, 2), 1e300, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"values beyond 1e\+70, whose squares leave float64"):
        checks.select_rows(rows, None, None, "raise")
    kept, _, dropped = checks.select_rows(rows.float().nan_to_num() * 0 + 1e30, None, None, "raise")
    assert (len(kept), dropped) == (3, 0)


# ---------------------------------------------------------------- numbers and choices
@pytest.mark.parametrize(
    ("given", "want"),
    [(None, None), (0, 0), (3, 3), (np.int64(3), 3), (0.5, 0.5), (1.0, 1.0), (np.float64(1), 1.0), (1, 1)],
)
def test_components_are_a_count_or_a_share(given, want):
    have = checks.as_components(given)
    assert have == want
    assert type(have) is type(want)  # 1 is one component, 1.0 is all the variance


@pytest.mark.parametrize(
    "bad", [True, False, -1, np.int64(-2), 0.0, 2.5, -0.5, float("nan"), "mle", np.array([2])]
)
def test_other_components_are_refused_with_what_came(bad):
    message = "`n_components` must be an integer ≥ 0, a share in (0, 1] as a float, or None, got "
    with pytest.raises(ValueError, match=literally(message + repr(bad))):
        checks.as_components(bad)


def test_numbers_out_of_range_are_refused():
    checks.check_number(3, "n", "above 2", True)
    with pytest.raises(ValueError, match="`n` must be above 2, got 1"):
        checks.check_number(1, "n", "above 2", False)


def test_choices():
    checks.check_choice("a", "mode", ("a", "b"))
    with pytest.raises(ValueError, match="`mode` must be one of 'a', 'b', got 'c'"):
        checks.check_choice("c", "mode", ("a", "b"))


# ---------------------------------------------------------------- memory
def test_free_memory_lies_between_nothing_and_the_machine():
    free = checks.free_memory(CPU)
    if free is None:
        pytest.skip("this system does not say how much memory is free")
    assert 0 < free < 2**50
    assert checks.free_memory(torch.device("meta")) is None


def test_a_square_that_does_not_fit_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda _: 8 * 2 * 100**2)
    checks.require_square(100, 2, CPU, "use less")  # exactly what is there
    message = "a 101 × 101 covariance needs 0.0 GiB on cpu, 0.0 GiB is free; use less."
    with pytest.raises(ValueError, match=literally(message)):
        checks.require_square(101, 2, CPU, "use less")


def test_a_square_beyond_lapack_is_refused_where_memory_is_enough(monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda _: None)
    checks.require_square(checks.LAPACK_LARGEST, 1, CPU, "use less")
    with pytest.raises(ValueError, match="a 32767 × 32767 eigenproblem is beyond LAPACK's 32766; use less"):
        checks.require_square(checks.LAPACK_LARGEST + 1, 1, CPU, "use less")


@pytest.mark.parametrize("door", ["transform", "partial_fit", "update"])
@pytest.mark.parametrize("form", ["torch", "scipy"])
def test_sparse_samples_are_refused_where_rows_are_wanted(door, form):
    sparse = torch.eye(4).to_sparse()
    if form == "scipy":
        sparse = pytest.importorskip("scipy.sparse").eye(4).tocsr()
    doors = {
        "transform": lambda x: pt.PCA(2).fit(torch.eye(4)).transform(x),
        "partial_fit": lambda x: pt.PCA(2).partial_fit(x),
        "update": lambda x: pt.Moments(4).update(x),
    }
    with pytest.raises(ValueError, match=r"must be dense here, got a sparse matrix.* pass `x\.to_dense\(\)`"):
        doors[door](sparse)


def test_masked_arrays_and_weights_that_overflow_are_refused():
    masked = np.ma.masked_array(np.eye(3), mask=np.eye(3, dtype=bool))
    with pytest.raises(ValueError, match=r"`x` is a masked array, whose mask would be lost; pass `x.data`"):
        pt.decompose(masked)
    for scale in (1e-200, 1e200):
        with pytest.raises(ValueError, match=r"`weights` must be 0 or between 1e-70 and 1e\+70"):
            pt.decompose(torch.eye(3), weights=scale * torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("name", ["center", "standardize", "whiten"])
def test_flags_are_true_or_false(name):
    for door in (lambda **option: pt.PCA(**option), lambda **option: pt.decompose(torch.eye(3), **option)):
        with pytest.raises(ValueError, match=f"`{name}` must be True or False, got 'no'"):
            door(**{name: "no"})


def test_seeds_fit_in_64_bits():
    with pytest.raises(ValueError, match="`random_state` must be an integer of at most 64 bits"):
        pt.PCA(random_state=2**70)
