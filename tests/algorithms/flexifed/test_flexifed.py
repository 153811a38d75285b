"""FlexiFed's strategies: worked examples, identities, the start, bytes, what is warned of."""

from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from lightfed.algorithms.fedavg import FedAvg
from lightfed.algorithms.flexifed.prefix_trie import Node, Trie
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
from tests.small import fleet_of, has_global_model, random_data, row_held, run_round

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


# Two clients of a, two of b, one of c. All networks begin with 5 units; b and c go on with 6; a and
# c end in a classifier from 5 units to 3 classes.
WIDTHS = {"a": (5,), "b": (5, 6, 7), "c": (5, 6, 5)}
COUNTS = {"a": 2, "b": 2, "c": 1}


def groups_of(counts: dict[str, int] = COUNTS) -> list[ClientGroup]:
    groups = []
    for name, count in counts.items():
        groups.append(ClientGroup(count, partial(Stack, *WIDTHS[name]), name=name))
    return groups


def flexi_fleet(strategy: Algorithm, groups: list[ClientGroup] | None = None, **work: Any) -> Fleet:
    """Return clients of a strategy; by default those of COUNTS."""
    groups = groups_of() if groups is None else groups
    num_clients = sum(group.count for group in groups)
    sizes = [6 + k % 3 for k in range(num_clients)]
    return fleet_of(groups, strategy, random_data(sizes), optimizer=slow, **work)


def tensors_of(fleet: Fleet, client: int) -> dict[str, Tensor]:
    """Return copies of a client's tensors, by the names in its network."""
    layout = fleet.state(client).layout
    row = fleet.row(client)
    views = layout.floats.views(row.floats) | layout.integers.views(row.integers)
    return {name.removeprefix("net."): view.clone() for name, view in views.items()}


def sharers(strategy: FlexiFed) -> dict[str, dict[str, str]]:
    """Return whom every group shares its tensors with: group -> tensor -> groups, itself included.

    Tensors are the weights of linear layers and norms. One that no mean includes is missing.
    """
    fleet = flexi_fleet(strategy)
    names = [state.name for state in fleet.groups]
    sharers: dict[str, dict[str, str]] = {name: {} for name in names}
    for shared in strategy.trie.shared(strategy.choose(strategy.trie)):
        groups = "".join(names[group] for group in shared.names)
        for group, tensors in shared.names.items():
            for tensor in tensors:
                if tensor.endswith("weight"):
                    sharers[names[group]][tensor.removeprefix("net.")] = groups
    return sharers


def spelled(**of_groups: str) -> dict[str, dict[str, str]]:
    """Return what `sharers` should return.

    Args:
        **of_groups: Of each group, who shares its linear layers in order, the classifier last; a
            dash where no mean includes the layer. A norm is shared as the layer in front of it.
    """
    expected: dict[str, dict[str, str]] = {}
    for group, text in of_groups.items():
        *hidden, classifier = text.split()
        expected[group] = {}
        for position, groups in enumerate(hidden):
            if groups != "-":
                linear = 3 * position  # each layer is linear, norm, ReLU
                norm = linear + 1
                expected[group][f"layers.{linear}.weight"] = groups
                expected[group][f"layers.{norm}.weight"] = groups
        if classifier != "-":
            expected[group]["head.weight"] = classifier
    return expected


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (BasicCommon(), spelled(a="abc -", b="abc - - -", c="abc - - -")),
        (ClusteredCommon(), spelled(a="abc a", b="abc b b b", c="abc c c c")),
        (MaxCommon(), spelled(a="abc a", b="abc bc b b", c="abc bc c c")),
        (ClusteredFL(), spelled(a="a a", b="b b b b", c="c c c c")),
        (MaxCommon(max_common_layers=0), spelled(a="- -", b="- - - -", c="- - - -")),
        (MaxCommon(max_common_layers=1), spelled(a="abc -", b="abc - - -", c="abc - - -")),
        (MaxCommon(max_common_layers=2), spelled(a="abc a", b="abc bc - -", c="abc bc - -")),
        (MaxCommon(share_classifier=True), spelled(a="abc ac", b="abc bc b b", c="abc bc c ac")),
    ],
)
def test_who_shares_what(strategy: FlexiFed, expected: dict[str, dict[str, str]]) -> None:
    assert sharers(strategy) == expected


LayerOfGroup: TypeAlias = tuple[int, int]
"""A group, and the position of one of its layers."""


def layers_alike(trie: Trie, nodes: list[Node]) -> dict[LayerOfGroup, set[LayerOfGroup]]:
    """Return with which layers each layer is averaged, itself included."""
    alike: dict[LayerOfGroup, set[LayerOfGroup]] = {}
    for node in nodes:
        layers = set()
        for group in node.groups:
            from_start = range(len(trie.models[group]))
            layers.add((group, from_start[node.depth]))
        assert not layers & alike.keys(), "nodes are disjoint"
        alike |= dict.fromkeys(layers, layers)
    return alike


@given(st.lists(st.text("abB", min_size=1, max_size=5), min_size=1, max_size=5))
def test_a_shared_classifier_adds_and_takes_nobody_away(words: list[str]) -> None:
    """Linear layers; b and B have the same shapes, but are not alike."""

    def layer(kind: str, position: int) -> Layer:
        shape = (ord(kind.lower()),)
        return Layer(str(position), "Linear", (kind,), (f"{position}.w",), (shape,), 1, kind)

    models = {}
    for group, word in enumerate(words):
        models[group] = [layer(kind, position) for position, kind in enumerate(word)]
    trie = Trie.build(models)
    without = layers_alike(trie, MaxCommon().choose(trie))
    shared = layers_alike(trie, MaxCommon(share_classifier=True).choose(trie))

    every_layer = {(group, i) for group, word in enumerate(words) for i in range(len(word))}
    assert without.keys() == shared.keys() == every_layer
    for layer_of_group in every_layer:
        assert without[layer_of_group] <= shared[layer_of_group]

    # Classifiers are averaged if and only if their shapes are equal.
    classifiers = [(group, len(word) - 1) for group, word in enumerate(words)]
    for one, other in product(range(len(words)), repeat=2):
        same_shapes = models[one][-1].shapes == models[other][-1].shapes
        assert (classifiers[other] in shared[classifiers[one]]) == same_shapes


def test_only_what_is_shared_travels() -> None:
    """A client of a shares everything, with all or with the other; c's last layers are its own."""
    fleet = flexi_fleet(MaxCommon())
    run_round(fleet, 0)
    up, down, _ = fleet.ledger.totals.T
    assert up.tolist() == down.tolist()

    # A linear layer with its norm: weights, bias, four vectors of the norm, and an int64 count.
    first = 4 * (4 * 5 + 5 + 4 * 5) + 8
    second = 4 * (5 * 6 + 6 + 4 * 6) + 8
    head = 4 * (5 * 3 + 3)
    layout_of_b = fleet.groups[1].layout
    everything_of_b = 4 * layout_of_b.floats.numel + 8 * layout_of_b.integers.numel
    assert up.tolist() == [
        first + head,
        first + head,
        everything_of_b,
        everything_of_b,
        first + second,
    ]


def test_who_does_not_take_part_keeps_its_row() -> None:
    """The means are over the participants: with b and c alone, the base is theirs."""
    fleet = flexi_fleet(BasicCommon(), clients_per_round=2)
    for t in range(6):
        before = [tensors_of(fleet, k) for k in range(5)]
        first, second = fleet.participants(t)
        run_round(fleet, t)
        after = [tensors_of(fleet, k) for k in range(5)]

        for k in set(range(5)) - {first, second}:
            assert same_tensors(after[k], before[k])

        if fleet.home_group(first) == fleet.home_group(second):
            assert same_tensors(after[first], after[second])
            continue
        equal = set()
        for name, tensor in after[first].items():
            if name in after[second] and torch.equal(tensor, after[second][name]):
                equal.add(name)
        assert {"layers.0.weight", "layers.0.bias", "layers.1.weight"} <= equal
        one_is_of_a = 0 in (fleet.home_group(first), fleet.home_group(second))
        assert ("layers.3.weight" in equal) == (not one_is_of_a)
        assert "head.weight" not in equal


def same_tensors(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two clients have the same tensors."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


# Identities.


def by_samples(initial: Any) -> FlexiFed:
    return ClusteredFL(initial, weights="samples")


@pytest.mark.parametrize("strategy", [*STRATEGIES, by_samples])
def test_equal_architectures_are_fedavg(strategy: Callable[..., FlexiFed]) -> None:
    """From a common start, with the same weights."""
    groups = [ClientGroup(3, partial(Stack, 5, 6))]
    fedavg = FedAvg("samples" if strategy is by_samples else "uniform")
    with_server = flexi_fleet(fedavg, groups, epochs=2)
    without = flexi_fleet(strategy(initial="group"), groups, epochs=2)
    for t in range(3):
        run_round(with_server, t)
        run_round(without, t)
        for client in range(3):
            assert torch.equal(without.row(client).floats, fedavg.model.floats)


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
    alone = flexi_fleet(Standalone())
    sharing_nothing = flexi_fleet(MaxCommon(0, initial="group"))
    for t in range(2):
        run_round(alone, t)
        metrics = run_round(sharing_nothing, t)
        assert metrics["bytes_up"] == 0
        assert metrics["bytes_down"] == 0
    for client in range(5):
        assert same_tensors(tensors_of(alone, client), tensors_of(sharing_nothing, client))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clusters_that_share_nothing_are_clustered_fl(strategy: Callable[..., FlexiFed]) -> None:
    strangers = [ClientGroup(2, partial(Stack, 5)), ClientGroup(3, partial(Stack, 6))]
    ours = flexi_fleet(strategy(), strangers)
    clustered = flexi_fleet(ClusteredFL(), strangers)
    run_round(ours, 0)
    run_round(clustered, 0)
    for k in range(5):
        is_same = torch.equal(ours.row(k).floats, clustered.row(k).floats)
        assert is_same == (strategy is not BasicCommon)  # which shares only what all have


# The start.


def test_every_client_starts_from_its_own_values() -> None:
    fleet = flexi_fleet(MaxCommon())
    starts = [tensors_of(fleet, k)["layers.0.weight"] for k in range(5)]
    for one, other in combinations(starts, 2):
        assert not torch.equal(one, other)

    # They depend on the seed and the client alone; clients 0, 1 and 4 have the same networks here.
    other_fleet = flexi_fleet(MaxCommon(), groups_of({"a": 2, "c": 3}))
    for k in (0, 1, 4):
        assert torch.equal(tensors_of(other_fleet, k)["layers.0.weight"], starts[k])
    assert torch.equal(tensors_of(fleet, 0)["layers.1.running_var"], torch.ones(5))


@pytest.mark.parametrize("initial", ["own", "group"])
def test_a_client_that_diverges_starts_again_and_spoils_no_mean(initial: Any) -> None:
    fleet = flexi_fleet(MaxCommon(initial=initial))
    start = tensors_of(fleet, 4)
    fleet.row(4).floats[0] = torch.inf
    metrics = run_round(fleet, 0)
    assert metrics["excluded"] == 1
    after = [tensors_of(fleet, k) for k in range(5)]
    for tensors in after:
        assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert torch.equal(after[4]["head.weight"], start["head.weight"])
    assert torch.equal(after[4]["layers.0.weight"], after[0]["layers.0.weight"])  # it is sent all


# What is stated, and refused.


def test_options_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"share_classifier: true, but max_common_layers"):
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
