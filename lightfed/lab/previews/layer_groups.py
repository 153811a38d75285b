"""Which groups share which layers, as text: the trie of a federation (`lightfed groups`)."""

from collections.abc import Callable, Collection, Sequence

import lightning.pytorch as L

from lightfed.algorithms.flexifed.prefix_trie import Node, Trie
from lightfed.algorithms.flexifed.signature import layers_of
from lightfed.local.client_group import ClientGroup, group_names
from lightfed.models.build import DataSpec, blank

_HEADS = ("layers", "clients", "parameters", "groups", "first layer", "last layer")
_LEFT_ALIGNED = (0, 3, 4, 5)


def groups_table(
    groups: Sequence[ClientGroup],
    data: DataSpec,
    *,
    seed: int,
    prepare: Callable[[L.LightningModule, DataSpec], None] = lambda module, data: None,
) -> str:
    """Return the trie of a federation, with a line for each chain of layers that groups share.

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

    counts = [group.count for group in groups]
    return trie_table(Trie.build(layers_of_group), names=group_names(groups), counts=counts)


def trie_table(trie: Trie, *, names: Sequence[str], counts: Sequence[int]) -> str:
    """Return a trie as indented text.

    Args:
        trie: The trie of groups 0, 1, ...
        names: The names of the groups.
        counts: The number of clients of each group.
    """
    # Depth first: a chain comes after the one that it continues.
    chains = sorted(_chains(trie), key=lambda chain: (chain[0].groups[0], chain[0].depth))

    lines: list[Sequence[str]] = [_HEADS]
    for chain in chains:
        first = chain[0]
        last = chain[-1]
        layers = trie.models[first.groups[0]]
        parameters = sum(layers[node.depth].parameters for node in chain)

        indent = "  " * _number_of_ancestors(first, chains)
        lines.append(
            (
                indent + _span(first.depth + 1, last.depth + 1),
                str(sum(counts[group] for group in first.groups)),
                f"{parameters:,}",
                ", ".join(names[group] for group in first.groups),
                layers[first.depth].text,
                layers[last.depth].text if len(chain) > 1 else "",
            )
        )

    clients = sum(counts[group] for group in trie.groups)
    title = f"{clients} clients of {len(trie.groups)} groups, {len(trie.clusters())} architectures"
    return f"{title}\n{aligned(lines, left=_LEFT_ALIGNED)}"


def _chains(trie: Trie) -> list[list[Node]]:
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
