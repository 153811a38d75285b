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
    """The recorded clients, a group for each version; all have different numbers of samples."""
    meta = NUMERIC[case]
    versions: list[str] = meta["clients"]
    groups = [
        ClientGroup(versions.count(v), partial(Recorded, v, meta["widths"], meta["classifier"]))
        for v in dict.fromkeys(versions)
    ]
    bounds = accumulate(range(2, 2 + len(versions)), initial=0)
    parts = [range(a, b) for a, b in pairwise(bounds)]
    x = torch.randn(parts[-1].stop, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return fleet_of(groups, strategy, data_of(x, torch.arange(len(x)) % 4, parts))


def tensors_of(fleet: Fleet, client: int, row: Row) -> dict[str, Tensor]:
    layout = fleet.state(client).layout
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    return {name.removeprefix("net."): view for name, view in views.items()}


def trained(fleet: Fleet, client: int, golden: dict[str, Tensor]) -> Row:
    """What a client had before the recorded aggregation."""
    layout = fleet.state(client).layout
    row = Row(layout.floats.new_row(), layout.integers.new_row())
    for name, view in tensors_of(fleet, client, row).items():
        view.copy_(golden[f"before/{client}/{name}"])
    return row


def largest(golden: dict[str, Tensor], name: str, client: int, tensor: str) -> Tensor:
    """The largest count among those that have this client's mean after the aggregation."""
    mean = tensor.replace("num_batches_tracked", "running_mean")
    own = golden[f"{name}/{client}/{mean}"]
    places = {k: f"{name}/{k}/{mean}" for k in range(8)}
    after = {k: golden[place] for k, place in places.items() if place in golden}
    alike = [
        k for k, v in after.items()
        if v.shape == own.shape and torch.allclose(v, own, rtol=0, atol=1e-6)
    ]  # fmt: skip
    return max(golden[f"before/{k}/{tensor}"] for k in alike)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_tensor_is_as_recorded(case: str, name: str) -> None:
    strategy: Any = type("Strategy", (Replayed, STRATEGIES[name]), {})()
    fleet, golden, seen = fleet_of_case(case, strategy), recorded(case), 0
    clients = range(fleet.clients)
    strategy.ends = {k: trained(fleet, k, golden) for k in clients}
    run_round(fleet, 0)
    for client in clients:
        found = tensors_of(fleet, client, fleet.row(client))
        expected = {
            tensor: largest(golden, name, client, tensor)
            if tensor.endswith("num_batches_tracked")
            else golden[f"{name}/{client}/{tensor}"]
            for tensor in found
        }
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        seen += len(found)
    assert seen == sum(key.startswith(f"{name}/") for key in golden)


@pytest.mark.parametrize("case", CASES)
def test_the_common_base_has_the_recorded_tensors(case: str) -> None:
    strategy = BasicCommon()
    fleet_of_case(case, strategy)
    (group,) = strategy.trie.shared(strategy.choose(strategy.trie))
    for names in group.names.values():
        assert [name.removeprefix("net.") for name in names] == NUMERIC[case]["basic_common"]
