"""Any classification model of torchvision, by its name."""

from torch import Tensor, nn
from typing_extensions import override

from lightfed.utils.errors import UserError


class Torchvision(nn.Module):
    """`torchvision.models.get_model(name, num_classes=...)`, randomly initialized.

    Args:
        name: Name of the model, such as resnet18.
        num_classes: C.

    Raises:
        UserError: torchvision has no model of this name.
    """

    def __init__(self, name: str, num_classes: int = 10) -> None:
        super().__init__()
        from torchvision import models  # slow to import, and few need it

        if name not in models.list_models():
            raise UserError(
                key="name",
                found=f"torchvision has no model {name!r}",
                fix="see torchvision.models.list_models()",
            )
        self.net = models.get_model(name, num_classes=num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, H, W) to logits (B, C)."""
        return self.net(x)
