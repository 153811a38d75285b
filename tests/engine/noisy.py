"""A network that draws in evaluation too, as a language model that masks tokens does."""

import torch
from torch import Tensor, nn
from typing_extensions import override


class Noisy(nn.Module):
    """Linear, on inputs of which a random part is left."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(4, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * torch.rand(x.shape))
