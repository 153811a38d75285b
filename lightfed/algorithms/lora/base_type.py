"""The type that the frozen base of a language model is held in, and what it takes to train on it.

A base of 16 bits takes half the memory, one of 8 bits a quarter. What a client trains is float32,
whatever the base is: steps of a round are smaller than what 16 bits resolve.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightfed.utils.errors import UserError
from lightfed.utils.tensor_parts import is_wrapped

DType = Literal["float32", "bfloat16", "auto"]
Quantization = Literal["int8"]

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def check_dtype(dtype: str | None, quantization: str | None, rank: int | None) -> None:
    """Refuse a type that a base cannot be held in.

    Raises:
        UserError: It names `dtype` or `quantization`.
    """
    if dtype == "float16":
        raise UserError("dtype", "float16, and there is no loss scaling", "give bfloat16")
    if dtype not in (None, "auto", *_TYPES):
        raise UserError("dtype", str(dtype), "give float32, bfloat16 or auto")
    if quantization not in (None, "int8"):
        raise UserError("quantization", str(quantization), "give int8, or leave it out")

    if rank is None and quantization is not None:
        found = f"{quantization}, and the whole base is trained"
        raise UserError("quantization", found, "give a rank, or leave quantization out")


def dtype_to_load(dtype: str | None) -> torch.dtype | str:
    """Return what `from_pretrained` takes for the type of a folder's model."""
    if dtype == "auto":
        return "auto"
    return _TYPES[dtype or "float32"]


def in_type(net: nn.Module, dtype: str | None, *, is_trained: bool) -> nn.Module:
    """Return a base in the type that is asked for; None and "auto" leave it as it is.

    Args:
        net: The base.
        dtype: The type.
        is_trained: Whether clients train the base itself.

    Raises:
        UserError: It is held in float16, or it is trained and held in bfloat16.
    """
    if dtype in _TYPES:
        net = net.to(_TYPES[dtype])
    for name, tensor in net.named_parameters():
        if tensor.dtype == torch.float16:
            raise UserError(
                "dtype",
                f"{name} of the base is float16, and there is no loss scaling",
                "give dtype: bfloat16 or float32",
            )
        if is_trained and tensor.dtype == torch.bfloat16:
            found = f"{name} is bfloat16, and the whole base is trained"
            raise UserError("dtype", found, "give a rank, or dtype: float32")
    return net


def quantize(net: Any, trained: Sequence[str]) -> None:
    """Hold the weights of a base's linear layers as int8, with a scale for each output.

    The output layer keeps its type, and so do layers that will be trained.

    Args:
        net: The base, before it has adapters. It is changed in place.
        trained: Names of layers, or their last parts, that will be trained.

    Raises:
        UserError: torchao is missing, there is no linear layer, or one of them shares its weight.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UserError(
            "quantization", "int8, and torchao is missing", "pip install torchao"
        ) from error

    output = None
    if hasattr(net, "get_output_embeddings"):
        output = net.get_output_embeddings()

    layers = {}
    for name, layer in net.named_modules():
        # A derived class may read its weight in its own way.
        if type(layer) is nn.Linear and layer is not output and not _is_below(name, trained):
            layers[name] = layer
    if not layers:
        raise UserError(
            "quantization",
            f"int8, and {type(net).__name__} has no nn.Linear besides its output layer",
            "leave it out, or give dtype: bfloat16",
        )
    _check_owners(net, layers)

    config = Int8WeightOnlyConfig()
    chosen = set(layers.values())
    quantize_(net, config, filter_fn=lambda layer, name: layer in chosen)
    for layer in chosen:
        layer.weight.requires_grad_(False)


def _is_below(name: str, layers: Sequence[str]) -> bool:
    """Return whether a module is one of some layers, or within one, which peft names by an end."""
    path = f".{name}."
    return any(f".{layer}." in path for layer in layers)


def _check_owners(net: nn.Module, layers: dict[str, nn.Linear]) -> None:
    """Refuse a linear layer that shares its weight: only one of both would be quantized."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    for name, layer in layers.items():
        others = [other for other in names_of[id(layer.weight)] if other != f"{name}.weight"]
        # One layer that is used in two places has two names, and is quantized once.
        if others and net.get_submodule(others[0].rpartition(".")[0]) is not layer:
            raise UserError(
                "quantization",
                f"int8, and {name}.weight is {others[0]}, too",
                "leave it out, or give dtype: bfloat16",
            )


def train_in_float32(net: Any) -> None:
    """Make what a model with adapters trains float32, on a base of any type.

    peft makes adapters float32. Copies of whole layers (`modules_to_save`) have the type of the
    base: they become float32, and hooks cast what goes into them. What comes out of them is cast
    back, except from the model's last layer, whose logits stay float32.

    Args:
        net: A `PeftModel`, which is changed in place.

    Raises:
        UserError: A tensor is trained within a layer of the base, as a bias is.
    """
    wrappers = dict(_trained_copies(net))
    in_copies = set()
    for wrapper in wrappers.values():
        in_copies |= {id(parameter) for parameter in wrapper.modules_to_save.parameters()}

    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        if is_wrapped(parameter):
            raise UserError(
                "quantization",
                f"int8, and {name} is trained",
                "name its layer in lora.modules_to_save, or leave quantization out",
            )
        if parameter.dtype == torch.float32:
            continue
        if id(parameter) not in in_copies:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                "dtype",
                f"{name} is trained within a layer that is {kind}",
                "give dtype: float32, or do not train it",
            )

    last = _last_layer(net.get_base_model())
    for name, wrapper in wrappers.items():
        if all(
            parameter.dtype == torch.float32 for parameter in wrapper.modules_to_save.parameters()
        ):
            continue
        wrapper.modules_to_save.float()  # its persistent buffers, too
        wrapper.register_forward_pre_hook(_float32_inputs, with_kwargs=True)
        if name.split(".")[0] != last:
            wrapper.register_forward_hook(_output_in_type_of_base)


def _trained_copies(net: Any) -> Iterator[tuple[str, Any]]:
    """Yield peft's wrappers around trained copies of layers, by their names in the base."""
    from peft.utils.other import ModulesToSaveWrapper

    for name, module in net.get_base_model().named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            yield name, module


def _last_layer(base: nn.Module) -> str:
    """Return the name of the last part of a model that has parameters, which makes its logits."""
    names = [name for name, part in base.named_children() if any(True for _ in part.parameters())]
    return names[-1] if names else ""


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return a value, in another type if it is a tensor of floats."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _float32_inputs(
    wrapper: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast what a trained copy of a layer is called with."""
    cast_args = tuple(_cast(value, torch.float32) for value in args)
    cast_kwargs = {name: _cast(value, torch.float32) for name, value in kwargs.items()}
    return cast_args, cast_kwargs


def _output_in_type_of_base(wrapper: Any, args: tuple[Any, ...], output: Any) -> Any:
    """Cast what a trained copy in the middle of the model returns to the type of its original."""
    dtype = next(wrapper.original_module.parameters()).dtype
    if isinstance(output, tuple):
        return tuple(_cast(value, dtype) for value in output)
    return _cast(output, dtype)
