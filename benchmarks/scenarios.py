"""The processes of `beside.py`: rounds of a checkout, of a plain loop or of pfl, on command.

    python -P benchmarks/scenarios.py CHECKOUT SCENARIO

with CHECKOUT, its kernels and its benchmarks on PYTHONPATH, and nothing of another checkout (-P).
It writes `ready`, then reads a line and answers it with a line, until it reads `stop`:

    N            train N rounds; the answer is their CPU seconds
    peak         the most memory that the process has held, in MB
    profile N    train N rounds under cProfile; the answer is JSON, the time of every own function

Scenarios are written with names that `lightfed` itself exports, so that older checkouts run them
too. A scenario is `KIND:ARGUMENT:...`; `SCENARIOS` below lists the kinds.
"""

import cProfile
import json
import logging
import os
import pstats
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

Side = int | str  # `auto`, `off` or a number, as of the Federation's side_by_side
_ENDLESS = 1_000_000


class Questions:
    """Reads what to do next, and answers when it is done.

    Args:
        answers: where the answers are written; the process's own output goes elsewhere.
        checkout: whose functions a profile lists.
    """

    def __init__(self, answers: TextIO, checkout: str) -> None:
        self._answers = answers
        self._checkout = checkout
        self._started: float | None = None
        self._profile: cProfile.Profile | None = None
        self._clock: Callable[[], float] = cpu_seconds

    def use_clock(self, clock: Callable[[], float]) -> None:
        """Answer with the seconds of this clock in place of the process's CPU time."""
        self._clock = clock

    def next(self) -> int | None:
        """Answer for the rounds before, and return the number to train now; None to end."""
        if self._started is None:
            self._say("ready")
        elif self._profile is not None:
            self._profile.disable()
            self._say(json.dumps(own_functions(self._profile, self._checkout)))
            self._profile = None
        else:
            self._say(f"{self._clock() - self._started}")

        while (line := sys.stdin.readline().strip()) == "peak":
            self._say(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6}")
        if line in ("", "stop"):
            return None

        command, _, count = line.rpartition(" ")
        if command == "profile":
            self._profile = cProfile.Profile(time.process_time)
            self._profile.enable()
        self._started = self._clock()
        return int(count)

    def _say(self, text: str) -> None:
        print(text, file=self._answers, flush=True)


def cpu_seconds() -> float:
    """User and system time of this process and the children that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def own_functions(profile: cProfile.Profile, checkout: str) -> list[tuple[str, int, float]]:
    """Return name, calls and own seconds of each function of a checkout, and the sum of all."""
    found: list[tuple[str, int, float]] = []
    total = 0.0
    stats: Mapping[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    for (file, line, name), (_, calls, own, _, _) in stats.items():
        total += own
        if file.startswith((f"{checkout}/lightfed/", f"{checkout}/kernels/")):
            found.append((f"{file.removeprefix(f'{checkout}/')}:{line} {name}", calls, own))
    return [("all functions", 0, total), *found]


# Networks and data that no workload of rounds.py has.


class LoRALinear(nn.Module):
    """W x + c + s B A x, where W and c are frozen and the same for all clients."""

    packs = True

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scaling = 16 / rank

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scaling * (x @ self.down.T @ self.up.T)


def adapted(rank: int) -> nn.Module:
    """784-256-256-256-256-10 with adapters of a rank on each layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (784, 256, 256, 256):
        layers += [LoRALinear(inputs, 256, rank), nn.ReLU()]
    return nn.Sequential(*layers, LoRALinear(256, 10, rank))


def convolutions(*, norm: bool) -> nn.Module:
    """Two convolutions of 8 and 16 channels on 1x8x8, with batch normalization or without."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16)):
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        if norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 10))


def perceptron() -> nn.Module:
    """64-64-10 on 1x8x8."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


SMALL: dict[str, Callable[[], nn.Module]] = {
    "mlp": perceptron,
    "cnn": partial(convolutions, norm=False),
    "batchnorm": partial(convolutions, norm=True),
}


def drawn(count: int, *shape: int) -> Any:
    """A source of so many samples of a shape, with labels of ten classes."""
    import lightfed

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, *shape, generator=generator)
    y = torch.randint(0, 10, (count,), generator=generator)
    return lightfed.FromTorch(TensorDataset(x, y), TensorDataset(x[:1000], y[:1000]))


# Scenarios.


def workload(questions: Questions, name: str, way: str = "lightfed") -> None:
    """W1 to W6 of rounds.py, as a way of the checkout's `workers.WAYS`."""
    from federated import build
    from workers import WAYS
    from workloads import WORKLOADS

    with tempfile.TemporaryDirectory() as folder:
        trainer, federation, data = build(
            WORKLOADS[name], folder, make_pace(questions), **WAYS[way]
        )
        trainer.fit(federation, datamodule=data)


def loop(questions: Questions, name: str) -> None:
    """The usual loop in plain PyTorch, which gets its participants and batches beforehand."""
    from bare import bare
    from workloads import WORKLOADS

    chosen = WORKLOADS[name]
    rounds, t = bare(chosen, "loop", "cpu"), 0
    # What is drawn for the next rounds is drawn outside of the clock.
    drawn_for = [chosen.draws(ahead) for ahead in range(_AHEAD)]
    while (count := questions.next()) is not None:
        for _ in range(count):
            rounds.round(drawn_for[t % _AHEAD], t)
            t += 1


_AHEAD = 64  # rounds; then the loop trains the same participants again


def pfl(questions: Questions, name: str) -> None:
    """The same rounds by pfl, as of cohort.py."""
    import cohort
    from workloads import WORKLOADS

    left = 0

    def between(_device: str) -> float:
        nonlocal left
        if left == 0:
            count = questions.next()
            if count is None:
                os._exit(0)  # pfl has no other way to end between two rounds
            left = count
        left -= 1
        return 0.0

    cohort.seconds_on = between
    cohort._pfl(replace(WORKLOADS[name], rounds=1), "cpu", _ENDLESS)


def keeps_rows(questions: Questions, method: str, clients: str, side: Side = "auto") -> None:
    """A method whose clients keep rows, with an MLP 32-64-10; 100 clients take part in a round."""
    import lightfed

    network = partial(lightfed.MLP, hidden=(64,))
    settings: dict[str, dict[str, Any]] = {
        "LGFedAvg": {"global_layers": 1},
        "FedPer": {"head": "net.layers.3."},
        "FedBCD": {"servers": 10, "active": 5},
    }
    algorithm = getattr(lightfed, method)(**settings.get(method, {}))
    count = int(clients)
    source = drawn(count * 100 if count <= 1000 else count * 10, 32)
    # The devices of FedBCD's active servers take part: half of them would be far more than 100.
    sampled = {} if method == "FedBCD" else {"clients_per_round": 100}
    fit(questions, algorithm, [(count, network)], source, lightfed.Iid(), 10, side, **sampled)


def unequal(questions: Questions, network: str, clients: str, alpha: str, side: Side) -> None:
    """FedAvg of small networks on Dirichlet's parts, 100 samples for each client on average."""
    import lightfed

    count = int(clients)
    partition = lightfed.Iid() if alpha == "equal" else lightfed.Dirichlet(float(alpha))
    groups = [(count, SMALL[network])]
    fit(questions, lightfed.FedAvg(), groups, drawn(count * 100, 1, 8, 8), partition, 32, side)


def lora(questions: Questions, side: Side = "auto") -> None:
    """30 clients with adapters of ranks 16, 8 and 4 on one frozen MLP; RankMean."""
    import lightfed

    groups = [(10, partial(adapted, rank)) for rank in (16, 8, 4)]
    algorithm = lightfed.RankMean(adapters={"down": "up"})
    fit(questions, algorithm, groups, drawn(3000, 784), lightfed.Iid(), 32, side)


def merge(questions: Questions, width: str) -> None:
    """Fleet.merge of two clients with about width^2 parameters: its CPU time alone."""
    import lightfed

    taken = 0.0
    merge_of_fleet = lightfed.Fleet.merge

    def timed(*args: Any, **settings: Any) -> Any:
        nonlocal taken
        start = time.process_time()
        try:
            return merge_of_fleet(*args, **settings)
        finally:
            taken += time.process_time() - start

    lightfed.Fleet.merge = timed
    questions.use_clock(lambda: taken)
    network = partial(lightfed.MLP, hidden=(int(width),))
    source = drawn(64, int(width))
    fit(questions, lightfed.FedAvg(), [(2, network)], source, lightfed.Iid(), 32, "off")


def copies(questions: Questions, width: str) -> None:
    """As many copies of a row of that network."""
    row = torch.randn(int(width) * (int(width) + 1) + 11 * int(width))
    target = torch.zeros_like(row)
    while (count := questions.next()) is not None:
        for _ in range(count):
            target.copy_(row)


def heterofl(questions: Questions, tested: str, samples: str = "") -> None:
    """Rounds of W3 with static batch normalization.

    Args:
        questions: asks for rounds.
        tested: `tested` after each round, or `untested`.
        samples: training samples that estimate the statistics; all by default.
    """
    from federated import Pool, Windows, _groups
    from workloads import LEARNING_RATE, SEED, WORKLOADS

    import lightfed

    chosen = WORKLOADS["W3"]
    data = lightfed.FederatedDataModule(Pool(chosen, 1000), Windows(chosen), batch_size=32)
    algorithm = lightfed.HeteroFL()
    if samples:
        algorithm = lightfed.HeteroFL(statistics_samples=int(samples))
    federation = lightfed.Federation(
        algorithm,
        _groups(chosen),
        optimizer=partial(SGD, lr=LEARNING_RATE),
        local_epochs=1,
        evaluate=("global",),
        export=(),
        seed=SEED,
        clients_per_round=chosen.per_round,
    )
    limits = {} if tested == "tested" else {"limit_val_batches": 0}
    train(questions, federation, data, check_val_every_n_epoch=1, **limits)


def start(questions: Questions, clients: str) -> None:
    """A run from its start to the end of its first round, in which 100 clients take part."""
    import lightfed

    network = partial(lightfed.MLP, hidden=(64,))
    count = int(clients)
    source = drawn(count * 10, 32)
    while (times := questions.next()) is not None:
        for _ in range(times):
            fit(
                None, lightfed.FedAvg(), [(count, network)], source, lightfed.Iid(), 10, "auto",
                clients_per_round=100,
            )  # fmt: skip


SCENARIOS: dict[str, Callable[..., None]] = {
    "workload": workload,
    "loop": loop,
    "pfl": pfl,
    "rows": keeps_rows,
    "unequal": unequal,
    "lora": lora,
    "merge": merge,
    "copies": copies,
    "heterofl": heterofl,
    "start": start,
}


def fit(
    questions: Questions | None,
    algorithm: Any,
    groups: list[tuple[int, Any]],
    source: Any,
    partition: Any,
    batch_size: int,
    side: Side,
    **settings: Any,
) -> None:
    """Train groups of clients, given by their number and network, without tests or exports."""
    import lightfed

    federation = lightfed.Federation(
        algorithm,
        [lightfed.ClientGroup(count, network) for count, network in groups],
        optimizer=partial(SGD, lr=0.05),
        evaluate=(),
        export=(),
        side_by_side=int(side) if str(side).isdigit() else side,
        **settings,
    )
    data = lightfed.FederatedDataModule(source, partition, batch_size=batch_size)
    train(questions, federation, data, limit_val_batches=0)


def train(questions: Questions | None, federation: Any, data: Any, **settings: Any) -> None:
    """Fit until `questions` ends it; a single round without questions."""
    import lightfed

    with tempfile.TemporaryDirectory() as folder:
        trainer = lightfed.FederatedTrainer(
            max_epochs=1 if questions is None else _ENDLESS,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_page=False,
            enable_checkpointing=False,
            default_root_dir=folder,
            callbacks=[] if questions is None else [make_pace(questions)],
            **settings,
        )
        trainer.fit(federation, datamodule=data)


def make_pace(questions: Questions) -> Any:
    """Return a callback that asks `questions` before a round, when all rounds before are done."""
    from lightning.pytorch import Callback

    class Pace(Callback):
        left = 0

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if self.left == 0:
                count = questions.next()
                trainer.should_stop = count is None
                self.left = count or 1
            self.left -= 1

    return Pace()


def main() -> None:
    """Run a scenario."""
    torch.set_num_threads(1)
    checkout, scenario = sys.argv[1:]
    kind, *arguments = scenario.split(":")
    # Whatever the run prints must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    if kind not in ("loop", "pfl", "copies"):
        import lightfed

        assert str(lightfed.__file__).startswith(f"{checkout}/"), lightfed.__file__
    SCENARIOS[kind](Questions(answers, checkout), *arguments)


if __name__ == "__main__":
    main()
