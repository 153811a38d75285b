"""HeteroFL's Scaler."""

from torch import Tensor, nn
from typing_extensions import override


class Scaler(nn.Module):
    """x / rate in training, x in evaluation.

    Narrow and wide models give activations of one magnitude (section 3.3). `rate` is the width
    ratio of the model.
    """

    packs = True  # see lightfed.local.pack_rules

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    @override
    def forward(self, x: Tensor) -> Tensor:
        return x / self.rate if self.training and self.rate != 1.0 else x
