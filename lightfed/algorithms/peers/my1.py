"""My-1: DisPFL with masks that grow where the neighbours' consensus would move most.

The first variant of the document behind DisPFL's reproduction (section 4.1): the aggregated model,
before the client's own mask is applied, guides regrowth. In its author's code, weights grow where
the gradient of one batch of the client's data at the dense consensus is largest. Weights are
dropped by their trained magnitude, as in DisPFL. A client that is not active uses its own model as
the consensus.

The document's sentence can also be read as growth by the magnitude of the consensus, which is left
out.
"""

from typing import Any

from lightfed_kernels import apply_mask_, prune_regrow
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.peers.dispfl import DisPFL
from lightfed.algorithms.topology.topology import Topology
from lightfed.api.fleet import Fleet
from lightfed.local.hooks import SessionContext
from lightfed.state.client_state import Kept


class My1(DisPFL):
    """DisPFL, grown by the gradient at the dense consensus."""

    side_by_side = True

    def __init__(self, topology: Topology | None = None, **dispfl: Any) -> None:
        """Set DisPFL's arguments.

        Args:
            topology: See DisPFL.
            **dispfl: See DisPFL.
        """
        super().__init__(topology, regrow="random", static=False, **dispfl)
        self.next: Kept  # m_{k,t+1}: its growth is known only during the round
        self._signals: dict[int, Tensor] = {}  # of the sessions under way
        self._drops: dict[int, list[int]] = {}  # of this round

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.next = fed.keep("next")

    @override
    def round(self, fed: Fleet, t: int) -> None:
        self.exchange(fed, self.all_senders(fed, t), masks=self.masks)  # the consensus, dense
        self.masks.update(self.next)
        self._drops = self.drops(fed, t)
        fed.train(range(fed.clients), t)

    @override
    def session_start(self, s: SessionContext) -> None:
        signal = s.fed.client_sessions.gradient(s.client, s.row, s.round)  # at the consensus
        self._signals[s.client] = self._weights(signal)
        apply_mask_(s.row.floats, self.masks[s.client])  # w_{k,t+1/2}

    @override
    def session_end(self, s: SessionContext) -> None:
        mask = self._words(self.masks[s.client])
        weights = self._weights(s.row.floats)
        signal = self._signals.pop(s.client)
        grown = prune_regrow(weights, mask, self._drops[s.client], self._segments, regrow=signal)
        self.next[s.client] = self._whole(grown)
