"""How wrong is an answer? The float64 SVD of the float64-centred samples says.

Every answer has one `error`, by which methods are compared, and a `tolerance` below which two errors count
as the same:

- few directions, `missed`: the share of the variance that the best K directions hold and these do not.
  Tolerance: 1e-6 of the total or 1 % of λ_K, whichever is less. That is what `krylov` promises by default;
  the second half keeps a massive λ₁ from hiding that the last directions are random.
- a share: the same against the right K, and never less than λ_K where K is another. Same tolerance.
- all components, `off`: the largest |λ - true| / λ₁. Tolerance: 1.2e-7, twice the unit roundoff of float32.
  The samples are float32: rounding them moves λ₁ by as much.

Beside it stands `variance`: the largest relative error of the variances that the method reports.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from rivals import Answer
from torch import Tensor
from truth import centred
from truth import rank as rank_of
from workloads import Workload

MISSED, DIRECTION = 1e-6, 1e-2
FLOAT32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Verdict:
    """How wrong one answer is."""

    error: float  # the number by which methods are compared
    variance: float | None  # largest relative error of the reported variances; None where there are none
    facts: dict[str, float]  # what else there is to say


class Truth:
    """The float64 SVD of centred rows; their right vectors are not needed."""

    def __init__(self, x: Tensor) -> None:
        self.rows = centred(x)  # (N, D)
        self.divisor = len(x) - 1
        tall = self.rows if len(x) >= x.shape[1] else self.rows.mT
        sigma = torch.linalg.svdvals(torch.linalg.qr(tall, mode="r").R)  # of R: the same, and sooner
        self.variances = sigma.square() / self.divisor  # (M,) descending

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


def of_heads(x: Tensor) -> list[Tensor]:
    """The variances (E,) of each head, on one thread: threads stall in factorisations as small as these.

    Args:
        x: (H, N, E).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [Truth(head).variances for head in x]
    finally:
        torch.set_num_threads(before)


def tolerance(truth: Truth | list[Tensor], workload: Workload) -> float:
    """The error below which two answers are equally right.

    Args:
        truth: of the workload.
        workload: the question.
    """
    if workload.k is None:
        return FLOAT32
    assert isinstance(truth, Truth)
    return min(MISSED, DIRECTION * _direction(truth, _true_k(truth, workload)))


def judge(truth: Truth | list[Tensor], workload: Workload, answer: Answer) -> Verdict:
    """The errors of an answer.

    Args:
        truth: of the workload; where there are heads, the variances (E,) of each.
        workload: the question.
        answer: of a method.
    """
    if isinstance(truth, list):
        verdicts = [_all(true, v) for true, v in zip(truth, as_tensor(answer.variances), strict=True)]
        worst = (max(v.error for v in verdicts), max(v.variance or 0.0 for v in verdicts))
        return Verdict(*worst, {})
    components = as_tensor(answer.components)
    variances = None if answer.variances is None else as_tensor(answer.variances)
    if workload.k is None:
        if variances is None:  # the variances along the directions it found
            along = (truth.rows @ components.mT).square().sum(0) / truth.divisor
            return Verdict(_all(truth.variances, along).error, None, {})
        return _all(truth.variances, variances)
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


def _all(true: Tensor, variances: Tensor) -> Verdict:
    if len(variances) != len(true):
        return Verdict(math.inf, math.inf, {"k": len(variances), "true_k": len(true)})
    off = ((variances - true).abs().max() / true[0]).item()
    return Verdict(_number(off), _relative(true, variances), {})


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
