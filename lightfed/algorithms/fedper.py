"""FedPer: clients share a body, and each has a head of its own; both are trained together.

Arivazhagan, Aggarwal, Singh, Choudhary: Federated Learning with Personalization Layers. 2019.
https://arxiv.org/abs/1912.00818

Clients are weighted by samples, as in the paper. The code released with FedRep runs FedPer with
`private=False`, and trains all heads after the last round (`final_epochs`).
"""

from typing_extensions import override

from lightfed.algorithms.fedrep import FedRep
from lightfed.api.fleet import Fleet, Weights
from lightfed.utils.errors import require


class FedPer(FedRep):
    """Local epochs of all parameters; the server averages the body."""

    personal = "tensors whose names begin with `head`"

    def __init__(
        self, head: str, final_epochs: int = 0, weights: Weights = "samples", private: bool = True
    ) -> None:
        """Set what is a head.

        Args:
            head: Prefix of the names of its tensors, such as net.fc.
            final_epochs: Local epochs of all clients' heads after the last round.
            weights: Of the participants in the mean: by samples, or uniform.
            private: The server never gets a head.
        """
        super().__init__(head, final_epochs=final_epochs, weights=weights, private=private)

    @override
    def setup(self, fed: Fleet) -> None:
        super().setup(fed)
        self.phases = ()
        found = f"a model without {self.personal}"
        fits = len(self.body) < len(fed.groups[0].layout.floats.entries)
        require(fits, "model.clients", found, "name others, or choose FedAvg")
