"""Checks at the door: one sentence with the parameter, what is allowed, what came, what to do."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

LARGEST_INTEGER = 2**53  # float64 holds every integer up to here, and not the next one
LARGEST = 1e70  # squares of the variances of larger values leave float64
WEIGHTS = 1e-70, 1e70  # likewise squares of weights, and their sums
LAPACK_LARGEST = 32766  # beyond this the 32-bit work sizes of LAPACK's eigensolvers overflow


def as_tensor(x: Any, name: str = "x") -> Tensor:
    """`x` as a real tensor that may share its memory (nothing here writes to it).

    Args:
        x: a tensor, an array, or nested numbers.
        name: how errors call it.

    Raises:
        TypeError: not numeric, wider than 64 bits, complex, or with integers that float64 cannot hold.
        ValueError: sparse, or a masked array.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise ValueError(
            f"`{name}` is a masked array, whose mask would be lost; pass `{name}.data` and a `mask`."
        )
    if hasattr(x, "tocsr"):
        raise ValueError(_dense_only(name))
    if not isinstance(x, Tensor):
        array = np.asarray(x)
        if array.dtype.kind == "c":
            raise TypeError(
                f"`{name}` must be real, got {array.dtype}; "
                f"pass `np.concatenate([np.real({name}), np.imag({name})], -1)`."
            )
        if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
            raise TypeError(
                f"`{name}` must be a numeric array or tensor of at most 64 bits, "
                f"got {type(x).__name__} of {array.dtype}."
            )
        if array.dtype == np.float64 and isinstance(x, list | tuple):
            _check_mixed(x, array, name)
        # native bytes in C order, as torch asks; not `ascontiguousarray`, which turns 0-d into 1-d
        array = np.asarray(array, array.dtype.newbyteorder("="), order="C")
        if not array.flags.writeable:  # torch warns about a read-only buffer; we only read
            array = array.copy()
        x = torch.from_numpy(array)
    if x.layout != torch.strided:
        raise ValueError(_dense_only(name))
    if x.is_complex():
        raise TypeError(
            f"`{name}` must be real, got {x.dtype}; pass `torch.view_as_real({name}).flatten(-2)`."
        )
    _check_integers(x, name)
    return x


def _check_integers(x: Tensor, name: str) -> None:
    """Refuse integers that float64 would round.

    Raises:
        TypeError: one is larger in size than 2⁵³.
    """
    if x.dtype not in {torch.int64, torch.uint64} or not x.numel():
        return
    signed = x.view(torch.int64)  # uint64 knows no order; its values from 2⁶³ on turn negative
    low, high = (int(end) for end in signed.aminmax())  # not by `abs`: that of the lowest int64 is negative
    lowest = -LARGEST_INTEGER if x.dtype == torch.int64 else 0
    if low < lowest or high > LARGEST_INTEGER:
        _refuse_integers(name)


def _check_mixed(x: Any, array: np.ndarray, name: str) -> None:
    """Refuse nested numbers whose integers were rounded when floats, or both signs, stood beside them.

    Raises:
        TypeError: one is larger in size than 2⁵³.
    """
    if not bool((np.abs(array) >= LARGEST_INTEGER).any()):
        return
    flat = np.asarray(x, dtype=object).ravel()
    if any(isinstance(value, numbers.Integral) and abs(int(value)) > LARGEST_INTEGER for value in flat):
        _refuse_integers(name)


def _refuse_integers(name: str) -> NoReturn:
    raise TypeError(
        f"`{name}` holds integers beyond 2^53, which float64 cannot hold exactly; "
        "subtract an offset as integers, or convert them to float64 if rounding them is meant."
    )


def _dense_only(name: str) -> str:
    return (
        f"`{name}` must be dense here, got a sparse matrix, which `decompose` and `PCA.fit` take; "
        f"pass `{name}.to_dense()`, a part of the rows at a time where memory is short."
    )


def as_rows(
    x: Any, d: int | None = None, name: str = "x", what: str = "features"
) -> tuple[Tensor, tuple[int, ...]]:
    """`x` (..., D) as rows (N, D), and the leading shape.

    Args:
        x: samples, D last.
        d: the D expected; None takes what comes.
        name: how errors call `x`.
        what: how errors call its columns.

    Raises:
        ValueError: fewer than two dimensions where rows are needed, no columns, or another D.
    """
    x = as_tensor(x, name)
    if x.ndim < 1 or (d is None and x.ndim < 2):
        raise ValueError(
            f"`{name}` must have shape (..., D) with at least two dimensions, got {tuple(x.shape)}."
        )
    if d is None and x.shape[-1] == 0:
        raise ValueError(f"`{name}` must have at least one column, got shape {tuple(x.shape)}.")
    if d is not None and x.shape[-1] != d:
        hint = f" If {what} come first, pass `{name}.mT`." if x.ndim >= 2 and x.shape[-2] == d else ""
        raise ValueError(f"`{name}` must end in {d} {what}, got shape {tuple(x.shape)}.{hint}")
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]), tuple(x.shape[:-1])


def as_mask(mask: Any, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """`mask` as flat booleans (N,), or None.

    Args:
        mask: 0/1 in any dtype, shaped like the leading dimensions of the data.
        shape: those dimensions.
        device: where the data are.

    Raises:
        ValueError: another shape, or values other than 0 and 1.
    """
    if mask is None:
        return None
    mask = as_tensor(mask, "mask").to(device)
    if tuple(mask.shape) != shape:
        raise ValueError(f"`mask` must have the leading shape of `x`, {shape}, got {tuple(mask.shape)}.")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError(
            "`mask` must hold 0 and 1 only, got other values; fractional importance goes in `weights`."
        )
    return mask.reshape(-1).bool()


def as_weights(weights: Any, shape: tuple[int, ...], device: torch.device) -> Tensor | None:
    """`weights` as flat float64 (N,), or None.

    Args:
        weights: non-negative finite numbers, shaped like the leading dimensions of the data.
        shape: those dimensions.
        device: where the data are.

    Raises:
        ValueError: another shape, a negative, or a value that is not finite.
    """
    if weights is None:
        return None
    weights = as_tensor(weights, "weights").to(device).double()
    if tuple(weights.shape) != shape:
        raise ValueError(
            f"`weights` must have the leading shape of `x`, {shape}, got {tuple(weights.shape)}."
        )
    weights = weights.reshape(-1)
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()):
        raise ValueError(
            "`weights` must be finite and not negative; select rows with `mask` to leave them out."
        )
    counted = weights[weights > 0]
    if len(counted) and not WEIGHTS[0] <= counted.min().item() <= counted.max().item() <= WEIGHTS[1]:
        raise ValueError(
            f"`weights` must be 0 or between {WEIGHTS[0]:g} and {WEIGHTS[1]:g}, got {counted.min().item():g} "
            f"to {counted.max().item():g}; divide them by their largest."
        )
    return weights


def select_rows(
    rows: Tensor, mask: Tensor | None, weights: Tensor | None, nonfinite: str
) -> tuple[Tensor, Tensor | None, int]:
    """Rows that count, their weights, and how many were dropped for NaN or inf.

    Rows are selected, never multiplied by the mask: 0·NaN is NaN.

    Args:
        rows: (N, D).
        mask: (N,) booleans, or None.
        weights: (N,) float64, or None; rows of weight zero do not count.
        nonfinite: "raise" or "drop".

    Raises:
        ValueError: a row that counts has NaN or inf, under "raise".
    """
    if weights is not None:
        mask = (weights > 0) if mask is None else mask & (weights > 0)
    if mask is not None:
        rows, weights = rows[mask], None if weights is None else weights[mask]
    if _surely_fine(rows):
        return rows, weights, 0
    if rows.dtype == torch.float64 and float(rows.abs().nan_to_num(0, 0).max()) > LARGEST:
        raise ValueError(
            f"`x` has values beyond {LARGEST:g}, whose squares leave float64; divide it by its largest value."
        )
    good = rows.isfinite().all(1)
    bad = len(rows) - int(good.sum())
    if bad and nonfinite == "raise":
        raise ValueError(
            f"`x` has {bad} of {len(rows)} samples with NaN or inf. "
            "Drop them (nonfinite='drop'), or capture in bfloat16: float16 overflows at 65504."
        )
    if not bad:
        return rows, weights, 0
    return rows[good], None if weights is None else weights[good], bad


def _surely_fine(rows: Tensor) -> bool:
    """Whether one fast pass shows that all values are finite and in range; a closer look decides if not."""
    if not rows.is_floating_point() or not rows.numel():
        return True
    if rows.dtype == torch.float64:
        low, high = rows.aminmax()  # NaN if one is
        return bool((low >= -LARGEST) & (high <= LARGEST))
    wide = None if rows.dtype == torch.float32 else torch.float32  # half types would overflow sooner
    return bool(rows.sum(dtype=wide).isfinite())  # in float64 it takes sixty times as long


def as_components(n_components: Any) -> int | float | None:
    """`n_components` as an int, a float share, or None.

    Raises:
        ValueError: neither a count ≥ 0, nor a share in (0, 1], nor None.
    """
    allowed = "`n_components` must be an integer ≥ 0, a share in (0, 1] as a float, or None"
    if n_components is None:
        return None
    if not isinstance(n_components, bool):
        if isinstance(n_components, numbers.Integral) and int(n_components) >= 0:
            return int(n_components)
        if isinstance(n_components, float | np.floating) and 0 < float(n_components) <= 1:
            return float(n_components)
    raise ValueError(f"{allowed}, got {n_components!r}.")


def check_number(value: Any, name: str, allowed: str, ok: bool) -> None:
    """Raise the ValueError of a number out of range.

    Raises:
        ValueError: `ok` is false.
    """
    if not ok:
        raise ValueError(f"`{name}` must be {allowed}, got {value!r}.")


def check_positive(value: Any, name: str) -> None:
    """Refuse what is neither None nor a number above zero.

    Raises:
        ValueError: it is neither.
    """
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    check_number(value, name, "a number > 0 or None", value is None or (number and float(value) > 0))


def check_whole(value: Any, name: str, least: int) -> None:
    """Refuse what is no integer from `least` on.

    Raises:
        ValueError: it is none.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    allowed = "a positive integer" if least == 1 else f"an integer ≥ {least}"
    check_number(value, name, allowed, whole and int(value) >= least)


def check_flag(value: Any, name: str) -> None:
    """Refuse what is neither true nor false.

    Raises:
        ValueError: it is neither.
    """
    check_number(value, name, "True or False", isinstance(value, bool | np.bool_))


def check_seed(random_state: Any) -> None:
    """Refuse what is no seed, no generator and not None.

    Raises:
        ValueError: it is none of them.
    """
    whole = isinstance(random_state, numbers.Integral) and not isinstance(random_state, bool)
    whole = whole and -(2**63) <= int(random_state) < 2**64
    fine = random_state is None or whole or isinstance(random_state, torch.Generator)
    check_number(
        random_state, "random_state", "an integer of at most 64 bits, a `torch.Generator` or None", fine
    )


def check_ddof(ddof: Any) -> None:
    """Refuse delta degrees of freedom that are no number ≥ 0.

    Raises:
        ValueError: they are not.
    """
    number = isinstance(ddof, numbers.Real) and not isinstance(ddof, bool)
    check_number(ddof, "ddof", "a number ≥ 0", number and float(ddof) >= 0)


def divisor_of(
    n: int,
    weight: float,
    weight_sq: float,
    ddof: float,
    empty: str = "`x` has no rows that count; give at least one sample.",
) -> float:
    """Σw - ddof·Σw²/Σw, which is N - ddof without weights.

    Args:
        n: N.
        weight: Σw.
        weight_sq: Σw².
        ddof: delta degrees of freedom.
        empty: what to say where there are no rows.

    Raises:
        ValueError: nothing would be left to divide by.
    """
    if n == 0:
        raise ValueError(empty)
    divisor = weight - ddof * weight_sq / weight
    if divisor <= 1e-12 * weight:
        raise ValueError(
            f"`ddof` = {ddof} needs more than {ddof} samples, got {n}; give more, or pass ddof=0."
        )
    return divisor


def check_choice(value: Any, name: str, choices: Sequence[str]) -> None:
    """Refuse a value that is none of `choices`.

    Raises:
        ValueError: it is none of them.
    """
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated on `device`; None where nobody says."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached  # what torch keeps for itself is ours to use
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def require_square(d: int, copies: int, device: torch.device, remedy: str) -> None:
    """Refuse a D×D problem that will not fit, before anything is allocated.

    Args:
        d: D.
        copies: float64 matrices of D×D that are alive at once.
        device: where they would lie.
        remedy: what to do instead, a clause.

    Raises:
        ValueError: D is beyond LAPACK, or the memory is not there.
    """
    need, free = 8 * copies * d * d, free_memory(device)
    if free is not None and need > free:
        raise ValueError(
            f"a {d} × {d} covariance needs {need / 2**30:,.1f} GiB on {device}, "
            f"{free / 2**30:,.1f} GiB is free; {remedy}."
        )
    if d > LAPACK_LARGEST:
        raise ValueError(f"a {d} × {d} eigenproblem is beyond LAPACK's {LAPACK_LARGEST}; {remedy}.")
