"""Very deep convolutions over characters, in FlexiFed's four depths."""

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.charcnn import LETTERS
from lightfed.networks.layers import scaled

# Number of blocks in each of the four stages, by depth.
_BLOCKS = {9: (1, 1, 1, 1), 17: (2, 2, 2, 2), 29: (5, 5, 2, 2), 49: (8, 8, 5, 3)}
_SECTIONS = 8
# Letters of CharCNN's alphabet that this one lacks.
_SECOND_HYPHEN = 60
_NEWLINE = 70


class VDCNN(nn.Module):
    """VDCNN-9, -17, -29 or -49: residual blocks of two conv3 over embedded characters.

    The layers are an embedding of size 16; conv3; four stages of 64, 128, 256 and 512 channels,
    each followed by a max-pool3 of stride 2; the maxima of 8 sections; linear-ReLU twice; linear.
    Every stage but the first begins with a block that widens. There are 14,351,892, 16,446,612,
    16,818,708 and 19,950,996 parameters with four classes. Samples may have any number of
    characters; the papers use 1,024.

    The family goes back to Conneau et al. 2017, who pool after three stages. FlexiFed's published
    reproduction pools twice after those and once after the fourth. The alphabet is that of CharCNN
    without the second hyphen and the newline.

    Args:
        layers: The depth, as in the name.
        num_classes: C.
        width: Factor of the stages' channels, rounded up.
        hidden: Units of both hidden linear layers.
    """

    def __init__(
        self,
        layers: Literal[9, 17, 29, 49] = 9,
        num_classes: int = 4,
        *,
        width: float = 1.0,
        hidden: int = 2048,
    ) -> None:
        super().__init__()
        channels = scaled([64, 128, 256, 512], width)
        self.embedding = nn.Embedding(LETTERS - 1, 16, padding_idx=0)
        self.stem = nn.Conv1d(16, channels[0], 3, padding=1)

        self.stages = nn.Sequential()
        inputs = channels[0]
        for stage, (outputs, count) in enumerate(zip(channels, _BLOCKS[layers], strict=True)):
            blocks = nn.Sequential()
            for block in range(count):
                widens = stage > 0 and block == 0
                blocks.append(ConvBlock(inputs, outputs, widens=widens))
                inputs = outputs
            blocks.append(nn.MaxPool1d(3, 2, padding=1))
            self.stages.append(blocks)

        self.classifier = nn.Sequential(
            nn.AdaptiveMaxPool1d(_SECTIONS),
            nn.Flatten(),
            nn.Linear(_SECTIONS * inputs, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv1d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map characters (B, characters) of any type, 0..70, to logits (B, C)."""
        # CharCNN's letters, 0..70, become those of this alphabet, 0..68. Both hyphens are read as
        # the first one, and a newline as no letter.
        without_hyphen = x - (x > _SECOND_HYPHEN).to(x)
        letters = torch.where(x == _NEWLINE, 0, without_hyphen).long()
        embedded = self.embedding(letters).transpose(1, 2)  # (B, 16, characters)
        return self.classifier(self.stages(self.stem(embedded)))


class ConvBlock(nn.Module):
    """conv3-BN-ReLU-conv3-BN, a shortcut around them, then ReLU.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        widens: Whether the shortcut is conv1-BN. Otherwise it is the input itself.
    """

    def __init__(self, inputs: int, outputs: int, *, widens: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(inputs, outputs, 3, padding=1),
            nn.BatchNorm1d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv1d(outputs, outputs, 3, padding=1),
            nn.BatchNorm1d(outputs),
        )
        # Made even where it is not needed: otherwise layers that are made later would draw other
        # initial values than in earlier versions.
        widening = nn.Sequential(
            nn.Conv1d(inputs, outputs, 1, bias=False),
            nn.BatchNorm1d(outputs),
        )
        self.shortcut = widening if widens else None
        self.relu = nn.ReLU(inplace=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map (B, inputs, characters) to (B, outputs, characters)."""
        # The body first: modules are called in the order in which they are registered.
        y = self.body(x)
        if self.shortcut is None:
            return self.relu(y + x)
        return self.relu(y + self.shortcut(x))
