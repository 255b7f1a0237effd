import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from pca_torch.export import load, load_metadata, save
from pca_torch.result import PCAResult
from tests.cases.reported import compare
from tests.support import reported_case, samples
from tests.test_layout import assert_same, certificate, result, uneven

ROOT = Path(__file__).parents[1]
FULL_OF_TYPES = {
    "big": 2**53 + 1,
    "negative": -(2**70),
    "sum": 0.1 + 0.2,
    "tiny": 5e-324,
    "minus zero": -0.0,
    "whole": 3.0,
    "none": None,
    "yes": True,
    "λ \ud800 \n": "h.λ.0 \"'\\ \ud800",
    "list": [1, [2.5, [], {}], "x", None],
    "inf": [math.inf, -math.inf],
    "": {"float": "inf", "nested": {"a": {"b": 1}}},
}


def raw_header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def exact(value) -> str:
    """Tells 1 from 1.0 and True, and -0.0 from 0.0."""
    return repr(value)


@pytest.mark.parametrize(
    "want",
    [
        result(),
        result(dtype=torch.float32, standardised=True),
        result(centred=False, whiten=True),
        result(k=0),
        result(k=0, m=0),
        result(d=1, k=1),
        result(k=6, m=6),
        replace(result(), divisor=38.5),
        replace(result(), n_samples=2**53 + 1, divisor=2**53),
        replace(
            result(), certificate=certificate(3, gap=math.inf, variance_error=(math.inf, -math.inf, 0.1))
        ),
        replace(result(), certificate=certificate(3, quantisation_floor=(0.1, 0.2, 0.3), fallbacks=())),
    ],
    ids=lambda r: f"k{r.n_components}m{len(r.spectrum)}",
)
def test_a_result_comes_back_bit_for_bit(tmp_path, want):
    save(tmp_path / "b.safetensors", {"site": want})
    got = load(tmp_path / "b.safetensors")["site"]
    assert isinstance(got, PCAResult)
    assert_same(got, want)


def test_nan_in_a_certificate_comes_back_as_nan(tmp_path):
    save(tmp_path / "b", {"s": replace(result(), certificate=certificate(3, gap=math.nan))})
    assert math.isnan(load(tmp_path / "b")["s"].certificate.gap)


def test_groups_come_back_as_a_tuple_and_one_group_as_itself(tmp_path):
    save(tmp_path / "b", {"heads": uneven(), "one": [result()], "same": (result(), result(seed=1))})
    file = load(tmp_path / "b")
    for got, want in zip(file["heads"], uneven(), strict=True):
        assert_same(got, want)
    assert isinstance(file["heads"], tuple)
    assert len(file["same"]) == 2
    assert_same(file["one"], result())


def test_a_file_is_a_mapping_in_the_order_it_was_given(tmp_path):
    names = ["z.layers.3", "a/components", "a", "a/b/mean", " ", "λ", "__metadata__", "/", "a\nb"]
    save(tmp_path / "b", {name: result(seed=i) for i, name in enumerate(names)}, {"n": 1})
    file = load(str(tmp_path / "b"))
    assert list(file) == names
    assert len(file) == len(names)
    assert "b" not in file
    assert file.path == tmp_path / "b"
    for i, name in enumerate(names):
        assert_same(file[name], result(seed=i))


def test_tensors_go_to_the_device_asked_for(tmp_path):
    save(tmp_path / "b", {"s": result(standardised=True)})
    got = load(tmp_path / "b", device="meta")["s"]
    assert {t.device.type for t in (got.mean, got.components, got.spectrum, got.scale)} == {"meta"}


def test_a_new_process_computes_the_same_scores(tmp_path):
    want = result(n=200, d=48, k=20, dtype=torch.float32)
    x = samples(500, 48, seed=9, dtype=torch.float32)
    save(tmp_path / "b", {"s": want})
    torch.save({"x": x, "scores": want.transform(x)}, tmp_path / "x.pt")
    code = (
        "import sys, torch; from pca_torch.export import load\n"
        "t = torch.load(sys.argv[2]); z = load(sys.argv[1])['s'].transform(t['x'])\n"
        "sys.exit(0 if torch.equal(z, t['scores']) else 3)"
    )
    run = [sys.executable, "-c", code, str(tmp_path / "b"), str(tmp_path / "x.pt")]
    assert subprocess.run(run, cwd=ROOT, timeout=120).returncode == 0


# --- metadata


def test_metadata_keep_value_and_type(tmp_path):
    save(tmp_path / "b", {"s": result()}, FULL_OF_TYPES)
    for got in (load(tmp_path / "b").metadata, load_metadata(tmp_path / "b")):
        assert exact(got) == exact(FULL_OF_TYPES)
    save(tmp_path / "b", {"s": result()})
    assert load_metadata(tmp_path / "b") == {}


def test_subclasses_come_back_as_the_plain_value(tmp_path):
    save(
        tmp_path / "b",
        {"s": result()},
        {"torch": torch.__version__, "x": np.float64(0.1), "y": np.float64("nan")},
    )
    got = load_metadata(tmp_path / "b")
    assert exact({**got, "y": None}) == exact({"torch": str(torch.__version__), "x": 0.1, "y": None})
    assert math.isnan(got["y"])


def test_metadata_are_read_from_the_header_alone(tmp_path):
    path = tmp_path / "b"
    save(path, {"s": result()}, {"n": 1})
    data = path.read_bytes()
    path.write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    assert load_metadata(path) == {"n": 1}
    with pytest.raises(ValueError, match="incomplete metadata"):
        load(path)


def cycle() -> list:
    inner: list = []
    inner.append(inner)
    return inner


def test_the_deepest_metadata_allowed_come_back(tmp_path):
    deep = 0
    for _ in range(63):
        deep = [deep]
    save(tmp_path / "b", {"s": result()}, {"deep": deep})
    assert load_metadata(tmp_path / "b") == {"deep": deep}
    with pytest.raises(ValueError, match="at most 64 deep"):
        save(tmp_path / "b", {"s": result()}, {"deep": [[deep]]})


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ((1, 2), TypeError, r"`metadata\['key'\]` must be dict, list, str, number, bool or None, got tuple"),
        ({"a": [0, {1}]}, TypeError, r"`metadata\['key'\]\['a'\]\[1\]` must be .* got set"),
        (np.int64(3), TypeError, r"`metadata\['key'\]` must be .* got int64"),
        (torch.ones(1), TypeError, "got Tensor"),
        (b"x", TypeError, "got bytes"),
        ({1: 2}, TypeError, r"`metadata\['key'\]` must have strings as keys, got 1"),
        (
            {"$float": "inf"},
            ValueError,
            r"`metadata\['key'\]` has the key '\$float', which marks inf and NaN",
        ),
        (cycle(), ValueError, "at most 64 deep; does it contain itself"),
    ],
)
def test_metadata_that_json_cannot_hold_are_refused_by_name(tmp_path, value, error, message):
    with pytest.raises(error, match=message):
        save(tmp_path / "b", {"s": result()}, {"key": value})
    assert list(tmp_path.iterdir()) == []


def test_metadata_too_long_for_a_header_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pca_torch._safetensors.MOST_TEXT", 3000)
    save(tmp_path / "b", {"s": result()}, {"x": "short"})
    with pytest.raises(ValueError, match="`metadata` must stay below 3000 characters of JSON, got"):
        save(tmp_path / "b", {"s": result()}, {"x": 3000 * "x"})
    assert load_metadata(tmp_path / "b") == {"x": "short"}


# --- what is written


def test_the_header_is_str_to_str_and_strict_json(tmp_path):
    bad = certificate(3, gap=math.inf)
    save(tmp_path / "b", {"s": replace(result(), certificate=bad)}, FULL_OF_TYPES)
    header = raw_header(tmp_path / "b")
    assert header.keys() == {"format", "version", "json"}
    assert (header["format"], header["version"]) == ("pca_torch", "1")

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    body = json.loads(header["json"], parse_constant=refuse)
    assert body.keys() == {"metadata", "sites", "sign_rule", "libraries"}
    assert body["libraries"]["torch"].startswith(torch.__version__.split("+")[0])
    (facts,) = body["sites"]["s"]
    assert facts.keys() == {"divisor", "centred", "whiten", "n_variances", "certificate"}
    assert facts["certificate"]["gap"] == {"$float": "inf"}


def test_other_tools_find_the_tensors_by_name(tmp_path):
    want = result(standardised=True, dtype=torch.float32)
    save(tmp_path / "b", {"model.layers.3": want})
    arrays = load_file(tmp_path / "b")
    assert {name: (array.dtype.name, array.shape) for name, array in arrays.items()} == {
        "model.layers.3/components": ("float32", (1, 3, 6)),
        "model.layers.3/explained_variance": ("float64", (1, 6)),
        "model.layers.3/mean": ("float64", (1, 6)),
        "model.layers.3/scale": ("float64", (1, 6)),
        "model.layers.3/total_variance": ("float64", (1,)),
        "model.layers.3/n_samples": ("int64", (1,)),
    }
    assert np.array_equal(arrays["model.layers.3/components"][0], want.components.numpy())


def test_reported_views_are_written_without_their_buffer(tmp_path):
    case = reported_case("export_views")
    vt = torch.from_numpy(case["x"]["Vt"])
    k = case["x"]["k"]
    base = result(d=64, k=k, m=k)
    for components in (vt[:k], vt.mT.contiguous().mT[:k]):  # rows, and columns, of a 64 × 64 buffer
        save(tmp_path / "b", {"s": replace(base, components=components, mean=vt[k])})
        got = load(tmp_path / "b")["s"]
        found = {
            "components_": got.components.numpy(),
            "V_k": got.components.mT.numpy(),
            "file_bytes_at_most": (tmp_path / "b").stat().st_size,
        }
        assert compare(case, found) == []
        assert torch.equal(got.components, vt[:k])
        assert torch.equal(got.mean, vt[k].double())
    assert compare(case, {**found, **case["wrong"]})


def test_reported_metadata_types(tmp_path):
    case = reported_case("export_metadata_types")
    save(tmp_path / "b", {"s": result()}, case["x"]["metadata"])
    got = {
        "metadata": load(tmp_path / "b").metadata,
        "raw_values_are_str": all(type(value) is str for value in raw_header(tmp_path / "b").values()),
    }
    assert compare(case, got) == []
    assert exact(got["metadata"]) == exact(case["expect"]["metadata"])
    assert compare(case, {**got, **case["wrong"]})


@pytest.mark.parametrize(
    ("results", "error", "message"),
    [
        ({}, ValueError, "`results` is empty"),
        (result(), TypeError, "`results` must map site names to results, got PCAResult"),
        ({"": result()}, ValueError, "non-empty strings as site names, got ''"),
        ({3: result()}, ValueError, "non-empty strings as site names, got 3"),
        ({"s": []}, ValueError, r"`results\['s'\]` is empty"),
        ({"s": None}, TypeError, r"`results\['s'\]` must be a PCAResult or a sequence of them, got None"),
        ({"s": [result(), 1]}, TypeError, r"`results\['s'\]` must be a PCAResult or a sequence"),
        (
            {"s": [result(), result(d=7)]},
            ValueError,
            r"`results\['s'\]`: all groups must have the same features",
        ),
        (
            {"s": replace(result(), n_samples=0)},
            ValueError,
            r"`results\['s'\]`: `n_samples` must be at least 1",
        ),
        ({"s": replace(result(), mean=torch.zeros(5))}, ValueError, r"`results\['s'\]`: `mean` must be"),
    ],
)
def test_results_that_make_no_file_are_refused(tmp_path, results, error, message):
    with pytest.raises(error, match=message):
        save(tmp_path / "b", results)
    assert list(tmp_path.iterdir()) == []


def test_neither_way_touches_the_global_generator(tmp_path):
    before = torch.get_rng_state()
    save(tmp_path / "b", {"s": result()})
    load(tmp_path / "b")
    assert torch.equal(torch.get_rng_state(), before)
