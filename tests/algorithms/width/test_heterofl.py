"""HeteroFL: its identities, what is covered, who trains which level."""

from collections import Counter
from functools import partial
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.width.heterofl import HeteroFL
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Iid
from lightfed.datasets.vision import Digits
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.cnn import Conv
from lightfed.utils.errors import UserError
from tests.small import data_of, fit, fleet_of, module_of, run_round

conv = partial(Conv, hidden=(6, 8))


def images(sizes: list[int]) -> FederatedDataModule:
    """Random images; every client holds all three classes."""
    count = sum(sizes)
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    parts = [range(s, s + n) for s, n in zip(starts, sizes, strict=True)]
    x = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    return data_of(x, torch.arange(count) % 3, parts, classes=3, batch_size=3)


def model_of(fleet: Fleet) -> dict[str, Tensor]:
    assert isinstance(fleet.algorithm, HeteroFL | FedAvg)
    model = fleet.algorithm.model
    return {k: v.clone() for k, v in model.layout.floats.views(model.floats).items()}


def test_full_width_and_all_labels_are_fedavg() -> None:
    """Of clients that count alike and drop statistics."""
    rows = []
    for algorithm in (HeteroFL(), FedAvg("uniform", buffers="drop")):
        fleet = fleet_of(
            [ClientGroup(4, conv, level="a")], algorithm, images([6, 9, 5, 7]),
            optimizer=partial(SGD, lr=0.1, momentum=0.9), clip=1.0, fraction=0.6, epochs=2,
        )  # fmt: skip
        for t in range(3):
            run_round(fleet, t)
        rows.append(algorithm.model.floats)
    assert torch.equal(*rows)


def test_a_global_model_of_level_b_is_one_of_half_the_channels() -> None:
    """The Scaler divides by the rate relative to the global model: without norms it matters."""
    rows = []
    for hidden, levels in (((12, 16), "bc"), ((6, 8), "ab")):
        model = partial(Conv, hidden=hidden, norm="none")
        groups = [ClientGroup(2, model, level=level) for level in levels]  # type: ignore[arg-type]
        fleet = fleet_of(groups, HeteroFL(), images([6, 9, 5, 7]))
        for t in range(2):
            run_round(fleet, t)
        rows.append(model_of(fleet))
    assert all(torch.equal(rows[0][name], rows[1][name]) for name in rows[1])


class Plain(nn.Module):
    """A user's own network, which knows nothing of rates."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, units), nn.Linear(units, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).relu())


def test_arguments_of_each_group_make_widths_of_an_own_network() -> None:
    widths = (8, 4, 2)
    groups = [ClientGroup(1, partial(Plain, units=units)) for units in widths]
    for position, group in enumerate(groups):
        group.check(position)
    fleet = fleet_of(groups, HeteroFL(), images([6, 6, 6]))
    old = model_of(fleet)["net.body.weight"]
    run_round(fleet, 0)
    sizes = [state.layout.parameter_numel for state in fleet.groups]
    assert sizes == [16 * n + n + 3 * n + 3 for n in widths]
    new = model_of(fleet)["net.body.weight"]
    assert (old != new).any(dim=1).all(), "every client has trained the units that it holds"


LEVELS = {"a": 2, "b": 3, "e": 5}


def dynamic_fleet(seed: int = 0, level_weights: list[float] | None = None) -> Fleet:
    groups = [ClientGroup(n, conv, level=level) for level, n in LEVELS.items()]  # type: ignore[arg-type]
    algorithm = HeteroFL("dynamic", level_weights=level_weights)
    return fleet_of(groups, algorithm, images([3] * 10), seed=seed)


@pytest.mark.parametrize(
    ("weights", "shares"), [(None, (0.2, 0.3, 0.5)), ([1, 1, 2], (0.25, 0.25, 0.5))]
)
def test_levels_are_drawn_with_the_shares_of_groups_or_weights(
    weights: list[float] | None, shares: tuple[float, ...]
) -> None:
    fleet = dynamic_fleet(level_weights=weights)
    assert isinstance(fleet.algorithm, HeteroFL)
    draws = 1000
    counts = Counter(fleet.algorithm.draw_level(fleet, m, t) for m in range(10) for t in range(100))
    for level, share in enumerate(shares):
        deviation = (draws * share * (1 - share)) ** 0.5
        assert abs(counts[level] - draws * share) < 4 * deviation


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        ([1.0, 0.0, 3.0], "above 0"),
        ([1.0, float("nan"), 3.0], "above 0"),
        ([1.0, 2.0], "2 weights"),
    ],
)
def test_weights_that_no_level_is_drawn_with_are_refused(weights: list[float], found: str) -> None:
    with pytest.raises(UserError, match=f"init_args.level_weights: .*{found}"):
        dynamic_fleet(level_weights=weights)


def test_levels_are_drawn_again_for_every_round_by_the_seed() -> None:
    fleet, again, other = dynamic_fleet(), dynamic_fleet(), dynamic_fleet(seed=1)
    draws = []
    for fed in (fleet, again, other):
        assert isinstance(fed.algorithm, HeteroFL)
        draws.append([[fed.algorithm.draw_level(fed, m, t) for m in range(10)] for t in range(5)])
    assert draws[0] == draws[1] != draws[2]
    assert len({tuple(levels) for levels in draws[0]}) == 5
    for t in range(2):
        run_round(fleet, t)
        assert [fleet.group_of(m) for m in range(10)] == draws[0][t]
        assert [fleet.home_group(m) for m in range(10)] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]


class Flat(nn.Module):
    """BatchNorm on vectors, which has no variance of a single sample."""

    def __init__(self, num_classes: int = 3, rate: float = 1.0) -> None:
        super().__init__()
        width = int(8 * rate)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, num_classes)
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_last_batch_of_one_sample_does_not_end_the_run() -> None:
    algorithm = HeteroFL(statistics_batch_size=5)
    groups = [ClientGroup(1, Flat, level="a"), ClientGroup(1, Flat, level="b")]
    fleet = fleet_of(groups, algorithm, images([6, 5]))
    algorithm.evaluation_start(fleet)
    module = module_of(fleet, None)
    state = module.state_dict()
    assert state["net.layers.2.running_var"].isfinite().all()


def test_a_mask_that_no_step_comes_by_is_refused() -> None:
    """A user's module that does not call itself has no hook on its logits."""

    class Aside(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 3)

        @override
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    x, y = torch.ones(4, 2), torch.tensor([0, 1, 0, 1])
    fleet = fleet_of(
        [ClientGroup(2, Aside)], HeteroFL(), data_of(x, y, [[0, 1], [2, 3]], classes=3)
    )
    with pytest.raises(UserError, match=r"mask: true, but the training_step of Aside"):
        run_round(fleet, 0)


def test_how_often_statistics_were_estimated_is_not_exported(tmp_path: Path) -> None:
    """A run that stopped has estimated them less often in its last process."""
    exported = []
    for name, evaluations in (("often", 1), ("once", 3)):
        federation = Federation(
            HeteroFL(),
            [ClientGroup(2, partial(Conv, hidden=(4, 4)))],
            optimizer=partial(SGD, lr=0.1),
            export=["server"],
        )
        data = FederatedDataModule(Digits(), Iid(), batch_size=64)
        fit(federation, data, tmp_path / name, rounds=3, check_val_every_n_epoch=evaluations)
        (file,) = (tmp_path / name).rglob("server.safetensors")
        exported.append(file.read_bytes())
    assert exported[0] == exported[1]
