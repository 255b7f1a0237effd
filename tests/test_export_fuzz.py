"""A thousand files that lie, in a process of its own: each is refused in one line or gives sound results."""

import copy
import json
import math
import random
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from pca_torch.export import load, save
from pca_torch.result import PCAResult
from tests.test_export_reading import body_of, join, split, with_body
from tests.test_layout import result, uneven

ROOT = Path(__file__).parents[1]
FILES = 1000
JUNK = [None, True, -1, 0, 2**70, 1e308, -0.5, "x", "1" * 5000, [], {}, [[1]], {"a": 1}, {"$float": "nan"}]


def places(value: object, at: tuple = ()) -> list[tuple]:
    """Every key path in nested JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, item in items for path in [(*at, key), *places(item, (*at, key))]]


def change_json(value: dict | list, rng: random.Random) -> None:
    """Replace, remove or double one thing somewhere."""
    *parents, last = rng.choice(places(value))
    for key in parents:
        value = value[key]
    how = rng.randrange(3)
    if how == 0:
        del value[last]
    elif how == 1 and isinstance(value, list):
        value.append(copy.deepcopy(value[last]))
    else:
        value[last] = copy.deepcopy(rng.choice(JUNK))


def flip(data: bytes, start: int, stop: int, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 4])):
        out[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    return bytes(out)


def change_facts(data: bytes, rng: random.Random) -> bytes:
    header, blob = split(data)
    body = body_of(header)
    change_json(body["sites"] if rng.random() < 0.8 else body, rng)
    return join(with_body(header, body), blob)


def change_entries(data: bytes, rng: random.Random) -> bytes:
    header, blob = split(data)
    change_json(header, rng)
    return join(header, blob)


def change_entry(data: bytes, rng: random.Random) -> bytes:
    """A dtype, a shape or an offset that could be."""
    header, blob = split(data)
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    how = rng.randrange(3)
    if how == 0:
        entry["dtype"] = rng.choice(["F64", "F32", "BF16", "F16", "I64", "F8_E4M3", "C64", "U64", "BOOL"])
    elif how == 1:
        rng.shuffle(entry["shape"])
        entry["shape"][0] += rng.choice([-1, 0, 1, 2**62])
    else:
        entry["data_offsets"][rng.randrange(2)] += rng.choice([-8, -1, 1, 8, 2**62])
    return join(header, blob)


def swap_tensors(data: bytes, rng: random.Random) -> bytes:
    header, blob = split(data)
    one, two = rng.sample([name for name in header if name != "__metadata__"], 2)
    header[one], header[two] = header[two], header[one]
    return join(header, blob)


def resize(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))] if rng.random() < 0.5 else data + bytes(rng.randrange(1, 999))


def lie_about_length(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    told = rng.choice([
        rng.randrange(2**64),
        rng.randrange(10**8),
        length + rng.randrange(-20, 20),
        len(data) - 8,
        0,
    ])
    return told.to_bytes(8, "little") + data[8:]


def flip_header(data: bytes, rng: random.Random) -> bytes:
    return flip(data, 0, 8 + int.from_bytes(data[:8], "little"), rng)


def flip_tensors(data: bytes, rng: random.Random) -> bytes:
    return flip(data, 8 + int.from_bytes(data[:8], "little"), len(data), rng)


MUTATIONS = [flip_header, flip_tensors, resize, lie_about_length, swap_tensors]
MUTATIONS += [change_entry, change_entries, change_facts, change_facts, flip_tensors]


def assert_well_formed(r: PCAResult) -> None:
    """Read with numpy; rows may be off by ten times the tolerance of the reader, u·√D·100, at most."""
    components, spectrum = r.components.double().numpy(), r.spectrum.numpy()
    (k, d), m = components.shape, len(spectrum)
    assert k <= m <= d
    assert r.mean.shape == (d,)
    assert r.total_variance.shape == ()
    assert all(
        np.isfinite(t.double().numpy()).all() for t in (r.components, r.spectrum, r.mean, r.total_variance)
    )
    assert (spectrum >= 0).all()
    assert r.scale is None or (r.scale.shape == (d,) and bool((r.scale > 0).all()))
    off = np.abs(components @ components.T - np.eye(k)).max(initial=0)
    assert off <= 1000 * torch.finfo(r.components.dtype).eps / 2 * math.sqrt(d)
    assert r.n_samples >= 1
    assert 0 < r.divisor < math.inf
    assert len(r.certificate.variance_error) == k


def outcome(path: Path) -> str:
    """Read a file, as a user would; only an error in one line that names it counts as a refusal."""
    try:
        file = load(path)
    except ValueError as error:
        text = str(error)
    else:
        for site in file.values():
            for one in [site] if isinstance(site, PCAResult) else site:
                assert_well_formed(one)
        return "loaded"
    assert text.startswith(f"{path}: "), text
    assert "\n" not in text, text
    return "refused"


def fuzz(folder: Path) -> None:
    """Print how many mutated files came out how, and the KiB by which the peak memory of the process grew."""
    rng = random.Random(0)
    path = folder / "b.safetensors"
    save(path, {"a.b": result(standardised=True, dtype=torch.float32), "heads": uneven()}, {"n": 2**53 + 1})
    data = path.read_bytes()
    outcomes = Counter({outcome(path): 0})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(FILES):
        path.write_bytes(MUTATIONS[i % len(MUTATIONS)](data, rng))
        outcomes[outcome(path)] += 1
    outcomes["grown"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    print(json.dumps(outcomes))


def test_a_thousand_mutated_files_are_refused_or_well_formed(tmp_path):
    code = "import sys, tests.test_export_fuzz as f; f.fuzz(f.Path(sys.argv[1]))"
    run = [sys.executable, "-W", "error", "-c", code, str(tmp_path)]
    done = subprocess.run(run, cwd=ROOT, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # a crash of the interpreter would show here too
    outcomes = json.loads(done.stdout)
    assert outcomes["refused"] + outcomes["loaded"] == FILES
    assert outcomes["refused"] > FILES / 2  # most mutations break something
    assert outcomes["loaded"] > 0  # the low bits of a mean, say, cannot be told from others
    assert outcomes["grown"] < 100 * 1024
