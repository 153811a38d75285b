"""The yardsticks: FedAvg, HeteroFL and DisPFL in plain PyTorch, as one writes them by hand."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from math import ceil, cos, pi
from typing import Literal

import torch
from lightfed_kernels import Layout, Segments, unpack_mask
from sessions import Batched, OneByOne, Sessions, Tensors
from torch import Tensor, nn
from typing_extensions import override
from workloads import (
    CLASSES,
    COSINE_ROUNDS,
    DENSITY,
    LEVELS,
    PRUNE_RATE,
    SEED,
    Draws,
    Workload,
)

from lightfed.algorithms.peers.sparsity import random_mask
from lightfed.utils.memory import keep_heap
from lightfed.utils.rng import derive_seed

Way = Literal["loop", "tuned", "batched"]
Make = Callable[..., Sessions]


class Bare(ABC):
    """Rounds of one workload.

    Args:
        workload: what is trained.
        make: makes the sessions of a network.
        device: cpu or cuda.
    """

    def __init__(self, workload: Workload, make: Make, device: str) -> None:
        self.workload, self.device = workload, device
        self.x, self.y = (part.to(device) for part in workload.samples("train", workload.pool))
        self._make_sessions = make

    def make(self, rate: float = 1.0) -> Sessions:
        """The sessions of the network of a width."""
        model = self._model(rate).train()
        return self._make_sessions(model, self.x, self.y, batch=self.workload.batch)

    def _model(self, rate: float = 1.0) -> nn.Module:
        return self.workload.build(rate).to(self.device)

    @abstractmethod
    def round(self, draws: Draws, t: int) -> None:
        """Train the participants of round t and average them."""

    @abstractmethod
    def models(self) -> list[Tensors]:
        """The parameters of the global model, or those of every client."""


class FedAvg(Bare):
    """All clients have as many samples: the server's model is the plain mean."""

    def __init__(self, workload: Workload, make: Make, device: str) -> None:
        super().__init__(workload, make, device)
        self._sessions = self.make()
        self._state = [p.detach().clone() for p in self._model().parameters()]

    @override
    def round(self, draws: Draws, t: int) -> None:
        self._state = self._sessions.summed(self._state, draws.order)
        torch._foreach_div_(self._state, len(draws.clients))

    @override
    def models(self) -> list[Tensors]:
        return [self._state]


class HeteroFL(Bare):
    """Slices of the widest model; every element is the mean over the clients that own it."""

    def __init__(self, workload: Workload, make: Make, device: str) -> None:
        super().__init__(workload, make, device)
        self._state = [p.detach().clone() for p in self._model().parameters()]
        self._sessions = [self.make(0.5**level) for level in range(len(LEVELS))]
        self._slices = [
            [tuple(slice(size) for size in p.shape) for p in sessions.model.parameters()]
            for sessions in self._sessions
        ]
        self._held = torch.zeros(workload.clients, CLASSES, dtype=torch.bool, device=device)
        for client in range(workload.clients):
            self._held[client, self.y[workload.owned(client)]] = True

    @override
    def round(self, draws: Draws, t: int) -> None:
        sums = [torch.zeros_like(value) for value in self._state]
        counts = [torch.zeros_like(value) for value in self._state]
        levels = torch.tensor([self.workload.level(k) for k in draws.clients], device=self.device)
        held = self._held[draws.clients]
        for level in levels.unique().tolist():
            here = levels == level
            start = self._covered(self._state, level)
            trained = self._sessions[level].summed(start, draws.order[here], held[here])
            torch._foreach_add_(self._covered(sums, level), trained)
            owners = held[here].sum(0)
            *inner, weight, bias = self._covered(counts, level)
            torch._foreach_add_(inner, float(here.sum()))
            torch._foreach_add_([weight, bias], [owners.unsqueeze(1), owners])
        self._state = [
            torch.where(count > 0, total / count, old)
            for total, count, old in zip(sums, counts, self._state, strict=True)
        ]

    def _covered(self, tensors: Tensors, level: int) -> Tensors:
        """Views of what a level owns."""
        return [t[part] for t, part in zip(tensors, self._slices[level], strict=True)]

    @override
    def models(self) -> list[Tensors]:
        return [self._state]


class DisPFL(Bare):
    """Sparse models in one matrix, averaged over neighbours by two products of matrices."""

    def __init__(self, workload: Workload, make: Make, device: str) -> None:
        super().__init__(workload, make, device)
        self._sessions = self.make()
        model = self._model()
        self._shapes = [p.shape for p in model.parameters()]
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        self._masks = torch.stack([self._first_mask(model, k) for k in range(workload.clients)])
        self._rows = flat * self._masks

    def _first_mask(self, model: nn.Module, client: int) -> Tensor:
        """(P,) float: what lightfed draws for the client."""
        layout = Layout.build([(name, p.shape) for name, p in model.named_parameters()])
        segments, seed = Segments.build(layout), derive_seed(SEED, "first-mask", client=client)
        words = random_mask(segments, DENSITY, erk=True, seed=seed, device=torch.device("cpu"))
        views = layout.views(unpack_mask(words).float()).values()
        return torch.cat([view.flatten() for view in views]).to(self.device)

    @override
    def round(self, draws: Draws, t: int) -> None:
        masks = self._masks if t == 0 else self._searched(draws, t - 1)
        counts = torch.mm(draws.senders, self._masks).clamp_(min=1.0)
        self._rows = torch.mm(draws.senders, self._rows).div_(counts).mul_(masks)
        self._masks = masks
        self._sessions.train_(self._stacks(self._rows), draws.order, self._stacks(masks))

    def _searched(self, draws: Draws, t: int) -> Tensor:
        """Drop the smallest weights of every tensor and grow where the gradient is largest."""
        rate = PRUNE_RATE / 2 * (1 + cos(pi * min(t, COSINE_ROUNDS) / COSINE_ROUNDS))
        grown = self._masks.clone()
        weights, masks = self._stacks(self._rows), self._stacks(grown)
        scores = self._sessions.gradients(weights, draws.batch)
        for weight, mask, score in zip(weights, masks, scores, strict=True):
            active = mask.flatten(1).sum(1).tolist()
            for k, number in enumerate(active):
                moved, row = ceil(rate * number), mask[k].view(-1)
                size = weight[k].reshape(-1).abs().masked_fill_(row == 0, torch.inf)
                row[size.topk(moved, largest=False, sorted=False).indices] = 0.0
                growth = score[k].reshape(-1).abs().masked_fill_(row > 0, -1.0)
                row[growth.topk(moved, sorted=False).indices] = 1.0
        return grown

    def _stacks(self, rows: Tensor) -> Tensors:
        """Views (K, *shape) on the rows."""
        parts = rows.split_with_sizes([shape.numel() for shape in self._shapes], 1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @override
    def models(self) -> list[Tensors]:
        return [[stack[k] for stack in self._stacks(self._rows)] for k in range(len(self._rows))]


METHODS: dict[str, type[Bare]] = {"FedAvg": FedAvg, "HeteroFL": HeteroFL, "DisPFL": DisPFL}


def bare(workload: Workload, way: Way, device: str = "cpu") -> Bare:
    """The rounds of a workload in plain PyTorch.

    Args:
        workload: what is trained.
        way: `loop`, one client after the other with torch.optim.SGD; `tuned`, the fastest known
            such loop; `batched`, all clients of one architecture at once.
        device: cpu or cuda.
    """
    if way != "loop":
        keep_heap()
    if way == "batched":
        return METHODS[workload.method](workload, Batched, device)
    tuned = way == "tuned"
    return METHODS[workload.method](workload, partial(OneByOne, tuned=tuned), device)
