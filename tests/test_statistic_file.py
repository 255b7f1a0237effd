"""A statistic that was saved goes on bit for bit as one that never was; what is read is checked."""

import copy
import itertools
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pca_torch.export import save
from pca_torch.head_moments import HeadMoments
from pca_torch.moments import Moments
from pca_torch.statistic_file import STATISTICS, load_statistics, save_statistics
from pca_torch.tokens import TokenViews
from tests.test_export_reading import body_of, join, split, with_body
from tests.test_layout import result

D = 12
LENGTHS = [1, 40, 700, 3, 511, 512, 5000, 20, 300, 300, 7]  # long batches, and short ones that wait


def batches(dtype: torch.dtype, *, far: bool = False) -> list[torch.Tensor]:
    """Rows around an offset; if asked, of norms that spread and lie on both sides of any threshold."""
    g = torch.Generator().manual_seed(1)
    found = []
    for n in LENGTHS:
        x = torch.randn(n, D, generator=g) + 3
        if far:
            x *= (torch.randn(n, 1, generator=g) / 2).exp()
        found.append(x.to(dtype))
    return found


def plain(statistic: Any, x: torch.Tensor, i: int) -> None:
    statistic.update(x)


def weighted(statistic: Any, x: torch.Tensor, i: int) -> None:
    statistic.update(x, weights=None if i % 3 == 0 else torch.linspace(0, 2, len(x)))


def grouped(statistic: Any, x: torch.Tensor, i: int) -> None:
    statistic.update(x, group=i % 3 % 2)


def damaged(statistic: Any, x: torch.Tensor, i: int) -> None:
    x = x.clone()
    x[:: 5 + i] = torch.nan
    statistic.update(x)


def in_turns(statistic: Any, x: torch.Tensor, i: int) -> None:
    statistic.update(x.to([torch.float32, torch.bfloat16, torch.float64][i % 3]))


def sequences(statistic: Any, x: torch.Tensor, i: int) -> None:
    statistic.update(x[None], mask=(torch.arange(len(x)) % 9 != 4)[None])


def views(make: Callable[[], Any], max_held: int = 512) -> TokenViews:
    return TokenViews(make, max_held=max_held)


STREAMS = {
    "float64": (partial(Moments, D), torch.float64, False, plain),
    "float32 products": (partial(Moments, D, precision="float32"), torch.float32, True, plain),
    "bfloat16": (partial(Moments, D, precision="float32"), torch.bfloat16, False, plain),
    "several dtypes": (partial(Moments, D, precision="float32"), torch.float32, False, in_turns),
    "weights": (partial(Moments, D, precision="float32"), torch.float32, True, weighted),
    "groups": (partial(Moments, D, groups=2), torch.float32, False, grouped),
    "dropped rows": (partial(Moments, D, nonfinite="drop"), torch.float32, False, damaged),
    "heads": (partial(HeadMoments, 3, 4), torch.float32, False, plain),
    "float32 heads": (partial(HeadMoments, 3, 4, precision="float32"), torch.float16, True, plain),
    "views": (partial(views, partial(Moments, D)), torch.float32, True, sequences),
    "views of float32": (
        partial(views, partial(Moments, D, precision="float32"), 40),
        torch.bfloat16,
        True,
        sequences,
    ),
    "views that assign early": (partial(views, partial(Moments, D), 8), torch.float32, True, sequences),
    "views of heads": (partial(views, partial(HeadMoments, 3, 4), 40), torch.float32, True, plain),
}


def numbers(statistic: Any) -> Iterable[Any]:
    """All that a statistic tells, in tensors and plain values."""
    if isinstance(statistic, TokenViews):
        everything, typical, extreme = statistic.result()
        return [*numbers(everything), *numbers(typical), extreme, statistic.n_samples, statistic.n_features]
    told = [statistic.mean, statistic.covariance(), statistic.scatter_error(), statistic.trace]
    told += [statistic.n_samples, statistic.n_dropped, statistic.input_dtype, statistic.product_dtype]
    if isinstance(statistic, Moments):
        told += [statistic.n_effective, statistic.groups, statistic.precision]
        told += [statistic.group(i).covariance() for i in range(statistic.groups) if statistic.groups > 1]
    return told


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(numbers(a), numbers(b), strict=True)
    )


def kept(statistic: Any, path: Path) -> Any:
    """What a file makes of it, which would be saved as the same again."""
    save_statistics(path, {"s": statistic})
    loaded = load_statistics(path)["s"]
    (tensors, facts), (again, told) = statistic.to_state(), loaded.to_state()
    assert facts == told
    assert tensors.keys() == again.keys()
    assert all(x.dtype == again[name].dtype and torch.equal(x, again[name]) for name, x in tensors.items())
    return loaded


@pytest.mark.parametrize("stream", STREAMS)
def test_a_statistic_goes_on_bit_for_bit_wherever_it_was_saved(stream, tmp_path):
    make, dtype, far, update = STREAMS[stream]
    rows = batches(dtype, far=far)
    uninterrupted = make()
    for i, x in enumerate(rows):
        update(uninterrupted, x, i)
    for at in range(len(rows) + 1):
        statistic = make()
        for i, x in enumerate(rows):
            if i == at:
                statistic = kept(statistic, tmp_path / "s")
            update(statistic, x, i)
        if at == len(rows):
            statistic = kept(statistic, tmp_path / "s")
        assert same(statistic, uninterrupted), f"saved before batch {at}"


def test_saving_changes_nothing_in_the_statistic(tmp_path):
    make, dtype, far, update = STREAMS["views"]
    watched, alone = make(), make()
    for i, x in enumerate(batches(dtype, far=far)):
        update(watched, x, i)
        update(alone, x, i)
        kept(watched, tmp_path / "s")
    assert same(watched, alone)


def test_the_comparison_sees_rows_that_were_summed_too_early():
    """Control: what saving must not do, sum the rows that wait, changes the last digits."""
    rows = batches(torch.float64)
    uninterrupted, flushed = Moments(D), Moments(D)
    for x in rows:
        uninterrupted.update(x)
        flushed.update(x).flush()
    assert not same(flushed, uninterrupted)
    torch.testing.assert_close(flushed.covariance(), uninterrupted.covariance(), rtol=1e-12, atol=1e-12)


def test_loaded_statistics_and_what_they_came_from_share_nothing(tmp_path):
    moments = Moments(D).update(torch.randn(600, D))
    tensors, facts = moments.to_state()
    copied = Moments.from_state(tensors, facts)
    before = copied.covariance()
    moments.update(torch.randn(600, D))
    assert torch.equal(copied.covariance(), before)
    save_statistics(tmp_path / "s", {"s": copied})
    file = load_statistics(tmp_path / "s")
    file["s"].update(torch.randn(600, D))
    assert torch.equal(file["s"].covariance(), before)  # read anew


def test_loaded_views_can_be_copied_pickled_and_merged(tmp_path):
    import pickle

    made = views(partial(Moments, D)).update(torch.randn(900, D))
    loaded = kept(made, tmp_path / "s")
    assert same(pickle.loads(pickle.dumps(loaded)), made)
    assert same(copy.deepcopy(loaded), made)
    assert same(loaded.merge(made), made.merge(copy.deepcopy(made)))


def test_statistics_are_loaded_outside_inference_mode(tmp_path):
    save_statistics(tmp_path / "s", {"s": views(partial(Moments, D)).update(torch.randn(900, D))})
    with torch.inference_mode():
        loaded = load_statistics(tmp_path / "s")["s"]
    loaded.update(torch.randn(900, D))
    assert loaded.n_samples == 1800


# --- the file ------------------------------------------------------------------------------------------


def example() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 400, D, generator=g)
    x[:, 0] *= 100
    return {
        "model.layers.0:output": views(partial(Moments, D, precision="float32")).update(x.bfloat16()),
        "a/b": views(partial(HeadMoments, 3, 4)).update(x),
        "short": Moments(D, groups=2).update(x[0], group=1).update(x[1, :30], weights=torch.ones(30)),
        "none yet": Moments(4),
    }


def test_a_file_holds_the_sites_and_the_metadata(tmp_path):
    statistics = example()
    save_statistics(tmp_path / "s", statistics, {"model": {"name": "m"}, "limit": float("inf")})
    file = load_statistics(tmp_path / "s")
    assert list(file) == list(statistics)
    assert file.metadata == {"model": {"name": "m"}, "limit": float("inf")}
    assert [file.n_samples(site) for site in file] == [1200, 1200, 430, 0]
    assert file.kind("a/b") == ("views", "head_moments")
    assert file.kind("short") == ("moments", "")
    assert all(same(file[site], statistics[site]) for site in list(statistics)[:3])


def test_any_safetensors_reader_reads_the_file(tmp_path):
    moments = Moments(D).update(torch.randn(700, D) + 4)
    save_statistics(tmp_path / "s", {"a/b": moments})
    tensors = safetensors.torch.load_file(tmp_path / "s")
    assert torch.equal(tensors["a/b/group0.mean"], moments.mean)
    scatter = torch.zeros(D, D, dtype=torch.float64)
    scatter[tuple(torch.triu_indices(D, D))] = tensors["a/b/group0.scatter"]  # as the docstring says
    assert torch.equal(scatter.triu() / 699, moments.covariance().triu())
    with safetensors.safe_open(tmp_path / "s", "pt") as file:
        assert file.metadata()["format"] == STATISTICS.name


def test_odd_half_rows_leave_all_tensors_aligned_for_other_readers(tmp_path):
    statistics = {name: views(partial(Moments, 3)).update(torch.randn(5, 3).bfloat16()) for name in "abc"}
    save_statistics(tmp_path / "s", statistics)
    header, _ = split((tmp_path / "s").read_bytes())
    size = {"BF16": 2, "F64": 8, "I64": 8}
    offsets = [(e["data_offsets"][0], size[e["dtype"]]) for n, e in header.items() if n != "__metadata__"]
    assert all(offset % width == 0 for offset, width in offsets)
    assert safetensors.torch.load_file(tmp_path / "s").keys() == header.keys() - {"__metadata__"}


@pytest.mark.parametrize("step", ["torch.Tensor.cpu", "os.fsync", "pathlib.Path.replace"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_at_any_step_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, step, error):
    path = tmp_path / "s"
    save_statistics(path, {"s": Moments(3).update(torch.randn(600, 3))})
    before = path.read_bytes()

    def fail(*_, **__):
        raise error("stopped")

    with monkeypatch.context() as patched:
        patched.setattr(step, fail)
        with pytest.raises(error, match="stopped"):
            save_statistics(path, {"s": Moments(3).update(torch.randn(600, 3))})
    assert os.listdir(tmp_path) == ["s"]
    assert path.read_bytes() == before


def test_a_file_has_the_permissions_of_any_new_file(tmp_path):
    old = os.umask(0o027)
    try:
        save_statistics(tmp_path / "s", {"s": Moments(3)})
    finally:
        os.umask(old)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o640


def test_what_cannot_be_saved_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "s"
    with pytest.raises(ValueError, match="`statistics` is empty"):
        save_statistics(path, {})
    with pytest.raises(ValueError, match="non-empty strings as site names, got ''"):
        save_statistics(path, {"": Moments(3)})
    with pytest.raises(TypeError, match=r"`statistics\['s'\]` must be .*, got PCAResult; save results with"):
        save_statistics(path, {"s": result()})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"`metadata\['a'\]` must be dict, list, .* got tuple; convert it"):
        save_statistics(path, {"s": Moments(3)}, {"a": (1,)})
    with pytest.raises(FileNotFoundError, match="is no folder; make it first"):
        save_statistics(tmp_path / "no" / "s", {"s": Moments(3)})
    monkeypatch.setattr("pca_torch._safetensors.MOST_TEXT", 3000)
    with pytest.raises(ValueError, match="`metadata` must stay below 3000 characters of JSON, got"):
        save_statistics(path, {"s": Moments(3)}, {"x": 3000 * "x"})
    assert os.listdir(tmp_path) == []


def test_a_statistic_that_an_interrupt_tore_is_refused(tmp_path, monkeypatch):
    moments = Moments(D).update(torch.randn(600, D))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("pca_torch.scatter.add_gram", interrupt)
        with pytest.raises(KeyboardInterrupt):
            moments.update(torch.randn(600, D))
    with pytest.raises(RuntimeError, match="was interrupted while it counted rows"):
        save_statistics(tmp_path / "s", {"s": moments})
    with pytest.raises(RuntimeError, match="these sums were interrupted"):
        moments._sums[0].to_state()
    assert os.listdir(tmp_path) == []


def test_a_statistic_that_changes_while_it_is_written_is_refused(tmp_path):
    class Restless(dict):
        def __getitem__(self, site):
            return super().__getitem__(site).update(torch.randn(1, D))

    with pytest.raises(RuntimeError, match="changed while it was written; save between two updates"):
        save_statistics(tmp_path / "s", Restless(s=Moments(D)))
    assert os.listdir(tmp_path) == []


# --- what is read --------------------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path) -> Path:
    save_statistics(tmp_path / "s", example(), {"n": 1})
    return tmp_path / "s"


def refused(path: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        dict(load_statistics(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_files_of_other_kinds_are_refused(good, tmp_path):
    save(tmp_path / "basis", {"s": result()})
    refused(tmp_path / "basis", "is not a pca_torch statistic")
    header, blob = split(good.read_bytes())
    header["__metadata__"]["version"] = "2"
    good.write_bytes(join(header, blob))
    refused(good, "has format version '2', only '1' can be read; a newer pca_torch may")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_statistics(tmp_path / "nowhere")


def test_a_file_that_is_cut_extended_or_changed_later_is_refused(good):
    whole = good.read_bytes()
    for data in (whole[:-1], whole[:-5000], whole + b"1"):
        good.write_bytes(data)
        refused(good, "is not a whole safetensors file")
    good.write_bytes(whole)
    file = load_statistics(good)
    save_statistics(good, {"a/b": Moments(3)})
    with pytest.raises(ValueError, match="was changed after it was opened; open it again"):
        file["a/b"]


def edited(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]) -> None:
    """Let `change` loose on the tensors and the sites of a file."""
    header, _ = split(path.read_bytes())
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    body = body_of(header)
    change(tensors, body["sites"])
    about = with_body({"__metadata__": header["__metadata__"]}, body)["__metadata__"]
    safetensors.torch.save_file(tensors, path, about)


def put(name: str, value: float, at: Any = 0) -> Callable[..., object]:
    """Set values of a tensor."""

    def change(tensors, sites):
        tensors[name][at] = value

    return change


def fact(site: str, *keys: str, value: Any) -> Callable[..., object]:
    """Set a fact."""

    def change(tensors, sites):
        inside = sites[site]
        for key in keys[:-1]:
            inside = inside[key]
        inside[keys[-1]] = value

    return change


def drop(name: str) -> Callable[..., object]:
    return lambda tensors, sites: tensors.pop(name)


def rename(old: str, new: str) -> Callable[..., object]:
    return lambda tensors, sites: tensors.update({new: tensors.pop(old)})


LAYER = "model.layers.0:output"
GROUP = ("short", "state", "group1")
FAULTS = [
    (put("short/group1.scatter", -1.0), "site 'short': `scatter` must have no entry above .* none below 0"),
    (put("short/group1.scatter", 1e9, at=1), "`scatter` must have no entry above its largest variance"),
    (put("short/group1.scatter", torch.nan), "`scatter` holds NaN or inf"),
    (put("short/group1.mean", 1e99), "`mean` and `scatter` must be those of 400 rows of values up to 1e"),
    (put("short/group0.mean", 1.0), "`mean` and `scatter` must be those of 0 rows"),
    (put("short/group1.between", -1e-9), "`between` must be at least 0, got -1e-09"),
    (put("short/intake.weights", -1.0), "`weights` must be at least 1e-70, got -1"),
    (put("short/intake.rows", torch.inf), "`rows` holds NaN or inf"),
    (put(f"{LAYER}/typical.group0.signs", 0.5), "`signs` must be 1 and -1"),
    (put(f"{LAYER}/histogram.counts", -1), "`counts` must be at least 0, got -1"),
    (put(f"{LAYER}/histogram.counts", 1), "`counts` must be of the 1200 rows of the views, got 1201"),
    (put(f"{LAYER}/histogram.counts", 2**62), "`counts` must add up to less than"),
    (put(f"{LAYER}/held.norms", 1.0), "`held` must be 1 to 512 rows and their norms"),
    (drop("short/group1.mean"), "site 'short': lacks the tensor `mean`"),
    (rename("short/group1.mean", "short/group1.man"), "lacks the tensor `mean`"),
    (rename("short/group1.mean", "shirt/group1.mean"), "site 'shirt' has tensors without facts"),
    (rename("short/group1.mean", "group1.mean"), "site '' has tensors without facts"),
    (lambda t, s: t.update({"short/x": torch.ones(1)}), "holds 'x', which this statistic does not have"),
    (lambda t, s: t.update({"short/intake.rows": torch.ones(29, D)}), "`weights` must be .* \\(29\\), got"),
    (
        lambda t, s: t.update({"short/group1.mean": torch.ones(D - 1).double()}),
        "`scatter` must be .* \\(66\\)",
    ),
    (lambda t, s: t.update({"short/group1.mean": torch.ones(D)}), "`mean` must be torch.float64 \\(any\\)"),
    (lambda t, s: s.pop("short"), "site 'short' has tensors without facts"),
    (lambda t, s: s.update(x={}), "site 'x' must have `n_samples`, `device` and `state`, got"),
    (fact("short", "n_samples", value=431), "`n_samples` must be 430, the rows counted, got 431"),
    (fact("short", "n_samples", value=430.0), "site 'short' must have `n_samples`"),
    (fact("short", "state", "kind", value="pickle"), "`kind` must be one of views, moments, head_moments"),
    (fact("short", "state", "kind", value=["a"]), "`kind` must be one of views, moments, head_moments"),
    (fact("short", "state", "groups", value=3), "lacks the fact `group2`"),
    (fact("short", "state", "groups", value=2**50), "covariance needs .* GiB on cpu"),
    (fact("short", "state", "pending_group", value=2), "`group` must be an integer in 0..1, got 2"),
    (fact("short", "state", "extra", value=2), "holds 'extra', which this statistic does not have"),
    (fact("short", "state", "precision", value="half"), "`precision` must be one of 'auto', 'float32'"),
    (fact("short", "state", "product_dtype", value=None), "holds 'group0.between', which this"),
    (fact("short", "state", "intake", "n_features", value=D + 1), "`rows` must be .* \\(any, 13\\)"),
    (
        fact("short", "state", "intake", "n_dropped", value=-1),
        "`n_dropped` must be an integer in 0..2\\*\\*53",
    ),
    (fact("short", "state", "intake", value=3), "`intake` must be an object, got 3"),
    (fact(*GROUP, "n", value=-1), "`n` must be an integer in 0..2\\*\\*53, got -1"),
    (fact(*GROUP, "n", value=True), "`n` must be an integer"),
    (fact(*GROUP, "n", value=399), "`weight` and `weight_sq` must be those of 399 rows"),
    (fact(*GROUP, "weight", value=0), "`weight` and `weight_sq` must be those of 400 rows"),
    (fact(*GROUP, "weight", value=10**400), "`weight` must be a number from 0 to 1e"),
    (fact(*GROUP, "weight", value={"$float": "nan"}), "`weight` must be a number from 0 to 1e"),
    (fact(*GROUP, "dtype", value="bfloat16"), "`dtype` must be one of 'float32', 'float64'"),
    (fact(LAYER, "state", "max_held", value=1), "`max_held` must be an integer in 2"),
    (
        fact(LAYER, "state", "empty", "intake", "n_features", value=5),
        "`held.values` must be .* \\(any, 5\\), got",
    ),
    (fact(LAYER, "state", "typical", "kind", value="views"), "`kind` must be one of views, moments"),
    (fact(LAYER, "state", "largest_typical", value=-1), "`largest_typical` must be a number from 0 to inf"),
    (fact(LAYER, "device", value="cuda:77"), None),
]


@pytest.mark.parametrize(("change", "message"), FAULTS)
def test_one_fault_is_named_in_one_line(good, change, message):
    edited(good, change)
    if message is None:  # the device of the file counts only where it is asked for
        assert len(dict(load_statistics(good))) == 4
        with pytest.raises(ValueError, match="was on 'cuda:77', which this machine lacks; pass `device`"):
            load_statistics(good, None)[LAYER]
    else:
        refused(good, message)


def test_a_file_without_a_fault_passes_the_same_way(good):
    edited(good, lambda tensors, sites: None)
    assert len(dict(load_statistics(good))) == 4


def test_a_fuzz_case_of_each_length_of_a_cut_header_is_refused(tmp_path):
    save_statistics(tmp_path / "s", {"s": Moments(3).update(torch.randn(5, 3))})
    whole = (tmp_path / "s").read_bytes()
    for end in itertools.chain(range(0, 64), range(64, len(whole), 29)):
        (tmp_path / "s").write_bytes(whole[:end])
        refused(tmp_path / "s", "is not a")


@pytest.mark.parametrize("runs", [3, "digest", ["a", "a"], ["a", 3], [""], {"a": 1}])
def test_runs_that_are_no_digests_are_refused(good, runs):
    header, blob = split(good.read_bytes())
    good.write_bytes(join(with_body(header, body_of(header) | {"runs": runs}), blob))
    refused(good, "`runs` must be different digests, got ")


def test_a_file_of_no_site_is_refused(good):
    header, _ = split(good.read_bytes())
    body = {"metadata": {}, "sites": {}}
    good.write_bytes(join(with_body({"__metadata__": header["__metadata__"]}, body), b""))
    refused(good, "holds no site")


def test_json_is_not_executed_and_nested_no_deeper_than_python_can(good):
    header, blob = split(good.read_bytes())
    header["__metadata__"]["json"] = "[" * 100_000
    good.write_bytes(join(json.dumps(header), blob))
    refused(good, "`json` in the header: JSON is nested too deeply")
