"""HeteroFL: its identities, what is covered, who trains which level."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Literal

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
from lightfed.engine.evaluation import Kind
from lightfed.federation import Federation
from lightfed.local.client_group import ClientGroup
from lightfed.networks.cnn import Conv
from lightfed.utils.errors import UserError
from tests.small import data_of, fit, fleet_of, module_of, run_round

Level = Literal["a", "b", "c"]

conv = partial(Conv, hidden=(6, 8))


def images(sizes: list[int]) -> FederatedDataModule:
    """Return random images of clients with these numbers; every client holds all three classes."""
    count = sum(sizes)
    x = torch.randn(count, 1, 4, 4, generator=torch.Generator().manual_seed(2))
    y = torch.arange(count) % 3

    parts = []
    start = 0
    for size in sizes:
        parts.append(range(start, start + size))
        start += size
    return data_of(x, y, parts, classes=3, batch_size=3)


def model_of(fleet: Fleet) -> dict[str, Tensor]:
    """Return copies of the tensors of the server's model."""
    assert isinstance(fleet.algorithm, HeteroFL | FedAvg)
    model = fleet.algorithm.model
    views = model.layout.floats.views(model.floats)
    return {name: view.clone() for name, view in views.items()}


def test_full_width_and_all_labels_are_fedavg() -> None:
    """Of clients that count alike and drop statistics."""

    def trained(algorithm: HeteroFL | FedAvg) -> Tensor:
        fleet = fleet_of(
            [ClientGroup(4, conv, level="a")],
            algorithm,
            images([6, 9, 5, 7]),
            optimizer=partial(SGD, lr=0.1, momentum=0.9),
            clip=1.0,
            fraction=0.6,
            epochs=2,
        )
        for t in range(3):
            run_round(fleet, t)
        return algorithm.model.floats

    assert torch.equal(trained(HeteroFL()), trained(FedAvg("uniform", buffers="drop")))


def test_a_global_model_of_level_b_is_one_of_half_the_channels() -> None:
    """The Scaler divides by the rate relative to the global model: without norms it matters."""

    def trained(hidden: tuple[int, int], wide: Level, narrow: Level) -> dict[str, Tensor]:
        model = partial(Conv, hidden=hidden, norm="none")
        groups = [ClientGroup(2, model, level=wide), ClientGroup(2, model, level=narrow)]
        fleet = fleet_of(groups, HeteroFL(), images([6, 9, 5, 7]))
        for t in range(2):
            run_round(fleet, t)
        return model_of(fleet)

    of_level_b = trained((12, 16), "b", "c")
    of_half_the_channels = trained((6, 8), "a", "b")
    assert of_level_b.keys() == of_half_the_channels.keys()
    for name, tensor in of_half_the_channels.items():
        assert torch.equal(tensor, of_level_b[name]), name


class Plain(nn.Module):
    """A user's own network, which knows nothing of rates."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.body = nn.Linear(16, units)
        self.head = nn.Linear(units, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).relu())


def test_arguments_of_each_group_make_widths_of_an_own_network() -> None:
    widths = (8, 4, 2)
    groups = [ClientGroup(1, partial(Plain, units=units)) for units in widths]
    for position, group in enumerate(groups):
        group.check(position)
    fleet = fleet_of(groups, HeteroFL(), images([6, 6, 6]))

    sizes = [state.layout.parameter_numel for state in fleet.groups]
    assert sizes == [16 * units + units + 3 * units + 3 for units in widths]

    before = model_of(fleet)["net.body.weight"]
    run_round(fleet, 0)
    after = model_of(fleet)["net.body.weight"]
    assert (before != after).any(dim=1).all(), "every unit has been trained by those that hold it"


def dynamic_fleet(seed: int = 0, level_weights: list[float] | None = None) -> Fleet:
    """Return ten clients of three levels, which draw their level in every round."""
    groups = [
        ClientGroup(2, conv, level="a"),
        ClientGroup(3, conv, level="b"),
        ClientGroup(5, conv, level="e"),
    ]
    algorithm = HeteroFL("dynamic", level_weights=level_weights)
    return fleet_of(groups, algorithm, images([3] * 10), seed=seed)


def levels_of(fleet: Fleet, t: int) -> list[int]:
    """Return the level that each client draws for round t, as the number of its group."""
    assert isinstance(fleet.algorithm, HeteroFL)
    return [fleet.algorithm.draw_level(fleet, client, t) for client in range(10)]


@pytest.mark.parametrize(
    ("weights", "shares"), [(None, (0.2, 0.3, 0.5)), ([1, 1, 2], (0.25, 0.25, 0.5))]
)
def test_levels_are_drawn_with_the_shares_of_groups_or_weights(
    weights: list[float] | None, shares: tuple[float, ...]
) -> None:
    fleet = dynamic_fleet(level_weights=weights)
    counts: Counter[int] = Counter()
    for t in range(100):
        counts.update(levels_of(fleet, t))

    draws = 1000
    for level, share in enumerate(shares):
        standard_deviation = (draws * share * (1 - share)) ** 0.5
        assert abs(counts[level] - draws * share) < 4 * standard_deviation


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
    fleet = dynamic_fleet()
    levels = [levels_of(fleet, t) for t in range(5)]
    for t in range(5):
        assert levels.count(levels[t]) == 1
    assert [levels_of(dynamic_fleet(), t) for t in range(5)] == levels
    assert [levels_of(dynamic_fleet(seed=1), t) for t in range(5)] != levels

    for t in range(2):
        run_round(fleet, t)
        assert [fleet.group_of(client) for client in range(10)] == levels[t]
        assert [fleet.home_group(client) for client in range(10)] == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]


class Flat(nn.Module):
    """BatchNorm on vectors, which has no variance of a single sample."""

    def __init__(self, num_classes: int = 3, rate: float = 1.0) -> None:
        super().__init__()
        width = int(8 * rate)
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(16, width),
            nn.BatchNorm1d(width),
            nn.Linear(width, num_classes),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_last_batch_of_one_sample_does_not_end_the_run() -> None:
    algorithm = HeteroFL(statistics_batch_size=5)
    groups = [ClientGroup(1, Flat, level="a"), ClientGroup(1, Flat, level="b")]
    fleet = fleet_of(groups, algorithm, images([6, 5]))
    algorithm.evaluation_start(fleet)
    state = module_of(fleet, None).state_dict()
    assert state["net.layers.2.running_var"].isfinite().all()


def test_statistics_of_some_samples_are_those_of_batches_evenly_spaced() -> None:
    # 27 samples have batches 0 to 6, the last of three; two of 7 begin at 0 and at 3.
    algorithm = HeteroFL(statistics_batch_size=4, statistics_samples=7)
    fleet = fleet_of([ClientGroup(3, Flat, level="a")], algorithm, images([12, 9, 6]))
    algorithm.evaluation_start(fleet)
    found = module_of(fleet, None).state_dict()

    x = torch.cat([fleet.data.train_batch(number, 4)[0] for number in range(7)])
    assert len(x) == 27
    weight = found["net.layers.1.weight"]
    bias = found["net.layers.1.bias"]
    batches = [
        nn.functional.linear(x[start : start + 4].flatten(1), weight, bias) for start in (0, 12)
    ]
    mean = (batches[0].mean(0) + batches[1].mean(0)) / 2
    variance = (batches[0].var(0) + batches[1].var(0)) / 2
    torch.testing.assert_close(found["net.layers.2.running_mean"], mean)
    torch.testing.assert_close(found["net.layers.2.running_var"], variance)


def test_more_samples_than_there_are_estimate_the_statistics_of_all() -> None:
    def statistics(samples: int | None) -> dict[str, Tensor]:
        algorithm = HeteroFL(statistics_batch_size=4, statistics_samples=samples)
        fleet = fleet_of([ClientGroup(3, Flat, level="a")], algorithm, images([12, 9, 6]))
        algorithm.evaluation_start(fleet)
        return module_of(fleet, None).state_dict()

    of_all = statistics(None)
    for name, value in statistics(1000).items():
        assert torch.equal(value, of_all[name])
    assert not torch.equal(
        statistics(8)["net.layers.2.running_mean"], of_all["net.layers.2.running_mean"]
    )


@pytest.mark.parametrize(("evaluate", "evaluations"), [((), 0), (("global",), 2)])
def test_statistics_are_estimated_only_where_something_is_tested(
    evaluate: tuple[Kind, ...], evaluations: int, tmp_path: Path
) -> None:
    """The pass over all training samples takes longer than a round."""
    started: list[int] = []
    ended: list[int] = []

    class Counted(HeteroFL):
        @override
        def evaluation_start(self, fed: Fleet) -> None:
            started.append(1)
            super().evaluation_start(fed)

        @override
        def evaluation_end(self, fed: Fleet) -> dict[str, dict[str, Tensor]]:
            ended.append(1)
            return {}

    federation = Federation(
        Counted(),
        [ClientGroup(2, partial(Conv, hidden=(4, 4)))],
        optimizer=partial(SGD, lr=0.1),
        evaluate=evaluate,
        export=(),
    )
    fit(federation, FederatedDataModule(Digits(), Iid(), batch_size=64), tmp_path, rounds=2)
    assert len(started) == len(ended) == evaluations


def test_a_mask_that_no_step_comes_by_is_refused() -> None:
    """A user's module that does not call itself has no hook on its logits."""

    class Aside(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(2, 3)

        @override
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

    data = data_of(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), [[0, 1], [2, 3]], classes=3)
    fleet = fleet_of([ClientGroup(2, Aside)], HeteroFL(), data)
    with pytest.raises(UserError, match=r"mask: true, but the training_step of Aside"):
        run_round(fleet, 0)


def test_how_often_statistics_were_estimated_is_not_exported(tmp_path: Path) -> None:
    """A run that stopped has estimated them less often in its last process."""

    def exported(folder: Path, *, rounds_between_tests: int) -> bytes:
        federation = Federation(
            HeteroFL(),
            [ClientGroup(2, partial(Conv, hidden=(4, 4)))],
            optimizer=partial(SGD, lr=0.1),
            export=["server"],
        )
        data = FederatedDataModule(Digits(), Iid(), batch_size=64)
        fit(federation, data, folder, rounds=3, check_val_every_n_epoch=rounds_between_tests)
        (file,) = folder.rglob("server.safetensors")
        return file.read_bytes()

    often = exported(tmp_path / "often", rounds_between_tests=1)
    once = exported(tmp_path / "once", rounds_between_tests=3)
    assert often == once
