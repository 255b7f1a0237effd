"""Logs of runs that never were: spectra that steepen or collapse while steps go by."""

import math
from dataclasses import replace

import numpy as np
import torch

from pca_torch.monitor.log_file import JsonlSink, Log
from pca_torch.monitor.record import Alert, SpectrumRecord, thinned

EVERY = 10  # steps from record to record
FLOOR = 1e-7  # of λ₁: what float32 products leave


def spectrum(d, steepness, loud=0.0):
    """(d,) variances that fall as a power, plus `loud` times their sum in the first direction."""
    values = np.arange(1, d + 1) ** -steepness
    values[0] += loud * values.sum()
    return values


def measured(values, fit_range=(6, 100)):
    """Metrics of a spectrum, as far as the tables and pictures tell them apart."""
    total = values.sum()
    if total == 0:
        return (
            dict.fromkeys(["rank_50", "rank_90", "rank_95", "rank_99"], 0)
            | dict.fromkeys(OTHERS, None)
            | {"total_variance": 0.0}
        )
    share, sigma = values / total, np.sqrt(values) / np.sqrt(values).sum()
    known = share[share > 0]
    ranks = {
        f"rank_{p}": int(np.searchsorted(np.cumsum(share), p / 100 - 1e-12) + 1) for p in (50, 90, 95, 99)
    }
    fitted = values[fit_range[0] - 1 : fit_range[1]]
    fitted = np.log(fitted[fitted > 0])
    index = np.log(np.arange(fit_range[0], fit_range[0] + len(fitted)))
    slope = -np.polyfit(index, fitted, 1)[0] if len(fitted) > 2 else None
    sigma = sigma[sigma > 0]
    entropy = math.exp(-(sigma * np.log(sigma)).sum())
    return ranks | {
        "participation_ratio": total**2 / (values**2).sum(),
        "effective_rank": entropy,
        "rankme": entropy * 0.98,
        "entropy_rank": math.exp(-(known * np.log(known)).sum()),
        "stable_rank": 0.9 * total / values[0],
        "nesum": total / values[0],
        "alpha_req": slope,
        "alpha_req_r2": None if slope is None else 0.97,
        "alpha_req_from": None if slope is None else 6.0,
        "alpha_req_to": None if slope is None else float(fit_range[0] + len(fitted) - 1),
        "total_variance": float(total),
        "condition": float(np.sqrt(values[0] / values[values > FLOOR * values[0]][-1])),
    }


OTHERS = [
    *("participation_ratio", "effective_rank", "rankme", "entropy_rank", "stable_rank", "nesum"),
    *("alpha_req", "alpha_req_r2", "alpha_req_from", "alpha_req_to", "condition"),
]


def drifts(i, speed):
    """What the directions did by the i-th record."""
    start = 1 - math.exp(-speed * i)
    return {
        "drift_last": None if i == 0 else speed * math.exp(-speed * i),
        "drift_last_angle": None if i == 0 else math.asin(min(1, 2 * speed * math.exp(-speed * i))),
        "drift_start": start,
        "drift_start_angle": math.asin(min(1.0, math.sqrt(start))),
        "drift_gap": 0.2 + 0.1 * math.cos(i),
    }


def record(step, site, values, *, n=2048, view="typical", head=None, i=0, speed=0.05):
    """One record with the metrics of `values`, of which variances below the floor are noise."""
    index, variance = thinned(torch.from_numpy(values))
    floor = FLOOR * values[0]
    return SpectrumRecord(
        step=step,
        site=site,
        view=view,
        head=head,
        n_samples=n,
        n_effective=float(n),
        n_features=len(values),
        metrics=measured(values) | drifts(i, speed),
        index=index,
        variance=variance,
        rounding_floor=floor,
        trusted=int((values > floor).sum()),
        extreme=0,
        extreme_share=0.0,
        heavy_tailed=False,
        nonfinite=0,
        tokens={"kept": n},
    )


def run(sites, **more):
    """The header of a log."""
    settings = {
        "model": "LlamaForCausalLM",
        "sites": sites,
        "every_n_steps": EVERY,
        "window": 1,
        "decay": None,
        "weighting": "window",
        "n_components": 8,
        "fit_range": [6, 100],
        "metrics": ["rank_95"],
        "selection": None,
        "versions": {"torch": "2.13.0"},
    }
    return settings | more


def log(
    layers=6,
    steps=30,
    d=96,
    *,
    n=2048,
    heads=None,
    pattern="model.layers.{}:output",
    collapse=False,
    views=("typical", "all"),
):
    """A run whose spectra steepen, deep layers more; with `collapse` the deepest lose theirs half way."""
    sites = [pattern.format(layer) for layer in range(layers)]
    rng = np.random.default_rng(0)
    records = []
    for i in range(steps):
        for layer, site in enumerate(sites):
            for view in views:
                for head in range(heads) if heads else [None]:
                    steep = 0.4 + 0.8 * (i / steps) * (1 + layer / layers) + 0.02 * rng.standard_normal()
                    gone = collapse and 2 * i > steps and 3 * layer >= 2 * layers
                    steep += (3 * (2 * i / steps - 1) if gone else 0) + 0.1 * (head or 0)
                    values = (1 + i) ** 0.7 * (1 + layer) * spectrum(d, steep, 20.0 if view == "all" else 0.0)
                    at = max(1, i * EVERY)
                    values[n - 1 :] = 0  # rows around their mean
                    few = n - int(rng.integers(0, 1 + n // 100)) if view == "typical" else n
                    records.append(
                        record(at, site, values, n=few, view=view, head=head, i=i, speed=0.05 + 0.02 * layer)
                    )
    return Log(run=run(sites), records=records, alerts=alarms(records) if collapse else [], resumed=[])


def alarms(records, limit=8):
    """An alarm where rank_95 first falls below a limit."""
    told, found = set(), []
    for r in records:
        value = r.metrics["rank_95"]
        key = (r.site, r.view, r.head)
        if r.view == "typical" and value < limit and key not in told:
            told.add(key)
            found.append(
                Alert(
                    step=r.step,
                    site=r.site,
                    view=r.view,
                    head=r.head,
                    rule=f"rank_95 < {limit}",
                    metric="rank_95",
                    value=value,
                )
            )
    return found


def both(first, second):
    """Two logs as that of one run."""
    return replace(
        first,
        run=first.run | {"sites": first.run["sites"] + second.run["sites"]},
        records=sorted(first.records + second.records, key=lambda r: r.step),
    )


def write(path, log):
    """The log as a file."""
    sink = JsonlSink(path)
    sink.begin(log.run, 0)
    for step in sorted({r.step for r in log.records}):
        lines = [[entry for entry in kind if entry.step == step] for kind in (log.records, log.alerts)]
        sink.write(*lines)
    sink.close()
    return path
