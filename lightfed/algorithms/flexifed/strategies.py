"""FlexiFed: clients of different architectures average their common first layers.

Wang, He, Chen, Chen, Huang, Jin, Yang: FlexiFed: Personalized Federated Learning for Edge Clients
with Heterogeneous Model Architectures. WWW 2023. https://doi.org/10.1145/3543507.3583347

Each strategy chooses nodes of one prefix trie of the clients' layers (`prefix_trie.py`). A node's
tensors become their plain mean over the participants U_node that pass through it:

    w_u[node] <- sum_v w_v[node] / |U_node|,   u and v in U_node                     (eq. 4 and 6)

Layers are compared by type and shape, not by name, and a convolution with its norm and activation
is one layer (`signature.py`). Basic-, Clustered- and Max-Common are the paper's strategies, and
Clustered-FL is its baseline. Its other baseline, Standalone (`lightfed.algorithms.standalone`),
shares nothing.

Every client starts from its own initial values and keeps its row. As in the released code,
BatchNorm statistics are averaged like weights, and clients are tested after aggregation.

Deviations: num_batches_tracked, which becomes a fraction in the released code, becomes the largest
of the group here. Clients are tested with the statistics of evaluation, not of training. Bytes
count the tensors that a client shares in the round, up and down; the released code sends whole
models up.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from typing_extensions import override

from lightfed.algorithms.flexifed.group_mean import GroupMeans, SharedTensors
from lightfed.algorithms.flexifed.prefix_trie import Node, Trie
from lightfed.algorithms.flexifed.signature import layers_of
from lightfed.api.algorithm import KEY, Algorithm
from lightfed.api.fleet import Fleet, Weights
from lightfed.models.build import blank
from lightfed.state.rows import LiveModule
from lightfed.utils.bounds import Number
from lightfed.utils.errors import UserError

Initial = Literal["own", "group"]

LayerOfGroup: TypeAlias = tuple[int, int]
"""A group, and the position of one of its layers."""


class FlexiFed(Algorithm):
    """A round of every strategy: train, choose nodes of the trie, average them.

    Attributes:
        trie: The layers of all groups, and what they have in common.
        weights: The clients' weights in a mean: plain, unless a strategy says otherwise.
    """

    stateful = True
    no_late = "clients average what they share among themselves, and no server has a model"
    no_server_step = "clients average what they share among themselves"
    tests_both = True
    weights: Weights = "uniform"
    trie: Trie

    def __init__(self, initial: Initial = "own") -> None:
        """Set where the clients start.

        Args:
            initial: Every client starts from its own draw of initial values (own), as in the paper,
                or all clients of a group start from the same (group).
        """
        super().__init__()
        self.initial = initial

    @abstractmethod
    def choose(self, trie: Trie) -> list[Node]:
        """Return the nodes to average, disjoint.

        Args:
            trie: The trie of the groups that take part in the round.
        """

    @override
    def setup(self, fed: Fleet) -> None:
        batch = blank(fed.data, samples=2).to(fed.device)
        models = {}
        for group, state in enumerate(fed.groups):
            models[group] = layers_of(state.module, batch, key=f"model.clients.{group}.model")
        self.trie = Trie.build(models)

        for client in fed.mine(range(fed.clients)):
            self.reset_client(fed, client)  # w_u,0

    @override
    def round(self, fed: Fleet, t: int) -> None:
        clients = fed.participants(t)  # U
        fed.train(clients, t)  # E local epochs of SGD on D_u
        trie = self.trie.among({fed.home_group(u) for u in clients})
        # eq. (4), (6): w_u[node] <- sum_v w_v[node] / |U_node|, u and v in U_node
        share(fed, clients, trie.shared(self.choose(trie)), weights=self.weights)

    @override
    def reset_client(self, fed: Fleet, client: int) -> None:
        """Set the client's initial values; its own are a function of (seed, client)."""
        state = fed.state(client)
        if self.initial == "group":
            fed.row(client).copy_(state.initial)
            return
        module = state.group.build(fed.data, position=client, seed=fed.seed)
        self.prepare_module(module, fed.data)
        fed.row(client).copy_(LiveModule(module, state.layout).row_of_module())


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
        nodes = list(base)
        for cluster in trie.clusters():
            nodes += trie.whole(cluster)[len(base) :]
        return nodes


class MaxCommon(FlexiFed):
    """Averages every layer over all networks that have the same layers up to it.

    The paper's recursion (Alg. 1) averages the common base of a set of clients, splits the set by
    the next layer and recurses into the subsets. That visits the nodes of the trie.
    """

    def __init__(
        self,
        max_common_layers: Number | None = None,
        share_classifier: bool = False,
        **flexifed: Any,
    ) -> None:
        """Set the options for the paper's other experiments.

        Args:
            max_common_layers: L, share at most the first L layers (convolutions, embeddings, linear
                layers), also between equal architectures; 0 is Standalone. All by default.
            share_classifier: Average the final linear layers over all clients with the same shapes
                from there to the end, even if their bases differ. The paper expects it to hurt.
            **flexifed: See FlexiFed.
        """
        super().__init__(**flexifed)
        if share_classifier and max_common_layers is not None:
            raise UserError(
                key=f"{KEY}.share_classifier",
                found=f"true, but max_common_layers is set: {max_common_layers}",
                fix="keep one of the two",
            )
        self.max_common_layers = max_common_layers
        self.share_classifier = share_classifier

    @override
    def choose(self, trie: Trie) -> list[Node]:
        nodes = list(trie.nodes)
        if self.max_common_layers is not None:
            nodes = [node for node in nodes if node.depth < self.max_common_layers]
        if self.share_classifier:
            nodes = with_heads(trie, nodes)
        return nodes


class ClusteredFL(FlexiFed):
    """FedAvg within each group of the same architecture (baseline)."""

    def __init__(self, *args: Any, weights: Weights = "uniform", **flexifed: Any) -> None:
        """Set FedAvg's mean.

        Args:
            *args: See FlexiFed.
            weights: Weigh the participants in a mean alike (uniform), as in the released code, or
                by their number of samples, as FedAvg in the paper's eq. (1).
            **flexifed: See FlexiFed.
        """
        super().__init__(*args, **flexifed)
        self.weights = weights

    @override
    def choose(self, trie: Trie) -> list[Node]:
        nodes = []
        for cluster in trie.clusters():
            nodes += trie.whole(cluster)
        return nodes


def share(
    fed: Fleet,
    clients: Sequence[int],
    shared: Sequence[SharedTensors],
    *,
    weights: Weights = "uniform",
) -> None:
    """Replace shared tensors by their mean over the clients that have them.

    Clients with unusable updates receive but do not contribute.

    Args:
        fed: The clients.
        clients: The participants.
        shared: Disjoint sets of tensors that they share.
        weights: The clients' weights in the means: 1 for all, or n_k.
    """
    layouts = [state.layout for state in fed.groups]
    group_of = {k: fed.home_group(k) for k in clients}
    means = GroupMeans(shared, layouts, group_of)

    sending = fed.sending(clients)
    fed.ledger.sent_up(sending, [means.bytes(k) for k in sending])
    contributing = fed.contributing(clients)  # ends the wait for clients that are late
    fed.ledger.sent_down(clients, [means.bytes(k) for k in clients])

    weight_of = dict(zip(contributing, fed.weights_of(weights, contributing), strict=True))
    rows = {k: fed.row(k) for k in fed.mine(clients)}
    means.mean_(rows, weights=weight_of, ranks=fed.ranks)


def with_heads(trie: Trie, nodes: list[Node]) -> list[Node]:
    """Add the classifier's layers, shared by shape, to some nodes.

    A head replaces nodes only if it includes all clients with which its layers are shared without
    it. Then one mean suffices: the mean over all clients of their groups' means is the mean over
    all clients.

    Args:
        trie: The trie.
        nodes: Some of its nodes.

    Returns:
        The heads, and the nodes that no head replaces; they are disjoint.
    """
    node_at: dict[LayerOfGroup, Node] = {}
    for node in nodes:
        for layer in _layers_at(trie, node):
            node_at[layer] = node

    heads = []
    for head in trie.heads():
        layers = _layers_at(trie, head)
        if all(_layers_at(trie, node_at[layer]) <= layers for layer in layers):
            heads.append(head)

    replaced: set[LayerOfGroup] = set()
    for head in heads:
        replaced |= _layers_at(trie, head)
    remaining = [node for node in nodes if not _layers_at(trie, node) & replaced]
    return remaining + heads


def _layers_at(trie: Trie, node: Node) -> set[LayerOfGroup]:
    """Return each group of a node with the position of the node's layer in that group."""
    layers = set()
    for group in node.groups:
        depth = node.depth
        if depth < 0:  # counts from the end
            depth += len(trie.models[group])
        layers.add((group, depth))
    return layers
