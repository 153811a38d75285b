"""A perceptron that reads the last characters of a text."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from typing_extensions import override

from lightfed.networks.charcnn import LETTERS
from lightfed.networks.layers import scaled
from lightfed.utils.errors import UserError


class CharMLP(nn.Module):
    """Embed the last characters, and pass them through linear layers with ReLU between them.

    A neural model of n-grams, as by Bengio et al. (JMLR 2003), of characters and without their
    direct connections. It is for tasks such as LEAF's Shakespeare, where the next character depends
    most on the last ones: there it learns in a few hundred steps of a CPU.

    Args:
        num_classes: C.
        input_shape: (characters,).
        context: How many characters it reads, from the end. Where shorter texts are filled up at
            their end, these are read, too.
        embedding: Numbers that a character becomes.
        hidden: Units of the hidden layers at rate 1.
        letters: Size of the alphabet, whose characters are 1 to `letters`. 255 for the bytes of
            `Hub(alphabet="bytes")`.
        rate: Width ratio; a hidden layer has ceil(rate * units) units.

    Raises:
        UserError: The samples are no sequences of characters, or have fewer than `context`.
    """

    def __init__(
        self,
        num_classes: int = 80,
        input_shape: Sequence[int] = (80,),
        *,
        context: int = 16,
        embedding: int = 8,
        hidden: Sequence[int] = (128,),
        letters: int = LETTERS,
        rate: float = 1.0,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1 or input_shape[0] < context:
            raise UserError(
                key="context",
                found=f"{context} for samples of shape {tuple(input_shape)}",
                fix="use texts as sequences of at least so many characters: (characters,)",
            )
        self.context = context
        self.embedding = nn.Embedding(letters + 1, embedding, padding_idx=0)

        widths = [context * embedding, *scaled(hidden, rate)]
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers.append(nn.Linear(inputs, outputs))
            layers.append(nn.ReLU())
        layers.append(nn.Linear(widths[-1], num_classes))
        self.layers = nn.Sequential(*layers)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Map characters (B, characters) of any type, 0..letters, to logits (B, C)."""
        last = x[:, -self.context :].long()
        return self.layers(self.embedding(last))
