"""Which groups share which layers, as text: the trie of a federation (`lightfed groups`)."""

from collections.abc import Callable, Collection, Sequence

import lightning.pytorch as L

from lightfed.algorithms.flexifed.prefix_trie import Node, Trie
from lightfed.algorithms.flexifed.signature import layers_of
from lightfed.local.client_group import ClientGroup, group_names
from lightfed.models.build import DataSpec, blank

_HEAD = ("layers", "clients", "parameters", "groups", "first layer", "last layer")


def groups_table(
    groups: Sequence[ClientGroup],
    data: DataSpec,
    *,
    seed: int,
    prepare: Callable[[L.LightningModule, DataSpec], None] = lambda module, data: None,
) -> str:
    """The trie of a federation, one line per sequence of layers that the same groups share.

    `prepare` is the algorithm's change to a fresh module. A UserError if a model cannot be built,
    or its layers cannot be ordered.
    """
    batch = blank(data, samples=2)
    models = {}
    for position, group in enumerate(groups):
        module = group.build(data, position=position, seed=seed)
        prepare(module, data)
        models[position] = layers_of(module, batch, key=f"model.clients.{position}.model")
    return trie_table(
        Trie.build(models), names=group_names(groups), counts=[c.count for c in groups]
    )


def trie_table(trie: Trie, *, names: Sequence[str], counts: Sequence[int]) -> str:
    """The trie of groups 0, 1, ... as indented text, with their names and numbers of clients."""
    lines = [_HEAD]
    # Depth first, each with the number of those that it continues.
    chains = sorted(_chains(trie), key=lambda chain: (chain[0].groups[0], chain[0].depth))
    for chain in chains:
        first = chain[0]
        level = sum(
            one.depth < first.depth and {*first.groups} <= {*one.groups} for one, *_ in chains
        )
        layers = trie.models[chain[0].groups[0]]
        depths = [node.depth for node in chain]
        lines.append(
            (
                "  " * level + _span(depths[0] + 1, depths[-1] + 1),
                str(sum(counts[c] for c in chain[0].groups)),
                f"{sum(layers[depth].parameters for depth in depths):,}",
                ", ".join(names[c] for c in chain[0].groups),
                layers[depths[0]].text,
                layers[depths[-1]].text if len(chain) > 1 else "",
            )
        )
    clients = sum(counts[c] for c in trie.groups)
    title = f"{clients} clients of {len(trie.groups)} groups, {len(trie.clusters())} architectures"
    return f"{title}\n{aligned(lines, left=(0, 3, 4, 5))}"


def _chains(trie: Trie) -> list[list[Node]]:
    """The nodes; consecutive ones with the same groups form one list."""
    chains: dict[tuple[int, ...], list[Node]] = {}
    for node in trie.nodes:
        chains.setdefault(node.groups, []).append(node)
    return list(chains.values())


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def aligned(lines: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Cells in aligned columns, to the left at positions `left`; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i in left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
