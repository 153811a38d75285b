"""Very deep convolutions over characters, in FlexiFed's four depths."""

from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.charcnn import LETTERS
from lightfed.networks.layers import scaled

# Number of blocks in each stage after its first one.
_MORE = {9: (0, 0, 0, 0), 17: (1, 1, 1, 1), 29: (4, 4, 1, 1), 49: (7, 7, 4, 2)}
_SECTIONS = 8
_SECOND_HYPHEN, _NEWLINE = 60, 70


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
        layers: depth, as in the name.
        num_classes: C.
        width: factor of the stages' channels, rounded up.
        hidden: units of both hidden linear layers.
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
        for stage, (outputs, more) in enumerate(zip(channels, _MORE[layers], strict=True)):
            blocks = [ConvBlock(inputs, outputs, widens=stage > 0)]
            blocks += [ConvBlock(outputs, outputs, widens=False) for _ in range(more)]
            self.stages.append(nn.Sequential(*blocks, nn.MaxPool1d(3, 2, padding=1)))
            inputs = outputs
        self.classifier = nn.Sequential(
            nn.AdaptiveMaxPool1d(_SECTIONS),
            nn.Flatten(),
            *(nn.Linear(_SECTIONS * inputs, hidden), nn.ReLU(inplace=True)),
            *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True)),
            nn.Linear(hidden, num_classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv1d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    @override
    def forward(self, x: Tensor) -> Tensor:
        """(B, characters) of any type, 0..70 -> (B, C) logits."""
        # CharCNN's letters, 0..70, in this alphabet, 0..68. A hyphen is read as the first one.
        letters = torch.where(x == _NEWLINE, 0, x - (x > _SECOND_HYPHEN).to(x)).long()
        embedded = self.embedding(letters).transpose(1, 2)
        return self.classifier(self.stages(self.stem(embedded)))


class ConvBlock(nn.Module):
    """conv3-BN-ReLU-conv3-BN, a shortcut around them, with conv1-BN if it `widens`, then ReLU."""

    def __init__(self, inputs: int, outputs: int, *, widens: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(inputs, outputs, 3, padding=1),
            nn.BatchNorm1d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv1d(outputs, outputs, 3, padding=1),
            nn.BatchNorm1d(outputs),
        )
        shortcut = (nn.Conv1d(inputs, outputs, 1, bias=False), nn.BatchNorm1d(outputs))
        self.shortcut = nn.Sequential(*shortcut) if widens else None
        self.relu = nn.ReLU(inplace=True)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + (x if self.shortcut is None else self.shortcut(x)))
