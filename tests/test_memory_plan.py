"""The plan of memory against what real processes take, what it refuses, and the choices it offers."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pca_torch import memory_plan
from pca_torch.memory_plan import parse_size, plan_memory, size_text

GIB = 2**30


@dataclass(frozen=True)
class Place:
    """As much of a site as a plan asks for."""

    name: str
    width: int | None
    heads: int = 1


def places(n, width, heads=1):
    return [Place(f"layers.{i}:output", width, heads) for i in range(n)]


CHILD = """
import gc, json, sys
import torch
from pca_torch.site_statistic import SiteStatistic
from pca_torch.solvers import decompose

sys.path.insert(0, "bench")
from children import forget_the_peak, resident

n, d, heads, rows, precision, solve = json.loads(sys.argv[1])
torch.set_num_threads(1)
x = torch.randn(rows, d, generator=torch.Generator().manual_seed(0))
x[::20] *= 50  # enough extreme rows for a statistic of their own
decompose(torch.randn(90, 8), 2, "covariance_eigh")
forget_the_peak()
before, _ = resident()
sites = [SiteStatistic(heads if heads > 1 else None, precision=precision) for _ in range(n)]
for _ in range(9):
    for site in sites:
        site.update_rows(x)
assert all(site.views._extreme is not None for site in sites)
if solve:
    everything, typical, _ = sites[0].views.result()
    results = [decompose(view, None, "covariance_eigh") for view in (everything, typical)]
print(resident()[1] - before)
"""


def measured(n, d, heads, rows, precision, solve):
    """Bytes at the peak of a fresh process, whose C library returns what is freed at once."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "1000000", "OMP_NUM_THREADS": "1"}
    case = json.dumps([n, d, heads, rows, precision, solve])
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", CHILD, case], cwd=root, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no peak of memory can be read here")
@pytest.mark.parametrize(
    ("n", "d", "heads", "rows", "precision", "solve"),
    [
        (16, 576, 1, 2048, "auto", False),
        (16, 576, 1, 2048, "float32", False),
        (30, 576, 9, 2048, "auto", False),
        (2, 1536, 1, 1024, "auto", True),
    ],
)
def test_the_plan_is_what_a_process_takes(n, d, heads, rows, precision, solve, monkeypatch):
    """Within 20 %: both count live bytes; they differ by rounded blocks and by how many rows wait."""
    if not solve:
        monkeypatch.setattr(memory_plan, "SOLVING", 0)
    plan = plan_memory(places(n, d, heads), batch_rows=rows, precision=precision, limit=100 * GIB)
    ratio = measured(n, d, heads, rows, precision, solve) / plan.total("cpu")
    assert 0.8 <= ratio <= 1.2
    sums = 8 * d * (d // heads) * n
    assert abs(sums / plan.total("cpu") - 1) > 0.2  # control: one D×D sum a site is not the answer


def test_the_figures_are_the_sum_of_their_parts():
    plan = plan_memory(places(3, 64), limit=GIB, batch_rows=4096, rows_held=10)
    square, row = 8 * 64 * 64, 4 * 64
    kept = 2 * (square + 3 * 8 * 64) + 512 * row + 10 * row + 8 * (128 * 254 + 1)
    assert plan.sites["layers.0:output"].kept == kept
    assert plan.total("cpu") == 3 * kept + max(2 * 8 * 64 * 4096, 10 * square)
    short = plan_memory(places(3, 64), limit=GIB, batch_rows=100, rows_held=10)
    assert short.sites["layers.0:output"].kept == kept + 512 * row  # all rows wait for company
    half = plan_memory(places(3, 64), limit=GIB, batch_rows=4096, rows_held=10, dtype=torch.bfloat16)
    assert half.sites["layers.0:output"].kept == kept - 522 * row // 2
    heads = plan_memory(places(1, 64, heads=4), limit=GIB, batch_rows=4096, rows_held=10)
    assert heads.sites["layers.0:output"].kept == kept - 2 * (square - square // 4)


def test_float32_products_save_nothing():
    exact, coarse = (plan_memory(places(3, 576), limit=GIB, precision=p) for p in ("float64", "float32"))
    assert coarse.total("cpu") > exact.total("cpu")


def test_passes_are_as_few_as_fit():
    whole = plan_memory(places(12, 256), limit=GIB)
    assert whole.passes == (tuple(whole.sites),)
    limit = whole.total("cpu") // 3
    plan = plan_memory(places(12, 256), limit=limit, max_passes=None)
    assert [name for group in plan.passes for name in group] == list(whole.sites)
    assert all(plan.total("cpu", group) <= limit for group in plan.passes)
    one = plan.sites["layers.0:output"]
    fit = int((limit - max(one.chunk, one.solving)) // one.kept)
    assert [len(group) for group in plan.passes] == [fit] * (12 // fit) + [12 % fit] * (12 % fit > 0)
    assert plan.total("cpu") == max(plan.total("cpu", group) for group in plan.passes) <= limit
    with pytest.raises(ValueError, match=f"count them in {len(plan.passes)} passes over the tokens"):
        plan_memory(places(12, 256), limit=limit, max_passes=len(plan.passes) - 1)


def test_a_refusal_tells_what_fits_with_its_figure():
    sites = places(12, 256)
    need = plan_memory(sites, limit=GIB).total("cpu")
    with pytest.raises(ValueError, match="statistics of 12 sites need") as caught:
        plan_memory(sites, limit="20MiB")
    text = str(caught.value)
    assert f"need {size_text(need)} on cpu, where 20.0 MiB is allowed" in text
    plan = plan_memory(sites, limit="20MiB", max_passes=None)
    most = size_text(plan.total("cpu"))
    n = len(plan.passes)
    assert (
        f"count them in {n} passes over the tokens (`max_passes={n}` or `--passes {n}`, {most} at most)"
        in text
    )
    assert "on the CPU" not in text  # they are there already
    alone = plan_memory(sites[:1], limit=GIB).total("cpu")
    assert f"capture fewer sites (the largest takes {size_text(alone)} alone)" in text


def test_a_site_that_does_not_fit_alone_leaves_no_passes_to_offer():
    with pytest.raises(ValueError, match="capture fewer sites") as caught:
        plan_memory([*places(3, 64), Place("wide", 4096)], limit="100MB", max_passes=None)
    assert "passes" not in str(caught.value)


def test_a_gpu_that_is_full_is_offered_the_cpu(monkeypatch):
    free = {"cuda": GIB // 2, "cpu": 64 * GIB}
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: free[device.type])
    sites = places(4, 4096)
    with pytest.raises(ValueError, match=r"on cuda, where 409\.6 MiB is allowed") as caught:
        plan_memory(sites, device="cuda", precision="float64")
    figure = re.search(r"keep them on the CPU \(`--statistics-on cpu`, (\S+ GiB) there\)", str(caught.value))
    assert figure
    assert 4 * 2 * 8 * 4096**2 / GIB < float(figure[1].split()[0]) < 64
    free["cpu"] = GIB
    with pytest.raises(ValueError, match="need") as caught:
        plan_memory(sites, device="cuda", precision="float64")
    assert "CPU" not in str(caught.value)


def test_devices_have_limits_of_their_own(monkeypatch):
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: GIB)
    sites = places(4, 512)
    where = {site.name: f"cuda:{i // 2}" for i, site in enumerate(sites)}
    plan = plan_memory(sites, device=where, precision="float64")
    assert list(plan.limits) == ["cuda:0", "cuda:1"]
    alone = plan_memory(sites[:2], device="cuda:0", precision="float64")
    assert plan.total("cuda:0") == plan.total("cuda:1") == alone.total("cuda:0")
    assert set(plan.limits.values()) == {int(0.8 * GIB)}


def test_nobody_says_what_is_free(monkeypatch):
    monkeypatch.setattr(memory_plan, "free_memory", lambda device: None)
    plan = plan_memory(places(4000, 4096))
    assert plan.limits == {"cpu": None}
    assert plan.lines() == [f"statistics of 4000 sites on cpu: {size_text(plan.total('cpu'))} at most"]
    with pytest.raises(ValueError, match="nobody says what is free here; give bytes"):
        plan_memory(places(4, 64), limit="50%")


def test_sites_of_unknown_width_are_listed_not_counted():
    plan = plan_memory([*places(2, 64), Place("late", None)], limit=GIB)
    assert plan.unknown == ("late",)
    assert plan.passes == (("layers.0:output", "layers.1:output", "late"),)
    assert plan.total("cpu") == plan_memory(places(2, 64), limit=GIB).total("cpu")
    split = plan_memory([*places(2, 512), Place("late", None)], limit="30MB", max_passes=None)
    assert split.passes == (("layers.0:output", "late"), ("layers.1:output",))
    assert plan_memory([Place("late", None)]).passes == (("late",),)


def test_lines_fit_a_terminal_and_a_report():
    plan = plan_memory(places(300, 512), limit="200MB", max_passes=None)
    lines = plan.lines()
    assert all(len(line) <= 80 for line in lines)
    assert (
        lines[0] == f"statistics of 300 sites on cpu: {size_text(plan.total('cpu'))} at most, limit 190.7 MiB"
    )
    assert lines[1].startswith(f"in {len(plan.passes)} passes over the tokens, of ")
    assert json.loads(json.dumps(plan.to_dict())) == plan.to_dict()
    assert plan.to_dict()["bytes"] == {"cpu": plan.total("cpu")}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("2GiB", 2 * GIB),
        ("2 gib", 2 * GIB),
        ("1.5KiB", 1536),
        ("500MB", 500 * 10**6),
        (" .5GB ", 5 * 10**8),
        ("123", 123),
        ("7B", 7),
        ("1TB", 10**12),
        ("50%", 500),
        ("100%", 1000),
    ],
)
def test_sizes_are_read(text, want):
    assert parse_size(text, available=1000) == want


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GB", "0", "0%", "101%", "2 GiBs", "2XB", "1e9", "nan", "2,5GB"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"`memory` must be a size such as 2GiB, 500MB or 50%, got"):
        parse_size(text, available=1000)


@pytest.mark.parametrize(
    ("size", "want"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB")]
)
def test_sizes_are_written(size, want):
    assert size_text(size) == want


@pytest.mark.parametrize("wrong", [{"batch_rows": 0}, {"rows_held": -1}, {"max_passes": 0}, {"limit": 0}])
def test_arguments_are_checked(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be"):
        plan_memory(places(1, 8), **wrong)
