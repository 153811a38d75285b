"""The prefix trie of the clients' architectures: which of them begin with the same layers.

A node is a layer together with all layers in front of it; the groups that pass through it have
them all alike. FlexiFed's strategies are choices of nodes: the tensors of a node's layer are
averaged over the clients of its groups.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

from lightfed.algorithms.flexifed.group_mean import SharedTensors
from lightfed.algorithms.flexifed.signature import Layer

Path: TypeAlias = tuple[tuple[tuple[str, ...], bool], ...]
"""Layers from the input on: the signature of each, and whether it is the network's last."""

Shapes: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
"""The shapes of the tensors of each of some layers."""


@dataclass(frozen=True, order=True)
class Node:
    """A layer that some groups have in common.

    Attributes:
        depth: Number of layers in front of it. Negative if it counts from the end: -1 is the last
            layer.
        groups: The groups, ascending.
    """

    depth: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Trie:
    """The layers of every group, and what they have in common.

    The last layer, the classifier, is alike only where the whole architectures are: a last layer
    and an equal one in the middle are two nodes.

    Attributes:
        models: Group -> its layers, from the input on.
        nodes: All nodes, sorted by depth and groups. Nodes of one depth have no group in common.
    """

    models: Mapping[int, tuple[Layer, ...]]
    nodes: tuple[Node, ...]

    @classmethod
    def build(cls, models: Mapping[int, Sequence[Layer]]) -> "Trie":
        """Build the trie of groups and their layers; the order of the groups does not matter."""
        in_order = {group: tuple(models[group]) for group in sorted(models)}

        # Two groups are at one node if and only if their paths to it are equal.
        groups_of_path: dict[Path, list[int]] = {}
        for group, layers in in_order.items():
            path: Path = ()
            for position, layer in enumerate(layers):
                is_last = position == len(layers) - 1
                path = (*path, (layer.signature, is_last))
                groups_of_path.setdefault(path, []).append(group)

        nodes = []
        for path, groups in groups_of_path.items():
            depth = len(path) - 1
            nodes.append(Node(depth, tuple(groups)))
        return cls(in_order, tuple(sorted(nodes)))

    @property
    def groups(self) -> tuple[int, ...]:
        """All groups, ascending."""
        return tuple(self.models)

    def among(self, groups: Collection[int]) -> "Trie":
        """Return the trie of some of the groups."""
        models = {group: layers for group, layers in self.models.items() if group in groups}

        nodes = []
        for node in self.nodes:
            remaining = tuple(group for group in node.groups if group in groups)
            if remaining:
                nodes.append(Node(node.depth, remaining))
        return Trie(models, tuple(sorted(nodes)))

    def common(self) -> list[Node]:
        """Return the nodes that all groups pass through: a chain from the root."""
        return [node for node in self.nodes if node.groups == self.groups]

    def clusters(self) -> list[tuple[int, ...]]:
        """Return the groups of each whole architecture."""
        clusters = []
        for node in self.nodes:
            num_layers = len(self.models[node.groups[0]])
            if node.depth == num_layers - 1:
                clusters.append(node.groups)
        return clusters

    def whole(self, cluster: tuple[int, ...]) -> list[Node]:
        """Return all layers of the architecture that these groups have, shared among them."""
        num_layers = len(self.models[cluster[0]])
        return [Node(depth, cluster) for depth in range(num_layers)]

    def heads(self) -> list[Node]:
        """Return the networks' final linear layers, regardless of the layers in front of them.

        A network has at least its last layer in a head. A layer is shared by the groups that have
        the same shapes from there to the end. Depths are negative.
        """
        groups_of_shapes: dict[Shapes, list[int]] = {}
        for group, layers in self.models.items():
            final_linear = list(takewhile(lambda layer: layer.kind == "Linear", reversed(layers)))
            longest = max(len(final_linear), 1)
            for length in range(1, longest + 1):
                shapes = tuple(layer.shapes for layer in layers[-length:])
                groups_of_shapes.setdefault(shapes, []).append(group)

        heads = []
        for shapes, groups in groups_of_shapes.items():
            heads.append(Node(-len(shapes), tuple(groups)))
        return sorted(heads)

    def shared(self, nodes: Sequence[Node]) -> list[SharedTensors]:
        """Return the tensors of nodes; those that the same groups share are in one set."""
        depths_of: dict[tuple[int, ...], list[int]] = {}
        for node in nodes:
            depths_of.setdefault(node.groups, []).append(node.depth)

        shared = []
        for groups, depths in depths_of.items():
            names = {group: self._tensors(group, depths) for group in groups}
            shared.append(SharedTensors(names))
        return shared

    def _tensors(self, group: int, depths: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the tensors of some of a group's layers."""
        names: list[str] = []
        for depth in depths:
            names.extend(self.models[group][depth].tensors)
        return tuple(names)
