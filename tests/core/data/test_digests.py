"""Which runs are seeds of one experiment, by the digests of what they trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from typing_extensions import override

import lightfed as lf
from lightfed.data.dataset import Dataset, Samples, Split
from lightfed.data.digests import digests
from lightfed.lab.results.groups import grouped
from lightfed.lab.results.run import read
from lightfed.utils.recorded import arguments
from tests.small import CPU, SGD_HALF, fit


class Noisy(TorchDataset[tuple[Tensor, int]]):
    """A user's data set of torch, whose arguments no configuration shows."""

    def __init__(self, noise: float, samples: int = 12) -> None:
        self.noise, self.samples = noise, samples

    def __len__(self) -> int:
        return self.samples

    @override
    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if number >= self.samples:
            raise IndexError
        return torch.full((3,), number * self.noise), number % 2


def noisy(noise: float, samples: int = 12) -> lf.FromTorch:
    return lf.FromTorch(Noisy(noise, samples), Noisy(noise))


class Drawn(Dataset):
    """Draws its samples by a seed of its own."""

    classes = ("a", "b")
    input_shape = (3,)
    transform = None

    def __init__(self, seed: int, *, root: str = "here", scale: float = 1.0) -> None:
        self.seed, self.scale = seed, scale

    @override
    def load(self, split: Split) -> Samples:
        draws = torch.Generator().manual_seed(self.seed)
        x = self.scale * torch.randn(12, 3, generator=draws)
        return Samples(x, torch.randint(2, (12,), generator=draws))


def of(dataset: Dataset, *, seed: int = 0) -> dict[str, str]:
    data = lf.FederatedDataModule(dataset, lf.Iid())
    data.prepare(clients=2, seed=seed, device=CPU)
    return digests(arguments(data), data.contents)


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (noisy(0.5), noisy(0.5), set()),
        (noisy(0.5), noisy(0.25), {"dataset"}),
        (noisy(0.5), noisy(0.5, 14), {"dataset"}),
        (Drawn(0), Drawn(1), set()),
        (Drawn(0), Drawn(0, root="there"), set()),
        (Drawn(0), Drawn(1, scale=2.0), {"dataset"}),
    ],
)
def test_what_makes_data_other_data(one: Any, other: Any, differ: set[str]) -> None:
    """Another seed of the run, which deals other samples to the clients, does not."""
    first, second = (of(x, seed=seed) for seed, x in enumerate((one, other)))
    assert {name for name in first if first[name] != second[name]} == differ


class Net(lf.ClientModule):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 2), num_classes=2)


def test_a_report_pools_seeds_of_equal_data_alone(tmp_path: Path) -> None:
    for seed, noise in enumerate([0.5, 0.5, 0.25]):
        made = lf.Federation(
            lf.FedAvg(), [lf.ClientGroup(2, Net)], optimizer=SGD_HALF, seed=seed, export=[]
        )
        fit(made, lf.FederatedDataModule(noisy(noise), lf.Iid()), tmp_path / str(seed))
    rows = grouped([read(tmp_path / str(seed) / "run") for seed in range(3)])
    assert [[run.seed for run in row.runs] for row in rows] == [[0, 1], [2]]
    assert all("dataset digest" in row.condition for row in rows)
