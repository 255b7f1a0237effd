"""Parts of a basis file, in other dtypes and for other programs, and what their certificates still say."""

import copy
import json
import math

import pytest
import safetensors
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

import pca_torch as pt
from pca_torch._dtypes import FLOATING
from pca_torch.commands.export import export as command
from pca_torch.conversion import convert, narrowed
from tests.support import samples, truth
from tests.tiny_model import tiny_llama

N, D = 200, 24
ROWS = {
    f"layers.{i}:output": samples(N, D, decay=0.8, offset=1.0, seed=i, dtype=torch.float32) for i in range(3)
}
HEADS = [samples(N, 8, seed=h, dtype=torch.float32) for h in range(3)]
U32 = torch.finfo(torch.float32).eps / 2
ROUNDOFF = {name: torch.finfo(dtype).eps / 2 for name, dtype in FLOATING.items()}


@pytest.fixture
def basis(tmp_path):
    results = {name: pt.decompose(x, 10) for name, x in ROWS.items()}
    path = tmp_path / "basis.safetensors"
    pt.save(
        path, results | {"attn:k": [pt.decompose(x) for x in HEADS]}, {"view": "typical", "share": math.inf}
    )
    return path


def invoke(*words):
    app = typer.Typer()
    app.command()(command)
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(map(str, words)))


def test_without_options_it_is_the_same_file(basis, tmp_path):
    shapes = convert(basis, tmp_path / "all")
    old, new = pt.load(basis), pt.load(tmp_path / "all")
    assert shapes == {**dict.fromkeys(ROWS, (10, D)), "attn:k": (3, 8, 8)}
    assert list(new) == list(old)
    for name in ROWS:
        assert torch.equal(new[name].components, old[name].components)
        assert new[name].certificate == old[name].certificate
    facts = {"source": "basis.safetensors", "k": None, "dtype": None, "layout": "pca_torch"}
    assert new.metadata == {**old.metadata, "exported": facts}


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("k", [1, 4, 8])
def test_k_and_dtype(basis, tmp_path, k, dtype):
    convert(basis.parent, tmp_path / "part", k=k, dtype=dtype)
    file = pt.load(tmp_path / "part")
    for name, x in ROWS.items():
        got = file[name]
        assert (got.n_components, got.components.dtype) == (k, FLOATING[dtype])
        v = truth(x)[2]
        # in float32 at best, whatever dtype they are stored in
        u = max(ROUNDOFF[dtype], U32)
        assert (got.components.double() - pt.load(basis)[name].components[:k]).abs().max() <= u
        assert pt.subspace.principal_angles(got, v[:k]).max() < 2 * u * math.sqrt(D) * 3
        torch.testing.assert_close(got.spectrum, pt.load(basis)[name].spectrum, rtol=0, atol=0)
        assert got.certificate.precision.endswith(f"components in {dtype}") == (dtype != "float32")
    for head, x in zip(file["attn:k"], HEADS, strict=True):
        assert head.n_components == k
        assert head.n_samples == len(x)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("k", [0, 1, 5, 10])
@pytest.mark.parametrize("solver", ["covariance_eigh", "randomized", "tsqr"])
def test_the_certificate_holds_for_what_is_stored(k, dtype, solver):
    """Against the covariance: what the new rows capture, what they miss, and how far they are turned."""
    x = ROWS["layers.0:output"]
    result = narrowed(pt.decompose(x, 10, solver), k, FLOATING[dtype])
    _, variance, v = truth(x)
    total = variance.sum()
    rows = result.components.double()
    span = torch.linalg.qr(rows.mT).Q.mT
    centred = x.double() - x.double().mean(0)
    captured = ((centred @ span.mT).square().sum() / centred.square().sum()).item()
    c = result.certificate
    slack = (N + D) * torch.finfo(torch.float64).eps  # of the sums of this test
    best = (variance[:k].sum() / total).item()
    assert c.captured_ratio <= captured + slack + 2 * sum(c.variance_error) / total
    assert c.captured_ratio + c.missed_ratio_bound >= best - slack
    assert c.missed_ratio_bound < 20 * ROUNDOFF[dtype] + 1e-6  # and it says something
    if k:
        assert pt.subspace.principal_angles(rows, v[:k]).max().item() <= c.angle_bound + D * slack
        applied = rows @ torch.cov(x.double().mT)
        residual = torch.linalg.vector_norm(applied - result.explained_variance[:, None] * rows, dim=1)
        held = torch.tensor(c.residual_norms) + 2 * torch.tensor(c.variance_error)
        assert (residual <= held + slack * variance[0]).all()
    assert len(c.variance_error) == len(c.residual_norms) == k


def test_a_coarse_dtype_is_noticed():
    result = pt.decompose(ROWS["layers.0:output"], 10)
    coarse = narrowed(result, 4, torch.bfloat16)
    assert coarse.certificate.angle_bound > 100 * narrowed(result, 4).certificate.angle_bound
    assert coarse.certificate.fallbacks[-1] == "export: the first 4 of 10 components"
    assert narrowed(result) is result
    with pytest.raises(ValueError, match=r"`k` must be in 0\.\.10, the components of the result, got 11"):
        narrowed(result, 11)


def test_scores_of_the_file_are_those_of_the_first_components(basis, tmp_path):
    convert(basis, tmp_path / "part", k=3, sites=["layers.1:output"])
    part, whole = pt.load(tmp_path / "part")["layers.1:output"], pt.load(basis)["layers.1:output"]
    x = ROWS["layers.1:output"]
    size = x.norm(dim=1).max().item()  # a float32 dot product of length D, twice
    torch.testing.assert_close(part.transform(x), whole.transform(x)[:, :3], rtol=0, atol=2 * D * U32 * size)


def test_columns_are_plain_tensors(basis, tmp_path):
    shapes = convert(basis, tmp_path / "plain", k=4, layout="columns", dtype="bfloat16")
    assert shapes["attn:k"] == (3, 4, 8)
    tensors = load_file(tmp_path / "plain")
    for name, x in ROWS.items():
        v, mean = tensors[f"{name}.V"], tensors[f"{name}.mean"]
        assert (v.shape, v.dtype, mean.dtype) == ((D, 4), torch.bfloat16, torch.float32)
        whole = pt.load(basis)[name]
        assert torch.equal(v, whole.components[:4].mT.bfloat16())
        centred = x - mean
        left = (centred - centred @ v.float() @ v.float().mT).square().sum() / centred.square().sum()
        missing = 1 - whole.explained_variance_ratio[:4].sum()
        # entries off by u bend V Vᵀ by 2u√K in all, which adds at most the square of that
        assert abs(left - missing) < 4 * 4 * ROUNDOFF["bfloat16"]
        assert abs(left - missing) < 0.1 * missing
        assert torch.equal(tensors[f"{name}.explained_variance"], whole.explained_variance[:4])
    assert tensors["attn:k.V"].shape == (3, 8, 4)
    assert tensors["attn:k.mean"].shape == (3, 8)
    assert not any(key.endswith("scale") for key in tensors)
    with safetensors.safe_open(tmp_path / "plain", "pt") as file:
        about = file.metadata()
    assert about["format"] == "pt"
    assert json.loads(about["pca_torch"])["exported"]["layout"] == "columns"
    assert (tmp_path / "plain").stat().st_mode == basis.stat().st_mode


def test_columns_of_standardised_samples_come_with_their_scale(tmp_path):
    x = ROWS["layers.0:output"]
    pt.save(tmp_path / "basis.safetensors", {"x": pt.decompose(x, standardize=True)})
    convert(tmp_path, tmp_path / "plain", layout="columns")
    tensors = load_file(tmp_path / "plain")
    z = (x - tensors["x.mean"]) / tensors["x.scale"] @ tensors["x.V"]
    torch.testing.assert_close(z.var(0).double(), tensors["x.explained_variance"], rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads the old name
def test_peft_takes_the_eva_layout(tmp_path):
    peft = pytest.importorskip("peft")
    eva = pytest.importorskip("peft.tuners.lora.eva")

    model = tiny_llama()
    names = [f"model.layers.{i}.self_attn.{side}_proj" for i in range(2) for side in "qv"]
    inputs = {name: samples(100, 16, seed=i, dtype=torch.float32) for i, name in enumerate(names)}
    pt.save(tmp_path / "basis.safetensors", {f"{name}:input": pt.decompose(x) for name, x in inputs.items()})
    shapes = convert(tmp_path, tmp_path / "eva", k=3, layout="eva")
    assert shapes == {f"{name}:input": (3, 16) for name in names}
    config = peft.LoraConfig(
        r=3, target_modules=["q_proj", "v_proj"], init_lora_weights="eva", eva_config=peft.EvaConfig()
    )
    adapted = peft.get_peft_model(copy.deepcopy(model), config, low_cpu_mem_usage=True)
    eva.initialize_lora_eva_weights(adapted, eva_state_dict=load_file(tmp_path / "eva"))
    for name, x in inputs.items():
        module = adapted.base_model.model.get_submodule(name)
        assert torch.equal(module.lora_A["default"].weight, pt.decompose(x).components[:3])
        assert not module.lora_B["default"].weight.any()


@pytest.mark.parametrize(
    ("patterns", "want"),
    [
        (["layers.1:output"], ["layers.1:output"]),
        (["layers.[02]:*"], ["layers.0:output", "layers.2:output"]),
        (["attn:k", "layers.1*"], ["layers.1:output", "attn:k"]),
        (None, [*ROWS, "attn:k"]),
    ],
)
def test_sites_by_name_or_pattern(basis, tmp_path, patterns, want):
    convert(basis, tmp_path / "part", sites=patterns, k=2)
    assert list(pt.load(tmp_path / "part")) == want


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sites": ["mlp"]}, r"`sites` has 'mlp', which is none of .*basis\.safetensors: layers\.0:output, "),
        ({"k": 9}, r"`k` must be at most 8, the components of site 'attn:k' in .*basis\.safetensors, got 9"),
        ({"k": 0}, "`k` must be a positive integer, got 0"),
        ({"layout": "loki"}, "`layout` must be one of 'pca_torch', 'columns', 'eva', got 'loki'"),
        ({"dtype": "int8"}, "`dtype` must be one of 'float64', 'float32', 'bfloat16', 'float16', got 'int8'"),
        ({"layout": "eva"}, r"`layout` = 'eva' takes the plain inputs of modules, 'layers\.0:output' in"),
    ],
)
def test_what_cannot_be_exported_is_refused(basis, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        convert(basis, tmp_path / "part", **options)
    assert not (tmp_path / "part").exists()


def test_heads_of_different_ranks(tmp_path):
    pt.save(tmp_path / "basis.safetensors", {"attn:k": [pt.decompose(x, i + 2) for i, x in enumerate(HEADS)]})
    convert(tmp_path, tmp_path / "part", dtype="float16")
    assert [head.n_components for head in pt.load(tmp_path / "part")["attn:k"]] == [2, 3, 4]
    with pytest.raises(
        ValueError, match=r"`layout` = 'columns' needs one `k` .* keep 2 to 4; pass `k` up to 2"
    ):
        convert(tmp_path, tmp_path / "plain", layout="columns")
    assert convert(tmp_path, tmp_path / "plain", layout="columns", k=2) == {"attn:k": (3, 2, 8)}


def test_the_command(basis, tmp_path):
    out = tmp_path / "part.safetensors"
    done = invoke(basis, "--out", out, "--k", 2, "--dtype", "bfloat16", "--sites", "layers.*")
    assert done.exit_code == 0, done.output
    size = out.stat().st_size
    assert done.stdout.strip() == f"wrote {out}: 3 sites, components 2 × 24, {size:,} bytes, layout pca_torch"
    one = invoke(basis.parent, "--out", out, "--sites", "attn:k", "--layout", "columns", "--json")
    written = {
        "file": str(out),
        "bytes": out.stat().st_size,
        "layout": "columns",
        "sites": {"attn:k": [3, 8, 8]},
    }
    assert json.loads(one.stdout) == written
    assert invoke(basis, "--dtype", "int8").exit_code == 2
