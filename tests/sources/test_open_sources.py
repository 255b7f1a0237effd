"""Shards of every kind as one data set: their order, their agreement, and the truth of what they give."""

import os

import numpy as np
import pytest
import safetensors.torch
import torch

import pca_torch as pt
from pca_torch.operators.disk import OnDisk
from pca_torch.sources import NpySource, SafetensorsSource, Source, TorchSource, open_sources
from tests.support import samples, truth


def write(path, x):
    """`x` in a file of the kind that its suffix says."""
    match path.suffix:
        case ".npy":
            np.save(path, x.numpy())
        case ".safetensors":
            safetensors.torch.save_file({"rows": x.contiguous()}, path)
        case _:
            torch.save({"rows": x}, path)
    return path


def rows_of(sources):
    """Every row of all of them, in float64."""
    return torch.cat([block.double() for source in sources for block in source])


@pytest.fixture
def mixed(tmp_path):
    """Shards of three kinds whose natural order is not that of the alphabet, and all rows."""
    x = samples(600, 12, decay=0.7, offset=3.0, dtype=torch.float32)
    for name, part in zip(
        ["shard_1.npy", "shard_2.safetensors", "shard_3.pt", "shard_10.npy", "shard_11.pth"],
        x.split([50, 200, 150, 120, 80]),
        strict=True,
    ):
        write(tmp_path / name, part)
    return tmp_path, x


def variance_bound(x):
    """How far λ may be off: a sum of N products in float64 and eigh of D × D, as in test_equivalence.

    Higham 2002, 3.5 and 3.13: γ tr C with γ = Nu / (1 - Nu), then D u tr C; twice, for the mean.
    """
    u, n, d = torch.finfo(torch.float64).eps / 2, *x.shape
    return 2 * (n * u / (1 - n * u) + d * u) * torch.cov(x.double().mT).trace().item()


@pytest.mark.parametrize("solver", ["covariance_eigh", "tsqr", "krylov", "auto"])
def test_shards_of_all_kinds_are_one_data_set(mixed, solver):
    folder, x = mixed
    result = pt.decompose(open_sources(folder), 4, solver, precision="float64")
    mean, variance, components = truth(x)
    # krylov and tsqr are at least as good as a sum of products; components obey Davis & Kahan: error over gap
    bound = 10 * variance_bound(x)
    assert result.n_samples == 600
    assert (result.mean - mean).abs().max() < bound
    assert (result.explained_variance[:4] - variance[:4]).abs().max() < bound
    gap = (variance[:4] - variance[1:5]).min()
    overlap = (result.components.double() @ components[:4].mT).diagonal().abs()
    assert (1 - overlap).max() < (bound / gap) ** 2 + 12 * torch.finfo(result.components.dtype).eps
    wrong = truth(x[:520])[1][:4]  # the control: one shard left out
    assert (wrong - variance[:4]).abs().max() > bound


def test_the_operator_on_disk_takes_all_kinds(mixed):
    folder, x = mixed
    op, v = OnDisk(open_sources(folder)), torch.randn(3, 12, dtype=torch.float64)
    want = v @ torch.cov(x.double().mT)
    assert (op.apply(v) - want).abs().max() < variance_bound(x) * v.norm(dim=1).max()


@pytest.mark.parametrize("kind", [NpySource, SafetensorsSource, TorchSource])
def test_one_source_is_data(tmp_path, kind):
    x = samples(40, 5)
    suffix = {NpySource: "npy", SafetensorsSource: "safetensors", TorchSource: "pt"}[kind]
    source = kind(write(tmp_path / f"x.{suffix}", x))
    assert isinstance(source, Source)
    got = pt.decompose(source).explained_variance
    assert (got - truth(x)[1]).abs().max() < variance_bound(x)


def test_a_source_of_ones_own_is_data():
    class Chunks:
        path, n_rows, n_features, dtype = "memory", 40, 5, torch.float64

        def __iter__(self):
            return iter(samples(40, 5).split(7))

    got = pt.decompose(Chunks()).explained_variance
    assert (got - truth(samples(40, 5))[1]).abs().max() < variance_bound(samples(40, 5))


def test_shards_may_differ_in_dtype(tmp_path):
    x = samples(60, 4, dtype=torch.bfloat16)
    write(tmp_path / "a.safetensors", x[:20])
    write(tmp_path / "b.pt", x[20:40])
    write(tmp_path / "c.npy", x[40:].double())
    sources = open_sources(tmp_path)
    assert [source.dtype for source in sources] == [torch.bfloat16, torch.bfloat16, torch.float64]
    assert torch.equal(rows_of(sources), x.double())


def test_natural_order_whatever_the_order_given(mixed, tmp_path_factory):
    folder, x = mixed
    for paths in (folder, [folder], sorted(folder.iterdir()), sorted(folder.iterdir(), reverse=True)):
        assert torch.equal(rows_of(open_sources(paths)), x.double())
    other = tmp_path_factory.mktemp("other")
    names = ["shard_10", "shard_2", "shard_1", "a_9", "shard_02"]
    for name in names:
        write(other / f"{name}.npy", torch.ones(1, 2))
    order = [source.path.stem for source in open_sources([other / f"{name}.npy" for name in names])]
    assert order == ["a_9", "shard_1", "shard_02", "shard_2", "shard_10"]


def test_folders_come_in_natural_order_too(tmp_path):
    for i in (10, 9):
        (tmp_path / f"run{i}").mkdir()
        write(tmp_path / f"run{i}" / "x.npy", torch.full((1, 2), i))
    assert rows_of(open_sources([tmp_path / "run10", tmp_path / "run9"]))[:, 0].tolist() == [9, 10]


def test_a_folder_holds_only_what_can_be_read(mixed):
    folder, x = mixed
    (folder / "index.json").write_text("{}")
    (folder / ".hidden.npy").write_bytes(b"")
    (folder / "notes.txt").write_text("none")
    (folder / "shard_12.NPY").write_bytes((folder / "shard_1.npy").read_bytes())
    assert torch.equal(rows_of(open_sources(folder)), torch.cat([x, x[:50]]).double())


def test_one_name_for_all_files(tmp_path):
    x = samples(30, 3)
    safetensors.torch.save_file({"a": x[:10], "b": x[:10] + 1}, tmp_path / "1.safetensors")
    torch.save({"a": x[10:20], "b": x[10:20] + 1}, tmp_path / "2.pt")
    np.save(tmp_path / "3.npy", x[20:].numpy())  # has no names
    assert torch.equal(rows_of(open_sources(tmp_path, tensor="a")), x)
    with pytest.raises(ValueError, match=r"1\.safetensors: holds several tensors"):
        open_sources(tmp_path)


def test_shards_must_agree_and_be_given_once(tmp_path):
    a, b = write(tmp_path / "a.npy", torch.ones(2, 3)), write(tmp_path / "b.pt", torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"b\.pt: 4 columns, but .*a\.npy has 3; all files must"):
        open_sources([b, a])
    with pytest.raises(ValueError, match=r"b\.pt: 4 columns, but .*a\.npy has 3"):
        pt.decompose([NpySource(a), TorchSource(b)])
    with pytest.raises(ValueError, match="`paths` names a file twice"):
        open_sources([a, tmp_path / "." / "a.npy"])
    with pytest.raises(ValueError, match="`paths` names a file twice"):
        open_sources([tmp_path, a])
    with pytest.raises(ValueError, match="`paths` is empty; give at least one file, `"):
        open_sources([])


def test_what_is_no_shard_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.npy: no such file"):
        open_sources(tmp_path / "nothing.npy")
    with pytest.raises(FileNotFoundError, match=r"nothing: no such file"):
        open_sources([tmp_path / "nothing"])
    (tmp_path / "x.csv").write_text("1,2")
    with pytest.raises(ValueError, match=r"x\.csv: must be a `\.npy`, .*`\.pth` file; convert"):
        open_sources([tmp_path / "x.csv"])
    (tmp_path / "layer_0").mkdir()
    with pytest.raises(ValueError, match=r"holds no .* file; give one of its folders: layer_0"):
        open_sources(tmp_path)
    os.mkfifo(tmp_path / "pipe.pt")  # opening it would wait for ever
    with pytest.raises(ValueError, match="not a file"):
        open_sources([tmp_path / "pipe.pt"])


@pytest.mark.parametrize("suffix", ["npy", "safetensors", "pt"])
def test_nan_is_named_with_its_file(tmp_path, suffix):
    x = samples(40, 3)
    write(tmp_path / f"a.{suffix}", x[:20])
    x[30] = torch.nan
    write(tmp_path / f"b.{suffix}", x[20:])
    with pytest.raises(ValueError, match=rf"b\.{suffix}: `x` has 1 of 20 samples with NaN"):
        pt.decompose(open_sources(tmp_path))
    result = pt.decompose(open_sources(tmp_path), nonfinite="drop")
    assert result.n_samples == 39
