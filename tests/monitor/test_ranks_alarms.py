"""What the first rank decides is known on all of them: none waits for one that has left."""

import json
from pathlib import Path

import torch.distributed as dist

from pca_torch.monitor import Alarm, SpectrumMonitor
from tests.monitor.test_core import Training
from tests.test_distributed import start_ranks


def work(rank: int, folder: str) -> None:
    """Three windows: alarms that fail and that ask for the end in one, no tokens on a rank in the last."""

    def fail(alert):
        raise ArithmeticError(alert.rule)

    training, found = Training(), []
    alarms = [Alarm("rank_50 > 1", fail), Alarm("rank_90 > 1", lambda alert: True)]
    with SpectrumMonitor(
        training.model, "layers.0", 1, path=Path(folder) / "log.jsonl", alarms=alarms
    ) as monitor:
        for number in (1, 2):
            training.step(number)
            try:
                found.append([monitor.should_stop, len(monitor.step())])
            except (ArithmeticError, RuntimeError) as error:
                found.append([type(error).__name__, str(error)])
        if rank == 0:
            training.step(3)
        records = monitor.step()
        found.append([monitor.should_stop, [record.n_samples for record in records]])
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def test_errors_and_stops_of_alarms_reach_every_rank(tmp_path):
    start_ranks(work, 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first[0] == ["ArithmeticError", "rank_50 > 1"]
    assert second[0] == ["RuntimeError", "an alarm ended the run at step 1; the first rank has its error."]
    assert (first[1], second[1]) == ([True, 2], [True, 0])
    assert (first[2], second[2]) == ([True, [43, 43]], [True, []])
