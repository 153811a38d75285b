"""The trie against its definition and the paper's recursion, and on the families of the paper."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import takewhile
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchvision.models.vgg import make_layers

from lightfed.algorithms.flexifed.prefix_trie import Node, Trie
from lightfed.algorithms.flexifed.signature import Layer, layers_of
from lightfed.lab.previews import layer_groups
from lightfed.lab.previews.layer_groups import trie_table
from lightfed.local.client_group import ClientGroup
from lightfed.networks.charcnn import CharCNN
from lightfed.networks.cifar_resnet import CIFARResNet
from lightfed.networks.vdcnn import VDCNN
from lightfed.networks.vgg import VGG
from tests.small import GOLDEN

FAMILIES: dict[str, Any] = json.loads((GOLDEN / "flexifed/families.json").read_text())


def layer(kind: str, position: int) -> Layer:
    """Return a made-up layer, whose kind is a letter, with one tensor."""
    shape = (ord(kind[0]),)
    return Layer(str(position), kind, (kind,), (f"{position}.w",), (shape,), 10, kind)


def model(word: str) -> tuple[Layer, ...]:
    """Return a made-up network: each letter is a layer."""
    return tuple(layer(kind, position) for position, kind in enumerate(word))


def trie_of(*words: str) -> Trie:
    return Trie.build({group: model(word) for group, word in enumerate(words)})


words = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6)


@given(words, st.randoms(use_true_random=False))
def test_the_order_of_the_clients_does_not_matter(architectures: list[str], rng: Any) -> None:
    order = list(range(len(architectures)))
    rng.shuffle(order)
    models = {group: model(architectures[group]) for group in order}
    assert Trie.build(models) == trie_of(*architectures)

    # Renumber the groups, and number them back.
    renumbered = trie_of(*(architectures[group] for group in order))
    nodes = []
    for node in renumbered.nodes:
        groups = sorted(order[group] for group in node.groups)
        nodes.append(Node(node.depth, tuple(groups)))
    assert tuple(sorted(nodes)) == trie_of(*architectures).nodes


MarkedLayer: TypeAlias = tuple[str, bool]
"""A letter, and whether it is the last of its word."""


def max_common(models: Mapping[int, Sequence[MarkedLayer]], done: int = 0) -> set[Node]:
    """Return the nodes of algorithm 1 of the paper.

    It averages the common base, divides the clients by the next layer, and recurs.

    Args:
        models: Client -> its layers.
        done: Number of layers that have been averaged.
    """
    columns = zip(*(layers[done:] for layers in models.values()), strict=False)
    base = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    members = tuple(sorted(models))
    nodes = {Node(depth, members) for depth in range(done, done + base)}

    clusters: dict[MarkedLayer, dict[int, Sequence[MarkedLayer]]] = {}
    for client, layers in models.items():
        if len(layers) > done + base:
            next_layer = layers[done + base]
            clusters.setdefault(next_layer, {})[client] = layers
    for cluster in clusters.values():
        nodes |= max_common(cluster, done + base)
    return nodes


@given(words)
def test_the_nodes_are_those_of_the_papers_recursion(architectures: list[str]) -> None:
    marked = {}
    for group, word in enumerate(architectures):
        marked[group] = [(kind, i == len(word) - 1) for i, kind in enumerate(word)]
    assert set(trie_of(*architectures).nodes) == max_common(marked)


@given(words, st.sets(st.integers(0, 5)))
def test_the_trie_of_some_is_built_from_them_alone(
    architectures: list[str], some: set[int]
) -> None:
    models = {group: model(word) for group, word in enumerate(architectures)}
    chosen = {group: layers for group, layers in models.items() if group in some}
    assert Trie.build(models).among(some) == Trie.build(chosen)


def test_heads_are_the_linear_layers_at_the_end_by_shape() -> None:
    shapes = {"Conv": (9,), "Linear": (5,), "Linear'": (6,)}

    def net(*names: str) -> tuple[Layer, ...]:
        layers = []
        for position, name in enumerate(names):
            kind = name.rstrip("'")
            tensor = f"{position}.w"
            layers.append(Layer(str(position), kind, (name,), (tensor,), (shapes[name],), 1, name))
        return tuple(layers)

    models = {
        0: net("Conv", "Linear", "Linear"),
        1: net("Conv", "Conv", "Linear", "Linear"),
        2: net("Conv", "Linear'", "Linear"),
        3: net("Linear", "Linear'"),
        4: net("Linear", "Conv"),
    }
    assert Trie.build(models).heads() == sorted(
        [
            Node(-1, (0, 1, 2)), Node(-1, (3,)), Node(-1, (4,)),
            Node(-2, (0, 1)), Node(-2, (2,)), Node(-2, (3,)),
        ]
    )  # fmt: skip


# The paper's families, at full size but without memory for values.

Network = Callable[[], nn.Module]


def authors_vgg19() -> nn.Module:
    """The document author's VGG-19: a convolution of 256 channels is missing."""
    config = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", *[512] * 4, "M", *[512] * 4, "M"]
    features = make_layers(config, batch_norm=True)
    return nn.Sequential(features, nn.Flatten(), *VGG(depth=19).classifier)


def names(family: str, versions: Sequence[int], make: Callable[[int], nn.Module]) -> Any:
    return {f"{family}{v}": partial(make, v) for v in versions}


VERSIONS: dict[str, dict[str, Network]] = {
    "vgg_official": names("vgg", (11, 13, 16, 19), lambda v: VGG(depth=v)),  # type: ignore[arg-type]
    "vgg_seed_author": names("vgg", (11, 13, 16), lambda v: VGG(depth=v))  # type: ignore[arg-type]
    | {"vgg19": authors_vgg19},
    "resnet": names("resnet", (20, 32, 44, 56), lambda v: CIFARResNet(depth=v)),  # type: ignore[arg-type]
    "vdcnn": names("vdcnn", (9, 17, 29, 49), lambda v: VDCNN(v)),  # type: ignore[arg-type]
    "charcnn": names("charcnn", (3, 4, 5, 6), lambda v: CharCNN(v)),  # type: ignore[arg-type]
}


@cache
def family_of(name: str) -> tuple[list[str], Trie]:
    shape = {"vdcnn": (1024,), "charcnn": (1014,)}.get(name, (3, 32, 32))
    models = {}
    with torch.device("meta"):
        for position, make in enumerate(VERSIONS[name].values()):
            models[position] = layers_of(make(), torch.zeros(2, *shape), key="model")
    return list(VERSIONS[name]), Trie.build(models)


def shared(trie: Trie) -> list[Layer]:
    return [trie.models[trie.groups[0]][node.depth] for node in trie.common()]


def entries(layers: Sequence[Layer]) -> int:
    return sum(len(layer.tensors) for layer in layers)


@pytest.mark.parametrize("name", VERSIONS)
def test_families_share_the_recorded_layers(name: str) -> None:
    """Entries of the state, tensors of weights and parameters, of all and of every pair."""
    versions, trie = family_of(name)
    golden = FAMILIES[name]
    assert list(golden["entries"]) == versions
    for group, version in enumerate(versions):
        layers = trie.models[group]
        assert entries(layers) == len(golden["entries"][version])
        assert sum(layer.parameters for layer in layers) == golden["param_count"][version]
    assert entries(shared(trie)) == golden["basic_common_entries"]
    for pair, expected in golden["pairwise"].items():
        base = shared(trie.among([versions.index(version) for version in pair.split("|")]))
        assert entries(base) == expected["common_entries"]
        assert len(base) == expected["weight_tensors"]
        assert sum(layer.parameters for layer in base) == expected["params"]
    for group, version in enumerate(versions):
        nodes = [node for node in trie.nodes if group in node.groups]
        found = [
            [versions[c] for c in node.groups]
            for node in nodes
            for _ in trie.models[group][node.depth].tensors
        ]
        assert found == [sharers for _, sharers in golden["max_common_sharers"][version]]


# As text.


class Images:
    num_classes, input_shape, task = 2, (4,), "classification"


class Net(nn.Module):
    def __init__(self, hidden: int, num_classes: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.relu = nn.ReLU()
        self.rest = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.relu(self.first(x)))


def test_the_table_says_who_shares_what_of_the_modules_as_they_train() -> None:
    def prepare(module: Any, data: object) -> None:
        module.net.rest.append(nn.Linear(2, 2))

    groups = [
        ClientGroup(3, partial(Net, 5), name="five"),
        ClientGroup(1, partial(Net, 6), name="six"),
        ClientGroup(2, partial(Net, 5), name="2"),
    ]
    trie = layer_groups.trie_of(groups, Images(), seed=0, prepare=prepare)  # type: ignore[arg-type]
    text = trie_table(trie, names=["five", "six", "2"], counts=[3, 1, 2])
    assert text.splitlines() == [
        "6 clients of 3 groups, 2 architectures",
        "layers  clients  parameters  groups        first layer        last layer",
        "1             6          15  five, six, 2  Linear 3x4 + ReLU",
        "  2-4         5          38  five, 2       Linear 5x3         Linear 2x2",
        "  2-4         1          44  six           Linear 6x3         Linear 2x2",
    ]


def test_the_table_is_indented_by_what_a_stretch_continues() -> None:
    text = trie_table(trie_of("aab", "aac", "ad", "b"), names="wxyz", counts=[1, 1, 1, 1])
    rows = [line[:8].rstrip() for line in text.splitlines()[2:]]
    assert rows == ["1", "  2", "    3", "    3", "  2", "1"]
