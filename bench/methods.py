"""Every method of the benchmark, ours and those of the peers, behind one call: data and K in, `Answer` out.

Each is called as its documentation says, with a fixed seed where it takes one, and with its own defaults
otherwise, but for two. `torch.pca_lowrank` is asked for ten directions more than K, because its q is "a
slightly overestimated rank", and cut to K; its two power iterations are its default. TorchDR's PCA does not
look for rows that are the same (`process_duplicates=False`): that sorts all samples and is no part of a PCA.
Packages are imported when a method first runs.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from workloads import Kind

import pca_torch as pt

OURS = "pca_torch"
FEW = "made for few directions"
WIDE = "forms D×D"
OVERSAMPLED = 10  # directions of `torch.pca_lowrank` beyond K


class Answer(NamedTuple):
    """What a method found, as it returned it."""

    components: Any  # (K, D) rows, or (H, E, E)
    variances: Any = None  # (K,) or (H, E), descending; None where the method reports none


@dataclass(frozen=True)
class Method:
    """One way to the principal directions."""

    package: str  # as it is imported
    name: str
    kind: Kind  # of the data it takes
    fit: Callable[[Any, Any], Answer]  # data, and K as an integer, a share or None
    lacks: Mapping[str, str] = field(default_factory=dict)  # workload: why it has no answer
    slow: bool = False  # of a class that takes long: last in the first round

    @property
    def title(self) -> str:
        """Package and name."""
        return f"{self.package} {self.name}"

    @property
    def ours(self) -> bool:
        """Whether it belongs to this package."""
        return self.package == OURS

    def missing(self, workload: str) -> str | None:
        """Why it cannot run at all, or None.

        Args:
            workload: its name.
        """
        if importlib.util.find_spec(self.package) is None:
            return "not installed"
        return self.lacks.get(workload)


# ---------------------------------------------------------------- ours
def _ours(solver: str, **options: Any) -> Callable[[Tensor, Any], Answer]:
    def fit(x: Tensor, k: Any) -> Answer:
        result = pt.decompose(x, k, solver, random_state=0, **options)
        return Answer(result.components, result.explained_variance)

    return fit


def _partial_fit(**options: Any) -> Callable[[Sequence[Tensor], int], Answer]:
    def fit(batches: Sequence[Tensor], k: int) -> Answer:
        pca = pt.PCA(k, **options)
        for batch in batches:
            pca.partial_fit(batch)
        return Answer(pca.components_, pca.explained_variance_)

    return fit


def _batch(precision: str) -> Callable[[Tensor, None], Answer]:
    def fit(x: Tensor, k: None) -> Answer:
        result = pt.decompose_batch(pt.batch_covariance(x, precision=precision), k)
        return Answer(result.components, result.explained_variance)

    return fit


# ---------------------------------------------------------------- torch
def _svd(x: Tensor, k: Any) -> Answer:
    """What a user writes: an SVD of the centred rows, and a cumulative sum where a share is asked for."""
    _, s, vh = torch.linalg.svd(x - x.mean(-2, keepdim=True), full_matrices=False)
    variances = s.square() / (x.shape[-2] - 1)
    if isinstance(k, float):
        k = int((variances.cumsum(0) / variances.sum() < k).sum()) + 1
    return Answer(vh[..., :k, :].clone(), variances[..., :k].clone())


def _pca_lowrank(x: Tensor, k: int) -> Answer:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, s, v = torch.pca_lowrank(x, q=min(k + OVERSAMPLED, *x.shape))
    return Answer(v.mT[:k], s[:k].square() / (len(x) - 1))


def _lobpcg(x: Tensor, k: int) -> Answer:
    z = x - x.mean(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        values, vectors = torch.lobpcg(z.mT @ z / (len(x) - 1), k=k)
    return Answer(vectors.mT, values)


def _batched_eigh(x: Tensor, k: None) -> Answer:
    z = x - x.mean(1, keepdim=True)
    values, vectors = torch.linalg.eigh(z.mT @ z / (x.shape[1] - 1))
    return Answer(vectors.mT.flip(1), values.flip(1))


# ---------------------------------------------------------------- scikit-learn
def _sklearn(solver: str) -> Callable[[Tensor, Any], Answer]:
    def fit(x: Tensor, k: Any) -> Answer:
        from sklearn.decomposition import PCA

        pca = PCA(k, svd_solver=solver, random_state=0).fit(x.numpy())
        return Answer(pca.components_, pca.explained_variance_)

    return fit


def _sklearn_incremental(batches: Sequence[Tensor], k: int) -> Answer:
    from sklearn.decomposition import IncrementalPCA

    pca = IncrementalPCA(k)
    for batch in batches:
        pca.partial_fit(batch.numpy())
    return Answer(pca.components_, pca.explained_variance_)


# ---------------------------------------------------------------- torch-pca, TorchDR, fbpca
def _torch_pca(solver: str) -> Callable[[Tensor, Any], Answer]:
    def fit(x: Tensor, k: Any) -> Answer:
        from torch_pca import PCA

        pca = PCA(k, svd_solver=solver, random_state=0).fit(x)
        return Answer(pca.components_, pca.explained_variance_)

    return fit


def _torchdr(x: Tensor, k: Any) -> Answer:
    from torchdr import PCA

    pca = PCA(n_components=k, process_duplicates=False)
    pca.fit_transform(x)
    return Answer(pca.components_)


def _torchdr_incremental(batches: Sequence[Tensor], k: int) -> Answer:
    from torchdr import IncrementalPCA

    pca = IncrementalPCA(n_components=k)
    for batch in batches:
        pca.partial_fit(batch)
    return Answer(pca.components_, pca.explained_variance_)


def _torchdr_exact(batches: Sequence[Tensor], k: int) -> Answer:
    from torchdr import ExactIncrementalPCA

    pca = ExactIncrementalPCA(n_components=k)
    pca.compute_mean(batches)
    pca.fit(batches)
    return Answer(pca.components_, pca.explained_variance_)


def _fbpca(x: Tensor, k: int) -> Answer:
    from fbpca import pca

    state = np.random.get_state()  # it draws from the global generator
    np.random.seed(0)
    try:
        _, s, rows = pca(x.numpy(), k)
    finally:
        np.random.set_state(state)
    return Answer(rows, s**2 / (len(x) - 1))


# ---------------------------------------------------------------- torch-incremental-pca and the copy in PEFT
def _incremental(package: str, **options: Any) -> Callable[[Sequence[Tensor], int], Answer]:
    def fit(batches: Sequence[Tensor], k: int) -> Answer:
        if package == "peft":
            from peft.utils.incremental_pca import IncrementalPCA
        else:
            from torch_incremental_pca import IncrementalPCA

        pca = IncrementalPCA(n_components=k, **options)
        for batch in batches:
            pca.partial_fit(batch)
        return Answer(pca.components_, pca.explained_variance_)

    return fit


def _looped(fit: Callable[[Tensor, Any], Answer]) -> Callable[[Tensor, None], Answer]:
    """A Python loop over heads."""

    def loop(x: Tensor, k: None) -> Answer:
        answers = [fit(head, k) for head in x]
        components = np.stack([np.asarray(answer.components) for answer in answers])
        return Answer(components, np.stack([np.asarray(answer.variances) for answer in answers]))

    return loop


NO_SHARE = {"share": "no n_components=0.95"}
SKETCH = {"all": FEW, **NO_SHARE}
COPIED = "torch_incremental_pca"  # by PEFT
LOWRANK = {"lowrank": True, "lowrank_seed": 0}

METHODS = (
    Method(OURS, "auto", "rows", _ours("auto")),
    Method(OURS, "krylov", "rows", _ours("krylov"), {"all": FEW}),
    Method(OURS, "krylov float32", "rows", _ours("krylov", precision="float32"), {"all": FEW}),
    Method(OURS, "covariance_eigh", "rows", _ours("covariance_eigh"), {"wide": WIDE}),
    Method(OURS, "tsqr", "rows", _ours("tsqr"), slow=True),
    Method(OURS, "full", "rows", _ours("full"), slow=True),
    Method(OURS, "randomized", "rows", _ours("randomized"), {"all": FEW}),
    Method("torch", "linalg.svd", "rows", _svd, slow=True),
    Method("torch", "pca_lowrank", "rows", _pca_lowrank, SKETCH),
    Method("torch", "lobpcg", "rows", _lobpcg, {"wide": WIDE, **SKETCH}),
    Method("sklearn", "full", "rows", _sklearn("full"), slow=True),
    Method("sklearn", "covariance_eigh", "rows", _sklearn("covariance_eigh"), {"wide": WIDE}),
    Method("sklearn", "randomized", "rows", _sklearn("randomized"), {"all": FEW}),
    Method("sklearn", "arpack", "rows", _sklearn("arpack"), {"all": FEW}),
    Method("torch_pca", "full", "rows", _torch_pca("full"), slow=True),
    Method("torch_pca", "covariance_eigh", "rows", _torch_pca("covariance_eigh"), {"wide": WIDE}),
    Method("torch_pca", "randomized", "rows", _torch_pca("randomized"), {"all": FEW}),
    Method("torchdr", "PCA", "rows", _torchdr, NO_SHARE, slow=True),
    Method("fbpca", "pca", "rows", _fbpca, SKETCH),
    Method(OURS, "partial_fit", "batches", _partial_fit()),
    Method(OURS, "partial_fit float32", "batches", _partial_fit(precision="float32")),
    Method(OURS, "partial_fit tsqr", "batches", _partial_fit(svd_solver="tsqr"), slow=True),
    Method("sklearn", "IncrementalPCA", "batches", _sklearn_incremental, slow=True),
    Method("torchdr", "IncrementalPCA", "batches", _torchdr_incremental, slow=True),
    Method("torchdr", "ExactIncrementalPCA", "batches", _torchdr_exact),
    Method(COPIED, "full", "batches", _incremental(COPIED), slow=True),
    Method(COPIED, "gram", "batches", _incremental(COPIED, gram=True), slow=True),
    Method(COPIED, "lowrank", "batches", _incremental(COPIED, **LOWRANK)),
    Method("peft", "IncrementalPCA", "batches", _incremental("peft"), slow=True),
    Method("peft", "IncrementalPCA lowrank", "batches", _incremental("peft", **LOWRANK), slow=True),
    Method(OURS, "batch", "heads", _batch("auto")),
    Method(OURS, "batch float32", "heads", _batch("float32")),
    Method("torch", "linalg.svd, batched", "heads", _svd, slow=True),
    Method("torch", "linalg.eigh, batched", "heads", _batched_eigh),
    Method("sklearn", "loop over full", "heads", _looped(_sklearn("full")), slow=True),
    Method("sklearn", "loop over auto", "heads", _looped(_sklearn("auto"))),
    Method("torch_pca", "loop over auto", "heads", _looped(_torch_pca("auto"))),
)
