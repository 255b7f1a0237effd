"""A training run on the device, in mixed precision, with a monitor: its counts, its spectra, its state."""

import pytest
import torch
from torch import nn

from pca_torch.monitor import SpectrumMonitor
from tests.monitor.test_core import Net, batch_of, weighted_spectrum

pytestmark = pytest.mark.gpu

STEPS = 12


class Training:
    """Training in bfloat16 autocast, whose rows are kept."""

    def __init__(self, device):
        torch.manual_seed(0)
        self.device = device
        self.model = Net().to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.3)
        self.rows, self.losses = {}, []

    def step(self, number):
        batch = {key: value.to(self.device) for key, value in batch_of(number).items()}
        kept = batch["attention_mask"].bool()

        def keep(module, args, output):
            self.rows[number] = output[kept].double()

        handle = self.model.layers[2].register_forward_hook(keep)
        with torch.autocast(self.device.type, torch.bfloat16):
            logits = self.model(**batch)
        handle.remove()
        loss = nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch["input_ids"][:, 1:].flatten()
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())


def monitor_of(training, path):
    return SpectrumMonitor(training.model, "layers.2", 4, window=2, decay=0.5, path=path)


def test_what_is_logged_is_what_was_there_also_after_a_resume(device, tmp_path):
    plain, training = Training(device), Training(device)
    for number in range(1, STEPS + 1):
        plain.step(number)
    monitor = monitor_of(training, tmp_path / "log.jsonl")
    found = {}
    for first, last in ((1, 7), (8, STEPS)):  # step 7 is in the middle of a window
        if first > 1:
            state = {name: tensor.cpu() for name, tensor in monitor.state_dict().items()}
            monitor = monitor_of(training, tmp_path / "log.jsonl")
            monitor.load_state_dict(state)
        with monitor:
            for number in range(first, last + 1):
                training.step(number)
                found |= {record.step: record for record in monitor.step() if record.view == "all"}
    assert training.losses == plain.losses
    rows, weights = torch.empty(0, 16), torch.empty(0)
    for end in (2, 4, 8, 12):
        new = torch.cat([training.rows[number].cpu() for number in (end - 1, end)])
        rows = torch.cat([rows.double(), new])
        weights = torch.cat([weights.double() * 0.5, torch.ones(len(new), dtype=torch.float64)])
        want = weighted_spectrum(rows, weights)
        record = found[end]
        assert record.n_samples == len(rows)
        assert record.tokens == {"padding": 10, "kept": 86}
        # float32 products obey u·N beside λ₁ at most; float64 ones are far inside
        off = 2**-24 * len(rows) * want[0].item()
        assert (torch.tensor(record.variance).double() - want).abs().max().item() < off
        control = weighted_spectrum(rows[1:], weights[1:])  # one row less shows
        assert (control - want).abs().max().item() > off
