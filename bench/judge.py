"""How wrong is an answer? The float64 SVD of the float64-centred samples says.

Every answer has one `error`, by which methods are compared:

- few directions, `missed`: the share of the variance that the best K directions hold and these do not.
- a share: the same against the right K, and never less than λ_K where K is another.
- all components: the largest of |λ - true| / λ₁, ‖Cv - true·v‖ / λ₁ and |VVᵀ - I|, so directions count too.

Beside it stands `variance`: the largest relative error of the variances that the method reports, or where it
reports none and all are asked for, of those along its directions.

An answer is "as right" below a tolerance of both:

- few directions, a share: 1e-6 of the total or 1 % of λ_K, whichever is less. That is what `krylov` promises
  by default; the second half keeps a massive λ₁ from hiding that the last directions are random.
- all components: what a backward stable method in float32 may show, and every variance to 1 %. Of an (N, D)
  matrix such a method finds each σ to p·u·σ₁ (LAPACK Users' Guide, §4.9), u = 6e-8, with p = 4√min(N, D) by
  the random walk that `pca_torch.precision.factor_noise` states; λ = σ² is off by twice that, and so are CV
  and |VVᵀ - I|: 8√min(N, D)·u. The second half keeps that from hiding that small variances are lost.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from methods import Answer
from torch import Tensor
from truth import centred
from truth import rank as rank_of
from workloads import Workload

MISSED, DIRECTION, RELATIVE = 1e-6, 1e-2, 1e-2
U32 = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True)
class Verdict:
    """How wrong one answer is."""

    error: float  # the number by which methods are compared
    variance: float | None  # largest relative error of the reported variances; None where there are none
    facts: dict[str, float]  # what else there is to say


@dataclass(frozen=True)
class Tolerance:
    """Below it two answers are equally right."""

    error: float
    variance: float | None = None  # None: the variances do not count

    def raised_to(self, verdict: Verdict) -> "Tolerance":
        """What is as right as an answer that may be worse.

        Args:
            verdict: on that answer.
        """
        if self.variance is None:
            return Tolerance(max(self.error, verdict.error))
        return Tolerance(max(self.error, verdict.error), max(self.variance, verdict.variance or 0.0))


def as_right(error: float, variance: float | None, tolerance: Tolerance) -> bool:
    """Whether an answer is within a tolerance.

    Args:
        error: of a `Verdict`.
        variance: of a `Verdict`.
        tolerance: of the workload.
    """
    if tolerance.variance is None:
        return error <= tolerance.error
    return error <= tolerance.error and variance is not None and variance <= tolerance.variance


class Truth:
    """The float64 SVD of centred rows; their right vectors are not needed."""

    def __init__(self, x: Tensor) -> None:
        rows = centred(x)  # (N, D)
        wide = len(x) < x.shape[1]
        factor = torch.linalg.qr(rows.mT if wide else rows, mode="r").R
        self.rows = rows if wide else factor  # RᵀR is the scatter, so R does for all that is asked
        self.divisor = len(x) - 1
        self.variances = torch.linalg.svdvals(factor).square() / self.divisor  # (M,) descending

    @cached_property
    def total(self) -> float:
        """The trace of the covariance."""
        return self.variances.sum().item()

    def best(self, k: int) -> float:
        """Share of the variance of the best K directions."""
        return self.variances[:k].sum().item() / self.total

    def captured(self, components: Tensor) -> float:
        """Share of the variance in the span of rows (K, D); their lengths and angles do not count.

        Args:
            components: (K, D) float64.
        """
        q = torch.linalg.qr(components.mT).Q
        return (self.rows @ q).square().sum().item() / self.divisor / self.total

    def along(self, components: Tensor) -> Tensor:
        """(K,) variances along rows (K, D).

        Args:
            components: (K, D) float64.
        """
        return (self.rows @ components.mT).square().sum(0) / self.divisor

    def residual(self, components: Tensor) -> float:
        """The largest ‖Cv - λv‖ of rows (M, D) with the true λ.

        Args:
            components: (M, D) float64, all of them.
        """
        images = self.rows.mT @ (self.rows @ components.mT) / self.divisor  # (D, M)
        return torch.linalg.vector_norm(images - components.mT * self.variances, dim=0).max().item()


def of_heads(x: Tensor) -> list[Truth]:
    """The truth of each head, on one thread: threads stall in factorisations as small as these.

    Args:
        x: (H, N, E).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [Truth(head) for head in x]
    finally:
        torch.set_num_threads(before)


def tolerance(truth: Truth | list[Truth], workload: Workload) -> Tolerance:
    """What counts as right.

    Args:
        truth: of the workload.
        workload: the question.
    """
    if workload.k is None:
        return Tolerance(8 * math.sqrt(min(workload.shape[-2:])) * U32, RELATIVE)
    assert isinstance(truth, Truth)
    return Tolerance(min(MISSED, DIRECTION * _direction(truth, _true_k(truth, workload))))


def judge(truth: Truth | list[Truth], workload: Workload, answer: Answer) -> Verdict:
    """The errors of an answer.

    Args:
        truth: of the workload; where there are heads, of each.
        workload: the question.
        answer: of a method.
    """
    components = as_tensor(answer.components)
    variances = None if answer.variances is None else as_tensor(answer.variances)
    if isinstance(truth, list):
        reported = [None] * len(truth) if variances is None else variances
        verdicts = [_all(*head) for head in zip(truth, components, reported, strict=True)]
        return Verdict(max(v.error for v in verdicts), max(v.variance or 0.0 for v in verdicts), {})
    if workload.k is None:
        return _all(truth, components, variances)
    return _few(truth, _true_k(truth, workload), components, variances)


def as_tensor(found: Any) -> Tensor:
    """A float64 tensor of what a method returned, a view with negative strides included.

    Args:
        found: tensor or array.
    """
    tensor = found.detach() if isinstance(found, Tensor) else torch.from_numpy(np.ascontiguousarray(found))
    return tensor.double()


def _few(truth: Truth, k: int, components: Tensor, variances: Tensor | None) -> Verdict:
    found = len(components)
    lost = truth.best(k) - truth.captured(components)
    error = abs(lost) if found == k else max(abs(lost), _direction(truth, k))
    facts = {
        "k": found,
        "true_k": k,
        "missed": lost,
        "missed_direction": lost / _direction(truth, k),
        "true_share": truth.best(k),
    }
    return Verdict(
        _number(error), None if variances is None else _relative(truth.variances, variances), facts
    )


def _all(truth: Truth, components: Tensor, variances: Tensor | None) -> Verdict:
    true = truth.variances
    found = truth.along(components) if variances is None else variances
    if not len(components) == len(found) == len(true):
        return Verdict(math.inf, math.inf, {"k": len(components), "true_k": len(true)})
    largest = true[0].item()
    facts = {
        "off": (found - true).abs().max().item() / largest,
        "residual": truth.residual(components) / largest,
        "skew": (components @ components.mT - torch.eye(len(components)).double()).abs().max().item(),
    }
    return Verdict(max(map(_number, facts.values())), _relative(true, found), facts)


def _relative(true: Tensor, variances: Tensor) -> float:
    most = min(len(variances), len(true))
    return _number((variances[:most] / true[:most] - 1).abs().max().item())


def _true_k(truth: Truth, workload: Workload) -> int:
    return workload.k if isinstance(workload.k, int) else rank_of(truth.variances, workload.k or 1.0)


def _direction(truth: Truth, k: int) -> float:
    """Share of the variance of direction K."""
    return truth.variances[k - 1].item() / truth.total


def _number(value: float) -> float:
    """NaN is as wrong as can be."""
    return math.inf if math.isnan(value) else value
