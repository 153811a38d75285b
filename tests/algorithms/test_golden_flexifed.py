"""Aggregation by FlexiFed's released code, and by the fork of the document's author (golden).

Every tensor of every client, num_batches_tracked aside: there a mean is a fraction, here the
largest.
"""

import json
from functools import cache, partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models.vgg import cfgs, make_layers
from typing_extensions import override

from lightfed.algorithms.flexifed import (
    BasicCommon,
    ClusteredCommon,
    ClusteredFL,
    FlexiFed,
    MaxCommon,
)
from lightfed.core.cohort import Cohort
from lightfed.core.fleet import Fleet
from tests.small import GOLDEN, data_of, fleet_of

NUMERIC: dict[str, Any] = json.loads((GOLDEN / "flexifed/numeric.json").read_text())
CASES = ("vgg_3clients_11_16_19", "vgg_8clients")
STRATEGIES: dict[str, type[FlexiFed]] = {
    "official_basic": BasicCommon,
    "official_max": MaxCommon,
    "author_max": MaxCommon,
    "author_clustered_common": ClusteredCommon,
    "author_clustered_fl": ClusteredFL,
}
LETTERS = {"vgg11": "A", "vgg13": "B", "vgg16": "D", "vgg19": "E"}


class Recorded(nn.Module):
    """The recorded networks: VGGs of a few channels, with the names of the released code."""

    def __init__(self, version: str, widths: dict[str, int], sizes: list[int]) -> None:
        super().__init__()
        config = cfgs[LETTERS[version]]
        self.features = make_layers(
            [v if isinstance(v, str) else widths[str(v)] for v in config], batch_norm=True
        )
        first, second, third, classes = sizes
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(first, second), nn.ReLU(), nn.Dropout(),
            nn.Linear(second, third), nn.ReLU(), nn.Linear(third, classes),
        )  # fmt: skip

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


@cache
def recorded(case: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"flexifed/{case}.safetensors")


def fleet_of_case(case: str, strategy: FlexiFed) -> Fleet:
    """The recorded clients, with their values, a cohort for each version."""
    meta = NUMERIC[case]
    versions: list[str] = meta["clients"]
    cohorts = [
        Cohort(versions.count(v), partial(Recorded, v, meta["widths"], meta["classifier"]))
        for v in dict.fromkeys(versions)
    ]
    x, y = torch.zeros(len(versions), 3, 32, 32), torch.zeros(len(versions), dtype=torch.int64)
    parts = [[k] for k in range(len(versions))]
    fleet = fleet_of(cohorts, strategy, data_of(x, y, parts, classes=4))
    for client in range(len(versions)):
        for name, view in tensors_of(fleet, client).items():
            view.copy_(recorded(case)[f"before/{client}/{name}"])
    return fleet


def tensors_of(fleet: Fleet, client: int) -> dict[str, Tensor]:
    layout, row = fleet.state(client).layout, fleet.row(client)
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    return {name.removeprefix("net."): view for name, view in views.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_tensor_is_as_recorded(case: str, name: str) -> None:
    strategy = STRATEGIES[name]()
    fleet = fleet_of_case(case, strategy)
    fleet.share(range(fleet.clients), strategy.trie.groups(strategy.choose(strategy.trie)))
    golden, seen = recorded(case), 0
    for client in range(fleet.clients):
        for tensor, value in tensors_of(fleet, client).items():
            seen += 1
            expected = golden[f"{name}/{client}/{tensor}"]
            if tensor.endswith("num_batches_tracked"):
                assert value >= expected - 1e-6  # the largest of those that were averaged
            else:
                assert torch.allclose(value, expected, rtol=1e-6, atol=1e-6), (client, tensor)
    assert seen == sum(key.startswith(f"{name}/") for key in golden)


@pytest.mark.parametrize("case", CASES)
def test_the_common_base_has_the_recorded_tensors(case: str) -> None:
    strategy = BasicCommon()
    fleet_of_case(case, strategy)
    (group,) = strategy.trie.groups(strategy.choose(strategy.trie))
    for names in group.tensors.values():
        assert [name.removeprefix("net.") for name in names] == NUMERIC[case]["basic_common"]
