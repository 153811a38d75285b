"""Clients trained side by side: the bits of any pack size, and what falls back."""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW
from typing_extensions import override

from lightfed.algorithms.dispfl import DisPFL
from lightfed.algorithms.fd import FD
from lightfed.algorithms.fedapen import FedAPEN
from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.fedbcd import FedBCD
from lightfed.algorithms.fedkd import FedKD
from lightfed.algorithms.fedproto import FedProto
from lightfed.algorithms.fedprox import FedProx
from lightfed.algorithms.fml import FML
from lightfed.algorithms.heterofl import HeteroFL
from lightfed.algorithms.lgfedavg import LGFedAvg
from lightfed.algorithms.my1 import My1
from lightfed.algorithms.my2 import My2
from lightfed.algorithms.pfedmoe import PFedMoE
from lightfed.algorithms.shared.aspg import ASPG
from lightfed.algorithms.standalone import Standalone
from lightfed.api.fleet import Fleet
from lightfed.engine.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.local.client_module import ClientModule
from lightfed.local.hooks import SessionContext
from lightfed.local.packed.rules import FLOOR
from lightfed.models import MLP, CIFARResNet, Conv
from lightfed.topology.topology import Ring
from lightfed.utils.errors import UserError
from tests.core.test_suspend import SignalAt
from tests.small import data_of, fit, fleet_of, random_data, run_round, server_row
from tests.strangers.fedrep import FedRep

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


class Optional(Residual):
    """A forward that decides on an argument which sessions do not give."""

    @override
    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x if extra is None else x + extra)


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


class Island(Residual):
    """Full precision, whatever the Trainer's."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


class Half(Residual):
    """A part of the network is not trained."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            inner = self.inner(x)
        return self.outer(x + torch.relu(inner))


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
        s.module.net.shift = torch.full((4,), s.client / CLIENTS)  # type: ignore[union-attr]


class Drops(nn.Module):
    """Dropout of what a convolution gives."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (1, 8, 8)) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(input_shape[0], 4, 3), nn.ReLU(), nn.Dropout(0.0), nn.Dropout(0.4),
            nn.Flatten(), nn.Linear(4 * 36, num_classes),
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
            self.log("late", loss)
        return loss


def images(sizes: list[int]) -> Any:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), 1, 8, 8, generator=generator)
    y = torch.arange(sum(sizes)) % 3
    ends = torch.tensor(sizes).cumsum(0).tolist()
    parts = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return data_of(x, y, parts, classes=3, batch_size=4)


def vectors(sizes: list[int], **settings: Any) -> Any:
    return random_data(sizes, batch_size=4, **settings)


conv = partial(Conv, hidden=(8, 12))
CASES: dict[str, dict[str, Any]] = {
    "mlp": {},
    "momentum": {"optimizer": partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)},
    "adam": {"optimizer": partial(Adam, lr=0.01)},
    "adamw": {"optimizer": partial(AdamW, lr=0.01)},
    "clipped": {"clip": 0.5},
    "fedprox": {"algorithm": partial(FedProx, 0.3)},
    "dropout": {"model": partial(MLP, hidden=(40, 30), dropout=0.3)},
    "residual": {"model": Residual},
    "vmap": {"model": Smooth},
    "frozen bn": {"model": Frozen},
    "optional argument": {"model": Optional},
    "tied": {"model": Tied},
    "island": {"model": Island},
    "averages": {"model": Averages},
    "shifts": {"model": Shifted, "algorithm": Shifts},
    "no gradients": {"model": Half},
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
    "fedproto": {"algorithm": FedProto},
    "fedkd": {"algorithm": partial(FedKD, mlp, rounds=4)},
    "fml": {"algorithm": partial(FML, mlp)},
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
    "static bn": {"model": conv, "data": images, "algorithm": HeteroFL},
    "resnet": {
        "model": partial(CIFARResNet, depth=8),
        "data": images,
        "optimizer": partial(SGD, lr=1e-3),
    },
}


def fleet(name: str, side_by_side: Any, sizes: list[int] = SIZES, **more: Any) -> Fleet:
    case = {
        "model": mlp, "data": vectors, "algorithm": FedAvg,
        "optimizer": partial(SGD, lr=0.1), "epochs": 2,
    } | CASES[name] | more  # fmt: skip
    group = ClientGroup(len(sizes), case.pop("model"))
    data, algorithm = case.pop("data"), case.pop("algorithm")
    if case.pop("joined", False):  # a batch of one sample has no statistics
        data = partial(data, last_batch="join")
    return fleet_of([group], algorithm(), data(sizes), side_by_side=side_by_side, **case)


def after(made: Fleet, rounds: int = 2) -> tuple[Tensor, dict[str, float]]:
    """All rows and the metrics after some rounds."""
    for t in range(rounds):
        metrics = run_round(made, t)
    rows = [made.row(k) for k in range(made.clients)]
    states = [torch.cat((row.floats, row.integers.float())) for row in rows]
    return torch.stack(states), {k: v for k, v in metrics.items() if k != "seconds"}


def most(made: Fleet) -> list[int]:
    """Clients of the largest pack of each group that is packed."""
    return [*made.training._packs._most.values()]


@pytest.mark.parametrize("name", CASES)
def test_a_clients_bits_are_those_of_any_pack(name: str) -> None:
    whole = fleet(name, CLIENTS)
    rows, metrics = after(whole)
    assert most(whole) == [CLIENTS]
    for size in (1, 3, 5):
        some = fleet(name, max(size, 2))
        some.training._packs._most = {0: size}  # of 1: padded
        found = after(some)
        assert torch.equal(found[0], rows)
        assert found[1] == metrics
    alone, its = after(fleet(name, "off"))
    torch.testing.assert_close(rows, alone, rtol=1e-5, atol=2e-5)
    assert metrics == pytest.approx(its, rel=1e-5)


@pytest.mark.parametrize("width", [40, 200])
def test_linear_layers_have_the_bits_of_a_client_alone(width: int) -> None:
    model, data = partial(MLP, hidden=(width,)), partial(random_data, features=64, batch_size=8)
    rows = [
        after(fleet("mlp", side, [24] * 5, model=model, data=data))[0] for side in ("off", 5, 2)
    ]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("mlp", 0.0), ("island", 1e-6), ("vmap", 2e-3), ("bn", 2e-3), ("gn", 2e-2)],
)
def test_bf16_takes_gradients_outside_autocast_as_for_a_client_alone(
    name: str, tolerance: float
) -> None:
    precision = partial(torch.autocast, "cpu", torch.bfloat16)
    alone, pack, packs = (
        after(fleet(name, side, precision=precision))[0] for side in ("off", CLIENTS, 3)
    )
    assert torch.equal(pack, packs)
    assert float((pack - alone).norm() / alone.norm()) <= tolerance


@pytest.mark.parametrize("name", ["bn", "vmap"])
def test_a_pack_below_the_floor_is_padded(name: str) -> None:
    drawn = [[0], [0, 1], [*range(FLOOR + 1)]]
    found = []
    for clients in drawn:
        made = fleet(name, CLIENTS)
        made.participants = lambda t, c=clients: c  # type: ignore[method-assign,misc]
        run_round(made, 0)
        found.append(made.row(0).floats.clone())
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


class Curved(nn.Module):
    """Odd widths, and functions whose last elements have other instructions."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__()
        sizes = [(input_shape[0], 31), (31, 33), (33, 25), (25, num_classes)]
        self.parts = nn.ModuleList(nn.Linear(a, b, bias=a != 31) for a, b in sizes)
        self.last = nn.SiLU()

    @override
    def forward(self, x: Tensor) -> Tensor:
        one, two, three, four = self.parts
        x = torch.sigmoid(one(x))
        return four(self.last(three(nn.functional.gelu(two(x), approximate="tanh"))))


class CurvedStep(Smooth):
    """The same, which only `vmap` runs."""

    def __init__(self, num_classes: int = 3, input_shape: tuple[int, ...] = (4,)) -> None:
        super().__init__(num_classes, input_shape)
        self.net = Curved(num_classes, input_shape)


@pytest.mark.parametrize("model", [Curved, CurvedStep])
@pytest.mark.parametrize("size", [50, 51, 53])
def test_neither_odd_widths_nor_the_ends_of_tensors_show_the_other_clients(
    model: type[nn.Module], size: int
) -> None:
    rows = []
    for most_clients in (CLIENTS, 4, 1):
        made = fleet("mlp", CLIENTS, [size] * CLIENTS, model=model, epochs=3)
        made.training._packs._most = {0: most_clients}
        rows.append(after(made)[0])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("name", ["mlp", "bn", "standalone", "dispfl", "phases"])
def test_rows_on_the_host_train_in_packs_to_the_same_bits(name: str) -> None:
    here, there = fleet(name, 3), fleet(name, 3, host_rows=True)
    assert most(here) == most(there) == [3]
    found, expected = after(there), after(here)
    assert torch.equal(found[0], expected[0])
    assert found[1] == expected[1]


def test_an_optimiser_that_moves_all_parameters_refuses_phases_in_packs_too() -> None:
    for side in ("off", 3):
        made = fleet("phases", side, optimizer=partial(ASPG, lr=0.1), clip=None)
        with pytest.raises(UserError, match="freezes a part"):
            run_round(made, 0)


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("algorithm", [FedAvg, Standalone])
def test_a_client_that_fails_is_left_out_and_the_others_keep_their_bits(
    algorithm: Callable[[], Any], host: bool
) -> None:
    rows = []
    for broken in (False, True):
        made = fleet("mlp", 4, algorithm=algorithm, host_rows=host)
        if broken:
            last = SIZES[0] + SIZES[1] - 1  # of client 1, whose second or third batch raises
            made.data.train.y[last] = 99
        else:
            others = [k for k in range(CLIENTS) if k != 1]
            made.participants = lambda t, o=others: o  # type: ignore[method-assign,misc]
        assert run_round(made, 0)["excluded"] == float(broken)
        rows.append(torch.stack([made.row(k).floats.clone() for k in range(CLIENTS) if k != 1]))
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model": Reads}, "item"),
        ({"optimizer": partial(torch.optim.ASGD, lr=0.1)}, "ASGD"),
        ({"model": Listened}, "hooks"),
        ({"algorithm": Bent}, "Bent"),
    ],
)
def test_what_cannot_be_packed_trains_one_client_at_a_time(
    settings: dict[str, Any], reason: str
) -> None:
    made = fleet("mlp", CLIENTS, **settings)
    assert most(made) == []
    rows, _ = after(made)
    assert torch.equal(rows, after(fleet("mlp", "off", **settings))[0])
    assert reason in str(made.training.side_by_side["0"])


def test_the_environment_says_how_each_group_is_trained(tmp_path: Path) -> None:
    import json

    groups = [ClientGroup(3, mlp, name="net"), ClientGroup(2, Reads, name="own")]
    federation = Federation(Standalone(), groups, optimizer=partial(SGD, lr=0.1), side_by_side=2)
    fit(federation, random_data([6] * 5), tmp_path)
    found = json.loads((tmp_path / "run/environment.json").read_text())["side_by_side"]
    assert found["net"] == 2
    assert "item" in found["own"]


def test_a_number_below_two_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        Federation(FedAvg(), [ClientGroup(2, mlp)], side_by_side=1)
    assert refused.value.key == "model.side_by_side"


def test_a_run_stopped_between_two_packs_resumes_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: Path, **flags: Any) -> Tensor:
        federation = Federation(
            FedAvg(), [ClientGroup(CLIENTS, mlp)], optimizer=partial(SGD, lr=0.2), side_by_side=3
        )
        fit(federation, vectors(SIZES), folder, rounds=2, **flags)
        return server_row(federation)

    whole = run(tmp_path / "whole")
    with pytest.raises(SystemExit) as left:
        run(tmp_path / "other", callbacks=[SignalAt(2)])
    assert left.value.code == 128 + signal.SIGUSR1
    assert torch.equal(run(tmp_path / "other", ckpt_path="last"), whole)


def test_a_users_module_logs_means_over_samples() -> None:
    values = [run_round(fleet("vmap", side), 0)["top"] for side in ("off", CLIENTS)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
