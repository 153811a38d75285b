"""The prefix trie of the clients' architectures: which of them begin with the same layers.

A node is a layer together with all layers in front of it; the groups that pass through it have
them all alike. FlexiFed's strategies are choices of nodes: the tensors of a node's layer are
averaged over the clients of its groups.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from lightfed.algorithms.flexifed.group_mean import SharedTensors
from lightfed.algorithms.flexifed.signature import Layer


@dataclass(frozen=True, order=True)
class Node:
    """A layer of some groups, ascending, `depth` layers from the start (negative: the end)."""

    depth: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class Trie:
    """The layers of every group, and what they have in common.

    The last layer, the classifier, is alike only where the whole architectures are: a last layer
    and one in the middle are two nodes.

    Attributes:
        models: group -> its layers.
        nodes: by depth and groups; nodes of one depth have no group in common.
    """

    models: Mapping[int, tuple[Layer, ...]]
    nodes: tuple[Node, ...]

    @classmethod
    def build(cls, models: Mapping[int, Sequence[Layer]]) -> "Trie":
        """Build the trie of groups and their layers, in any order."""
        numbers: dict[tuple[int, tuple[str, ...], bool], int] = {}  # parent, layer, last -> node
        depths: list[int] = []
        groups: list[list[int]] = []
        for group in sorted(models):
            node = -1
            for depth, layer in enumerate(models[group]):
                last = depth == len(models[group]) - 1
                node = numbers.setdefault((node, layer.signature, last), len(depths))
                if node == len(depths):
                    depths.append(depth)
                    groups.append([])
                groups[node].append(group)
        nodes = sorted(Node(d, tuple(c)) for d, c in zip(depths, groups, strict=True))
        return cls({group: tuple(models[group]) for group in sorted(models)}, tuple(nodes))

    @property
    def groups(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(self.models)

    def among(self, groups: Collection[int]) -> "Trie":
        """The trie of some of the groups."""
        kept = [Node(n.depth, tuple(c for c in n.groups if c in groups)) for n in self.nodes]
        return Trie(
            {group: layers for group, layers in self.models.items() if group in groups},
            tuple(sorted(node for node in kept if node.groups)),
        )

    def common(self) -> list[Node]:
        """The chain from the root that all groups pass through."""
        return [node for node in self.nodes if node.groups == self.groups]

    def clusters(self) -> list[tuple[int, ...]]:
        """The groups by whole architecture."""
        return [n.groups for n in self.nodes if n.depth == len(self.models[n.groups[0]]) - 1]

    def whole(self, cluster: tuple[int, ...]) -> list[Node]:
        """All layers of an architecture, shared by the given groups."""
        return [Node(depth, cluster) for depth in range(len(self.models[cluster[0]]))]

    def heads(self) -> list[Node]:
        """The networks' final linear layers (at least the last layer), regardless of their bases.

        A layer is shared by the groups with the same shapes from there to the end.
        """
        alike: dict[tuple[tuple[tuple[int, ...], ...], ...], list[int]] = {}
        for group, layers in self.models.items():
            linear = len(list(takewhile(lambda layer: layer.kind == "Linear", reversed(layers))))
            for count in range(1, max(linear, 1) + 1):
                shapes = tuple(layer.shapes for layer in layers[-count:])
                alike.setdefault(shapes, []).append(group)
        return sorted(Node(-len(shapes), tuple(groups)) for shapes, groups in alike.items())

    def shared(self, nodes: Sequence[Node]) -> list[SharedTensors]:
        """The tensors of nodes, those of the same groups together."""
        chosen: dict[tuple[int, ...], list[int]] = {}
        for node in nodes:
            chosen.setdefault(node.groups, []).append(node.depth)
        return [
            SharedTensors({c: self._tensors(c, depths) for c in groups})
            for groups, depths in chosen.items()
        ]

    def _tensors(self, group: int, depths: Sequence[int]) -> tuple[str, ...]:
        return tuple(name for depth in depths for name in self.models[group][depth].tensors)
