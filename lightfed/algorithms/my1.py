"""My-1: DisPFL whose masks grow where the neighbours' consensus would move most.

The first variant of the document behind DisPFL's reproduction (section 4.1): regrowth is guided by
the model that aggregation gives, before the client's own mask takes its part. Its author's code
settles how: weights grow where the gradient of one batch of the client's data, taken at the dense
consensus, is largest; weights are dropped by what has been trained, as in DisPFL. A client that is
not active takes its own model for the consensus.

The document's sentence can also be read as growth by the magnitude of the consensus, which
`regrow_signal` offers.
"""

from typing import Literal

import lightning.pytorch as L
from lightfed_kernels import apply_mask_, prune_regrow
from torch import Tensor
from typing_extensions import override

from lightfed.algorithms.dispfl import DisPFL
from lightfed.api.fleet import Fleet
from lightfed.state.rows import Row
from lightfed.topology.topology import Topology


class My1(DisPFL):
    """DisPFL, grown by the gradient at the dense consensus."""

    def __init__(
        self,
        topology: Topology | None = None,
        density: float | list[float] = 0.5,
        distribution: Literal["erk", "uniform"] = "erk",
        own_masks: bool = True,
        prune_rate: float = 0.5,
        regrow_signal: Literal["gradient", "magnitude"] = "gradient",
        active: float = 1.0,
        buffers: Literal["refuse", "average"] = "refuse",
        rounds: int | None = None,
    ) -> None:
        """As DisPFL, but for regrowth.

        Args:
            topology: See DisPFL.
            density: See DisPFL.
            distribution: See DisPFL.
            own_masks: See DisPFL.
            prune_rate: See DisPFL.
            regrow_signal: Grow where the gradient of a batch at the consensus is largest, or where
                the consensus itself is.
            active: See DisPFL.
            buffers: See DisPFL.
            rounds: See DisPFL.
        """
        super().__init__(
            topology, density, distribution, own_masks, prune_rate,
            active=active, buffers=buffers, rounds=rounds,
        )  # fmt: skip
        self.regrow_signal = regrow_signal
        self.next: dict[int, Tensor] = {}  # m_{k,t+1} of this rank's clients
        self._signal: Tensor  # of the session under way
        self._t = 0

    @override
    def round(self, fed: Fleet, t: int) -> None:
        masks = self.masks | self.next
        fed.exchange(self.hears(fed, t), masks=self.masks)  # the consensus, dense
        self.masks, self.next, self._t = masks, {}, t
        self.sessions(fed, t)

    @override
    def session_start(self, fed: Fleet, client: int, module: L.LightningModule, row: Row) -> None:
        consensus = row.floats
        if self.regrow_signal == "gradient":
            signal = fed.training.gradient(client, row, self._t)
        else:
            signal = consensus.clone()
        self._signal = self._weights(signal)
        apply_mask_(consensus, self.masks[client])  # w_{k,t+1/2}
        super().session_start(fed, client, module, row)

    @override
    def session_end(self, fed: Fleet, client: int, row: Row) -> None:
        super().session_end(fed, client, row)
        mask = self._words(self.masks[client])
        counts = self.drops(fed, mask, self._t)
        weights = self._weights(row.floats)
        grown = prune_regrow(weights, mask, counts, self._segments, regrow=self._signal)
        self.next[client] = self._whole(grown)

    @override
    def session_result(self, fed: Fleet, client: int) -> dict[str, Tensor]:
        return super().session_result(fed, client) | {"next": self.next[client]}

    @override
    def load_session_result(self, fed: Fleet, client: int, result: dict[str, Tensor]) -> None:
        super().load_session_result(fed, client, result)
        self.next[client] = result["next"].to(fed.device, copy=True)

    @override
    def client_state(self, fed: Fleet, client: int) -> dict[str, Tensor]:
        """Both masks: where the next one grows is known in the round only."""
        return super().client_state(fed, client) | {
            "next": self.next.get(client, self.masks[client])
        }

    @override
    def load_client_state(self, fed: Fleet, client: int, state: dict[str, Tensor]) -> None:
        super().load_client_state(fed, client, state)
        self.next[client] = state["next"].to(fed.device, copy=True)

    @override
    def stored_bytes(self, fed: Fleet, client: int) -> int:
        return super().stored_bytes(fed, client) + 4 * len(self.masks[client])
