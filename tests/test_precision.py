"""Which arithmetic is chosen, and that the caller's shortcuts neither come in nor are lost."""

import threading

import pytest
import torch

from pca_torch.precision import component_dtype, exact_products, product_dtype, unit_roundoff

CPU = torch.device("cpu")
HALF_TYPES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_TYPES])
def test_roundoff_is_the_largest_relative_error_of_rounding(dtype):
    u = unit_roundoff(dtype)
    x = 1 + torch.rand(10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if dtype != torch.float64:  # nothing finer to compare with
        seen = ((x.to(dtype).double() - x).abs() / x).max().item()
        assert u / 2 < seen <= u
    one = torch.ones((), dtype=dtype)
    assert one + u == 1  # a tie goes to the even neighbour
    assert one + 2 * u > 1


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_half_types_and_float32_work_in_float32(dtype):
    assert component_dtype(dtype) == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.bool])
def test_float64_and_integers_work_in_float64(dtype):
    assert component_dtype(dtype) == torch.float64


@pytest.mark.parametrize(
    ("capability", "dtype", "want"),
    [
        ((8, 0), torch.float32, torch.float64),  # half-rate float64
        ((9, 0), torch.bfloat16, torch.float64),
        ((8, 6), torch.float32, torch.float32),  # a consumer card, 1/64
        ((8, 9), torch.bfloat16, torch.float32),
        ((8, 9), torch.float64, torch.float64),  # the data ask for it
        ((8, 9), torch.int32, torch.float64),
    ],
)
def test_auto_takes_float64_where_it_is_cheap_or_needed(monkeypatch, capability, dtype, want):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert product_dtype(dtype, torch.device("cuda")) == want
    assert product_dtype(dtype, CPU) == torch.float64


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_what_was_asked_for_is_taken(name):
    for dtype in (torch.bfloat16, torch.float64):
        assert product_dtype(dtype, CPU, name) == getattr(torch, name)


def test_another_precision_is_refused():
    with pytest.raises(
        ValueError, match="`precision` must be one of 'auto', 'float32', 'float64', got 'tf32'"
    ):
        product_dtype(torch.float32, CPU, "tf32")  # pyright: ignore[reportArgumentType]


def test_autocast_autograd_and_inference_stay_outside():
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert (x.mT @ x).dtype == torch.bfloat16  # control: what would come out
        with exact_products(CPU):
            made = x.mT @ x
        assert (x.mT @ x).dtype == torch.bfloat16
        assert torch.is_inference_mode_enabled()
    assert made.dtype == torch.float32
    assert not made.requires_grad
    assert not made.is_inference()
    assert torch.equal(made, x.detach().mT @ x.detach())


def fail(matmul):
    assert matmul.fp32_precision == "ieee"
    raise RuntimeError("inside")


def test_each_backend_setting_comes_back_by_itself():
    """One backend may be set apart from the others: the global switch would level them."""
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        with pytest.raises(RuntimeError, match="inside"), exact_products(CPU):
            fail(matmul)
        assert matmul.fp32_precision == "bf16"
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("who_leaves_first", ["first", "second"])
def test_overlapping_fits_stay_exact_and_give_the_switches_back(who_leaves_first):
    """The switches are the process's: the first to leave may not switch TF32 on under the other."""
    inside, both = threading.Event(), threading.Event()
    left = {"first": threading.Event(), "second": threading.Event()}
    seen = []
    matmul = torch.backends.mkldnn.matmul

    def run(name, entered, wait_for):
        with exact_products(CPU):
            entered.set()
            assert wait_for.wait(10)
            if name != who_leaves_first:
                assert left[who_leaves_first].wait(10)
            seen.append(matmul.fp32_precision)
        left[name].set()

    def second():
        assert inside.wait(10)
        run("second", both, both)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        wanted = matmul.fp32_precision
        assert wanted != "ieee"
        other = threading.Thread(target=second)
        other.start()
        run("first", inside, both)
        other.join()
        assert seen == ["ieee", "ieee"]
        assert matmul.fp32_precision == wanted
    finally:
        torch.set_float32_matmul_precision(before)
