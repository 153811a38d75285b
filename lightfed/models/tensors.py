"""Which tensors of a client's module a row can hold: their types, and the memory they lie in."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightfed.utils.errors import require

# A row is float32. It holds these float buffers without loss.
_FLOAT_BUFFERS = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)


def check_memory(module: nn.Module, key: str) -> None:
    """Reject parameters and buffers that lie in one another's memory, which rows would part.

    One tensor may have several names, as in `a.weight = b.weight`. Tensors may also be cut from
    one, if no element belongs to two of them.

    Raises:
        UserError: it names the second tensor, and the first.
    """
    seen: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in _tensors(module):
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        memory = seen.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other, earlier in memory:
            fix = "share the tensor itself, as in a.weight = b.weight, or clone its data"
            found = f"{name} lies in the memory of {other}"
            require(not _overlap(tensor, earlier), key, found, fix)
        memory.append((name, tensor))


def expand_buffers(module: nn.Module) -> None:
    """Give every element of a buffer a place of its own: `zeros(1).expand(4)` has one for all."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and _is_expanded(buffer):
                part._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def _is_expanded(tensor: Tensor) -> bool:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return any(stride == 0 and length > 1 for length, stride in pairs)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether an element of one tensor is one of the other, in the same storage."""
    if one is other:
        return False
    first, second = _span(one), _span(other)
    if first[1] <= second[0] or second[1] <= first[0]:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    # Columns of one matrix lie between one another: compare the places of all elements.
    unit = 1
    if one.element_size() == other.element_size():
        unit = one.element_size()
    return bool(torch.isin(_places(one, unit), _places(other, unit)).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((n - 1) * stride for n, stride in steps)
    size = tensor.element_size()
    return int(tensor.storage_offset() * size), int((last + 1) * size)


def _places(tensor: Tensor, unit: int) -> Tensor:
    """Where all elements lie in the storage, in units of so many bytes."""
    places = torch.tensor([tensor.storage_offset()])
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(length) * stride).flatten()
    units = tensor.element_size() // unit
    return (places[:, None] * units + torch.arange(units)).flatten()


def check_trained(name: str, tensor: Tensor, key: str) -> None:
    """Reject a trained parameter of another type than float32, that of the rows."""
    kind = str(tensor.dtype).removeprefix("torch.")
    fix = "build it in float32, as by module.float()"
    if tensor.dtype in _HALVES:
        fix = "build it in float32; trainer.precision: bf16-mixed computes in bfloat16"
    elif tensor.is_complex():
        fix = "hold its real and imaginary parts as a float32 parameter, by torch.view_as_real"
    require(tensor.dtype == torch.float32, key, f"{name} is trained, and is {kind}", fix)


def check_buffer(name: str, tensor: Tensor, key: str) -> None:
    """Reject a persistent buffer that neither a float32 row nor an int64 row can hold."""
    kind = str(tensor.dtype).removeprefix("torch.")
    floating = tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized
    fits = not floating or tensor.dtype in _FLOAT_BUFFERS
    fix = "register it with persistent=False, if no client changes it for good, or in float32"
    require(fits, key, f"the buffer {name} is {kind}, which no row holds", fix)
