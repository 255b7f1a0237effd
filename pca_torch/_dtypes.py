"""Dtypes by the names that files call them, told once."""

from __future__ import annotations

import torch

__all__ = ["FLOATING", "READABLE", "STORED"]

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}

STORED = _FLOATS | {"I64": torch.int64}  # in our safetensors files, by the names of that format
READABLE = STORED | {  # in those of others: real numbers of 8 to 64 bits
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOATING = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS.values()}  # by the names of torch
