"""Which tensors of a client's module a row can hold: their types, and the memory they lie in."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lightfed.utils.errors import UserError
from lightfed.utils.tensor_parts import is_wrapped, kind, parts

# A row is float32. It holds these float buffers without loss.
_FLOAT_BUFFERS = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)


def check_memory(module: nn.Module, key: str) -> None:
    """Refuse parameters and buffers that lie in one another's memory, which rows would part.

    One tensor may have several names, as in `a.weight = b.weight`. Tensors may also be cut from
    one, if no element belongs to two of them.

    Raises:
        UserError: It names the second tensor, and the first.
    """
    tensors_in: dict[int, list[tuple[str, Tensor]]] = {}  # by the address of their storage
    for name, tensor in _tensors(module):
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        neighbors = tensors_in.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other_name, other in neighbors:
            if _overlap(tensor, other):
                raise UserError(
                    key=key,
                    found=f"{name} shares memory with {other_name}",
                    fix="share the tensor itself, as in a.weight = b.weight, or clone its data",
                )
        neighbors.append((name, tensor))


def check_layers(module: nn.Module, key: str) -> None:
    """Refuse layers that learn nothing, or something else, after a model has been tried on a CPU.

    Every model is tried there without gradients, before its cost is known. On a CPU with
    AVX512-BF16 the first such call of a 4-bit layer of bitsandbytes packs its weight in another
    order: from then on adapters get no gradient, and no error says so
    (findings/bitsandbytes_4bit_on_a_cpu.sh).

    Raises:
        UserError: It names the first such layer and its class.
    """
    for name, layer in module.named_modules():
        for ancestor in type(layer).__mro__:
            is_of_bitsandbytes = ancestor.__module__.split(".")[0] == "bitsandbytes"
            if is_of_bitsandbytes and ancestor.__name__ == "Linear4bit":
                raise UserError(
                    key=key,
                    found=f"{name} is a {type(layer).__name__} of bitsandbytes, whose first call "
                    "without gradients on a CPU repacks its weight: adapters then get no gradient",
                    fix="use PeftClient's quantization: int8, or dtype: bfloat16",
                )


def check_device(module: nn.Module, device: torch.device, key: str) -> None:
    """Refuse frozen parameters of bfloat16 on a GPU that cannot compute with them.

    Raises:
        UserError: It names the first such parameter, and the GPU.
    """
    if device.type != "cuda":
        return
    halves = [name for name, p in module.named_parameters() if p.dtype == torch.bfloat16]
    if not halves:
        return

    with torch.cuda.device(device):
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return
    raise UserError(
        key=key,
        found=f"{halves[0]} is bfloat16, which {torch.cuda.get_device_name(device)} does not have",
        fix="hold it in float32, as by PeftClient's dtype: float32, or use another GPU",
    )


def expand_buffers(module: nn.Module) -> None:
    """Give every element of a buffer a place of its own: `zeros(1).expand(4)` has one for all."""
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and buffer.layout is torch.strided and _is_expanded(buffer):
                submodule._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def _is_expanded(tensor: Tensor) -> bool:
    """Return whether several elements along an axis are the same place in memory."""
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return any(length > 1 and stride == 0 for length, stride in axes)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers with their names, and the tensors within quantized ones."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        for name_within, part in parts(tensor).items():
            yield f"{name}.{name_within}".rstrip("."), part


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors in the same storage share an element."""
    if one is other:
        return False

    one_start, one_end = _span(one)
    other_start, other_end = _span(other)
    if one_end <= other_start or other_end <= one_start:
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True

    # Columns of one matrix lie between one another: compare the places of all elements. Bytes are
    # compared only where elements differ in size, because that takes several times the memory.
    unit = 1
    if one.element_size() == other.element_size():
        unit = one.element_size()
    return bool(torch.isin(_places(one, unit), _places(other, unit)).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the one behind its last."""
    first = int(tensor.storage_offset())
    last = first
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += int((length - 1) * stride)
    size = tensor.element_size()
    return first * size, (last + 1) * size


def _places(tensor: Tensor, unit: int) -> Tensor:
    """Return where all elements lie in the storage, in units of that many bytes."""
    places = torch.tensor([tensor.storage_offset()])
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(length) * stride).flatten()
    units = tensor.element_size() // unit
    return (places[:, None] * units + torch.arange(units)).flatten()


def check_trained(name: str, tensor: Tensor, key: str) -> None:
    """Refuse a trained parameter of another type than float32, that of the rows."""
    if tensor.dtype == torch.float32 and not is_wrapped(tensor):
        return

    fix = "build it in float32, as by module.float()"
    if is_wrapped(tensor):
        fix = "freeze it, or build it in float32 without quantization"
    elif tensor.dtype in _HALVES:
        fix = "build it in float32; trainer.precision: bf16-mixed computes in bfloat16"
    elif tensor.is_complex():
        fix = "hold its real and imaginary parts as a float32 parameter, by torch.view_as_real"
    raise UserError(key=key, found=f"{name} is trained, and is {kind(tensor)}", fix=fix)


def check_buffer(name: str, tensor: Tensor, key: str) -> None:
    """Refuse a persistent buffer that neither a float32 row nor an int64 row can hold."""
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
    if (is_integer or tensor.dtype in _FLOAT_BUFFERS) and not is_wrapped(tensor):
        return
    raise UserError(
        key=key,
        found=f"the buffer {name} is {kind(tensor)}, which no row holds",
        fix="register it with persistent=False, if no client changes it for good, or in float32",
    )
