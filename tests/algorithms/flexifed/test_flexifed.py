"""FlexiFed's strategies: worked examples, identities, the start, bytes, what is warned of."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.flexifed.prefix_trie import Trie
from lightfed.algorithms.flexifed.signature import Layer
from lightfed.algorithms.flexifed.strategies import (
    BasicCommon,
    ClusteredCommon,
    ClusteredFL,
    FlexiFed,
    MaxCommon,
)
from lightfed.algorithms.standalone import Standalone
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.local.client_group import ClientGroup
from lightfed.utils.errors import UserError
from tests.small import (
    fleet_of,
    has_global_model,
    random_data,
    row_held,
    run_round,
)

STRATEGIES: list[Callable[..., FlexiFed]] = [BasicCommon, ClusteredCommon, MaxCommon, ClusteredFL]
slow = partial(SGD, lr=0.05)


class Stack(nn.Module):
    """Linear layers of these widths, each with BatchNorm and ReLU, and a classifier."""

    def __init__(self, *widths: int, num_classes: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 4
        for width in widths:
            layers += [nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()]
            inputs = width
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


# Two of a, two of b, one of c: all begin with 5, b and c go on with 6; a and c end in 5 -> 3.
WIDTHS = {"a": (5,), "b": (5, 6, 7), "c": (5, 6, 5)}
COUNTS = {"a": 2, "b": 2, "c": 1}


def groups_of(counts: dict[str, int] = COUNTS) -> list[ClientGroup]:
    return [ClientGroup(count, partial(Stack, *WIDTHS[n]), name=n) for n, count in counts.items()]


def flexi_fleet(strategy: Algorithm, groups: list[ClientGroup] | None = None, **work: Any) -> Fleet:
    groups = groups_of() if groups is None else groups
    sizes = [6 + k % 3 for k in range(sum(group.count for group in groups))]
    return fleet_of(groups, strategy, random_data(sizes), optimizer=slow, **work)


def tensors_of(fleet: Fleet, client: int) -> dict[str, Tensor]:
    layout, row = fleet.state(client).layout, fleet.row(client)
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    return {name.removeprefix("net."): view.clone() for name, view in views.items()}


def sharers(strategy: FlexiFed, counts: dict[str, int] = COUNTS) -> dict[str, str]:
    """Tensor of a group -> the groups that it is averaged over, itself among them."""
    fleet = flexi_fleet(strategy, groups_of(counts))
    names = [state.name for state in fleet.groups]
    groups = strategy.trie.shared(strategy.choose(strategy.trie))
    return {
        f"{names[c]}.{tensor.removeprefix('net.')}": "".join(names[k] for k in group.names)
        for group in groups
        for c, tensors in group.names.items()
        for tensor in tensors
        if tensor.endswith("weight") and len(tensor.split(".")) < 5
    }


LAYERS = {
    "a": ["layers.0", "layers.1", "head"],
    "b": ["layers.0", "layers.1", "layers.3", "layers.4", "layers.6", "layers.7", "head"],
    "c": ["layers.0", "layers.1", "layers.3", "layers.4", "layers.6", "layers.7", "head"],
}


def spelled(**sharers: str) -> dict[str, str]:
    """Of each group, who shares its linear layers in order, a dash where nobody does."""
    found = {}
    for group, words in sharers.items():
        linear = [n for n in LAYERS[group] if n == "head" or int(n.split(".")[1]) % 3 == 0]
        for name, who in zip(linear, words.split(), strict=True):
            if who == "-":
                continue
            found[f"{group}.{name}.weight"] = who
            if name != "head":
                norm = f"layers.{int(name.split('.')[1]) + 1}"
                found[f"{group}.{norm}.weight"] = who
    return found


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (BasicCommon(), spelled(a="abc -", b="abc - - -", c="abc - - -")),
        (ClusteredCommon(), spelled(a="abc a", b="abc b b b", c="abc c c c")),
        (MaxCommon(), spelled(a="abc a", b="abc bc b b", c="abc bc c c")),
        (ClusteredFL(), spelled(a="a a", b="b b b b", c="c c c c")),
        (MaxCommon(max_common_layers=0), {}),
        (MaxCommon(max_common_layers=1), spelled(a="abc -", b="abc - - -", c="abc - - -")),
        (MaxCommon(max_common_layers=2), spelled(a="abc a", b="abc bc - -", c="abc bc - -")),
        (MaxCommon(share_classifier=True), spelled(a="abc ac", b="abc bc b b", c="abc bc c ac")),
    ],
)
def test_who_shares_what(strategy: FlexiFed, expected: dict[str, str]) -> None:
    assert sharers(strategy) == expected


@given(st.lists(st.text("abB", min_size=1, max_size=5), min_size=1, max_size=5))
def test_a_shared_classifier_adds_and_takes_nobody_away(words: list[str]) -> None:
    """Linear layers; b and B have the same shapes, but are not alike."""
    models = {
        group: [
            Layer(str(place), "Linear", (kind,), (f"{place}.w",), ((ord(kind.lower()),),), 1, kind)
            for place, kind in enumerate(word)
        ]
        for group, word in enumerate(words)
    }
    trie = Trie.build(models)
    found = []
    for shared in (False, True):
        nodes = MaxCommon(share_classifier=shared).choose(trie)
        groups = [{(c, range(len(models[c]))[node.depth]) for c in node.groups} for node in nodes]
        assert sum(map(len, groups)) == sum(map(len, words))  # every layer is in one of them
        found.append({place: group for group in groups for place in group})
    assert all(group <= found[1][place] for place, group in found[0].items())
    for one, other in product(range(len(words)), repeat=2):
        agree = models[one][-1].shapes == models[other][-1].shapes
        assert ((other, len(words[other]) - 1) in found[1][one, len(words[one]) - 1]) == agree


def test_only_what_is_shared_travels() -> None:
    """A client of a shares everything, with all or with the other; c's last layers are its own."""
    fleet = flexi_fleet(MaxCommon())
    run_round(fleet, 0)
    first = 4 * (4 * 5 + 5 + 4 * 5) + 8  # linear, norm with statistics, a count
    second = 4 * (5 * 6 + 6 + 4 * 6) + 8
    head = 4 * (5 * 3 + 3)
    up, down, _ = fleet.ledger.totals.T
    assert up.tolist() == down.tolist()
    assert [up[0], up[1], up[4]] == [first + head, first + head, first + second]
    layout = fleet.groups[1].layout
    assert up[2] == up[3] == 4 * layout.floats.numel + 8 * layout.integers.numel


def test_who_does_not_take_part_keeps_its_row() -> None:
    """The means are over the participants: with b and c alone, the base is theirs."""
    fleet = flexi_fleet(BasicCommon(), clients_per_round=2)
    for t in range(6):
        before = [tensors_of(fleet, k) for k in range(5)]
        chosen = fleet.participants(t)
        run_round(fleet, t)
        after = [tensors_of(fleet, k) for k in range(5)]
        one, other = (after[k] for k in chosen)
        common = [n for n in one if n in other and torch.equal(one[n], other[n])]
        kinds = {fleet.home_group(k) for k in chosen}
        if len(kinds) == 1:
            assert common == list(one)
        else:
            assert {n.rpartition(".")[0] for n in common} >= {"layers.0", "layers.1"}
            assert ("layers.3.weight" in common) == (0 not in kinds)
            assert "head.weight" not in common
        for k in set(range(5)) - set(chosen):
            assert all(torch.equal(after[k][n], before[k][n]) for n in after[k])


# Identities.


def by_samples(initial: Any) -> FlexiFed:
    return ClusteredFL(initial, weights="samples")


@pytest.mark.parametrize("strategy", [*STRATEGIES, by_samples])
def test_equal_architectures_are_fedavg(strategy: Callable[..., FlexiFed]) -> None:
    """From a common start, with the same weights."""
    average = FedAvg("samples" if strategy is by_samples else "uniform")
    groups = [ClientGroup(3, partial(Stack, 5, 6))]
    fleets = [flexi_fleet(a, groups, epochs=2) for a in (average, strategy(initial="group"))]
    for t in range(3):
        for fleet in fleets:
            run_round(fleet, t)
        for client in range(3):
            assert torch.equal(fleets[1].row(client).floats, average.model.floats)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_groups_of_one_architecture_are_one(strategy: Callable[..., FlexiFed]) -> None:
    stack = partial(Stack, 5)  # so small that a pack has other last bits
    one = flexi_fleet(strategy(), [ClientGroup(4, stack)], side_by_side="off")
    two = flexi_fleet(strategy(), [ClientGroup(1, stack), ClientGroup(3, stack)])
    for fleet in (one, two):
        run_round(fleet, 0)
    for client in range(4):
        assert torch.equal(one.row(client).floats, two.row(client).floats)


def test_no_common_layers_is_standalone() -> None:
    fleets = [flexi_fleet(a) for a in (Standalone(), MaxCommon(0, initial="group"))]
    for t in range(2):
        metrics = [run_round(fleet, t) for fleet in fleets]
    assert metrics[1]["bytes_up"] == metrics[1]["bytes_down"] == 0
    for client in range(5):
        one, other = (fleet.row(client) for fleet in fleets)
        assert torch.equal(one.floats, other.floats)
        assert torch.equal(one.integers, other.integers)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clusters_that_share_nothing_are_clustered_fl(strategy: Callable[..., FlexiFed]) -> None:
    strangers = [ClientGroup(2, partial(Stack, 5)), ClientGroup(3, partial(Stack, 6))]
    ours, theirs = (flexi_fleet(make(), strangers) for make in (strategy, ClusteredFL))
    for fleet in (ours, theirs):
        run_round(fleet, 0)
    same = [torch.equal(ours.row(k).floats, theirs.row(k).floats) for k in range(5)]
    assert same == [strategy is not BasicCommon] * 5


# The start.


def test_every_client_starts_from_its_own_values() -> None:
    fleets = [flexi_fleet(MaxCommon()), flexi_fleet(MaxCommon(), groups_of({"a": 2, "c": 3}))]
    starts = [[tensors_of(fleet, k)["layers.0.weight"] for k in range(5)] for fleet in fleets]
    for k in range(5):
        assert not any(torch.equal(starts[0][k], starts[0][other]) for other in range(k))
    # Of seed and client alone; client 4 is of c in both.
    for k in (0, 1, 4):
        assert torch.equal(starts[0][k], starts[1][k])
    assert torch.equal(tensors_of(fleets[0], 0)["layers.1.running_var"], torch.ones(5))


@pytest.mark.parametrize("initial", ["own", "group"])
def test_a_client_that_diverges_starts_again_and_spoils_no_mean(initial: Any) -> None:
    fleet = flexi_fleet(MaxCommon(initial=initial))
    start = tensors_of(fleet, 4)
    fleet.row(4).floats[0] = torch.inf
    metrics = run_round(fleet, 0)
    assert metrics["excluded"] == 1
    after = [tensors_of(fleet, k) for k in range(5)]
    assert all(value.isfinite().all() for tensors in after for value in tensors.values())
    assert torch.equal(after[4]["head.weight"], start["head.weight"])
    assert torch.equal(after[4]["layers.0.weight"], after[0]["layers.0.weight"])  # it is sent all


# What is stated, and refused.


def test_options_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"init_args\.share_classifier: true, together with"):
        MaxCommon(max_common_layers=2, share_classifier=True)


def test_a_network_whose_layers_have_no_order_is_named() -> None:
    class Token(Stack):
        def __init__(self) -> None:
            super().__init__(5)
            self.token = nn.Parameter(torch.zeros(4))

    with pytest.raises(UserError, match=r"model\.clients\.1\.model: net has its own token"):
        flexi_fleet(MaxCommon(), [ClientGroup(1, partial(Stack, 5)), ClientGroup(1, Token)])


def test_clients_are_tested_on_their_own_rows_and_there_is_no_global_model() -> None:
    fleet = flexi_fleet(MaxCommon())
    assert not has_global_model(fleet)
    layout, row = row_held(fleet, 3)
    assert layout == fleet.groups[1].layout
    assert torch.equal(row.floats, fleet.row(3).floats)
