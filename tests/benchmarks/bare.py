"""The yardstick: FedAvg as a plain PyTorch loop, as one writes it without a framework.

A new torch.optim.SGD for every client, clients one after another, tensors made beforehand, one
model object that every client starts from the global state.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor
from workloads import BATCH_SIZE, LEARNING_RATE, SEED, Workload

from lightfed.utils.rng import derive_seed, torch_generator


class BareLoop:
    """Rounds of federated averaging over one workload."""

    def __init__(self, workload: Workload) -> None:
        x, y = workload.samples("train", workload.pool)
        windows = [workload.owned(client) for client in range(workload.clients)]
        self.data = [(x[window], y[window]) for window in windows]
        self.per_round = workload.per_round
        self.model = workload.build()
        self.state = {name: t.clone() for name, t in self.model.state_dict().items()}
        self.random = random.Random(derive_seed(SEED, "benchmark/bare/participants"))
        self.order = torch_generator(SEED, "benchmark/bare/order")

    def round(self) -> None:
        """Train the participants of one round and average them."""
        participants = self.random.sample(range(len(self.data)), self.per_round)
        total = sum(len(self.data[client][1]) for client in participants)
        average = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        for client in participants:
            x, y = self.data[client]
            self.model.load_state_dict(self.state)
            self._train(x, y)
            for name, tensor in self.model.state_dict().items():
                average[name].add_(tensor, alpha=len(y) / total)
        self.state = average

    def _train(self, x: Tensor, y: Tensor) -> None:
        """One local epoch."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        for index in torch.randperm(len(y), generator=self.order).split(BATCH_SIZE):
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x[index]), y[index])
            loss.backward()
            optimizer.step()

    def global_model(self) -> torch.nn.Module:
        """The model with the global state."""
        self.model.load_state_dict(self.state)
        return self.model
