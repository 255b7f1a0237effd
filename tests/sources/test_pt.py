"""Tensors that `torch.save` wrote: any view as it is, nothing executed, damage and surprises in one line."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch

from pca_torch._dtypes import READABLE
from pca_torch.sources import TorchSource
from tests.sources.test_safetensors import attempt, bits, numbers, one_line, rows_of


def save(path, content, **options):
    torch.save(content, path, **options)
    return path


@pytest.mark.parametrize("dtype", READABLE.values(), ids=READABLE)
def test_blocks_are_the_rows_of_the_file(tmp_path, dtype):
    want = numbers((23, 5), dtype)
    source = TorchSource(save(tmp_path / "x.pt", want), block_rows=4)
    for _ in range(2):  # any number of times
        assert torch.equal(bits(rows_of(source)), bits(want))
    assert [len(block) for block in source] == [4, 4, 4, 4, 4, 3]
    assert (source.n_rows, source.n_features, source.dtype) == (23, 5, dtype)
    assert len({block.data_ptr() for block in source}) == 1


VIEWS = {
    "first_columns": lambda x: x[..., :2],
    "every_other_column": lambda x: x[..., ::2],
    "every_third_row": lambda x: x[::3],
    "from_the_middle": lambda x: x[5:9],
    "transposed": lambda x: x.mT,
    "expanded": lambda x: x[:1].expand(50, *x.shape[1:]),
    "last_first": lambda x: x.movedim(-1, 0),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=True),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("shape", [(12, 7), (12, 5, 7), (12, 2, 3, 7)])
def test_a_view_is_read_as_it_is(tmp_path, name, shape):
    want = VIEWS[name](numbers(shape, torch.bfloat16))
    source = TorchSource(save(tmp_path / "x.pt", want), block_rows=3)
    got = rows_of(source)
    assert got.shape == (source.n_rows, source.n_features) == (want[..., 0].numel(), want.shape[-1])
    assert torch.equal(got, want.detach().reshape(got.shape))


def test_batches_of_a_list_follow_each_other(tmp_path):
    batches = [numbers((n, 3, 4), torch.float16, seed=n) for n in (2, 0, 5)]
    for content in (batches, tuple(batches), {"h": batches, "layer": 3}):
        got = rows_of(TorchSource(save(tmp_path / "x.pt", content), block_rows=4))
        assert torch.equal(got, torch.cat(batches).view(-1, 4))


def test_one_of_a_dict(tmp_path):
    a, b = numbers((6, 3), torch.float32), numbers((4, 2), torch.float64)
    path = save(tmp_path / "x.pt", OrderedDict(a=a, b=b, token=torch.arange(6), model="gpt2"))
    assert torch.equal(rows_of(TorchSource(path, "a")), a)
    assert torch.equal(rows_of(TorchSource(path, "b")), b)
    with pytest.raises(ValueError, match=r"x\.pt: holds several tensors; say which.*one of a, b, token\."):
        TorchSource(path)
    with pytest.raises(ValueError, match=r"x\.pt: no tensor 'model'; there is a, b, token"):
        TorchSource(path, "model")
    layers = save(tmp_path / "layers.pt", {0: a, 1: b})
    assert torch.equal(rows_of(TorchSource(layers, "1")), b)
    single = save(tmp_path / "single.pt", {"rows": a, "token": torch.arange(6), "seed": 1})
    assert TorchSource(single).tensor == "rows"
    assert torch.equal(rows_of(TorchSource(save(tmp_path / "bare.pt", b), "any name")), b)


def test_no_rows_give_no_blocks(tmp_path):
    source = TorchSource(save(tmp_path / "x.pt", torch.empty(0, 3)))
    assert list(source) == []
    assert (source.n_rows, source.n_features) == (0, 3)


def test_bytes_that_are_no_booleans_are_true(tmp_path):
    x = torch.tensor([[0, 1], [2, 255]], dtype=torch.uint8).view(torch.bool)
    assert rows_of(TorchSource(save(tmp_path / "x.pt", x))).double().tolist() == [[0.0, 1.0], [1.0, 1.0]]


REFUSED = {
    "flat": (torch.arange(5.0), r"must have shape \(\.\.\., D\) with at least two dimensions, got \(5,\)"),
    "no_columns": (torch.empty(4, 0), r"at least one column, got \(4, 0\)"),
    "complex": (
        torch.ones(2, 2, dtype=torch.complex64),
        "dense real numbers of 8 to 64 bits, got torch.complex",
    ),
    "small_float": (torch.ones(2, 2).to(torch.float8_e4m3fn), "8 to 64 bits, got torch.float8_e4m3fn"),
    "sparse": (torch.eye(3).to_sparse(), "dense real numbers of 8 to 64 bits, got torch.sparse_coo"),
    "number": (3.5, "holds an object of type float; save a tensor"),
    "nothing": ([], "holds an empty list; save a tensor|holds no tensor|holds a list"),
    "text": ([torch.ones(2, 2), "a"], "holds a list of str; save a tensor"),
    "empty_dict": ({}, "holds no tensor"),
    "nested": ({"a": {"b": torch.ones(2, 2)}}, "holds no tensor"),
    "other_width": (
        [torch.ones(2, 2), torch.ones(2, 3)],
        "holds tensors of 2 columns of torch.* and of 3",
    ),
    "other_dtype": (
        [torch.ones(2, 2), torch.ones(2, 2).half()],
        "of torch.float16; all must have the",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_table_of_real_numbers_is_refused(tmp_path, name):
    content, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"x\.pt: .*({message})") as error:
        TorchSource(save(tmp_path / "x.pt", content))
    assert one_line(error)


class Touch:
    """A pickle that makes a file when it is loaded as pickles are."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("new", [True, False], ids=["archive", "old_format"])
def test_code_in_a_file_is_never_run(tmp_path, new):
    path, trap = tmp_path / "x.pt", tmp_path / "trap"
    torch.save({"x": torch.ones(2, 2), "y": Touch(trap)}, path, _use_new_zipfile_serialization=new)
    with pytest.raises(ValueError, match=r"x\.pt: (holds \w+\.mkdir, and no code|not an archive)") as error:
        TorchSource(path)
    assert one_line(error)
    assert not trap.exists()
    torch.load(path, weights_only=False)  # the control: whoever trusts the file falls into the trap
    assert trap.is_dir()


def test_a_bare_pickle_is_never_run(tmp_path):
    path, trap = tmp_path / "x.pt", tmp_path / "trap"
    path.write_bytes(pickle.dumps(Touch(trap)))
    with pytest.raises(ValueError, match=r"x\.pt: not an archive of `torch.save`"):
        TorchSource(path)
    assert not trap.exists()


def repacked(path, change=lambda name, content: content, method=zipfile.ZIP_STORED):
    """The archive written anew, each record through `change`."""
    with zipfile.ZipFile(path) as old:
        records = [(record.filename, old.read(record)) for record in old.infolist()]
    with zipfile.ZipFile(path, "w", method) as new:
        for name, content in records:
            new.writestr(name, change(name, content))
    return path


def test_a_compressed_archive_is_refused(tmp_path):
    x = numbers((6, 4), torch.float32)
    path = repacked(save(tmp_path / "x.pt", x), method=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match=r"x\.pt: a compressed archive; save it with `torch.save`"):
        TorchSource(path)
    wrong = torch.load(path, mmap=True, weights_only=True)  # what would be taken for numbers
    assert not torch.equal(wrong, x)


def test_bytes_in_the_other_order_are_refused(tmp_path):
    path = save(tmp_path / "x.pt", torch.ones(2, 2))
    repacked(path, lambda name, content: b"big" if name.endswith("byteorder") else content)
    with pytest.raises(ValueError, match=r"x\.pt: not a whole archive.*big-endian"):
        TorchSource(path)


def test_a_storage_that_is_shorter_than_claimed_is_refused(tmp_path):
    path = save(tmp_path / "x.pt", torch.ones(64, 8))
    repacked(path, lambda name, content: content[:-32] if name.endswith("data/0") else content)
    with pytest.raises(ValueError, match=r"x\.pt: (larger or smaller than its record|cannot be read)"):
        TorchSource(path)


OTHERS = {
    "empty": (b"", "the file is empty"),
    "zip": (b"PK\x03\x04" + bytes(60), "not a whole archive"),
    "text": (b"hello", "not an archive of `torch.save`"),
}


def test_a_torchscript_archive_is_refused(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/constants.pkl", b"\x80\x02).")
        archive.writestr("x/data.pkl", b"\x80\x02).")
        archive.writestr("x/version", b"3\n")
    (tmp_path / "x.pt").write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"x\.pt: cannot be read as plain tensors \(.*TorchScript") as error:
        TorchSource(tmp_path / "x.pt")
    assert one_line(error)


@pytest.mark.parametrize("name", OTHERS)
def test_another_file_is_refused(tmp_path, name):
    data, message = OTHERS[name]
    path = tmp_path / "x.pt"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"x\.pt: {message}") as error:
        TorchSource(path)
    assert one_line(error)


def test_an_archive_of_numpy_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones((2, 2)))
    os.rename(tmp_path / "x.npz", tmp_path / "x.pt")
    with pytest.raises(ValueError, match=r"x\.pt: cannot be read as plain tensors") as error:
        TorchSource(tmp_path / "x.pt")
    assert one_line(error)


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.pt: no such file"):
        TorchSource(tmp_path / "nothing.pt")
    with pytest.raises(ValueError, match="not a file"):
        TorchSource(tmp_path)
    with pytest.raises(ValueError, match=r"`block_rows` must be an integer of at least 1, got 1\.5"):
        TorchSource(save(tmp_path / "x.pt", torch.ones(2, 2)), block_rows=1.5)


@pytest.mark.parametrize("change", ["shrink", "rewrite", "replace"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_file_that_changes_is_an_error(tmp_path, change, when):
    path = save(tmp_path / "x.pt", torch.zeros(8, 2**12))  # several pages: a cut one would end the process
    source = TorchSource(path, block_rows=2)
    blocks = iter(source)
    if when == "between":
        next(blocks)
    if change == "shrink":
        os.truncate(path, 2**14)
    elif change == "rewrite":
        save(path, torch.ones(8, 2**12))
        os.utime(path, ns=(0, 1))  # a clock that is too coarse to see the moment between
    else:
        os.replace(save(tmp_path / "y.pt", torch.ones(8, 2**12)), path)
        if when == "between":  # the open file is still the old one, and whole
            assert not torch.cat([block.clone() for block in blocks]).any()
            blocks = iter(source)
    with pytest.raises(ValueError, match=r"x\.pt: the file changed after it was opened"):
        list(blocks)


LARGE = """
import sys
from pca_torch.sources import TorchSource
source = TorchSource(sys.argv[1], block_rows=64)
before = open("/proc/self/status").read()
rows = sum(len(block) for block in source)
after = open("/proc/self/status").read()
anon = lambda text: int(next(line for line in text.splitlines() if line.startswith("RssAnon")).split()[1])
print(rows, anon(after) - anon(before))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_the_file_is_mapped_and_not_loaded(tmp_path):
    path = save(tmp_path / "x.pt", torch.ones(2**14, 1024))  # 64 MiB
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(path)], capture_output=True, text=True, check=True
    )
    rows, grown = map(int, done.stdout.split())
    assert rows == 2**14
    assert grown < 2**13  # KiB: an eighth of the file; blocks are 256 KiB


def archives():
    """Sound archives, small, as bytes, and the rows in each."""
    a, b = numbers((20, 4), torch.float64), numbers((5, 4), torch.float64, seed=1)
    single, half = numbers((40, 3), torch.float32), numbers((40, 3), torch.bfloat16)
    contents = {
        single: single,
        half: {"a": half, "b": torch.arange(3)},
        torch.cat([a, b]): [a, b.mT.clone().mT],
    }
    for rows, content in contents.items():
        buffer = io.BytesIO()
        torch.save(content, buffer)
        yield buffer.getvalue(), rows


def reference(path):
    """The rows by `torch.load` without a map, or None."""
    try:
        content = torch.load(path, weights_only=True)
        content = content["a"] if isinstance(content, dict) else content
        parts = content if isinstance(content, list) else [content]
        return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    except Exception:  # damaged archives make it fail in every way
        return None


@pytest.mark.filterwarnings("ignore")  # of the reference
def test_five_hundred_damaged_files_are_read_right_or_refused(tmp_path):
    rng, path, sound, read = np.random.default_rng(2), tmp_path / "x.pt", list(archives()), 0
    for i in range(500):
        content, rows = sound[i % len(sound)]
        data = bytearray(content)
        if i % 7:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        else:
            del data[int(rng.integers(len(data))) :]
        path.write_bytes(data)
        got = attempt(lambda: TorchSource(path, block_rows=16))
        if isinstance(got, Exception):
            assert "x.pt: " in str(got)
            assert "\n" not in str(got)
        else:  # the damage lies where nothing depends on it, or in the numbers, which have no sum
            read += 1
            assert any(
                want is not None and torch.equal(bits(got), bits(want)) for want in (rows, reference(path))
            )
    assert 50 < read < 450  # both branches did their work
