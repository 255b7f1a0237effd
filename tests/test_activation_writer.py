"""Rows on disk: bitwise, in order, within the limits, whole after any end, and telling what was left out."""

import json
import os
import subprocess
import sys

import pytest
import safetensors.torch
import torch
from torch import nn

import pca_torch as pt
from pca_torch import activation_writer
from pca_torch.activation_writer import ActivationWriter
from pca_torch.sites.site import Site
from pca_torch.sources import open_sources
from tests.support import truth

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def rows_in(folder):
    """Every row of a folder, as it is stored."""
    return torch.cat([block.clone() for source in open_sources(folder) for block in source])


def bits(x):
    return x.contiguous().view(torch.uint8)


def index_of(folder):
    return json.loads((folder / "index.json").read_text())


def shards(folder):
    return sorted(folder.rglob("*.safetensors"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back_bit_for_bit_in_order(tmp_path, dtype):
    firings = [torch.randn(2, n, 6).to(dtype) for n in (5, 1, 17, 3)]
    firings[1][0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    with ActivationWriter(tmp_path / "a", max_shard_bytes=7 * 6 * dtype.itemsize) as writer:
        sink = writer.sink("layer")
        for x in firings:
            assert sink.update(x) is None
    want = torch.cat([x.view(-1, 6) for x in firings])
    got = rows_in(tmp_path / "a" / "layer")
    assert got.dtype == dtype
    assert torch.equal(bits(got), bits(want))
    assert len(shards(tmp_path / "a")) == 8  # 52 rows, seven in each
    assert sink.n_rows == 52


def test_only_the_rows_of_the_mask(tmp_path):
    x = torch.randn(3, 4, 5)
    masks = [torch.rand(3, 4) > 0.5, torch.ones(3, 4), torch.zeros(3, 4, dtype=torch.int64), None]
    with ActivationWriter(tmp_path / "a", origins=True) as writer:
        for mask in masks:
            writer.sink("layer").update(x, mask=mask)
    want = [x.view(-1, 5) if m is None else x[m.bool()] for m in masks]
    assert torch.equal(rows_in(tmp_path / "a" / "layer"), torch.cat(want))
    (path,) = shards(tmp_path / "a")
    with safetensors.safe_open(path, "pt") as file:
        firing, token, rows = (file.get_tensor(name) for name in ("firing", "token", "rows"))
    assert firing.bincount(minlength=4).tolist() == [len(part) for part in want]
    assert torch.equal(x.view(-1, 5)[token], rows)  # each row is that token of its firing


def test_a_transposed_and_a_borrowed_output(tmp_path):
    x = torch.randn(7, 5)
    with ActivationWriter(tmp_path / "a") as writer:
        writer.sink("layer").update(x.mT)
        kept = x.clone()
        x.zero_()  # what happens to an output later is not our affair
    assert torch.equal(rows_in(tmp_path / "a" / "layer"), kept.mT)


def test_within_and_outside_of_inference_mode(tmp_path):
    x = torch.randn(4, 3, requires_grad=True)
    with ActivationWriter(tmp_path / "a") as writer:
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                writer.sink("layer").update(x * 2)
    assert torch.equal(rows_in(tmp_path / "a" / "layer"), (x.detach() * 2).repeat(3, 1))


@pytest.mark.gpu
def test_rows_of_a_device(tmp_path, device):
    x = torch.randn(50, 6).to(device, torch.bfloat16)
    keep = torch.rand(50, device=device) > 0.5
    with ActivationWriter(tmp_path / "a", max_shard_bytes=100, origins=True) as writer:
        writer.sink("layer").update(x)
        writer.sink("layer").update(x, mask=keep)
    assert torch.equal(rows_in(tmp_path / "a" / "layer"), torch.cat([x, x[keep]]).cpu())


def test_the_shards_say_what_they_are(tmp_path):
    site = Site("h.1:k", "h.1", "output", "k", "keys of h.1", lambda *_: torch.empty(0))
    about = {"model": "tiny", "layers": [1]}
    with ActivationWriter(tmp_path / "a", max_shard_bytes=4 * 3 * 4, metadata=about) as writer:
        writer.sink(site).update(torch.randn(10, 3))
        writer.sink("silent")
    index = index_of(tmp_path / "a")
    assert index["metadata"] == about
    assert index["complete"] is True
    assert index["sites"]["h.1:k"] == {
        "folder": "h.1_k", "kind": "k", "point": "keys of h.1", "rows": 10, "features": 3, "dtype": "float32",
        "left_out": 0, "shards": [
            {"file": f"h.1_k-0000{i + 1}.safetensors", "first_row": 4 * i, "rows": n}
            for i, n in enumerate((4, 4, 2))
        ],
    }  # fmt: skip
    assert index["sites"]["silent"]["rows"] == 0
    for shard in index["sites"]["h.1:k"]["shards"]:
        with safetensors.safe_open(tmp_path / "a" / "h.1_k" / shard["file"], "pt") as file:
            facts = file.metadata()
            assert file.get_slice("rows").get_shape() == [shard["rows"], 3]
        assert (facts["site"], facts["kind"], facts["point"]) == ("h.1:k", "k", "keys of h.1")
        assert int(facts["first_row"]) == shard["first_row"]


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    with ActivationWriter(tmp_path / "a") as writer:
        writer.sink("layer").update(torch.ones(2, 2))
    (tmp_path / "plain").touch()
    (path,) = shards(tmp_path / "a")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_names_become_folders_of_their_own(tmp_path):
    names = [
        "a:b",
        "a_b",
        "A_B",
        "..",
        "../..",
        "/etc",
        "x" * 300,
        "x" * 301,
        "index.json",
        "модель",
        ".hid",
        "-v",
    ]
    with ActivationWriter(tmp_path / "a") as writer:
        for i, name in enumerate(names):
            writer.sink(name).update(torch.full((1, 2), float(i)))
            assert writer.sink(name) is writer.sink(name)
    sites = index_of(tmp_path / "a")["sites"]
    assert list(sites) == names
    for i, facts in enumerate(sites.values()):
        folder = tmp_path / "a" / facts["folder"]
        assert folder.parent == tmp_path / "a"
        assert folder.resolve().parent == (tmp_path / "a").resolve()
        assert rows_in(folder).tolist() == [[i, i]]
    assert len({facts["folder"].lower() for facts in sites.values()}) == len(names)
    assert os.listdir(tmp_path) == ["a"]


def test_rows_beyond_a_number_are_counted_and_told(tmp_path):
    x = torch.randn(25, 3)
    writer = ActivationWriter(tmp_path / "a", max_rows=10)
    for part in x.split(4):
        assert writer.full is (writer.sink("a").n_rows == 10)
        writer.sink("a").update(part)
        writer.sink("b").update(part + 1)
    with pytest.warns(UserWarning, match=r"30 rows came after a limit.*15 of them of \w; raise that limit"):
        writer.close()
    assert torch.equal(rows_in(tmp_path / "a" / "a"), x[:10])
    assert torch.equal(rows_in(tmp_path / "a" / "b"), x[:10] + 1)
    sites = index_of(tmp_path / "a")["sites"]
    assert [(facts["rows"], facts["left_out"]) for facts in sites.values()] == [(10, 15), (10, 15)]


def test_bytes_beyond_the_total_are_not_written(tmp_path):
    x = torch.randn(40, 4)
    writer = ActivationWriter(tmp_path / "a", max_total_bytes=500, max_shard_bytes=64)
    for part in x.split(3):
        writer.sink("wide").update(part)  # 16 bytes a row
        writer.sink("narrow").update(part[:, :1])  # 4 bytes
    assert writer.left_out == 80 - writer.sink("wide").n_rows - writer.sink("narrow").n_rows
    with pytest.warns(UserWarning, match="rows came after a limit"):
        writer.close()
    wide, narrow = rows_in(tmp_path / "a" / "wide"), rows_in(tmp_path / "a" / "narrow")
    assert 500 - 16 < 16 * len(wide) + 4 * len(narrow) <= 500
    assert torch.equal(wide, x[: len(wide)])  # the first rows, without a gap
    assert torch.equal(narrow, x[: len(narrow), :1])
    stored = sum(safetensors.torch.load_file(path)["rows"].nbytes for path in shards(tmp_path / "a"))
    assert stored <= 500


def test_no_limit_where_none_is_set(tmp_path):
    with ActivationWriter(tmp_path / "a", max_total_bytes=None) as writer:
        writer.sink("a").update(torch.ones(100, 2))
    assert (writer.left_out, writer.full) == (0, False)


def test_a_dtype_of_choice(tmp_path):
    x = torch.randn(9, 4)
    with ActivationWriter(tmp_path / "a", dtype=torch.bfloat16) as writer:
        writer.sink("a").update(x)
        writer.sink("a").update(x.double())
        writer.sink("integers").update(torch.arange(8).view(4, 2))
    assert torch.equal(rows_in(tmp_path / "a" / "a"), torch.cat([x, x]).bfloat16())
    with ActivationWriter(tmp_path / "b", dtype=torch.float16) as writer:
        with pytest.raises(ValueError, match=r"`x` has values beyond 65504, where torch\.float16 ends"):
            writer.sink("a").update(torch.tensor([[7e4, 1.0]]))
        writer.sink("a").update(torch.tensor([[torch.inf, 1.0]]))  # it was so before
    assert rows_in(tmp_path / "b" / "a").tolist() == [[torch.inf, 1.0]]


def test_later_firings_must_be_like_the_first(tmp_path):
    with ActivationWriter(tmp_path / "a", max_shard_bytes=40) as writer:
        sink = writer.sink("a")
        with pytest.raises(
            ValueError, match="`max_shard_bytes` must hold at least one row, here of 44 bytes"
        ):
            sink.update(torch.ones(2, 11))
        with pytest.raises(ValueError, match=r"`x` must hold floats of 16 to 64 bits, got torch\.int64; set"):
            sink.update(torch.ones(2, 3, dtype=torch.int64))
        sink.update(torch.ones(2, 3))
        with pytest.raises(ValueError, match="`x` must end in 3 features, got shape"):
            sink.update(torch.ones(2, 4))
        with pytest.raises(ValueError, match=r"`x` is torch\.float64 after torch\.float32; say with `dtype`"):
            sink.update(torch.ones(2, 3).double())
        with pytest.raises(ValueError, match="`mask` must have the leading shape"):
            sink.update(torch.ones(2, 3), mask=torch.ones(3))
    assert torch.equal(rows_in(tmp_path / "a" / "a"), torch.ones(2, 3))  # what was refused left no trace
    with pytest.raises(ValueError, match=r"the writer of .* is closed; open a new one"):
        sink.update(torch.ones(2, 3))
    with pytest.raises(ValueError, match="is closed"):
        writer.sink("b")
    writer.close()  # again, to no effect
    assert writer.sink("a") is sink


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_shard_bytes": 0}, ValueError, "`max_shard_bytes` must be a positive integer, got 0"),
        ({"max_shard_bytes": None}, ValueError, "`max_shard_bytes` must be a positive integer, got None"),
        ({"max_total_bytes": 1.5}, ValueError, "`max_total_bytes` must be a positive integer, got 1.5"),
        ({"max_rows": -1}, ValueError, "`max_rows` must be a positive integer, got -1"),
        (
            {"dtype": torch.int8},
            ValueError,
            "`dtype` must be one of float64, float32, bfloat16, float16, or None",
        ),
        ({"metadata": {"a": object()}}, TypeError, r"`metadata\['a'\]` must be dict, list, str.*got object"),
    ],
)
def test_bad_options_are_refused_before_a_folder_is_made(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        ActivationWriter(tmp_path / "a", **options)
    assert not (tmp_path / "a").exists()


def test_a_folder_is_written_once(tmp_path):
    with ActivationWriter(tmp_path) as writer:  # empty, so it may be there
        writer.sink("a").update(torch.ones(2, 2))
        with pytest.raises(ValueError, match="`site` must be a name, got an empty one"):
            writer.sink("")
    with pytest.raises(ValueError, match=r"`folder` must be new or empty, and .* is not; give another"):
        ActivationWriter(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        ActivationWriter(tmp_path / "file")


def test_an_error_keeps_what_came_and_says_so(tmp_path):
    def stopped():
        with ActivationWriter(tmp_path / "a") as writer:
            writer.sink("a").update(torch.ones(3, 2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert index_of(tmp_path / "a")["complete"] is False
    assert torch.equal(rows_in(tmp_path / "a" / "a"), torch.ones(3, 2))


def test_a_shard_that_could_not_be_written_is_tried_again(tmp_path, monkeypatch):
    x = torch.randn(10, 2)
    writer = ActivationWriter(tmp_path / "a", max_shard_bytes=4 * 2 * 4)
    writer.sink("a").update(x[:3])

    def full(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(activation_writer, "write_tensors", full)
        with pytest.raises(OSError, match="No space left"):
            writer.sink("a").update(x[3:4])
        with pytest.raises(OSError, match="No space left"):
            writer.close()
        assert shards(tmp_path / "a") == []
    writer.sink("a").update(x[4:])
    writer.close()
    assert torch.equal(rows_in(tmp_path / "a" / "a"), x)
    assert not list((tmp_path / "a" / "a").glob(".*"))  # no draft is left


def test_it_is_a_sink_of_capture(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).bfloat16()
    batches = [torch.randn(3, 5, 8).bfloat16() for _ in range(4)]
    with ActivationWriter(tmp_path / "a", max_shard_bytes=600) as writer:
        sinks = {name: writer.sink(name) for name in ("0", "2")}
        with pt.capture(model, sinks, mask=None), torch.inference_mode():
            want = [model(x) for x in batches]
    assert torch.equal(rows_in(tmp_path / "a" / "2"), torch.cat(want).view(-1, 4))
    got = pt.decompose(open_sources(tmp_path / "a" / "0"), precision="float64").explained_variance
    hidden = torch.cat([model[0](x).detach() for x in batches]).view(-1, 16)
    # float64 sums of N products, and eigh of D × D (Higham 2002, 3.5): (N + D) u tr C, twice for the mean
    bound = 2 * (60 + 16) * torch.finfo(torch.float64).eps * hidden.double().var(0).sum()
    assert (got - truth(hidden)[1]).abs().max() < bound


def test_the_residual_stream_of_a_language_model(tmp_path, smollm2):
    tokens = torch.tensor([smollm2.tokenizer("the cat sat on the mat and looked at me")["input_ids"]])
    tokens = torch.cat([tokens, tokens.flip(1)])
    mask = torch.ones_like(tokens)
    mask[1, -3:] = 0
    name = "model.layers.3"
    with ActivationWriter(tmp_path / "a", max_shard_bytes=10_000) as writer, torch.no_grad():
        with pt.capture(smollm2.model, {name: writer.sink(name)}):
            smollm2.model(input_ids=tokens, attention_mask=mask)
        out = smollm2.model(input_ids=tokens, attention_mask=mask, output_hidden_states=True)
    want = out.hidden_states[4][mask.bool()]  # entry i + 1 is what layer i leaves
    assert torch.equal(rows_in(tmp_path / "a" / name), want)


KILLED = """
import os, pathlib, random, signal, sys, time, torch
from pca_torch.activation_writer import ActivationWriter

def write(folder):
    writer = ActivationWriter(folder, max_shard_bytes=40 * 16 * 4)
    for i in range(10**9):
        x = (torch.arange(7 * 16) + 7 * 16 * i).remainder(2**20).float().view(7, 16)
        for site in "ab":
            writer.sink(site).update(x)

for trial in range(12):
    folder = pathlib.Path(sys.argv[1], str(trial))
    child = os.fork()
    if not child:
        try:
            write(folder)
        finally:
            os._exit(1)
    while not any(folder.glob("b/*.safetensors")):
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        time.sleep(0.002)
    time.sleep(random.random() * 0.05)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_a_killed_process_leaves_whole_shards(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=True, timeout=200)
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 12
    for folder in folders:
        assert not (folder / "index.json").exists()
        for site in "ab":
            rows = rows_in(folder / site)
            want = torch.arange(rows.numel()).remainder(2**20).float().view(-1, 16)
            assert len(rows) % 40 == 0
            assert torch.equal(rows, want)
        with pytest.raises(ValueError, match="`folder` must be new or empty"):
            ActivationWriter(folder)


MEMORY = """
import sys, torch
from pca_torch.activation_writer import ActivationWriter
anon = lambda: int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])
x = torch.ones(256, 1024)
with ActivationWriter(sys.argv[1], max_shard_bytes=4 * 2**20) as writer:
    for _ in range(8):
        writer.sink("a").update(x)
    before = anon()
    for _ in range(64):
        writer.sink("a").update(x)
    print(anon() - before, writer.sink("a").n_rows)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_rows(tmp_path):
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, rows = map(int, done.stdout.split())
    assert rows == 72 * 256  # 64 MiB after the first eight
    assert grown < 2 * 4 * 2**10  # KiB: less than two shards
