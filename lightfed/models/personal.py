"""Which tensors of a model stay with their client: the words of `model.personal`."""

from collections.abc import Sequence

from torch import nn

from lightfed.utils.errors import require
from lightfed.utils.torch_private import _NormBase

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def personal_tensors(
    module: nn.Module, chosen: Sequence[str], *, key: str = "model.personal"
) -> set[str]:
    """Names of the parameters and buffers that begin with a prefix, or are in `norms`.

    Args:
        module: of a client.
        chosen: prefixes, such as net.fc, or the word `norms` for all normalisation layers. These
            are chosen by their type.
        key: of the configuration, for errors.

    Raises:
        UserError: one of them is in no tensor's name.
    """
    norms = [f"{path}." for path, layer in module.named_modules() if isinstance(layer, _NORMS)]
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    found: set[str] = set()
    for word in chosen:
        prefixes = tuple(norms) if word == "norms" else (word,)
        own = {name for name in names if name.startswith(prefixes)}
        require(bool(own), key, f"a model without {word}", f"it has {', '.join(names)}")
        found |= own
    return found
