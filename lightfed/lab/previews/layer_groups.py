"""Which groups share which layers, as text: the trie of a federation (`lightfed groups`)."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import lightning.pytorch as L

from lightfed.algorithms.flexifed.prefix_trie import Node, Trie
from lightfed.algorithms.flexifed.signature import layers_of
from lightfed.local.client_group import ClientGroup
from lightfed.models.build import DataSpec, blank

_HEADS = ("layers", "clients", "parameters", "groups", "first layer", "last layer")
_LEFT_ALIGNED = (0, 3, 4, 5)


class Chain(NamedTuple):
    """Consecutive layers that the same groups share.

    Attributes:
        first_layer: The number of the first layer, counted from 1.
        last_layer: The number of the last one.
        groups: The positions of the groups.
        parameters: The number of parameters in all of its layers.
        first: The first layer, as text.
        last: The last layer, as text.
        ancestors: The number of chains that come before it in all of its groups.
    """

    first_layer: int
    last_layer: int
    groups: tuple[int, ...]
    parameters: int
    first: str
    last: str
    ancestors: int


def trie_of(
    groups: Sequence[ClientGroup],
    data: DataSpec,
    *,
    seed: int,
    prepare: Callable[[L.LightningModule, DataSpec], None] = lambda module, data: None,
) -> Trie:
    """Return the trie of a federation's groups.

    Args:
        groups: The client groups.
        data: What the models are built for.
        seed: The seed of the run.
        prepare: The algorithm's change to a fresh module.

    Raises:
        UserError: A model cannot be built, or its layers cannot be ordered.
    """
    batch = blank(data, samples=2)
    layers_of_group = {}
    for position, group in enumerate(groups):
        module = group.build(data, position=position, seed=seed)
        prepare(module, data)
        key = f"model.clients.{position}.model"
        layers_of_group[position] = layers_of(module, batch, key=key)
    return Trie.build(layers_of_group)


def chains_of(trie: Trie) -> list[Chain]:
    """Return the chains of a trie; one comes after the chain that it continues."""
    nodes_of_chains = sorted(
        _nodes_of_chains(trie), key=lambda nodes: (nodes[0].groups[0], nodes[0].depth)
    )

    chains = []
    for nodes in nodes_of_chains:
        first = nodes[0]
        last = nodes[-1]
        layers = trie.models[first.groups[0]]
        chains.append(
            Chain(
                first_layer=first.depth + 1,
                last_layer=last.depth + 1,
                groups=first.groups,
                parameters=sum(layers[node.depth].parameters for node in nodes),
                first=layers[first.depth].text,
                last=layers[last.depth].text,
                ancestors=_number_of_ancestors(first, nodes_of_chains),
            )
        )
    return chains


def trie_numbers(trie: Trie, *, names: Sequence[str], counts: Sequence[int]) -> dict[str, Any]:
    """Return a trie for a program, as values for JSON.

    Args:
        trie: The trie of groups 0, 1, ...
        names: The names of the groups.
        counts: The number of clients of each group.
    """
    chains = []
    for chain in chains_of(trie):
        chains.append(
            {
                "first_layer": chain.first_layer,
                "last_layer": chain.last_layer,
                "clients": sum(counts[group] for group in chain.groups),
                "groups": [names[group] for group in chain.groups],
                "parameters": chain.parameters,
                "first": chain.first,
                "last": chain.last,
            }
        )
    return {
        "clients": sum(counts[group] for group in trie.groups),
        "groups": [
            {"name": names[group], "clients": counts[group]} for group in sorted(trie.groups)
        ],
        "architectures": len(trie.clusters()),
        "chains": chains,
    }


def trie_table(trie: Trie, *, names: Sequence[str], counts: Sequence[int]) -> str:
    """Return a trie as indented text.

    Args:
        trie: The trie of groups 0, 1, ...
        names: The names of the groups.
        counts: The number of clients of each group.
    """
    lines: list[Sequence[str]] = [_HEADS]
    for chain in chains_of(trie):
        indent = "  " * chain.ancestors
        has_several = chain.last_layer > chain.first_layer
        lines.append(
            (
                indent + _span(chain.first_layer, chain.last_layer),
                str(sum(counts[group] for group in chain.groups)),
                f"{chain.parameters:,}",
                ", ".join(names[group] for group in chain.groups),
                chain.first,
                chain.last if has_several else "",
            )
        )

    clients = sum(counts[group] for group in trie.groups)
    title = f"{clients} clients of {len(trie.groups)} groups, {len(trie.clusters())} architectures"
    return f"{title}\n{aligned(lines, left=_LEFT_ALIGNED)}"


def _nodes_of_chains(trie: Trie) -> list[list[Node]]:
    """Return the nodes of a trie; consecutive ones with the same groups form one chain."""
    nodes_of_groups: dict[tuple[int, ...], list[Node]] = {}
    for node in trie.nodes:
        nodes_of_groups.setdefault(node.groups, []).append(node)
    return list(nodes_of_groups.values())


def _number_of_ancestors(node: Node, chains: Sequence[Sequence[Node]]) -> int:
    """Return the number of chains that come before a node in all of its groups."""
    ancestors = 0
    for chain in chains:
        first = chain[0]
        if first.depth < node.depth and set(node.groups) <= set(first.groups):
            ancestors += 1
    return ancestors


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def aligned(lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return lines of cells as text in columns.

    Args:
        lines: The cells; the first line has the heads.
        left: The positions of columns that are aligned to the left.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    texts = []
    for line in lines:
        cells = []
        for position, (cell, width) in enumerate(zip(line, widths, strict=True)):
            cells.append(cell.ljust(width) if position in left else cell.rjust(width))
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)
