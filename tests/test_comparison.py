"""Two files compared, against numbers worked out from the rows themselves."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import pca_torch as pt
from pca_torch import comparison
from pca_torch.commands.compare import compare as command
from pca_torch.commands.compare import comparison_table
from pca_torch.head_moments import HeadMoments
from pca_torch.statistic_file import save_statistics
from tests.support import samples, truth

EPS = torch.finfo(torch.float64).eps
N, D = 300, 24  # twice the k that are compared: SciPy loses angles of 0 between spans that must meet
A = {"model.layers.0": samples(N, D, decay=0.7), "model.layers.1": samples(N, D, decay=0.8, seed=1)}
B = {
    "model.layers.0": samples(N, D, decay=0.7, offset=2.0) + 0.05 * samples(N, D, decay=1.0, seed=7),
    "model.layers.1": samples(N, D, decay=0.8, seed=2),
    "model.layers.2": samples(N, D, seed=3),
}
ABOUT = {"model": {"name": "toy"}, "settings": {"drop_first": 0, "batch_size": 4}, "view": "typical"}


def save_bases(path, rows, n_components=None, metadata=ABOUT):
    results = {name: pt.decompose(x, n_components) for name, x in rows.items()}
    pt.save(path, results, metadata)
    return path


def compared(first, second, k=None, view="typical"):
    return comparison.compare(comparison.open_side(first, view), comparison.open_side(second, view), k)


def worked_out(x, y, k):
    """Angles, overlap and shared variance of the k leading directions, from the rows, without the package."""
    (_, var_x, vx), (_, var_y, vy) = truth(x), truth(y)
    angles = scipy.linalg.subspace_angles(vx[:k].numpy().T, vy[:k].numpy().T)

    def share(rows, v):
        rows = rows.double() - rows.double().mean(0)
        return ((rows @ v[:k].mT).square().sum() / rows.square().sum()).item()

    return {
        "largest_angle": angles.max(),
        "mean_angle": angles.mean(),
        "overlap": (np.cos(angles) ** 2).mean(),
        "a_in_b": share(x, vy),
        "b_in_a": share(y, vx),
        "a_in_a": (var_x[:k].sum() / var_x.sum()).item(),
        "b_in_b": (var_y[:k].sum() / var_y.sum()).item(),
    }


def ranks(x):
    _, variance, _ = truth(x)
    return int((variance.cumsum(0) / variance.sum() < 0.95).sum()) + 1


def gap(x, k):
    """The k-th gap over the largest variance: it divides the errors of a covariance into those of a basis."""
    _, variance, _ = truth(x)
    return ((variance[k - 1] - variance[k]) / variance[0]).item()


@pytest.mark.parametrize("kind", ["bases", "statistics"])
@pytest.mark.parametrize("k", [None, 1, 4])
def test_every_number_of_two_files(tmp_path, kind, k):
    paths = []
    for name, rows in (("a", A), ("b", B)):
        paths.append(tmp_path / f"{name}.safetensors")
        if kind == "bases":
            save_bases(paths[-1], rows)
        else:
            save_statistics(paths[-1], {n: pt.Moments(D).update(x) for n, x in rows.items()}, ABOUT)
    found = compared(*paths, k)
    assert [site.name for site in found.sites] == list(A)
    assert (found.only_in_a, found.only_in_b) == ((), ("model.layers.2",))
    assert found.differences == ()
    for site in found.sites:
        x, y = A[site.name], B[site.name]
        (group,) = site.groups
        used = min(ranks(x), ranks(y)) if k is None else k
        assert (site.n_features, group.k, group.rank_a, group.rank_b) == (D, used, ranks(x), ranks(y))
        # N products for a covariance, D for its eigenvectors, either side, over the smaller gap
        tolerance = 4 * (N + D) * EPS / min(gap(x, used), gap(y, used))
        want = worked_out(x, y, used)
        for key, value in want.items():
            have = getattr(group, key)
            for end in (have.low, have.high) if key in {"a_in_b", "b_in_a"} else (have,):
                assert end == pytest.approx(value, rel=0, abs=tolerance), key
        other = worked_out(x, y, used + 1)
        assert abs(group.overlap - other["overlap"]) > tolerance
        assert abs(group.a_in_b.low - group.b_in_a.low) > tolerance  # the two directions are told apart
        assert group.chance == pt.subspace.random_overlap(used, used, D)
        assert site.sigmas == pytest.approx((group.overlap - used / D) / group.chance.std)


def test_a_file_with_itself(tmp_path):
    path = save_bases(tmp_path / "a.safetensors", A, 0.95)
    found = compared(path, path)
    for site in found.sites:
        (group,) = site.groups
        assert group.overlap == pytest.approx(1, abs=2 * D * EPS)
        assert group.largest_angle < 2 * D * EPS
        assert group.a_in_b.low == pytest.approx(group.a_in_a, abs=2 * D * EPS)


def test_a_folder_is_its_basis_file(tmp_path):
    save_bases(tmp_path / "basis.safetensors", A)
    side = comparison.open_side(tmp_path)
    assert (side.path, side.view, side.names) == (tmp_path / "basis.safetensors", "typical", tuple(A))


def test_few_components_give_a_range_that_holds_the_share(tmp_path):
    first = save_bases(tmp_path / "a.safetensors", A, 3)
    second = save_bases(tmp_path / "b.safetensors", B, 3)
    for site in compared(first, second).sites:
        (group,) = site.groups
        assert group.k == 3  # neither file has the rank for 95 %
        want = worked_out(A[site.name], B[site.name], 3)
        assert group.a_in_b.low < want["a_in_b"] < group.a_in_b.high


def heads_of(seed, n_heads=3):
    return [samples(N, 8, decay=0.6 + 0.1 * h, seed=seed + h) for h in range(n_heads)]


@pytest.mark.parametrize("kind", ["bases", "statistics"])
def test_heads_are_compared_one_by_one(tmp_path, kind):
    pairs = list(zip(heads_of(0), heads_of(10), strict=True))
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, heads in zip(paths, zip(*pairs, strict=True), strict=True):
        if kind == "bases":
            pt.save(path, {"attn:k": [pt.decompose(x) for x in heads]}, ABOUT)
        else:
            typical = partial(HeadMoments, 3, 8)
            views = pt.TokenViews(typical, typical).update(torch.cat(heads, 1))
            save_statistics(path, {"attn:k": views}, ABOUT)
    (site,) = compared(*paths, 2, view="all").sites
    assert (site.n_features, len(site.groups)) == (8, 3)
    want = [worked_out(x, y, 2)["overlap"] for x, y in pairs]
    tolerance = max(4 * (N + 8) * EPS / gap(x, 2) for pair in pairs for x in pair)
    np.testing.assert_allclose([group.overlap for group in site.groups], want, rtol=0, atol=tolerance)
    mean, spread = site.over_groups(lambda group: group.overlap)
    assert (mean, spread) == (pytest.approx(np.mean(want)), pytest.approx(np.std(want)))
    one = pt.subspace.random_overlap(2, 2, 8)
    assert site.sigmas == pytest.approx((np.mean(want) - one.mean) / (one.std / math.sqrt(3)))


def test_the_view_of_a_statistic_is_chosen(tmp_path):
    x = torch.cat([A["model.layers.0"], 1e3 * torch.eye(D).double()[:3]])
    path, plain = tmp_path / "s.safetensors", tmp_path / "plain.safetensors"
    views = pt.TokenViews(partial(pt.Moments, D)).update(x)
    save_statistics(path, {"model.layers.0": views}, ABOUT)
    save_statistics(plain, {"model.layers.0": pt.Moments(D).update(A["model.layers.0"])}, ABOUT)
    (typical,), (every,) = compared(path, plain).sites, compared(path, plain, view="all").sites
    assert typical.groups[0].overlap == pytest.approx(1, abs=1e-9)
    assert every.groups[0].overlap < 0.5


def test_sites_that_share_a_tensor_are_compared_like_all_others(tmp_path):
    """A statistic file holds what they share once, and says whose it is."""
    order = ["q", "k", "v", "o"]
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, seed in zip(paths, (0, 1), strict=True):
        rows = {"q": samples(N, D, seed=seed), "o": samples(N, D, seed=seed + 5), "one": samples(1, D)}
        about = {
            "sites": {name: {} for name in order},
            "shared": {"k": "q", "v": "q", "x": "nowhere", "y": "one", "z": ["q"]},
        }
        save_statistics(path, {name: pt.Moments(D).update(x) for name, x in rows.items()}, ABOUT | about)
    found = compared(*paths, 3).sites
    assert [site.name for site in found] == order
    assert found[0].groups == found[1].groups == found[2].groups != found[3].groups


def test_a_site_without_variance_overlaps_with_nothing(tmp_path):
    with pytest.warns(UserWarning, match="total variance is zero"):
        path = save_bases(tmp_path / "a.safetensors", {"x": torch.ones(20, 4)})
    (site,) = compared(path, path).sites
    (group,) = site.groups
    assert (group.k, group.overlap, group.largest_angle, site.sigmas) == (0, 0.0, None, None)
    assert json.loads(json.dumps(compared(path, path).to_dict(), allow_nan=False))
    Console(width=80).print(comparison_table(compared(path, path)))


def test_what_was_measured_differently_is_said(tmp_path):
    name, settings = "model.layers.0", {"drop_first": 2, "batch_size": 8, "roles": [1]}
    points = {name: "keys before RoPE", "model.layers.9": "keys"}
    about = {"view": "all", "settings": settings | {"points": points}}
    other = {**ABOUT, "settings": {"drop_first": 0, "points": {name: "keys after RoPE"}}}
    first, second = (save_bases(tmp_path / f, A, metadata=m) for f, m in (("a", other), ("b", about)))
    assert compared(first, second).differences == (
        'view is "typical" in A and "all" in B',
        "setting `drop_first` is 0 in A and 2 in B",
        "setting `roles` is null in A and [1] in B",
        'the point of site model.layers.0 is "keys after RoPE" in A and "keys before RoPE" in B',
    )
    raw = tmp_path / "raw"
    pt.save(raw, {name: pt.decompose(x, center=False) for name, x in A.items()}, ABOUT)
    assert compared(first, raw).differences[0] == "site model.layers.0 is centred in A alone"


@pytest.mark.parametrize(
    ("results", "k", "message"),
    [
        ({"x": pt.decompose(samples(20, 5))}, None, r"site 'x' has 4 features in .*a and 5 in .*b\."),
        ({"x": [pt.decompose(samples(20, 4))] * 2}, None, r"site 'x' has 1 heads or groups in .*a and 2 in"),
        ({"y": pt.decompose(samples(20, 4))}, None, r"a and .*b have no site in common: x against y\."),
        (
            {"x": pt.decompose(samples(20, 4), standardize=True)},
            None,
            r"site 'x' is standardised in one of .*a and .*b alone",
        ),
        (
            {"x": pt.decompose(samples(20, 4), 2)},
            3,
            r"`k` must be at most 2, the components .* 'x' in .*b, got 3",
        ),
        ({"x": pt.decompose(samples(20, 4))}, 0, "`k` must be a positive integer, got 0"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path, results, k, message):
    first, second = tmp_path / "a", tmp_path / "b"
    pt.save(first, {"x": pt.decompose(samples(20, 4))})
    pt.save(second, results)
    with pytest.raises(ValueError, match=message):
        compared(first, second, k)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(60), b"\x10" + bytes(7) + b"[" * 16])
def test_what_is_no_file_of_ours_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=r"x: is not a"):
        comparison.open_side(tmp_path / "x")
    with pytest.raises(ValueError, match="`view` must be one of 'typical', 'all', got 'most'"):
        comparison.open_side(tmp_path / "x", "most")


def application():
    app = typer.Typer()
    app.command()(command)
    return app


def invoke(*words):
    return CliRunner(env={"COLUMNS": "80"}).invoke(application(), list(map(str, words)))


def test_the_table_fits_a_terminal(tmp_path):
    names = ["model.layers.0.self_attn:k", "transformer.encoder.blocks.11.attention.output:input"]
    for file, seed in (("a", 0), ("b", 20)):
        heads = {name: [pt.decompose(x) for x in heads_of(seed + i)] for i, name in enumerate(names)}
        noise = torch.randn(1500, 1100, generator=torch.Generator().manual_seed(seed))
        wide = {"final": pt.decompose(noise, 5, "covariance_eigh")}
        pt.save(tmp_path / file, heads | wide | {f"only.{file}.{i}": wide["final"] for i in range(6)}, ABOUT)
    done = invoke(tmp_path / "a", tmp_path / "b", "--k", 5)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("site")) :]
    assert max(map(len, table)) <= 80
    assert sum("±" in line for line in table) == 3  # two sites with heads, and the note
    assert any(line.startswith("only in A: only.a.0, only.a.1") and "and 2 more" in line for line in lines)
    row = next(line for line in table if line.startswith("final"))
    assert min(int(rank) for rank in row.split("  ")[-1].split(" → ")) > 700


def test_two_runs_of_a_language_model(tmp_path, smollm2):
    """The same layers on two texts: nearer to each other than chance, and not the same."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for i, folder in enumerate(folders):
        text = Path(__file__).read_text()[8000 * i :]
        ids = torch.tensor(smollm2.tokenizer(text)["input_ids"][:400]).reshape(4, 100)
        reports = pt.analyse(smollm2.model, [ids], ["model.layers.4", "model.layers.20"])
        folder.mkdir()
        pt.save(folder / "basis.safetensors", {name: site.typical for name, site in reports.items()}, ABOUT)
    done = invoke(*folders, "--k", 10, "--json")
    found = json.loads(done.stdout)
    assert len(found["sites"]) == 2
    for site, entry in found["sites"].items():
        (group,) = entry["groups"]
        one, two = (pt.load(folder / "basis.safetensors")[site] for folder in folders)
        # K×K products of unit rows are off by γ_D K in the Frobenius norm (Higham 2002, §3.5), and so are the
        # rows by making them orthonormal; both twice, here and in SciPy
        tolerance = 4 * 10 * one.n_features * EPS / 2
        for k in (10, 9):  # 9: the control
            spans = [result.components[:k].double().numpy().T for result in (one, two)]
            off = abs(group["largest_angle"] - scipy.linalg.subspace_angles(*spans).max())
            assert (off <= tolerance) == (k == 10)
        assert 0.05 < group["overlap"] < 0.99
        assert entry["sigmas"] > 10
    table = invoke(*folders)
    assert table.exit_code == 0
    assert max(map(len, table.stdout.splitlines()[2:])) <= 80
