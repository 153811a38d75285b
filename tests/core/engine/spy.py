"""A small federation and a callback that writes down its hooks, for the tests of the engine."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.engine.evaluation import Evaluation
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.models.client_module import ClientModule
from lightfed.networks.mlp import MLP
from lightfed.state.client_state import by_client
from lightfed.trainer import FederatedTrainer
from tests.small import data_of, random_data, server_row

SIZES = (6, 9, 3, 5)

# Every hook that a callback can have for training and validation, in no particular order.
HOOKS = (
    "setup", "teardown", "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_train_start",
    "on_train_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start",
    "on_train_batch_end", "on_validation_start", "on_validation_end", "on_validation_epoch_start",
    "on_validation_epoch_end", "on_validation_batch_start", "on_validation_batch_end",
    "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip


class Spy(Callback):
    """Writes down the hooks that are called.

    Args:
        watch: What else to write down, by hook: a function of the Trainer.

    Attributes:
        calls: The names of the hooks, in the order of their calls.
        seen: What the functions of `watch` have returned, in the same order.
    """

    hears = "rounds"

    def __init__(self, **watch: Callable[[FederatedTrainer], Any]) -> None:
        self.calls: list[str] = []
        self.seen: list[Any] = []
        for name in HOOKS:
            setattr(self, name, partial(self._called, name, watch.get(name)))

    def _called(
        self, name: str, watch: Callable[..., Any] | None, trainer: Any, *_: Any, **__: Any
    ) -> None:
        self.calls.append(name)
        if watch is not None:
            self.seen.append(watch(trainer))


class Counting(ClientModule):
    """A classifier with a training step of its own, so that its clients train alone."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        net = MLP(num_classes, input_shape, hidden=(6,), dropout=0.2)
        super().__init__(net, num_classes=num_classes)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


class Noisy(nn.Module):
    """A linear layer on inputs that are multiplied by random numbers, in evaluation too."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(4, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * torch.rand(x.shape))


def federation(**settings: Any) -> Federation:
    """Return four clients, of which three take part in a round; FedAvg by default."""
    algorithm = settings.pop("algorithm", None) or FedAvg()
    optimizer = partial(SGD, lr=0.2, momentum=0.9)
    settings = {"optimizer": optimizer, "fraction": 0.7, **settings}
    return Federation(algorithm, [ClientGroup(len(SIZES), Counting)], **settings)


def data(**settings: Any) -> Any:
    """Return the clients' samples, in batches of two by default."""
    return random_data(SIZES, **({"batch_size": 2} | settings))


def two_labels_each() -> FederatedDataModule:
    """Return samples of three clients, each of which has two of three classes."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(3))
    y = torch.tensor([0, 1] * 4 + [1, 2] * 4 + [2, 0] * 4)
    samples_of_clients = [range(8 * k, 8 * k + 8) for k in range(3)]
    return data_of(
        x + y[:, None], y, samples_of_clients, classes=3, batch_size=3, eval_batch_size=5
    )


def evaluated(fleet: Fleet, **settings: Any) -> Evaluation:
    """Return an evaluation after all of its jobs, run in inference mode as `validate` does."""
    evaluation = Evaluation(fleet, fleet.data, **settings)
    with torch.inference_mode():
        evaluation.start()
        for job in evaluation.jobs:
            evaluation.run(job)
    return evaluation


def state_of(model: Federation) -> dict[str, Any]:
    """Return all that a round leaves behind: the server, the clients' rows and the costs."""
    state: dict[str, Any] = {"ledger": model.fleet.ledger.totals.tolist()}
    rows = by_client(model.fleet.states() or {})
    if not rows:
        state["server"] = server_row(model).tolist()
    for client, row in rows.items():
        state[f"client {client}"] = [values.tolist() for values in row.values()]
    return state


def lr_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Halve the rate after every round: 0.2, 0.1, 0.05, ..."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
