"""pfl-research's own setting on CIFAR-10's shape: lightfed, pfl itself and a bare loop on one card.

    python benchmarks/cohort.py [--passes 5] [--device cuda] [--out FOLDER] [--tiny]

The cross-device benchmark of pfl-research: 1,000 users of 50 samples of 3x32x32, a cohort of 50,
batches of 10, one local epoch of SGD (rate 0.05, there 0.1), two convolutions and two linear
layers, FedAvg. Nothing is evaluated. The samples are drawn, see workloads.py, and lie on the device
for all sides; each side has a process to itself. The sides:

    pfl          pfl-research, where it is installed: SimulatedBackend, FederatedAveraging
    loop         bare PyTorch, one client after the other
    sequential   lightfed, one client after the other
    packs        lightfed, the whole cohort side by side
    as it comes  lightfed, which chooses
    bf16         packs in bf16-mixed

`--out` keeps cohort.csv, and the aims. The exit status is 1 if a side fails or a loss is not a
number; pfl is left out where it cannot be imported.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import rounds  # noqa: F401 - first: it sets the number of threads
import torch
import torch.nn.functional as F
from aims import Aim, write_aims
from figures import machine, out_folder
from models import Measured, Table, by_hand, by_lightfed, memory
from published import ratio
from torch import Tensor
from workers import seconds_on
from workloads import COHORT, LEARNING_RATE, Workload

_WARM_UP = 2
_WHOLE: dict[str, Any] = {"side_by_side": 50, "pack_memory": 1 << 17}


def by_pfl(workload: Workload, way: str, device: str, passes: int) -> Measured:
    """`_pfl` in a main process: in any other, pfl has no distributed context and fails."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "measured.json"
        command = [sys.executable, __file__, "--device", device, "--passes", str(passes)]
        command += ["--pfl-alone", str(result)]
        if workload.clients != COHORT.clients:
            command.append("--tiny")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        fields = json.loads(result.read_text())
    return Measured(tuple(fields["seconds"]), fields["memory"], tuple(fields["losses"]))


def _pfl(workload: Workload, device: str, passes: int) -> Measured:
    """Rounds of pfl-research, timed from the end of one to the end of another."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    losses: list[float] = []

    class Network(torch.nn.Module):
        """The network with the two methods that pfl asks for."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = workload.build()

        def loss(self, x: Tensor, y: Tensor, *, eval: bool = False) -> Tensor:
            self.train(not eval)
            return F.cross_entropy(self.inner(x), y)

        def metrics(self, x: Tensor, y: Tensor, *, eval: bool = True) -> dict[str, Any]:
            with torch.no_grad():
                value = float(F.cross_entropy(self.inner(x), y))
            losses.append(value)
            return {"loss": Weighted(value * len(y), len(y))}

    class Clock(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Any]:
            ends.append(seconds_on(device))
            return False, Metrics()

    x, y = (part.to(device) for part in workload.samples("train", workload.pool))

    def user(client: int) -> Dataset:
        owned = workload.owned(client)
        return Dataset(raw_data=[x[owned], y[owned]])

    ends: list[float] = []
    network = Network().to(device)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    users = get_user_sampler("minimize_reuse", list(range(workload.clients)))
    federated = FederatedDataset(user, users)
    count = _WARM_UP + passes * workload.rounds
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=count,
            # The first round evaluates its users, which is part of the warm-up.
            evaluation_frequency=count,
            train_cohort_size=workload.per_round,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=federated, val_data=federated),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=workload.epochs,
            local_learning_rate=LEARNING_RATE,
            local_batch_size=workload.batch,
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
    )
    with torch.no_grad():
        last = float(F.cross_entropy(network.inner(x[:1000]), y[:1000]))
    marks = ends[_WARM_UP - 1 :: workload.rounds]
    seconds = [(end - start) / workload.rounds for start, end in pairwise(marks)]
    return Measured(tuple(seconds), memory(device), (losses[0], last))


def compare(table: Table, workload: Workload) -> list[Aim]:
    """Measure all sides."""
    print(f"\n{workload.name}  {workload.title}", flush=True)
    side = partial(table.side, workload)
    pfl = Measured(note="not installed")
    if importlib.util.find_spec("pfl") is not None:
        pfl = side("pfl", by_pfl, "pfl")
    packs = side("packs", by_lightfed, "", "32", _WHOLE)
    comes = side("as it comes", by_lightfed, "lightfed")
    loop = side("loop", by_hand, "loop")
    side("sequential", by_lightfed, "sequential")
    side("packs, bf16", by_lightfed, "", "bf16", _WHOLE)
    return [
        Aim("pfl's CIFAR-10 setting: packs over pfl itself", ratio(pfl, packs), 5, 3),
        Aim("pfl's CIFAR-10 setting: as it comes over pfl itself", ratio(pfl, comes), 5, 3),
        Aim("pfl's CIFAR-10 setting: packs over the bare loop", ratio(loop, packs), 5, 3),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure all sides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=5, help="measurements of every side")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=out_folder, help="folder for cohort.csv")
    parser.add_argument("--tiny", action="store_true", help="few clients, to see that it runs")
    parser.add_argument("--pfl-alone", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    workload = COHORT.tiny() if options.tiny else COHORT
    if options.pfl_alone is not None:
        measured = _pfl(workload, options.device, options.passes)
        options.pfl_alone.write_text(json.dumps(asdict(measured)))
        return 0
    print(machine())
    table = Table(options.device, options.passes, options.out, "cohort.csv")
    write_aims(options.out, compare(table, workload))
    return 0 if table.good else 1


if __name__ == "__main__":
    sys.exit(main())
