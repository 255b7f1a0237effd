"""Tensors of safetensors files: the bytes of the file, refused in one line, never trusted before measured."""

import json
import os
import tracemalloc

import numpy as np
import pytest
import safetensors.torch
import torch

from pca_torch._dtypes import READABLE
from pca_torch.sources import SafetensorsSource, open_sources
from pca_torch.sources.safetensors import SafetensorError
from tests.support import reported_case


def rows_of(source):
    """A copy of every row."""
    blocks = [block.clone() for block in source]
    return torch.cat(blocks) if blocks else torch.empty(0, source.n_features, dtype=source.dtype)


def attempt(make):
    """The rows of the source that `make` opens, or the error."""
    try:
        return rows_of(make())
    except (ValueError, OSError) as error:
        return error


def bits(x):
    """The bytes of a tensor: equality of NaN and of signed zeros counts too."""
    return x.contiguous().view(torch.uint8)


def save(path, metadata=None, **tensors):
    safetensors.torch.save_file(tensors, path, metadata=metadata)
    return path


def numbers(shape, dtype, seed=0):
    """Numbers of `dtype`, negative ones among them where it has such."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 50
    return x.abs().to(dtype) if dtype in {torch.uint16, torch.uint32, torch.uint64} else x.to(dtype)


def one_line(error):
    return "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", READABLE.values(), ids=READABLE)
def test_blocks_are_the_rows_of_the_file(tmp_path, dtype):
    want = numbers((23, 5), dtype)
    source = SafetensorsSource(save(tmp_path / "x.safetensors", x=want), block_rows=4)
    for _ in range(2):  # any number of times
        assert torch.equal(bits(rows_of(source)), bits(want))
    assert [len(block) for block in source] == [4, 4, 4, 4, 4, 3]
    assert (source.n_rows, source.n_features, source.shape, source.dtype) == (23, 5, (23, 5), dtype)
    assert len({block.data_ptr() for block in source}) == 1


def test_every_pattern_of_two_bytes_survives(tmp_path):
    want = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(-1, 64)
    source = SafetensorsSource(save(tmp_path / "x.safetensors", x=want))
    assert torch.equal(bits(rows_of(source)), bits(want))


def test_leading_axes_are_flattened_to_rows(tmp_path):
    want = numbers((2, 3, 4, 5), torch.float32)
    source = SafetensorsSource(save(tmp_path / "x.safetensors", x=want), block_rows=7)
    assert source.n_rows == 24
    assert torch.equal(rows_of(source), want.view(-1, 5))


def test_one_of_several_tensors(tmp_path):
    a, b = numbers((6, 3), torch.float16), numbers((4, 2), torch.float64)
    path = save(tmp_path / "x.safetensors", {"about": "two"}, a=a, b=b, token=torch.arange(6))
    assert torch.equal(rows_of(SafetensorsSource(path, "a")), a)
    assert torch.equal(rows_of(SafetensorsSource(path, "b")), b)
    with pytest.raises(
        ValueError,
        match=r"x\.safetensors: holds several tensors; say which with `tensor`.* a, b, token",
    ):
        SafetensorsSource(path)
    with pytest.raises(ValueError, match=r"x\.safetensors: no tensor 'c'; there is a, b, token"):
        SafetensorsSource(path, "c")


def test_the_only_table_needs_no_name(tmp_path):
    path = save(tmp_path / "x.safetensors", rows=torch.ones(3, 2), token=torch.arange(3))
    assert SafetensorsSource(path).tensor == "rows"


def test_no_rows_give_no_blocks(tmp_path):
    source = SafetensorsSource(save(tmp_path / "x.safetensors", x=torch.empty(0, 3)))
    assert list(source) == []
    assert (source.n_rows, source.n_features) == (0, 3)


def test_memory_is_one_block_whatever_the_size(tmp_path):
    path = save(tmp_path / "x.safetensors", x=torch.zeros(2**16, 64))  # 16 MiB
    source = SafetensorsSource(path, block_rows=2**10)
    tracemalloc.start()
    rows = sum(len(block) for block in source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 2**16
    assert peak < 2**10 * 64 * 4 + 2**16  # the block, and the little that a loop needs


def test_bytes_that_are_no_booleans_are_true(tmp_path):
    path = save(tmp_path / "x.safetensors", x=torch.zeros(2, 2, dtype=torch.bool))
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x01\x02\xff")
    assert rows_of(SafetensorsSource(path)).double().tolist() == [[0.0, 1.0], [1.0, 1.0]]


REFUSED = {
    "flat": (torch.arange(5.0), r"tensor 'x': must have shape \(\.\.\., D\).*at least two.*got \(5,\); save"),
    "scalar": (torch.tensor(3.0), r"at least two dimensions, got \(\)"),
    "no_columns": (torch.empty(4, 0), r"at least one column, got \(4, 0\)"),
    "small_float": (
        torch.ones(2, 2).to(torch.float8_e4m3fn),
        "must hold real numbers of 8 to 64 bits, got F8_E4M3",
    ),
    "complex": (torch.ones(2, 2, dtype=torch.complex64), "must hold real numbers of 8 to 64 bits, got C64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_table_of_real_numbers_is_refused(tmp_path, name):
    tensor, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"x\.safetensors: .*{message}") as error:
        SafetensorsSource(save(tmp_path / "x.safetensors", x=tensor))
    assert one_line(error)


def content(header, data=b"", length=None):
    """A file with this header, and any length of it that one likes to claim."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def claim(shape, offsets, dtype="F32"):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


LIES = {
    "empty": (b"", "the file is empty"),
    "short": (b"\x08\x00", "not a whole safetensors file"),
    "zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "npy": (b"\x93NUMPY\x01\x00" + bytes(60), "not a whole safetensors file"),
    "no_tensor": (content({}), "holds no tensor"),
    "header_length": (content({}, length=2**62), "not a whole safetensors file"),
    "truncated": (content(claim([2, 3], [0, 24]), bytes(20)), "not a whole safetensors file"),
    "trailing": (content(claim([2, 3], [0, 24]), bytes(28)), "not a whole safetensors file"),
    "shape": (content(claim([2, 4], [0, 24]), bytes(24)), "not a whole safetensors file"),
    "overflow": (content(claim([2**40, 2**40], [0, 24]), bytes(24)), "not a whole safetensors file"),
    "negative": (content(claim([-2, -3], [0, 24]), bytes(24)), "not a whole safetensors file"),
    "hole": (content(claim([2, 3], [8, 32]), bytes(32)), "not a whole safetensors file"),
    "not_json": (content(b"{'x': 1}"), "not a whole safetensors file"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_file_is_refused(tmp_path, name):
    data, message = LIES[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"x\.safetensors: .*{message}") as error:
        SafetensorsSource(path)
    assert one_line(error)


def test_a_reported_bad_file_is_refused(tmp_path):
    name = "really_a_zip.safetensors"
    (tmp_path / name).write_bytes(reported_case("cli_bad_files")["x"]["files"][name])
    with pytest.raises(ValueError, match=f"{name}: a zip archive") as error:
        SafetensorsSource(tmp_path / name)
    assert one_line(error)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.safetensors: no such file"):
        SafetensorsSource(tmp_path / "nothing.safetensors")
    with pytest.raises(ValueError, match="not a file"):
        SafetensorsSource(tmp_path)
    with pytest.raises(ValueError, match="`block_rows` must be an integer of at least 1, got 0"):
        SafetensorsSource(save(tmp_path / "x.safetensors", x=torch.ones(2, 2)), block_rows=0)


@pytest.mark.parametrize("change", ["shrink", "rewrite", "replace"])
def test_a_file_that_changes_is_an_error(tmp_path, change):
    path = save(tmp_path / "x.safetensors", x=torch.zeros(8, 2))
    source = SafetensorsSource(path, block_rows=2)
    blocks = iter(source)
    next(blocks)
    if change == "shrink":
        os.truncate(path, path.stat().st_size - 8)
    elif change == "rewrite":
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        os.utime(path, ns=(0, 1))  # a clock that is too coarse to see the moment between
    else:
        os.replace(save(tmp_path / "y.safetensors", x=torch.ones(8, 2)), path)
        blocks = iter(source)
    with pytest.raises(ValueError, match=r"x\.safetensors: the file changed after it was opened"):
        list(blocks)


def indexed(folder, weight_map):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_an_index_names_the_file_of_a_tensor(tmp_path):
    a, b = numbers((6, 3), torch.bfloat16), numbers((4, 2), torch.float32)
    save(tmp_path / "model-1.safetensors", a=a)
    save(tmp_path / "model-2.safetensors", b=b, bias=torch.ones(2))
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors", "bias": "model-2.safetensors"}
    path = indexed(tmp_path, files)
    (source,) = open_sources(path, tensor="b")
    assert source.path.name == "model-2.safetensors"
    assert torch.equal(rows_of(source), b)
    with pytest.raises(ValueError, match=r"index\.json: holds several tensors; say which .*a, b"):
        open_sources(path)
    with pytest.raises(ValueError, match=r"index\.json: no tensor 'c'; there is a, b, bias"):
        open_sources(path, tensor="c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no index of safetensors files"),
        ('{"weight_map": {"a": 3}}', "is no index of safetensors files"),
        ('{"weight_map": {}}', "holds no tensor"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "is not the name of a file beside the index"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "is not the name of a file beside the index"),
    ],
)
def test_a_bad_index_is_refused(tmp_path, text, message):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"index\.json: .*{message}") as error:
        open_sources(path)
    assert one_line(error)


def reference(path):
    """What the library makes of the file, if it takes it and there is one table in it; else None."""
    try:
        tensors = safetensors.torch.load_file(path)
    except (SafetensorError, OSError, KeyError, RuntimeError):
        return None
    tables = [x for x in tensors.values() if x.ndim >= 2] or list(tensors.values())
    return tables[0] if len(tables) == 1 else None


def damaged(data, rng):
    """`data` with a bit flipped, a byte set, the end cut, or something put in."""
    data = bytearray(data)
    at = int(rng.integers(min(len(data), 120)))  # the header, mostly
    match int(rng.integers(6)):
        case 0 | 1 | 2:
            data[at] ^= 1 << int(rng.integers(8))
        case 3:
            data[at] = int(rng.choice(list(b'0123456789{}[],:"-e')))
        case 4:
            del data[int(rng.integers(len(data))) :]
        case 5:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(data)


def test_a_thousand_damaged_files_are_read_right_or_refused(tmp_path):
    rng, path = np.random.default_rng(1), tmp_path / "x.safetensors"
    sound = [
        save(path, x=numbers((170, 3), dtype), **others).read_bytes()
        for dtype in (torch.float32, torch.bfloat16, torch.bool)
        for others in ({}, {"token": torch.arange(4)})
    ]
    read = 0
    for i in range(1000):
        path.write_bytes(damaged(sound[i % len(sound)], rng))
        want = reference(path)
        got = attempt(lambda: SafetensorsSource(path, block_rows=50))
        if isinstance(got, Exception):
            assert str(path) in str(got)
            assert "\n" not in str(got)
            assert want is None or want.ndim < 2 or want.shape[-1] == 0 or want.dtype not in READABLE.values()
        else:
            read += 1
            assert want is not None
            want = want.view(torch.uint8) != 0 if want.dtype == torch.bool else want
            assert torch.equal(bits(got), bits(want.reshape(got.shape)))
    assert 100 < read < 900  # both branches did their work
