"""Files with one fault each: what is wrong is named in one line."""

import json
from pathlib import Path

import pytest

from pca_torch._safetensors import format_of, is_safetensors
from pca_torch.export import load, load_metadata, save
from tests.test_layout import result, uneven


def split(data: bytes) -> tuple[dict, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def join(header: dict | str, blob: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + blob


def body_of(header: dict) -> dict:
    return json.loads(header["__metadata__"]["json"])


def with_body(header: dict, body: object) -> dict:
    return {**header, "__metadata__": {**header["__metadata__"], "json": json.dumps(body)}}


@pytest.fixture
def good(tmp_path) -> tuple[Path, dict, bytes]:
    path = tmp_path / "b.safetensors"
    save(path, {"s": result(), "heads": uneven()}, {"n": 1})
    return path, *split(path.read_bytes())


def refused(path: Path, data: bytes, message: str) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_rebuilding_a_file_without_a_fault_loads(good):
    path, header, blob = good
    path.write_bytes(join(with_body(header, body_of(header)), blob))
    assert load(path).metadata == {"n": 1}


@pytest.mark.parametrize("data", [b"", b"12345", b"PK\x03\x04" + bytes(60), b"\x80\x02}q\x00." * 9])
def test_what_is_no_safetensors_file_is_refused(tmp_path, data):
    refused(tmp_path / "b", data, "is not a whole safetensors file: .* bytes do not hold the header")
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        load_metadata(tmp_path / "b")


def test_a_file_is_known_by_its_beginning(good, tmp_path):
    path, header, blob = good
    assert (is_safetensors(path), format_of(path)) == (True, "pca_torch")
    cases = {  # neither, both, or a header that says nothing of a format
        b"": (False, None),
        b"PK\x03\x04" + bytes(60): (False, None),
        b'{"version": 2}': (False, None),
        b"\x10" + bytes(7) + b"[" * 16: (False, None),
        path.read_bytes()[:40]: (True, None),
        join(header | {"__metadata__": 3}, blob): (True, None),
        join(header | {"__metadata__": {"format": "pt"}}, blob): (True, "pt"),
    }
    for data, want in cases.items():
        (tmp_path / "x").write_bytes(data)
        assert (is_safetensors(tmp_path / "x"), format_of(tmp_path / "x")) == want, data
    assert not is_safetensors(tmp_path)
    assert not is_safetensors(tmp_path / "nowhere")


def test_a_missing_file_and_a_folder_are_the_errors_of_open(tmp_path):
    for read in (load, load_metadata):
        with pytest.raises(FileNotFoundError, match="no"):
            read(tmp_path / "no")
        with pytest.raises(IsADirectoryError, match="directory"):
            read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is not a pca_torch basis"),
        ('{"__metadata__": {"format": "pt"}}', "is not a pca_torch basis"),
        ('{"__metadata__": 3}', "is not a pca_torch basis"),
        ("{}", "is not a pca_torch basis"),
        ("{", "is not a safetensors file: Expecting property name"),
        ("[" * 100_000, "is not a safetensors file: JSON is nested too deeply"),
        ('{"a": NaN}', "is not a safetensors file: NaN is not JSON"),
        ('{"a": 1, "a": 1}', "is not a safetensors file: a JSON object has the same key twice"),
        ('{"a": ' + "1" * 5000 + "}", "is not a safetensors file: Exceeds the limit"),
    ],
)
def test_a_header_of_another_kind_is_refused(tmp_path, text, message):
    refused(tmp_path / "b", join(text, b""), message)


def test_a_header_that_is_no_text_is_refused(tmp_path):
    refused(
        tmp_path / "b", (2).to_bytes(8, "little") + b"\xff\xfe", "is not a safetensors file: 'utf-8' codec"
    )


@pytest.mark.parametrize("version", ["2", "one", None])
def test_another_version_is_refused(good, version):
    path, header, blob = good
    header["__metadata__"]["version"] = version
    refused(path, join(header, blob), f"has format version {version!r}, only '1' can be read")


@pytest.mark.parametrize("text", [None, 3, "", "{", "[" * 100_000, "NaN", '{"metadata": {}, "metadata": {}}'])
def test_broken_facts_are_refused(good, text):
    path, header, blob = good
    header["__metadata__"]["json"] = text
    refused(path, join(header, blob), "`json` in the header: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.pop("metadata"), "must hold `metadata` and `sites`"),
        (lambda body: body.update(metadata=[]), "must hold `metadata` and `sites`"),
        (lambda body: body.update(sites=None), "must hold `metadata` and `sites`"),
        (lambda body: body.update(metadata={"$float": "1"}), r"'\$float' must mark inf, -inf or nan"),
        (
            lambda body: body.update(metadata={"$float": "inf", "a": 1}),
            r"'\$float' must mark inf, -inf or nan",
        ),
        (lambda body: body.update(metadata={"$float": []}), r"'\$float' must mark inf, -inf or nan"),
        (lambda body: body["sites"].pop("s"), "site 's' has tensors without facts, or facts without"),
        (lambda body: body["sites"].update(t=[]), "site 't' has tensors without facts"),
        (
            lambda body: body["sites"].update(s={}),
            "site 's': must have a list with the facts of its 1 groups",
        ),
        (lambda body: body["sites"]["heads"].pop(), "site 'heads': must have a list with the facts of its 3"),
        (
            lambda body: body["sites"]["s"][0].update(divisor=-1),
            "site 's': group 0: `divisor` must be positive",
        ),
    ],
)
def test_a_wrong_fact_is_named(good, change, message):
    path, header, blob = good
    body = body_of(header)
    change(body)
    refused(path, join(with_body(header, body), blob), message)


@pytest.mark.parametrize(
    "entry",
    [
        3,
        None,
        {"dtype": "F4", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": ["F64"], "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": [True], "data_offsets": [0, 8]},
        {"dtype": "F64", "shape": [0, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F64", "shape": [0, 9, 9, 9], "data_offsets": [0, 0]},
        {"dtype": "F64", "shape": [-1], "data_offsets": [0, 8]},
    ],
)
def test_a_tensor_that_save_does_not_write_is_refused(good, entry):
    path, header, blob = good
    refused(
        path, join({**header, "s/mean": entry}, blob), "describes tensor 's/mean' as .*, which no basis file"
    )


@pytest.mark.parametrize("name", ["s/median", "mean", "/mean", "s"])
def test_a_tensor_of_another_name_is_refused(good, name):
    path, header, blob = good
    header[name] = header.pop("s/mean")
    refused(path, join(header, blob), f"holds an unknown tensor '{name}'")


def test_a_file_without_sites_is_refused(good):
    path, header, _ = good
    about = with_body({"__metadata__": header["__metadata__"]}, {"metadata": {}, "sites": {}})
    refused(path, join(about, b""), "holds no site")


def test_a_tensor_named_twice_is_refused(good):
    """Two shapes for the same bytes: a reader that keeps the last would believe it."""
    path, header, blob = good
    text = json.dumps(header)
    twice = text[:-1] + ', "s/mean": ' + json.dumps({**header["s/mean"], "shape": [6, 1]}) + "}"
    refused(path, join(twice, blob), "the same key twice")


@pytest.mark.parametrize("cut", [1, 100])
def test_a_cut_or_extended_file_is_refused(good, cut):
    path, header, blob = good
    refused(path, join(header, blob[:-cut]), "not fully covered")
    refused(path, join(header, blob + bytes(cut)), "not fully covered")
