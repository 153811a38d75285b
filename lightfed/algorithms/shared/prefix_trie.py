"""The prefix trie of the clients' architectures: which of them begin with the same layers.

A node is a layer together with all layers in front of it; the cohorts that pass through it have
them all alike. FlexiFed's strategies are choices of nodes: the tensors of a node's layer are
averaged over the clients of its cohorts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from lightfed.aggregation.group_mean import Group
from lightfed.algorithms.shared.signature import Layer


@dataclass(frozen=True, order=True)
class Node:
    """A layer that some cohorts have in common.

    Attributes:
        depth: number of layers in front of it; if negative, its position from the end.
        cohorts: cohorts that share it, ascending.
    """

    depth: int
    cohorts: tuple[int, ...]


@dataclass(frozen=True)
class Trie:
    """The layers of every cohort, and what they have in common.

    The last layer, the classifier, is alike only where the whole architectures are: a last layer
    and one in the middle are two nodes.

    Attributes:
        models: cohort -> its layers.
        nodes: by depth and cohorts; nodes of one depth have no cohort in common.
    """

    models: Mapping[int, tuple[Layer, ...]]
    nodes: tuple[Node, ...]

    @classmethod
    def build(cls, models: Mapping[int, Sequence[Layer]]) -> "Trie":
        """Build the trie of cohorts and their layers, in any order."""
        numbers: dict[tuple[int, tuple[str, ...], bool], int] = {}  # parent, layer, last -> node
        depths: list[int] = []
        cohorts: list[list[int]] = []
        for cohort in sorted(models):
            node = -1
            for depth, layer in enumerate(models[cohort]):
                last = depth == len(models[cohort]) - 1
                node = numbers.setdefault((node, layer.signature, last), len(depths))
                if node == len(depths):
                    depths.append(depth)
                    cohorts.append([])
                cohorts[node].append(cohort)
        nodes = sorted(Node(d, tuple(c)) for d, c in zip(depths, cohorts, strict=True))
        return cls({cohort: tuple(models[cohort]) for cohort in sorted(models)}, tuple(nodes))

    @property
    def cohorts(self) -> tuple[int, ...]:
        """All of them, ascending."""
        return tuple(self.models)

    def among(self, cohorts: Collection[int]) -> "Trie":
        """The trie of some of the cohorts."""
        kept = [Node(n.depth, tuple(c for c in n.cohorts if c in cohorts)) for n in self.nodes]
        return Trie(
            {cohort: layers for cohort, layers in self.models.items() if cohort in cohorts},
            tuple(sorted(node for node in kept if node.cohorts)),
        )

    def common(self) -> list[Node]:
        """The chain from the root that all cohorts pass through."""
        return [node for node in self.nodes if node.cohorts == self.cohorts]

    def clusters(self) -> list[tuple[int, ...]]:
        """The cohorts by whole architecture."""
        return [n.cohorts for n in self.nodes if n.depth == len(self.models[n.cohorts[0]]) - 1]

    def whole(self, cluster: tuple[int, ...]) -> list[Node]:
        """All layers of an architecture, shared by the given cohorts."""
        return [Node(depth, cluster) for depth in range(len(self.models[cluster[0]]))]

    def heads(self) -> list[Node]:
        """The networks' final linear layers (at least the last layer), regardless of their bases.

        A layer is shared by the cohorts with the same shapes from there to the end.
        """
        alike: dict[tuple[tuple[tuple[int, ...], ...], ...], list[int]] = {}
        for cohort, layers in self.models.items():
            linear = len(list(takewhile(lambda layer: layer.kind == "Linear", reversed(layers))))
            for count in range(1, max(linear, 1) + 1):
                shapes = tuple(layer.shapes for layer in layers[-count:])
                alike.setdefault(shapes, []).append(cohort)
        return sorted(Node(-len(shapes), tuple(cohorts)) for shapes, cohorts in alike.items())

    def groups(self, nodes: Sequence[Node]) -> list[Group]:
        """The tensors of nodes, those of the same cohorts in one group."""
        chosen: dict[tuple[int, ...], list[int]] = {}
        for node in nodes:
            chosen.setdefault(node.cohorts, []).append(node.depth)
        return [
            Group({c: self._tensors(c, depths) for c in cohorts})
            for cohorts, depths in chosen.items()
        ]

    def _tensors(self, cohort: int, depths: Sequence[int]) -> tuple[str, ...]:
        return tuple(name for depth in depths for name in self.models[cohort][depth].tensors)
