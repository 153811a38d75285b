"""My-1: DisPFL with masks that grow where the neighbors' consensus would move most.

The first variant of the document behind DisPFL's reproduction (section 4.1): the aggregated model,
before the client's own mask is applied, guides regrowth. In its author's code, weights grow where
the gradient of one batch of the client's data at the dense consensus is largest. Weights are
dropped by their trained magnitude, as in DisPFL. A client that is not active uses its own model as
the consensus.

The document's sentence can also be read as growth by the magnitude of the consensus. That reading
is not implemented.
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
    """DisPFL whose weights grow by the gradient at the dense consensus.

    Attributes:
        next: m_{k,t+1} of each client. It is found during round t, where the consensus is known,
            and replaces the client's mask in the next one.
    """

    side_by_side = True
    next: Kept

    def __init__(self, topology: Topology | None = None, **dispfl: Any) -> None:
        """Set DisPFL's arguments.

        Args:
            topology: See DisPFL.
            **dispfl: See DisPFL.
        """
        super().__init__(topology, regrow="random", static=False, **dispfl)
        self._gradients: dict[int, Tensor] = {}  # at the consensus, of the sessions under way
        self._drops: dict[int, list[int]] = {}  # how many weights clients drop in this round

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.next = fed.keep("next")

    @override
    def round(self, fed: Fleet, t: int) -> None:
        # sum_j w_{j,t} / sum_j m_{j,t},   j in S_{k,t} and k: the consensus stays dense for now.
        self.exchange(fed, self.all_senders(fed, t), masks=self.masks)
        self.masks.update(self.next)  # m_{k,t}
        self._drops = self.drops(fed, t)
        fed.train(range(fed.clients), t)

    @override
    def session_start(self, s: SessionContext) -> None:
        gradient = s.fed.client_sessions.gradient(s.client, s.row, s.round)  # at the consensus
        self._gradients[s.client] = self.parameters_of(gradient)
        apply_mask_(s.row.floats, self.masks[s.client])  # w_{k,t+1/2}

    @override
    def session_end(self, s: SessionContext) -> None:
        grown = prune_regrow(
            self.parameters_of(s.row.floats),
            self.parameter_words(self.masks[s.client]),
            self._drops[s.client],
            self.segments,
            regrow=self._gradients.pop(s.client),
        )
        self.next[s.client] = self.row_mask(grown)  # m_{k,t+1}
