"""The workloads of the round benchmark: models and data, the same for both sides."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from lightfed.models.networks.cnn import SimpleCNN
from lightfed.models.networks.mlp import MLP
from lightfed.utils.rng import derive_seed, torch_generator

SEED = 2024
BATCH_SIZE = 32
LEARNING_RATE = 0.05
CLASSES = 10
CLIENT_SAMPLES = 100


@dataclass(frozen=True)
class Workload:
    """FedAvg, one local epoch of plain SGD, 100 samples a client.

    Attributes:
        name: short.
        title: for people.
        input_shape: of a sample.
        network: builds the model from `num_classes` and `input_shape`.
        clients: registered.
        per_round: clients that take part in a round.
        pool: distinct samples; clients share them where they are fewer than the clients need.
        rounds: timed together, about a second of them.
        target: largest ratio of lightfed to bare that is good enough.
    """

    name: str
    title: str
    input_shape: tuple[int, ...]
    network: Callable[..., nn.Module] = field(repr=False)
    clients: int
    per_round: int
    pool: int
    rounds: int
    target: float

    def build(self) -> nn.Module:
        """The model, initialised by the benchmark's seed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(SEED, f"benchmark/{self.name}/init"))
            return self.network(num_classes=CLASSES, input_shape=self.input_shape)

    def samples(self, split: str, count: int) -> tuple[Tensor, Tensor]:
        """Noise around one random centre a class; classes overlap as much in any dimension.

        Args:
            split: names the draw; the centres are the same in all splits.
            count: N.

        Returns:
            (N, *input_shape) float32 of about unit variance and (N,) int64.
        """
        centres = torch.randn(
            CLASSES, *self.input_shape, generator=torch_generator(SEED, "benchmark/centres")
        )
        generator = torch_generator(SEED, f"benchmark/{split}")
        labels = torch.randint(CLASSES, (count,), generator=generator)
        noise = torch.randn(count, *self.input_shape, generator=generator)
        spread = 0.25 * prod(self.input_shape) ** 0.5
        x = noise.mul_(spread).add_(centres[labels]).div_((1 + spread**2) ** 0.5)
        return x, labels

    def owned(self, client: int) -> slice:
        """The samples of a client: a window on the pool, whose length is a multiple of it."""
        start = client * CLIENT_SAMPLES % self.pool
        return slice(start, start + CLIENT_SAMPLES)

    def windows(self, clients: int) -> list[np.ndarray]:
        """`owned` of the first clients, as indices."""
        return [np.arange(w.start, w.stop) for w in map(self.owned, range(clients))]

    def with_clients(self, clients: int) -> "Workload":
        """The same with more registered clients on the same pool."""
        return replace(self, clients=clients)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="W1",
            title="MLP 784-200-200-10, 10 of 100 clients",
            input_shape=(1, 28, 28),
            network=partial(MLP, hidden=(200, 200)),
            clients=100,
            per_round=10,
            pool=10_000,
            rounds=30,
            target=0.75,
        ),
        Workload(
            name="W2",
            title="CNN 3x32x32, 10 of 100 clients",
            input_shape=(3, 32, 32),
            network=partial(SimpleCNN, channels=(32, 64), hidden=128),
            clients=100,
            per_round=10,
            pool=10_000,
            rounds=3,
            target=0.57,
        ),
        Workload(
            name="W5",
            title="MLP 32-64-10, 100 of 10,000 clients",
            input_shape=(32,),
            network=partial(MLP, hidden=(64,)),
            clients=10_000,
            per_round=100,
            pool=20_000,
            rounds=12,
            target=0.12,
        ),
    )
}
