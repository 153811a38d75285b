"""The server's model."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from lightfed.state.rows import ModelLayout, Row


class ServerModel(nn.Module):
    """A model of the server: a row, replicated on every rank, checkpointed as buffers.

    Attributes:
        layout: of the row.
        aliases: for a partial model, by group: the name of a tensor here -> its name in the
            group. Empty for a whole model.
    """

    floats: Tensor
    integers: Tensor

    def __init__(
        self, layout: ModelLayout, row: Row, *, aliases: Sequence[Mapping[str, str]] = ()
    ) -> None:
        super().__init__()
        self.layout = layout
        self.aliases = tuple(aliases)
        self.register_buffer("floats", row.floats)
        self.register_buffer("integers", row.integers)

    @property
    def part(self) -> bool:
        """Whether clients have more tensors than this model."""
        return bool(self.aliases)

    @property
    def parameters_row(self) -> Tensor:
        """The leading part of `floats`, without buffers; a view."""
        return self.floats[: self.layout.floats.span(self.layout.parameters)]

    @property
    def row(self) -> Row:
        """(P,) parameters and float buffers, (Q,) integer buffers."""
        return Row(self.floats, self.integers)
