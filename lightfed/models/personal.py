"""Which tensors of a model stay with their client: the words of `model.personal`."""

from collections.abc import Sequence

from torch import nn

from lightfed.utils.errors import UserError
from lightfed.utils.torch_private import _NormBase

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def personal_tensors(
    module: nn.Module, chosen: Sequence[str], *, key: str = "model.personal"
) -> set[str]:
    """Return the names of the parameters and buffers that stay with the client.

    Args:
        module: The client's module.
        chosen: Prefixes of names, such as net.fc, or the word `norms` for all normalization layers.
            These are chosen by their type.
        key: The key of the configuration, for errors.

    Raises:
        UserError: If one of the words chooses no tensor.
    """
    norms = tuple(f"{path}." for path, layer in module.named_modules() if isinstance(layer, _NORMS))
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]

    personal: set[str] = set()
    for word in chosen:
        prefixes = norms if word == "norms" else (word,)
        matches = {name for name in names if name.startswith(prefixes)}
        if not matches:
            raise UserError(
                key=key, found=f"a model without {word}", fix=f"it has {', '.join(names)}"
            )
        personal |= matches
    return personal
