"""Reports of heads with spectra we choose, without a fit."""

import numpy as np

from pca_torch.heads import HeadsReport
from pca_torch.report import report_dict
from tests.reports import result, sink

H, E = 3, 16


def heads_site(variances, *, d=E, n=2000, kind="k", rope=None, layer=0, extreme=None, loud=None, floor=0.0):
    """A site whose heads have these variances; uncentred, the first direction holds as much again as all."""
    around_zero = [np.concatenate([[sum(values) + values[0]], values[1:]]) for values in variances]
    extreme = extreme or sink(n, count=0, positions={})

    def several(spectra):
        return tuple(result(np.array(values), n=n, d=d, floor=floor) for values in spectra)

    return HeadsReport(
        all_tokens=several(variances if loud is None else loud),
        typical=several(variances),
        all_tokens_uncentred=several(around_zero if loud is None else loud),
        typical_uncentred=several(around_zero),
        extreme=extreme,
        kind=kind,
        rope=rope,
        layer=layer,
    )


def falling(d=E, h=H, base=0.8):
    return [(base - 0.1 * i) ** np.arange(d) for i in range(h)]


def head_layers(count=30, d=E, h=H, kinds=("k", "k_rope", "v", "q"), n=2000):
    """A report of `count` layers with keys before and after RoPE, values and queries."""
    states = {"k": "pre", "k_rope": "post", "q": "pre"}
    sites = {
        f"model.layers.{i}.self_attn:{kind}": heads_site(
            falling(d, 3 * h if kind == "q" else h, 0.8 + 0.005 * i),
            d=d,
            n=n,
            kind=kind[0],
            rope=states.get(kind),
            layer=i,
        )
        for i in range(count)
        for kind in kinds
    }
    return report_dict(sites, {"name": "m"}, {"seen": n}, {})
