"""Federations whose clients train side by side: modules of many kinds, and how they are run."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from typing_extensions import override

from lightfed.algorithms.depth.depthfl import DepthFL
from lightfed.algorithms.depth.networks import DepthConv
from lightfed.algorithms.ditto import Ditto
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd.aspg import ASPG
from lightfed.algorithms.fedbcd.fedbcd import FedBCD
from lightfed.algorithms.fedbuff import FedBuff
from lightfed.algorithms.feddyn import FedDyn
from lightfed.algorithms.fednova import FedNova
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.fedrep import FedRep
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.moon import MOON
from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.peers.my1 import My1
from lightfed.algorithms.peers.my2 import My2
from lightfed.algorithms.pfedme import PFedMe
from lightfed.algorithms.pfedmoe.fedapen import FedAPEN
from lightfed.algorithms.pfedmoe.fedkd import FedKD
from lightfed.algorithms.pfedmoe.fedmrl import FedMRL
from lightfed.algorithms.pfedmoe.fml import FML
from lightfed.algorithms.pfedmoe.pfedmoe import PFedMoE
from lightfed.algorithms.prototypes.fd import FD
from lightfed.algorithms.prototypes.fedgh import FedGH
from lightfed.algorithms.prototypes.fedproto import FedProto
from lightfed.algorithms.prototypes.fedtgp import FedTGP
from lightfed.algorithms.scaffold import SCAFFOLD
from lightfed.algorithms.standalone import Standalone
from lightfed.algorithms.topology.topology import Ring
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.dataset import Task
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import SessionContext
from lightfed.local.local_work import RoundPlan
from lightfed.models.client_module import ClientModule
from lightfed.networks import MLP, CIFARResNet, Conv
from lightfed.networks.transformer import Transformer
from tests.small import Given, Tensors, data_of, fleet_of, random_data, run_round

SIZES = [5, 9, 4, 16, 7, 7, 12]  # sessions of one to four batches, some with a small last one
CLIENTS = len(SIZES)
mlp = partial(MLP, hidden=(40, 30))


class Residual(nn.Module):
    """A network whose graph has a sum."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.inner = nn.Linear(input_shape[0], input_shape[0])
        self.outer = nn.Linear(input_shape[0], num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x + torch.relu(self.inner(x)))


class Smooth(ClientModule):
    """A training step of a user's, which logs; only `vmap` runs it for several clients."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(Residual(num_classes, input_shape), num_classes=num_classes)

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        self.log("top", logits.max())
        return nn.functional.cross_entropy(logits, y, label_smoothing=0.1)


class Reads(Smooth):
    """Looks at the value of a tensor, which `vmap` cannot."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() < 1e6 else 0 * loss


class Listened(Residual):
    """Something changes the gradient of a parameter."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.inner.weight.register_hook(lambda gradient: 0 * gradient)


class Bent(FedAvg):
    """Changes gradients without saying whether it may do so in packs."""

    @override
    def local_gradient(self, s: SessionContext, gradient: Tensor) -> None:
        gradient.mul_(0.5)


class Frozen(nn.Module):
    """Keeps its batch normalisation in evaluation mode."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(input_shape[0])
        self.out = nn.Linear(input_shape[0], num_classes)

    @override
    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.norm.eval()
        return self

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Tied(nn.Module):
    """Two layers with one bias."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.one = nn.Linear(input_shape[0], num_classes)
        self.other = nn.Linear(input_shape[0], num_classes)
        self.other.bias = self.one.bias

    @override
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.one(x)) + self.other(x)


class Averages(Smooth):
    """Keeps a mean of its inputs in a buffer, and puts a new tensor there with every batch."""

    mean: Tensor

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.register_buffer("mean", torch.zeros(input_shape))

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().training_step((x - self.mean, y), batch_idx)


class Shifted(nn.Module):
    """Adds a buffer that no row has to its inputs."""

    shift: Tensor

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        self.out = nn.Linear(input_shape[0], num_classes)
        self.register_buffer("shift", torch.zeros(input_shape), persistent=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.shift)


class Shifts(FedAvg):
    """Puts a tensor of each client's in the place of that buffer."""

    side_by_side = True

    @override
    def session_start(self, s: SessionContext) -> None:
        s.module.net.shift = s.row.floats.new_full((4,), s.client / CLIENTS)  # type: ignore[union-attr]


class Drops(nn.Module):
    """Dropout of what a convolution gives."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(input_shape[0], 4, 3), nn.ReLU(), nn.Dropout(0.0), nn.Dropout(0.4),
            nn.BatchNorm2d(4), nn.Dropout(0.2), nn.Flatten(), nn.Linear(4 * 36, num_classes),
        )  # fmt: skip

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Late(Smooth):
    """Logs in batches that short sessions do not have."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            self.log("later", loss)
        return loss


def parts_of(sizes: list[int]) -> list[range]:
    """Return the samples of clients with these numbers of samples: one client after the other."""
    parts = []
    first = 0
    for size in sizes:
        parts.append(range(first, first + size))
        first += size
    return parts


def images(sizes: list[int]) -> Any:
    """Return random images of three classes, for clients with these numbers of samples."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), 1, 8, 8, generator=generator)
    y = torch.arange(sum(sizes)) % 3
    return data_of(x, y, parts_of(sizes), classes=3, batch_size=4, channels_last=False)


class Windows(Tensors):
    """Windows of tokens, which are their own targets."""

    task: Task = "masked_lm"

    @property
    @override
    def transform(self) -> None:
        return None


def windows(sizes: list[int]) -> Any:
    """Return random windows of tokens, for clients with these numbers of samples."""
    x = torch.randint(11, (sum(sizes), 6), generator=torch.Generator().manual_seed(3))
    labels = torch.zeros(len(x), dtype=torch.int64)
    dataset = Windows(x, labels, classes=11, test=(x, labels))
    return FederatedDataModule(dataset, Given(*parts_of(sizes)), batch_size=4, eval_batch_size=1000)


def vectors(sizes: list[int], **settings: Any) -> Any:
    """Return random vectors, for clients with these numbers of samples."""
    return random_data(sizes, batch_size=4, **settings)


def grouped(params: Any) -> SGD:
    """The first parameter has a rate of its own."""
    first, *rest = params
    return SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.02}], momentum=0.5)


conv = partial(Conv, hidden=(8, 12))
CASES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "momentum": {"optimizer": partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)},
    "groups": {"optimizer": grouped},
    "adam": {"optimizer": partial(Adam, lr=0.01)},
    "adamw": {"optimizer": partial(AdamW, lr=0.01)},
    "clipped": {"clip": 0.5},
    "fedprox": {"algorithm": partial(FedProx, 0.3)},
    "dropout": {"model": partial(MLP, hidden=(40, 30), dropout=0.3)},
    "residual": {"model": Residual},
    "vmap": {"model": Smooth},
    "frozen bn": {"model": Frozen},
    "tied": {"model": Tied},
    "averages": {"model": Averages},
    "shifts": {"model": Shifted, "algorithm": Shifts},
    "dropout of convolutions": {
        "model": Drops,
        "data": images,
    },
    "late": {"model": Late},
    "standalone": {"algorithm": Standalone},
    "dispfl": {"algorithm": partial(DisPFL, Ring(), density=0.5, rounds=4)},
    "my1": {"algorithm": partial(My1, Ring(), density=0.5, rounds=4)},
    "my2": {"algorithm": partial(My2, Ring(), density=0.5, rounds=4)},
    "fd": {"algorithm": FD},
    "fd of raw logits": {"algorithm": partial(FD, target="raw")},
    "fedgh": {"algorithm": FedGH},
    "fedproto": {"algorithm": FedProto},
    "fedtgp": {"algorithm": FedTGP},
    "fedkd": {"algorithm": partial(FedKD, mlp, rounds=4)},
    "fedkd of htfllib": {"algorithm": partial(FedKD, mlp, rounds=4, form="htfllib")},
    "fedmrl": {"algorithm": partial(FedMRL, mlp)},
    "fml": {"algorithm": partial(FML, mlp)},
    "fml of htfllib": {"algorithm": partial(FML, mlp, form="htfllib")},
    "scaffold": {"algorithm": SCAFFOLD, "lr": 0.1},
    "feddyn": {"algorithm": partial(FedDyn, 0.1)},
    "fednova": {"algorithm": partial(FedNova, 0.3, (1, 3)), "lr": 0.1},
    "ditto": {"algorithm": partial(Ditto, 0.5)},
    "moon": {"algorithm": partial(MOON, pool=2)},
    "moon of images": {"algorithm": MOON, "model": conv, "data": images},
    "fedbuff": {"algorithm": partial(FedBuff, CLIENTS)},
    "pfedme": {"algorithm": partial(PFedMe, 2.0, 3, 0.1)},
    "steps on every batch": {"algorithm": partial(PFedMe, 2.0, 3, 0.1), "model": Smooth},
    "depthfl": {"algorithm": DepthFL, "model": partial(DepthConv, channels=(4, 6)), "data": images},
    "fedapen": {"algorithm": partial(FedAPEN, mlp)},
    "pfedmoe": {"algorithm": partial(PFedMoE, mlp, gate_units=8), "joined": True},
    "lgfedavg": {"algorithm": partial(LGFedAvg, 1)},
    "aspg": {
        "algorithm": partial(FedBCD, 1, CLIENTS, gamma=0.1, steps=(1, 3)),
        "optimizer": partial(ASPG, lr=0.05),
        "epochs": 1,
    },
    "phases": {
        "algorithm": partial(FedRep, "net.layers.5.", head_epochs=2, body_epochs=1),
        "optimizer": partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
        "clip": 0.5,
    },
    "phases with adam": {
        "algorithm": partial(FedRep, "net.layers.5.", head_epochs=1, body_epochs=2),
        "optimizer": partial(Adam, lr=0.01),
    },
    "bn": {"model": conv, "data": images},
    "gn": {"model": partial(Conv, hidden=(8, 12), norm="gn"), "data": images},
    "static bn of drops": {"model": Drops, "data": images, "algorithm": HeteroFL},
    "masked language model": {
        "model": partial(Transformer, embedding=16, heads=2, hidden=24, layers=1, mask_rate=0.4),
        "data": windows,
    },
    "one pixel": {"model": partial(Conv, hidden=(4, 8, 8, 12), norm="ln"), "data": images},
    "static bn": {"model": conv, "data": images, "algorithm": HeteroFL},
    "resnet": {
        "model": partial(CIFARResNet, depth=8),
        "data": images,
        "optimizer": partial(SGD, lr=1e-3),
    },
}


def fleet(name: str, side_by_side: Any, sizes: list[int] = SIZES, **changes: Any) -> Fleet:
    """Make the federation of a case.

    Args:
        name: A name in CASES.
        side_by_side: Number of clients in a pack, "auto" or "off".
        sizes: Number of samples of each client.
        **changes: What differs from the case.
    """
    case: dict[str, Any] = {
        "model": mlp,
        "data": vectors,
        "algorithm": FedAvg,
        "optimizer": partial(SGD, lr=0.1),
        "epochs": 2,
    }
    case |= CASES[name]
    case |= changes

    group = ClientGroup(len(sizes), case.pop("model"))
    algorithm = case.pop("algorithm")
    data = case.pop("data")
    lr = case.pop("lr", None)
    if case.pop("joined", False):  # a batch of one sample has no statistics
        data = partial(data, last_batch="join")

    made = fleet_of([group], algorithm(), data(sizes), side_by_side=side_by_side, **case)
    made.plan = RoundPlan(lr=lr)
    return made


def after(made: Fleet, rounds: int = 2) -> tuple[Tensor, dict[str, float]]:
    """Return the rows of all clients, (N, P + Q), and the metrics after some rounds."""
    for t in range(rounds):
        metrics = run_round(made, t)
    metrics = {name: value for name, value in metrics.items() if name != "seconds"}

    states = []
    for client in range(made.clients):
        row = made.row(client)
        states.append(torch.cat((row.floats, row.integers.float())))
    return torch.stack(states), metrics
