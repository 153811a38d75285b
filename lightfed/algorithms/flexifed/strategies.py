"""FlexiFed: clients of different architectures average their common first layers.

Wang, He, Chen, Chen, Huang, Jin, Yang: FlexiFed: Personalized Federated Learning for Edge Clients
with Heterogeneous Model Architectures. WWW 2023. https://doi.org/10.1145/3543507.3583347

Each strategy chooses nodes of one prefix trie of the clients' layers: a node's tensors become their
plain mean over the participants that pass through it. Layers are compared by type and shape, not by
name, and a convolution with its norm and activation is one layer
(`lightfed.algorithms.flexifed.signature`). Basic-, Clustered- and Max-Common are the paper's
strategies. Clustered-FL is its baseline. Standalone (`lightfed.algorithms.standalone`) uses none.

Every client starts from its own initial values and keeps its row. BatchNorm statistics are averaged
like weights, as in the released code; num_batches_tracked, which becomes a fraction there, becomes
the largest of the group here. As in the released code, clients are tested after aggregation, but
with the statistics of evaluation, not of training.

Bytes count the tensors that a client shares in the round, up and down; the released code sends
whole models up.
"""

from abc import abstractmethod
from typing import Any, Literal

from typing_extensions import override

from lightfed.algorithms.flexifed.prefix_trie import Node, Trie
from lightfed.algorithms.flexifed.signature import layers_of
from lightfed.api.algorithm import Algorithm, require_argument
from lightfed.api.fleet import Fleet, Weights
from lightfed.models.build import blank
from lightfed.state.rows import LiveModule
from lightfed.utils.bounds import Number

Initial = Literal["own", "group"]


class FlexiFed(Algorithm):
    """A round of every strategy: train, choose nodes of the trie, average them."""

    stateful = True
    no_server_step = "clients average what they share among themselves"
    tests_both = True
    weights: Weights = "uniform"
    trie: Trie

    def __init__(self, initial: Initial = "own") -> None:
        """Set where the clients start.

        Args:
            initial: Every client from its own draw of initial values, as in the paper, or all
                clients of a group from the same.
        """
        super().__init__()
        self.initial = initial

    @abstractmethod
    def choose(self, trie: Trie) -> list[Node]:
        """The nodes to average, disjoint, in the trie of the groups that take part in the round."""

    @override
    def setup(self, fed: Fleet) -> None:
        batch = blank(fed.data, samples=2).to(fed.device)
        self.trie = Trie.build(
            {
                group: layers_of(state.module, batch, key=f"model.clients.{group}.model")
                for group, state in enumerate(fed.groups)
            }
        )
        for client in fed.mine(range(fed.clients)):
            self.reset_client(fed, client)  # w_u,0

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # U
        fed.train(clients, t)  # E local epochs of SGD on D_u
        trie = self.trie.among({fed.home_group(u) for u in clients})
        # eq. (4), (6): w_u[node] <- sum_v w_v[node] / |U_node|, u and v in U_node
        fed.share(clients, trie.shared(self.choose(trie)), weights=self.weights)

    @override
    def reset_client(self, fed: Fleet, client: int) -> None:
        """Set the client's initial values; its own are a function of (seed, client)."""
        state = fed.state(client)
        row = state.initial
        if self.initial == "own":
            module = state.group.build(fed.data, position=client, seed=fed.seed)
            self.prepare_module(module, fed.data)
            row = LiveModule(module, state.layout).row_of_module()
        fed.row(client).copy_(row)


class BasicCommon(FlexiFed):
    """Averages the base that all participants have in common; the rest is personal."""

    @override
    def choose(self, trie: Trie) -> list[Node]:
        return trie.common()


class ClusteredCommon(FlexiFed):
    """Averages the common base over all participants and the rest within each architecture."""

    @override
    def choose(self, trie: Trie) -> list[Node]:
        base = trie.common()
        return base + [n for c in trie.clusters() for n in trie.whole(c)[len(base) :]]


class MaxCommon(FlexiFed):
    """Averages every layer over all networks that have the same layers up to it.

    The paper's recursion (Alg. 1) averages the common base of a set of clients, splits the set by
    the next layer and recurses into the parts. This visits the nodes of the trie.
    """

    def __init__(
        self,
        max_common_layers: Number | None = None,
        share_classifier: bool = False,
        **flexifed: Any,
    ) -> None:
        """Options for the paper's other experiments.

        Args:
            max_common_layers: L, share at most the first L layers (convolutions, embeddings, linear
                layers), also between equal architectures; 0 is Standalone. All by default.
            share_classifier: Average the final linear layers over all clients with the same shapes
                from there to the end, even if their bases differ. The paper expects it to hurt.
            **flexifed: See FlexiFed.
        """
        super().__init__(**flexifed)
        found = f"true, together with max_common_layers: {max_common_layers}"
        fits, fix = max_common_layers is None or not share_classifier, "keep one of the two"
        require_argument(fits, "share_classifier", found, fix)
        self.max_common_layers, self.share_classifier = max_common_layers, share_classifier

    @override
    def choose(self, trie: Trie) -> list[Node]:
        limit = self.max_common_layers
        nodes = [n for n in trie.nodes if limit is None or n.depth < limit]
        return with_heads(trie, nodes) if self.share_classifier else nodes


class ClusteredFL(FlexiFed):
    """FedAvg within each group of the same architecture (baseline)."""

    def __init__(self, *args: Any, weights: Weights = "uniform", **flexifed: Any) -> None:
        """Set FedAvg's mean.

        Args:
            *args: See FlexiFed.
            weights: Of the participants in a mean: uniform, as in the released code, or by samples,
                FedAvg's in the paper's eq. (1).
            **flexifed: See FlexiFed.
        """
        super().__init__(*args, **flexifed)
        self.weights = weights

    @override
    def choose(self, trie: Trie) -> list[Node]:
        return [n for cluster in trie.clusters() for n in trie.whole(cluster)]


def with_heads(trie: Trie, nodes: list[Node]) -> list[Node]:
    """The nodes, with classifier layers grouped by shape if that includes more clients.

    One mean suffices: the mean over all clients of their groups' means is the mean over all
    clients.
    """

    def places(node: Node) -> set[tuple[int, int]]:
        """Groups, and the position of the layer in each."""
        return {(c, range(len(trie.models[c]))[node.depth]) for c in node.groups}

    by_path = {place: places(node) for node in nodes for place in places(node)}
    heads = [
        head
        for head in trie.heads()
        if all(by_path[place] <= places(head) for place in places(head))
    ]
    taken = {place for head in heads for place in places(head)}
    return [node for node in nodes if not places(node) & taken] + heads
