"""`.npy` files: read right by blocks, refused in one line, and never trusted before they are measured."""

import io
import os
import time
import tracemalloc
import warnings

import numpy as np
import pytest
import torch

from pca_torch.sources import NpySource
from tests.support import reported_case

FLOATS = ["<f2", ">f2", "<f4", ">f4", "<f8", ">f8"]
INTEGERS = ["|i1", "|u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">u4", "<i8", ">i8", ">u8"]


def read_all(source):
    """A copy of every row, as numpy."""
    blocks = [block.numpy().copy() for block in source]
    return np.concatenate(blocks) if blocks else np.empty((0, source.n_features))


def save(path, array, version=None):
    with path.open("wb") as file:
        np.lib.format.write_array(file, array, version=version, allow_pickle=True)
    return path


def one_line(error):
    return "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "?"])
def test_blocks_are_the_rows_of_the_file(tmp_path, dtype):
    want = (np.random.default_rng(0).standard_normal((23, 5)) * 50).astype(dtype)
    source = NpySource(save(tmp_path / "x.npy", want), block_rows=4)
    for _ in range(2):  # any number of times
        got = read_all(source)
        assert np.array_equal(got, want)
    assert [len(block) for block in source] == [4, 4, 4, 4, 4, 3]
    assert (source.n_rows, source.n_features, source.shape) == (23, 5, (23, 5))
    assert all(block.dtype == source.dtype for block in source)
    assert source.dtype == torch.from_numpy(want.astype(want.dtype.newbyteorder("="))).dtype


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(tmp_path, version):
    want = np.arange(12.0).reshape(4, 3)
    assert np.array_equal(read_all(NpySource(save(tmp_path / "x.npy", want, version))), want)


def test_leading_axes_are_flattened_to_rows(tmp_path):
    want = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    source = NpySource(save(tmp_path / "x.npy", want), block_rows=7)
    assert source.n_rows == 24
    assert np.array_equal(read_all(source), want.reshape(-1, 5))


def test_a_block_is_a_view_of_one_buffer(tmp_path):
    source = NpySource(save(tmp_path / "x.npy", np.arange(8.0).reshape(4, 2)), block_rows=2)
    places = [block.data_ptr() for block in source]
    assert len(places) == 2
    assert len(set(places)) == 1


def test_memory_is_one_block_whatever_the_size(tmp_path):
    path = save(tmp_path / "x.npy", np.zeros((2**16, 64), np.float32))  # 16 MiB
    source = NpySource(path, block_rows=2**10)
    tracemalloc.start()
    rows = sum(len(block) for block in source)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 2**16
    assert peak < 2**10 * 64 * 4 + 2**16  # the block, and the little that a loop needs


def test_the_default_block_is_about_16_mib(tmp_path):
    assert NpySource(save(tmp_path / "wide.npy", np.zeros((4, 2**20), np.float64))).block_rows == 2
    assert (
        NpySource(save(tmp_path / "narrow.npy", np.zeros((4, 3)))).block_rows == 4
    )  # never more than there is


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (1, 1, 5)])
def test_fortran_order_with_one_long_axis_is_the_same_order(tmp_path, shape):
    want = np.arange(5.0).reshape(shape)
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f8", "fortran_order": True, "shape": shape})
    path = tmp_path / "x.npy"
    path.write_bytes(buffer.getvalue() + want.tobytes())
    assert np.array_equal(read_all(NpySource(path)), np.load(path).reshape(-1, shape[-1]))


def test_fortran_order_is_refused(tmp_path):
    path = save(tmp_path / "x.npy", np.asfortranarray(np.arange(6.0).reshape(3, 2)))
    with pytest.raises(ValueError, match=r"x\.npy: stored in Fortran order.*ascontiguousarray"):
        NpySource(path)


def test_no_rows_give_no_blocks(tmp_path):
    source = NpySource(save(tmp_path / "x.npy", np.empty((0, 3), np.float32)))
    assert list(source) == []
    assert (source.n_rows, source.n_features) == (0, 3)


def test_bytes_that_are_no_booleans_are_true(tmp_path):
    path = save(tmp_path / "x.npy", np.zeros((2, 2), bool))
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x01\x02\xff")
    assert torch.cat(list(NpySource(path))).double().tolist() == [[0.0, 1.0], [1.0, 1.0]]


REFUSED = {
    "object": (np.array([[object()]]), "real numbers of at most 64 bits"),
    "complex": (np.ones((2, 2), complex), "real numbers of at most 64 bits, got complex128"),
    "long_double": (np.ones((2, 2), np.longdouble), "real numbers of at most 64 bits"),
    "text": (np.array([["a", "b"]]), "real numbers"),
    "date": (np.zeros((2, 2), "M8[s]"), "real numbers"),
    "fields": (np.zeros((2, 2), [("a", "f4")]), "real numbers"),
    "bfloat16": (np.zeros((2, 2), "V2"), r"bfloat16; save `x\.float\(\)\.numpy\(\)`"),
    "scalar": (np.float64(3.0), r"at least two dimensions, got \(\)"),
    "flat": (np.arange(5.0), r"at least two dimensions, got \(5,\)"),
    "no_columns": (np.empty((4, 0)), r"at least one column.*got \(4, 0\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_table_of_real_numbers_is_refused(tmp_path, name):
    array, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"x\.npy: .*{message}") as error:
        NpySource(save(tmp_path / "x.npy", array))
    assert one_line(error)


def header(shape, descr="<f4", order=False, version=(1, 0)):
    """The start of a file that claims `shape`."""
    text = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}}}".encode()
    return np.lib.format.magic(*version) + len(text).to_bytes(2 if version == (1, 0) else 4, "little") + text


LIES = {
    "empty": (b"", "the file is empty"),
    "other": (b"not an array at all", "not a `.npy` file|header is damaged"),
    "zip": (b"PK\x03\x04" + bytes(60), "a zip archive"),
    "version": (np.lib.format.magic(9, 9) + bytes(40), r"version \(9, 9\)"),
    "longer": (header((2, 3)) + bytes(28), r"28 bytes of data are not \(2, 3\) of float32"),
    "shorter": (header((2, 3)) + bytes(20), r"20 bytes of data are not \(2, 3\) of float32"),
    "huge": (header((10**15, 4)) + bytes(64), r"64 bytes of data are not \(1000000000000000, 4\)"),
    "overflow": (header((2**40, 2**40)) + bytes(64), "64 bytes of data are not"),  # 2**82 wraps to 0 in int64
    "many_digits": (header((int("9" * 4000), int("9" * 4000))), "the sizes in its header"),
    "negative": (header((-2, -3)) + bytes(24), "the sizes in its header"),
    "boolean": (header((True, 3)) + bytes(24), "the sizes in its header"),
    "header_length": (
        np.lib.format.magic(2, 0) + (2**32 - 1).to_bytes(4, "little") + bytes(64),
        "header is damaged",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_file_is_refused_before_anything_is_allocated(tmp_path, name):
    content, message = LIES[name]
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"x\.npy: .*({message})") as error:
        NpySource(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert one_line(error)
    assert peak < 2**21  # a header read, parsed and quoted


def test_reported_bad_files_are_refused(tmp_path):
    case = reported_case("cli_bad_files")
    names = [name for name in case["expect"]["exit_code_nonzero"] if name.endswith(".npy")]
    assert len(names) == 4
    for name in names:
        path = tmp_path / name
        path.write_bytes(case["x"]["files"][name])
        with pytest.raises(ValueError, match=name) as error:
            NpySource(path)
        assert one_line(error)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.npy: no such file"):
        NpySource(tmp_path / "nothing.npy")
    with pytest.raises(ValueError, match="not a file"):
        NpySource(tmp_path)
    os.mkfifo(tmp_path / "pipe.npy")  # opening it would wait for ever
    with pytest.raises(ValueError, match="not a file"):
        NpySource(tmp_path / "pipe.npy")


def test_block_rows_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="`block_rows` must be an integer of at least 1, got 0"):
        NpySource(save(tmp_path / "x.npy", np.ones((2, 2))), block_rows=0)


@pytest.mark.parametrize("change", ["shrink", "rewrite", "replace"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_file_that_changes_is_an_error(tmp_path, change, when):
    path = save(tmp_path / "x.npy", np.zeros((8, 2)))
    source = NpySource(path, block_rows=2)
    blocks = iter(source)
    if when == "between":
        next(blocks)
    if change == "shrink":
        os.truncate(path, path.stat().st_size - 8)
    elif change == "rewrite":
        save(path, np.ones((8, 2)))
        os.utime(path, ns=(0, 1))  # a clock that is too coarse to see the moment between
    else:
        os.replace(save(tmp_path / "y.npy", np.ones((8, 2))), path)
        if when == "between":  # the open file is still the old one, and whole
            assert not torch.cat([block.clone() for block in blocks]).any()
            blocks = iter(source)
    with pytest.raises(ValueError, match=r"x\.npy: the file changed after it was opened"):
        list(blocks)


def seeds():
    """Sound files of every kind, small, as bytes."""
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (2, 3, 4), (1, 50), (170, 1)]
    for shape in shapes:
        for dtype in ["<f4", ">f8", "<f2", "|i1", ">i2", "<u8", "?"]:
            for version in [(1, 0), (2, 0), (3, 0)]:
                buffer = io.BytesIO()
                array = (rng.standard_normal(shape) * 9).astype(dtype)
                np.lib.format.write_array(buffer, array, version=version)
                yield buffer.getvalue()


def mutated(content, rng):
    """`content` after one or two kinds of damage, anywhere."""
    data = bytearray(content)
    for _ in range(rng.integers(1, 3)):
        kind = rng.choice([
            0,
            0,
            0,
            1,
            1,
            1,
            2,
            3,
            4,
            5,
            6,
            7,
        ])  # flips most: only they can leave a sound file
        at = int(rng.integers(len(data))) if data else 0
        if kind == 0 and data:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1 and data:
            data[at] = int(rng.integers(256))
        elif kind == 2:
            del data[int(rng.integers(len(data) + 1)) :]
        elif kind == 3:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        elif kind == 4:
            data += rng.bytes(int(rng.integers(1, 65)))
        elif kind == 5:
            data[8:12] = rng.bytes(int(rng.integers(2, 5)))  # length of the header
        elif kind == 6:
            digits = [i for i, byte in enumerate(data[:140]) if chr(byte).isdigit()]
            for i in digits[-3:]:
                data[i : i + 1] = str(rng.integers(-(10**12), 10**12)).encode()[: int(rng.integers(1, 14))]
        else:
            words = [
                b"'<f4'",
                b"'|O'",
                b"'<c8'",
                b"'|V2'",
                b"True",
                b"None",
                b"((",
                b"-",
                b"'<f4', 'x'",
                b"'M8'",
            ]
            old, new = words[rng.integers(len(words))], words[rng.integers(len(words))]
            data = data.replace(old, new) if old in data else data.replace(b"False", new)
    return bytes(data)


def reference(content):
    """What numpy makes of the bytes, when it takes them and nothing is left over; else None."""
    buffer = io.BytesIO(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = np.lib.format.read_array(buffer, allow_pickle=False)
    except Exception:  # damaged headers make it fail in every way
        return None
    if array.dtype == bool:
        array = array.view(np.uint8) != 0
    return array if buffer.tell() == len(content) else None


def readable(array):
    """Whether a reference is what NpySource promises to read."""
    fits = (
        array.ndim >= 2 and array.shape[-1] > 0 and array.dtype.kind in "fiub" and array.dtype.itemsize <= 8
    )
    return fits and array.flags.c_contiguous


def attempt(path):
    """The rows, or the error."""
    try:
        return read_all(NpySource(path, block_rows=2))
    except (ValueError, OSError) as error:
        return error


def test_a_thousand_damaged_files_are_read_right_or_refused(tmp_path):
    rng = np.random.default_rng(1)
    sound = list(seeds())
    path = tmp_path / "x.npy"
    read, started = 0, time.monotonic()
    tracemalloc.start()
    for i in range(1000):
        content = mutated(sound[i % len(sound)], rng)
        path.write_bytes(content)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        got = attempt(path)
        assert tracemalloc.get_traced_memory()[1] - before < 8 * len(content) + 20 * 2**20
        want = reference(content)
        if isinstance(got, Exception):
            assert want is None or not readable(want), got
            assert str(path) in str(got)
            assert "\n" not in str(got)
        else:
            read += 1
            assert want is not None
            assert np.array_equal(got, want.reshape(-1, want.shape[-1]), equal_nan=True)
    tracemalloc.stop()
    assert 100 < read < 900  # both branches did their work
    assert time.monotonic() - started < 15
