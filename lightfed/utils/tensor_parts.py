"""The tensors that hold a tensor's values: itself, or those within a quantized one.

A quantized tensor looks like one of floats, and keeps integers and scales in tensors within. Its
`nbytes` is that of the floats, and it has no memory of its own. torch calls it a wrapper subclass:
`__tensor_flatten__` names what is within.
"""

import torch
from torch import Tensor


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor keeps its values in tensors within."""
    return hasattr(type(tensor), "__tensor_flatten__")


def parts(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that hold a tensor's values, by their names within it.

    A plain tensor has one part, itself, whose name is empty. A part that is wrapped, too, is
    replaced by its own parts, such as `values.scale`.
    """
    if not is_wrapped(tensor):
        return {"": tensor}

    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    found = {}
    for name in names:
        inner = getattr(tensor, name)
        if inner is None:  # a zero point, for example, of a symmetric quantizer
            continue
        for name_within, part in parts(inner).items():
            found[f"{name}.{name_within}".rstrip(".")] = part
    return found


def held_bytes(tensor: Tensor) -> int:
    """Return the bytes that a tensor's values take in memory."""
    return sum(part.nbytes for part in parts(tensor).values())


def bytes_of(part: Tensor) -> memoryview:
    """Return the bytes of a plain tensor's values, in host memory."""
    values = part.detach().cpu().contiguous().flatten()
    return values.view(torch.uint8).numpy().data


def kind(tensor: Tensor) -> str:
    """Return what a tensor holds in a word: its type, such as bfloat16, or the wrapper's class."""
    if is_wrapped(tensor):
        return f"quantized ({type(tensor).__name__})"
    return str(tensor.dtype).removeprefix("torch.")
