"""Any classification model of torchvision, by its name."""

from torch import Tensor, nn
from typing_extensions import override

from lightfed.utils.errors import require


class Torchvision(nn.Module):
    """`torchvision.models.get_model(name, num_classes=...)`, randomly initialised.

    Args:
        name: such as resnet18.
        num_classes: C.
    """

    def __init__(self, name: str, num_classes: int = 10) -> None:
        super().__init__()
        from torchvision import models

        known, fix = name in models.list_models(), "see torchvision.models.list_models()"
        require(known, "name", f"torchvision has no model {name!r}", fix)
        self.net = models.get_model(name, num_classes=num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, C) logits."""
        return self.net(x)
