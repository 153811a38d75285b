"""The workloads of the round benchmark: models, data and draws, the same for every side."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.algorithms.fedavg import drop_statistics
from lightfed.algorithms.topology.topology import TimeVarying, round_senders
from lightfed.api.places import participants
from lightfed.networks.cifar_resnet import ResNet18GN
from lightfed.networks.cnn import Conv, SimpleCNN
from lightfed.networks.lenet import LeNet
from lightfed.networks.mlp import MLP
from lightfed.networks.resnet import PreActResNet
from lightfed.networks.transformer import Transformer
from lightfed.utils.rng import derive_seed, torch_generator

SEED = 2024
BATCH_SIZE = 32
LEARNING_RATE = 0.05
CLASSES = 10
CLIENT_SAMPLES = 100
LEVELS = "abcde"  # of HeteroFL: widths 1, 1/2, 1/4, 1/8, 1/16
NEIGHBOURS = 5
DENSITY = 0.5
PRUNE_RATE = 0.5
COSINE_ROUNDS = 1000  # of DisPFL's decay of the prune rate
_COARSE = 4  # pixels of a class's pattern before it is enlarged

Method = Literal["FedAvg", "HeteroFL", "DisPFL"]


@dataclass(frozen=True)
class Draws:
    """What is random in a round; the baselines get it before the clock starts.

    Attributes:
        clients: who takes part, ascending.
        order: (K, n) the samples of each participant in the order of its epoch.
        batch: (K, B) the samples of its regrow gradient.
        senders: (K, K) float, 1 where a participant (row) averages over another, or over itself.
    """

    clients: list[int]
    order: Tensor
    batch: Tensor
    senders: Tensor

    def to(self, device: str) -> "Draws":
        """The same on a device."""
        moved = (part.to(device) for part in (self.order, self.batch, self.senders))
        return Draws(self.clients, *moved)


@dataclass(frozen=True)
class Workload:
    """Local epochs of plain SGD.

    Attributes:
        name: short.
        title: for people.
        method: the algorithm.
        input_shape: of a sample.
        network: builds the model from `num_classes`, `input_shape` and HeteroFL's `rate`.
        clients: registered.
        per_round: clients that take part in a round.
        pool: distinct samples; clients share them where they are fewer than the clients need.
        rounds: timed together.
        goal: largest ratio of lightfed to the plain loop that is good enough; None for none.
        labels: classes of a client's samples.
        noise: of the samples, relative to the patterns of the classes.
        words: of the vocabulary, if samples are windows of text; 0 for classes.
        batch: samples of a step.
        each: samples of a client.
        epochs: of a client in a round.
        narrow: builds a smaller model, for `tiny`.
    """

    name: str
    title: str
    method: Method
    input_shape: tuple[int, ...]
    network: Callable[..., nn.Module] = field(repr=False)
    clients: int
    per_round: int
    pool: int
    rounds: int
    goal: float | None
    labels: int = CLASSES
    noise: float = 2.0
    words: int = 0
    batch: int = BATCH_SIZE
    each: int = CLIENT_SAMPLES
    epochs: int = 1
    narrow: Callable[..., nn.Module] | None = field(default=None, repr=False)

    def build(self, rate: float = 1.0) -> nn.Module:
        """The model of a width, initialized as lightfed initializes the first group's."""
        width = {"rate": rate} if self.method == "HeteroFL" else {}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(SEED, "init", client=0))
            net = self.network(num_classes=CLASSES, input_shape=self.input_shape, **width)
        drop_statistics(net)
        return net

    def samples(self, split: str, count: int) -> tuple[Tensor, Tensor]:
        """A smooth random pattern a class, and noise: convolutions learn it too.

        Args:
            split: names the draw; the patterns are the same in all splits.
            count: N.

        Returns:
            (N, *input_shape) float32 of about unit variance and (N,) int64; of text, int32 words,
            of which few are frequent, and zeros.
        """
        if self.words:
            share = torch.rand(count, *self.input_shape, generator=torch_generator(SEED, split))
            return share.pow(3).mul(self.words).int(), torch.zeros(count, dtype=torch.int64)
        patterns = self._patterns()
        generator = torch_generator(SEED, f"benchmark/{split}")
        drawn = torch.randint(self.labels, (count,), generator=generator)
        labels = (drawn + torch.arange(count) // self.each) % CLASSES
        x = torch.randn(count, *self.input_shape, generator=generator).mul_(self.noise)
        return x.add_(patterns[labels]).div_((1 + self.noise**2) ** 0.5), labels

    def _patterns(self) -> Tensor:
        """(CLASSES, *input_shape) of unit variance."""
        generator = torch_generator(SEED, "benchmark/patterns")
        if len(self.input_shape) == 1:
            return torch.randn(CLASSES, *self.input_shape, generator=generator)
        channels, *size = self.input_shape
        coarse = torch.randn(CLASSES, channels, _COARSE, _COARSE, generator=generator)
        smooth = F.interpolate(coarse, size=size, mode="bilinear")
        return smooth / smooth.std()

    def owned(self, client: int) -> slice:
        """The samples of a client: a window on the pool, whose length is a multiple of it."""
        start = client * self.each % self.pool
        return slice(start, start + self.each)

    def level(self, client: int) -> int:
        """The position of a client's width among HeteroFL's levels; 0 for other methods."""
        return client * len(LEVELS) // self.clients if self.method == "HeteroFL" else 0

    def draws(self, t: int) -> Draws:
        """The draws of round t, by lightfed's names for them, so that all sides do equal work."""
        chosen = participants(self.per_round, range(self.clients), seed=SEED, t=t)
        batch = [self._shuffled(k, t - 1, "gradient-order")[:BATCH_SIZE] for k in chosen]
        senders = torch.eye(len(chosen))
        if self.method == "DisPFL":
            of_round = round_senders(TimeVarying(NEIGHBOURS), t, clients=self.clients, seed=SEED)
            for receiver, heard in of_round.items():
                senders[receiver, heard] = 1.0
        order = torch.stack([self._shuffled(k, t, "order") for k in chosen])
        # A loop goes over the samples in the same order again.
        order = torch.cat([order] * self.epochs, 1)
        return Draws(chosen, order, torch.stack(batch), senders)

    def _shuffled(self, client: int, t: int, purpose: str) -> Tensor:
        generator = torch_generator(SEED, purpose, t, client)
        return self.owned(client).start + torch.randperm(self.each, generator=generator)

    def tiny(self) -> "Workload":
        """The same work in small, for tests of the benchmark."""
        shape = (self.input_shape[0], 16, 16) if len(self.input_shape) == 3 else self.input_shape
        per_round = 10 if self.clients == self.per_round else 6  # as few as form a pack
        pool = 10 * self.each
        return replace(
            self, input_shape=shape, clients=10, per_round=per_round, pool=pool, rounds=1,
            network=self.narrow or self.network, words=min(self.words, 50),
            batch=max(self.batch, self.each // 4),
        )  # fmt: skip


_IMAGE = (3, 32, 32)
_HETEROFL = partial(Conv, hidden=(32, 64, 128, 256))
_TINY_MLP = partial(MLP, hidden=(64,))
_W3 = Workload(
    "W3", "HeteroFL, Conv 32-64-128-256 on 1x28x28, five widths, 10 of 100 clients", "HeteroFL",
    (1, 28, 28), _HETEROFL, clients=100, per_round=10, pool=10_000, rounds=2, goal=0.80, labels=4,
)  # fmt: skip
_W5 = Workload(
    "W5", "MLP 32-64-10, 100 of 10,000 clients", "FedAvg",
    (32,), _TINY_MLP, clients=10_000, per_round=100, pool=20_000, rounds=12, goal=0.20,
)  # fmt: skip
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "W1", "MLP 784-200-200-10, 10 of 100 clients", "FedAvg", (1, 28, 28),
            partial(MLP, hidden=(200, 200)),
            clients=100, per_round=10, pool=10_000, rounds=30, goal=0.75, noise=8.0,
        ),
        Workload(
            "W2", "CNN on 3x32x32, 10 of 100 clients", "FedAvg", _IMAGE,
            partial(SimpleCNN, channels=(32, 64), hidden=128),
            clients=100, per_round=10, pool=10_000, rounds=2, goal=0.57,
        ),
        _W3,
        replace(
            _W3, name="W3a", title="the same, all 100 clients in a round",
            per_round=100, rounds=1, goal=None,
        ),
        Workload(
            "W4", "DisPFL, LeNet on 3x32x32, density 0.5, 10 clients, 5 neighbours", "DisPFL",
            _IMAGE, LeNet, clients=10, per_round=10, pool=1_000, rounds=1, goal=0.65, noise=0.5,
        ),
        _W5,
        replace(
            _W5, name="W5b", title="the same, 100 of 100,000 clients", clients=100_000, goal=None
        ),
    )
}  # fmt: skip
# Of the papers' networks, for a card. All ten clients take part, two of each of HeteroFL's widths,
# which is what a round of ten of a hundred has on average.
_LARGE: dict[str, Any] = {
    "clients": 10, "per_round": 10, "pool": 1_000, "rounds": 1, "goal": None, "noise": 0.5
}  # fmt: skip
LARGE = {
    workload.name: workload
    for workload in (
        Workload(
            "W6", "HeteroFL, PreActResNet-18 on 3x32x32, five widths, 10 clients", "HeteroFL",
            _IMAGE, PreActResNet, labels=4, **_LARGE,
            narrow=partial(PreActResNet, hidden=(16, 16), blocks=(1, 1)),
        ),
        Workload(
            "W7", "DisPFL, ResNet-18 GN on 3x32x32, density 0.5, 10 clients, 5 neighbours",
            "DisPFL", _IMAGE, ResNet18GN, **_LARGE,
            narrow=partial(ResNet18GN, width=4, groups=2),
        ),
        Workload(
            "W8", "HeteroFL, Transformer, 33,278 words, windows of 64, batches of 5, 10 clients",
            "HeteroFL", (64,), Transformer, words=33_278, batch=5, **_LARGE,
            narrow=partial(Transformer, embedding=32, heads=2, hidden=16, layers=1),
        ),
    )
}  # fmt: skip

# Settings that others have published, for a card.
PUBLISHED = replace(
    LARGE["W6"],
    name="published",
    title="HeteroFL, PreActResNet-18 on 3x32x32, five widths, 10 clients of 50 steps of 10",
    batch=10,
    each=500,
    pool=5_000,
)
# With a hundred clients packs have something to pack; a client has a fifth of a published epoch.
HUNDRED = replace(
    PUBLISHED,
    name="hundred",
    title="the same, 100 of 1,000 clients of 10 steps of 10",
    clients=1_000,
    per_round=100,
    each=100,
    pool=10_000,
)
COHORT = replace(
    WORKLOADS["W2"],
    name="cohort",
    title="two convolutions on 3x32x32, 50 of 1,000 clients, 5 steps of 10",
    clients=1_000,
    per_round=50,
    pool=50_000,
    each=50,
    batch=10,
    rounds=10,
)
CARD = {workload.name: workload for workload in (PUBLISHED, HUNDRED, COHORT)}
