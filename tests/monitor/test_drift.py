"""Drift against projectors of planes turned by known angles, and the vectors it must not look at."""

import json
import math
from dataclasses import replace

import pytest
import torch

from pca_torch import decompose
from pca_torch.monitor.drift import DRIFT, Drift
from tests.matrices import frame, noise
from tests.reports import result
from tests.support import truth

D = 20
EPS = torch.finfo(torch.float64).eps
TURNED = 10 * D * EPS  # orthonormal rows come out of products of length D, the angles out of two more


def spanning(rows, variances=None, **more):
    """A result with these components."""
    variances = torch.arange(len(rows), 0, -1.0).tolist() if variances is None else variances
    return replace(result(variances, d=rows.shape[1], k=len(rows), **more), components=rows)


def turned(rows, angles):
    """`rows` (k, D) turned by these angles into directions outside of their span."""
    angles = torch.as_tensor(angles, dtype=torch.float64)
    outside = torch.linalg.qr(torch.cat([rows, noise(len(rows), D, seed=9)]).mT).Q.mT[len(rows) :]
    return angles.cos()[:, None] * rows + angles.sin()[:, None] * outside


def between(a, b):
    """Mean sin² and the largest angle from the projectors: 1 - tr(PQ)/k, and arcsin ‖P - Q‖₂."""
    p, q = a.mT @ a, b.mT @ b
    largest = torch.linalg.matrix_norm(p - q, 2).clamp(max=1).asin()
    return 1 - (p @ q).trace().item() / len(a), largest.item()


def test_planes_turned_by_known_angles():
    start = frame(3, D)
    second = turned(start, [0.1, 0.2, 0.3])
    third = turned(second, [0.0, 0.4, 0.9])
    drift = Drift(3)
    assert drift.update(spanning(start)) == {
        "drift_last": None,
        "drift_last_angle": None,
        "drift_start": 0.0,
        "drift_start_angle": 0.0,
        "drift_gap": None,  # three variances are known of twenty
    }
    found = drift.update(spanning(second))
    want = sum(math.sin(a) ** 2 for a in (0.1, 0.2, 0.3)) / 3
    assert found["drift_last"] == found["drift_start"] == pytest.approx(want, abs=TURNED)
    assert found["drift_last_angle"] == found["drift_start_angle"] == pytest.approx(0.3, abs=TURNED)
    found = drift.update(spanning(third))
    assert found["drift_last"] == pytest.approx((math.sin(0.4) ** 2 + math.sin(0.9) ** 2) / 3, abs=TURNED)
    assert found["drift_last_angle"] == pytest.approx(0.9, abs=TURNED)
    mean, largest = between(start, third)
    assert found["drift_start"] == pytest.approx(mean, abs=TURNED)
    assert found["drift_start_angle"] == pytest.approx(largest, abs=TURNED / math.cos(largest))
    assert abs(found["drift_start"] - found["drift_last"]) > 0.01  # the one is not the other


def test_small_drifts_keep_their_digits():
    start, angle = frame(2, D), 1e-9
    drift = Drift(2)
    drift.update(spanning(start))
    found = drift.update(spanning(turned(start, [angle, angle])))
    assert found["drift_last_angle"] == pytest.approx(angle, abs=TURNED)
    assert found["drift_last"] == pytest.approx(angle**2, rel=4 * TURNED / angle, abs=0)
    assert 1 - math.cos(angle) ** 2 == 0  # what the cosines would have said


def test_directions_that_change_places_are_no_drift():
    """Variances 9, 1.001, 1: the second and the third direction trade places with a breath of noise."""
    axes = torch.diag(torch.tensor([9.0, 1.001, 1.0, 0.1, 0.1], dtype=torch.float64).sqrt())
    before = torch.cat([axes, -axes])
    after = before[:, [0, 2, 1, 3, 4]]
    first, second = decompose(before, 3), decompose(after, 3)
    drift = Drift(3)
    drift.update(first)
    found = drift.update(second)
    assert found["drift_last"] <= TURNED
    assert found["drift_last_angle"] <= TURNED
    assert found["drift_gap"] == pytest.approx(0.9, abs=TURNED)
    cosines = (first.components * second.components).sum(1)
    assert 1 - cosines.square().mean() == pytest.approx(2 / 3, abs=TURNED)  # vector by vector
    apart = Drift(2)  # V_2 splits the pair: it has turned all the way, and its gap says why
    apart.update(first)
    found = apart.update(second)
    assert found["drift_last_angle"] == pytest.approx(math.pi / 2, abs=TURNED)
    assert found["drift_last"] == pytest.approx(1 / 2, abs=TURNED)
    assert found["drift_gap"] == pytest.approx(0.001 / 1.001, rel=1e-9)


def test_signs_and_mixtures_are_no_drift():
    start = frame(4, D)
    drift = Drift(4)
    drift.update(spanning(start))
    found = drift.update(spanning(frame(4, 4, seed=5) @ start * -1))
    assert found["drift_last"] <= TURNED
    assert found["drift_last_angle"] <= TURNED


def test_only_directions_above_the_floor_are_followed():
    rows = frame(4, D)
    given = spanning(rows, [4.0, 1.0, 1e-20, 0.0])
    given = replace(given, certificate=replace(given.certificate, trusted=2))
    other = replace(given, components=torch.cat([rows[:2], turned(rows, [1.0] * 4)[2:]]))
    drift = Drift(4)
    drift.update(given)
    found = drift.update(other)
    assert found["drift_last"] <= TURNED
    assert found["drift_gap"] == pytest.approx(1, rel=1e-15)


def test_the_smaller_of_two_is_compared():
    """Three directions, then one: the leading one has turned by 0.5, whatever lies in the old span."""
    rows = frame(3, D)
    one = math.cos(0.5) * rows[:1] + math.sin(0.5) * rows[1:2]
    drift = Drift(3)
    drift.update(spanning(rows))
    found = drift.update(spanning(one))
    assert found["drift_last_angle"] == pytest.approx(0.5, abs=TURNED)
    assert found["drift_start"] == pytest.approx(math.sin(0.5) ** 2, abs=TURNED)
    assert drift.update(spanning(rows))["drift_last_angle"] == pytest.approx(0.5, abs=TURNED)


@pytest.mark.filterwarnings("ignore:total variance is zero")
def test_where_nothing_varies_nothing_turns():
    constant = decompose(torch.ones(9, 3, dtype=torch.float64))
    rows = decompose(noise(9, 3), 2)
    drift = Drift(2)
    assert drift.update(constant) == dict.fromkeys(DRIFT)
    assert drift.update(rows)["drift_start"] == 0
    assert drift.update(constant) == dict.fromkeys(DRIFT)
    assert drift.update(rows)["drift_last"] <= TURNED


def test_the_gap_of_the_last_direction():
    given = spanning(frame(2, D), [4.0, 3.0, 1.0])
    assert Drift(8).update(given)["drift_gap"] == pytest.approx((3 - 1) / 3, rel=EPS)
    assert Drift(1).update(given)["drift_gap"] == pytest.approx((4 - 3) / 4, rel=EPS)
    assert Drift(3).update(decompose(noise(30, 3)))["drift_gap"] == 1  # nothing is left beside V_3
    assert Drift(3).update(spanning(frame(3, D)))["drift_gap"] is None


def test_float32_components_of_real_samples():
    """The span of 32-bit components is off by their rounding alone."""
    x = (noise(200, D) * 0.8 ** torch.arange(D)).float()
    y = x + 0.3 * x.roll(1, dims=1)
    drift = Drift(4)
    for rows in (x, y):
        found = drift.update(decompose(rows, 4))
    a, b = (truth(rows)[2][:4] for rows in (x, y))
    mean, largest = between(a, b)
    rounding = 4 * D * torch.finfo(torch.float32).eps
    assert found["drift_last"] == pytest.approx(mean, abs=rounding)
    assert found["drift_last_angle"] == pytest.approx(largest, abs=rounding / math.cos(largest))
    assert mean > 100 * rounding


# ---------------------------------------------------------------- as a state


def saved(drift):
    """Its state after a trip through JSON and fresh tensors."""
    tensors, facts = drift.to_state()
    return {name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(facts))


def test_a_restored_drift_goes_on_as_if_never_stopped():
    steps = [spanning(frame(3, D, seed=seed)) for seed in range(5)]
    straight, drift = Drift(3), Drift(3)
    want = [straight.update(step) for step in steps]
    for step, numbers in zip(steps, want, strict=True):
        drift = Drift.from_state(*saved(drift))
        assert drift.update(step) == numbers
    assert want[4]["drift_last"] != want[4]["drift_start"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"n_components": 0}, "`n_components` must be an integer"),
        ({"last": None}, "lacks the tensor `last`"),
        ({"start": None}, "lacks the tensor `start`"),
        ({"last": frame(2, D + 1)}, "`last` must be torch.float64"),
        ({"last": frame(2, D).float()}, "`last` must be torch.float64"),
        ({"start": 2 * frame(2, D)}, "`start` must have orthonormal rows"),
        ({"start": frame(4, D)}, r"`start` must have 1\.\.3 rows"),
        ({"start": torch.zeros(0, D, dtype=torch.float64)}, r"`start` must have 1\.\.3 rows"),
        ({"start": frame(2, D) * math.nan}, "`start` holds NaN"),
        ({"more": frame(2, D)}, "holds 'more'"),
    ],
)
def test_what_is_no_state_is_refused(change, match):
    drift = Drift(3)
    drift.update(spanning(frame(2, D)))
    tensors, facts = saved(drift)
    for name, value in change.items():
        if name == "n_components":
            facts[name] = value
        else:
            tensors[name] = value
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=match):
        Drift.from_state(tensors, facts)


def test_other_features_are_refused():
    drift = Drift(2)
    drift.update(spanning(frame(2, D)))
    with pytest.raises(ValueError, match=f"`result` must have {D} features, got 7"):
        drift.update(spanning(frame(2, 7)))


@pytest.mark.parametrize("n_components", [0, -1, 1.5, True])
def test_a_count_of_components_that_is_none(n_components):
    with pytest.raises(ValueError, match="`n_components` must be a positive integer"):
        Drift(n_components)
