"""Variance along chosen directions."""

import math

import numpy as np
import pytest
import torch

import pca_torch as pt
from tests.support import samples

X = samples(40, 5, decay=0.5, offset=3.0)
EPS = torch.finfo(torch.float64).eps
# vᵀCv/vᵀv in float64: N products for an entry of C, D² for the form, on either side; C ≤ its trace
BOUND = 2 * (40 + 25) * EPS * X.var(0).sum().item()


def along(v, ddof=1):
    """Variance of the samples projected on the unit vector of `v`, without a covariance."""
    v = np.asarray(v, dtype=float)
    return np.var(X.numpy() @ (v / np.linalg.norm(v)), ddof=ddof)


def close(have, want):
    np.testing.assert_allclose(have, want, rtol=0, atol=BOUND)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("length", [1.0, 3.0, 1e-200, 1e200])
def test_it_is_the_variance_of_the_projections_whatever_the_length(ddof, length):
    v = torch.tensor([[1.0, 2, -1, 0, 0.5], [0, 0, 0, 1, 0]]).double()
    want = [along(row, ddof) for row in v]
    close(pt.subspace.captured(X, v * length, ddof=ddof), want)
    assert abs(want[0] - along(v[0], 1 - ddof)) > BOUND  # the other divisor would fail


def test_samples_and_their_statistic_agree():
    v = torch.eye(5)[:2]
    moments = pt.Moments(5)
    for batch in X.split(7):
        moments.update(batch)
    close(pt.subspace.captured(moments, v), pt.subspace.captured(X, v))


def test_one_direction_is_a_scalar():
    one = pt.subspace.captured(X, [1, 0, 0, 0, 0])
    assert one.shape == ()
    assert one.dtype == torch.float64
    close(one, along([1, 0, 0, 0, 0]))


def test_leading_dimensions_of_samples_and_directions_stay():
    have = pt.subspace.captured(X.reshape(4, 10, 5), torch.eye(5).reshape(1, 5, 5))
    assert have.shape == (1, 5)
    close(have[0], [along(v) for v in np.eye(5)])


def test_components_capture_their_variances_and_all_of_them_the_total():
    pca = pt.PCA().fit(X)
    close(pt.subspace.captured(X, pca.components_), pca.explained_variance_)
    moments = pt.Moments(5).update(X)
    share = pt.subspace.captured(moments, torch.eye(5)).sum() / (moments.trace / moments.divisor())
    assert share.item() == pytest.approx(1, rel=(40 + 25) * EPS)


def test_between_two_components_lies_the_mean_of_their_variances():
    pca = pt.PCA(2).fit(X)
    middle = pca.components_.sum(0)
    close(pt.subspace.captured(X, middle), pca.explained_variance_.mean())


def test_the_offset_does_not_count():
    v = [1.0, 1, 1, 1, 1]
    far = X + 1e6  # rounding the samples to eps·1e6 moves each projection by √5 of that at most
    moved = 4 * math.sqrt(5) * EPS * 1e6 * math.sqrt(along(v))
    assert abs(pt.subspace.captured(far, v).item() - along(v)) < moved + BOUND


def test_nothing_is_changed_or_differentiated():
    v = torch.eye(5, dtype=torch.float64, requires_grad=True)
    before = pt.Moments(5).update(X)
    covariance = before.covariance().clone()
    assert not pt.subspace.captured(before, v).requires_grad
    assert torch.equal(before.covariance(), covariance)
    assert torch.equal(v.detach(), torch.eye(5).double())


@pytest.mark.parametrize("bad", [[0.0] * 5, [math.nan] + [1.0] * 4, [math.inf] + [0.0] * 4])
def test_directions_must_point_somewhere(bad):
    with pytest.raises(ValueError, match="`basis` must hold finite directions of non-zero length"):
        pt.subspace.captured(X, [[1.0] * 5, bad])


def test_directions_must_have_the_same_features():
    with pytest.raises(ValueError, match=r"`basis` must end in 5 features, got shape \(5, 2\).*`basis\.mT`"):
        pt.subspace.captured(X, torch.ones(5, 2))


def test_too_few_rows():
    with pytest.raises(ValueError, match="`ddof` = 1 needs more than 1 samples, got 1"):
        pt.subspace.captured(X[:1], torch.eye(5))
    assert pt.subspace.captured(X[:1], torch.eye(5), ddof=0).tolist() == [0] * 5
