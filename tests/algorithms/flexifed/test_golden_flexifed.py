"""Rounds of FlexiFed against the released code and the fork of the document's author (golden).

Sessions end with the recorded values. Every tensor of every client is compared, num_batches_tracked
with the largest of those that were averaged: the released code makes a fraction of it.
"""

import json
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models.vgg import cfgs, make_layers
from typing_extensions import override

from lightfed.algorithms.flexifed.strategies import (
    BasicCommon,
    ClusteredCommon,
    ClusteredFL,
    FlexiFed,
    MaxCommon,
)
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.state.rows import Row
from tests.algorithms.peers.dispfl_cases import Replayed
from tests.small import GOLDEN, data_of, fleet_of, run_round

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
        config: list[str | int] = []
        for item in cfgs[LETTERS[version]]:
            config.append(item if item == "M" else widths[str(item)])
        self.features = make_layers(config, batch_norm=True)

        features, first, second, classes = sizes
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(features, first),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(first, second),
            nn.ReLU(),
            nn.Linear(second, classes),
        )

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


@cache
def recorded(case: str) -> dict[str, Tensor]:
    return load_file(GOLDEN / f"flexifed/{case}.safetensors")


def fleet_of_case(case: str, strategy: FlexiFed) -> Fleet:
    """Return the recorded clients, a group for each version.

    All have different numbers of samples.
    """
    about = NUMERIC[case]
    versions: list[str] = about["clients"]
    groups = []
    for version in dict.fromkeys(versions):
        network = partial(Recorded, version, about["widths"], about["classifier"])
        groups.append(ClientGroup(versions.count(version), network))

    sizes = range(2, 2 + len(versions))
    parts = [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]
    x = torch.randn(sum(sizes), 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return fleet_of(groups, strategy, data_of(x, torch.arange(len(x)) % 4, parts))


def tensors_of(fleet: Fleet, client: int, row: Row) -> dict[str, Tensor]:
    """Return the tensors of a row of a client, as views, by the names in its network."""
    layout = fleet.state(client).layout
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    return {name.removeprefix("net."): view for name, view in views.items()}


def trained(fleet: Fleet, client: int, golden: dict[str, Tensor]) -> Row:
    """Return the row that a client had before the recorded aggregation."""
    layout = fleet.state(client).layout
    row = Row(layout.floats.new_row(), layout.integers.new_row())
    for name, view in tensors_of(fleet, client, row).items():
        view.copy_(golden[f"before/{client}/{name}"])
    return row


def largest_count(golden: dict[str, Tensor], name: str, client: int, tensor: str) -> Tensor:
    """Return the largest count among the clients that were averaged with this one.

    They are those that have the client's mean after the recorded aggregation.

    Args:
        golden: The recorded tensors.
        name: The recorded strategy.
        client: The client.
        tensor: Name of a num_batches_tracked.
    """
    mean_name = tensor.replace("num_batches_tracked", "running_mean")
    mean = golden[f"{name}/{client}/{mean_name}"]
    counts = []
    for other in range(8):
        other_mean = golden.get(f"{name}/{other}/{mean_name}")
        if other_mean is None or other_mean.shape != mean.shape:
            continue
        if torch.allclose(other_mean, mean, rtol=0, atol=1e-6):
            counts.append(golden[f"before/{other}/{tensor}"])
    return max(counts)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_tensor_is_as_recorded(case: str, name: str) -> None:
    golden = recorded(case)
    strategy: Any = type("Strategy", (Replayed, STRATEGIES[name]), {})()
    fleet = fleet_of_case(case, strategy)
    strategy.ends = {client: trained(fleet, client, golden) for client in range(fleet.clients)}
    run_round(fleet, 0)

    compared = 0
    for client in range(fleet.clients):
        for tensor, value in tensors_of(fleet, client, fleet.row(client)).items():
            if tensor.endswith("num_batches_tracked"):
                expected = largest_count(golden, name, client, tensor)
            else:
                expected = golden[f"{name}/{client}/{tensor}"]
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
            compared += 1
    assert compared == sum(key.startswith(f"{name}/") for key in golden)


@pytest.mark.parametrize("case", CASES)
def test_the_common_base_has_the_recorded_tensors(case: str) -> None:
    strategy = BasicCommon()
    fleet_of_case(case, strategy)
    (shared,) = strategy.trie.shared(strategy.choose(strategy.trie))
    for names in shared.names.values():
        assert [name.removeprefix("net.") for name in names] == NUMERIC[case]["basic_common"]
