"""FedAvg as a bare torch loop. No line of lightfed is in this file."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, FEATURES, TOKENS = 4, 16, 20
SHAPES = {
    "vector": (FEATURES,), "tokens": (12,), "series": (10, 6), "image": (3, 8, 8),
    "picture": (3, 32, 32),
}  # fmt: skip
EQUAL, UNEQUAL = (8,) * 8, (8, 12, 6, 10, 5, 16, 9, 3)

Batches = Mapping[tuple[int, int], Sequence[Tensor]]  # indices of samples, by round and client
SGD = partial(torch.optim.SGD, lr=0.05)


@dataclass(frozen=True)
class Case:
    """A network and the settings that it is trained with.

    Attributes:
        net: builds a network of 4 classes, or a LightningModule.
        data: a key of SHAPES.
        sizes: samples of each client, which are sorted by class if `skewed`.
        optimizer: of the parameters that are trained; None if the module configures its own.
        last: what becomes of a smaller last batch.
        schedule: of the learning rate, stepped once a round.
        clip: the bound and what it bounds, "norm" or "value".
        each_round: changes the network at the start of a round, as a callback does.
        draws: draws random numbers, which a pack draws from a generator of its own.
        refused: the key of the one line that refuses the case.
        may_refuse: the case is either right or refused.
        counts: the attribute that keeps state from session to session. A warning names it.
        packed: what `auto` packs.
    """

    net: Callable[[], nn.Module]
    data: str = "vector"
    sizes: Sequence[int] = UNEQUAL
    skewed: bool = False
    optimizer: Callable[..., torch.optim.Optimizer] | None = SGD
    batch: int = 4
    epochs: int = 2
    rounds: int = 2
    last: str = "keep"
    precision: str = "32"
    schedule: Callable[..., Any] | None = None
    clip: tuple[float, str] | None = None
    each_round: Callable[[Any, int], None] | None = None
    draws: bool = False
    refused: str | None = None
    may_refuse: bool = False
    counts: str | None = None
    packed: bool = False

    def built(self) -> nn.Module:
        """The network with its initial values, which are always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            return self.net()

    def samples(self) -> tuple[Tensor, Tensor]:
        """(N, ...) inputs and (N,) labels of all clients, in their order."""
        rng, count = torch.Generator().manual_seed(7), sum(self.sizes)
        x = torch.randn(count, *SHAPES[self.data], generator=rng)
        scores = x.flatten(1) @ torch.randn(x[0].numel(), CLASSES, generator=rng)
        y = (scores + torch.randn(count, CLASSES, generator=rng)).argmax(1)
        y[:CLASSES] = torch.arange(CLASSES)
        if self.data == "tokens":
            x = torch.randint(0, TOKENS, x.shape, generator=rng).float()
        order = y.argsort(stable=True) if self.skewed else torch.arange(count)
        return x[order], y[order]


def train(case: Case, batches: Batches, seeds: Mapping[tuple[int, int], int]) -> dict[str, Tensor]:
    """The state dict of the server after all rounds; `seeds` are those of the sessions."""
    x, y = case.samples()
    state = case.built().state_dict()
    for t in range(case.rounds):
        found = []
        for k in range(len(case.sizes)):
            net = case.built().train()
            net.load_state_dict(state)
            if case.each_round is not None:
                case.each_round(net, t)
            seed = seeds[t, k]
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            _session(case, net, [(x[index], y[index]) for index in batches[t, k]], t)
            found.append({name: value.detach() for name, value in net.state_dict().items()})
        state = {name: _mean([each[name] for each in found], case.sizes) for name in state}
    return state


def _session(case: Case, net: Any, batches: Sequence[tuple[Tensor, Tensor]], t: int) -> None:
    optimizer, after_step = _optimizer(case, net, t)
    batches_of_an_epoch = len(batches) // case.epochs
    for number, batch in enumerate(batches):
        index = number % batches_of_an_epoch  # as Lightning counts
        optimizer.zero_grad()
        half = case.precision == "bf16-mixed"
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            loss = loss_of(net, batch, index)
        if loss is None:
            continue
        loss.backward()
        if case.clip is not None:
            bound, kind = case.clip
            clip: Any = nn.utils.clip_grad_norm_ if kind == "norm" else nn.utils.clip_grad_value_
            clip([p for group in optimizer.param_groups for p in group["params"]], bound)
        optimizer.step()
        after_step()


def _optimizer(case: Case, net: Any, t: int) -> tuple[torch.optim.Optimizer, Callable[[], Any]]:
    """The optimiser of a session in round t, and what follows each of its steps."""
    if case.optimizer is None:
        own = net.configure_optimizers()
        if not isinstance(own, dict):
            return own, lambda: None
        return own["optimizer"], own["lr_scheduler"]["scheduler"].step
    optimizer = case.optimizer([p for p in net.parameters() if p.requires_grad])
    if case.schedule is not None:
        schedule = case.schedule(optimizer)
        for _ in range(t):
            schedule.step()
    return optimizer, lambda: None


def loss_of(net: Any, batch: tuple[Tensor, Tensor], index: int) -> Tensor | None:
    """The loss of a batch: the network's own, or else cross-entropy."""
    x, y = batch
    if hasattr(net, "training_step"):
        out = net.training_step(batch, index)
        return out["loss"] if isinstance(out, dict) else out
    if hasattr(net, "losses"):
        return sum(net.losses(x, y).values())
    return F.cross_entropy(net(x), y)


def _mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The mean, weighted by samples; of whole numbers the largest."""
    stacked = torch.stack(list(values))
    if not stacked.is_floating_point():
        return stacked.amax(0)
    weights = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    return torch.tensordot(weights, stacked.double(), 1).to(stacked.dtype)


def error(
    found: Mapping[str, Tensor], right: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> float:
    """The norm of the difference over that of the whole update; inf if whole numbers differ."""
    if found.keys() != right.keys():
        return float("inf")
    difference = update = 0.0
    for name, value in right.items():
        if not value.is_floating_point():
            if not torch.equal(found[name].to(value.dtype), value):
                return float("inf")
            continue
        difference += float((found[name].double() - value.double()).square().sum())
        update += float((value.double() - start[name].double()).square().sum())
    return (difference / update) ** 0.5 if update else float("inf")
