"""What the monitor hands to a dashboard: records of two sites, one with heads, and alarms."""

import torch

from pca_torch.monitor.record import Alert, SpectrumRecord, thinned

PLAIN, HEADED = "model.layers.3:output", "model.layers.3.self_attn:query"
RUN = {"model": "LlamaForCausalLM", "sites": [PLAIN, HEADED], "every_n_steps": 10, "decay": None}
FLOOR = 1e-6


def power_law(n, exponent=1.3):
    """(n,) variances 0.7·i^-exponent."""
    return 0.7 * torch.arange(1, n + 1, dtype=torch.float64) ** -exponent


def record(step, site=PLAIN, spectrum=None, *, view="typical", head=None, floor=FLOOR, **metrics):
    """A record of a spectrum; `metrics` are beside rank_95."""
    spectrum = power_law(40) if spectrum is None else spectrum
    index, variance = thinned(spectrum)
    return SpectrumRecord(
        step=step,
        site=site,
        view=view,
        head=head,
        n_samples=500,
        n_effective=500.0,
        n_features=len(spectrum),
        metrics={"rank_95": 20.0} | metrics,
        index=index,
        variance=variance,
        rounding_floor=floor,
        trusted=int((spectrum > floor).sum()),
        extreme=3,
        extreme_share=0.25,
        heavy_tailed=False,
        nonfinite=0,
        tokens={"kept": 500},
    )


def at_step(step, shift=0.0):
    """Records of both sites: one view and both views, two heads, a metric that is not defined yet."""
    first = None if step == 10 else 0.1 + shift
    return [
        record(step, rank_95=step / 3 + shift, drift_last=first),
        record(step, view="all", rank_95=2.0 + shift, drift_last=first),
        record(step, HEADED, head=0, rank_95=step / 7 + shift, drift_last=first),
        record(step, HEADED, head=1, rank_95=step / 9 + shift, drift_last=first),
    ]


def alert(step, site=PLAIN, head=None):
    """An alarm that rang."""
    return Alert(
        step=step, site=site, view="typical", head=head, rule="rank_95 < 8", metric="rank_95", value=3.0
    )
