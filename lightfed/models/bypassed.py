"""Layers of torch that read the weight of another layer without calling it.

An adapter changes what its layer computes, not the weight that one reads there. Whoever reads the
weight gets that of the base, without a word.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightfed.utils.errors import UserError


def call_every_layer(module: nn.Module) -> None:
    """Switch off the paths of evaluation that would leave adapters out.

    In evaluation an `nn.TransformerEncoderLayer` hands the weights of its layers to one operator.
    This is left as it is where all of them are layers of torch, whose forward passes compute the
    same; where one of them is another layer, such as an adapter of peft, each is called.

    Raises:
        UserError: an attention's output layer has an adapter, which no setting lets it call.
    """
    changed = set()
    for name, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            _check_output_layer(module, name, part)
        if isinstance(part, nn.TransformerEncoderLayer) and _has_own_layers(part):
            # The name of torch's own switch: a layer whose activation is neither is always called.
            part.activation_relu_or_gelu = 0
            changed.add(part)

    for part in module.modules():
        if isinstance(part, nn.TransformerEncoder) and not changed.isdisjoint(part.layers):
            # Padded batches become nested tensors only for that operator.
            part.enable_nested_tensor = False
            part.use_nested_tensor = False


def _has_own_layers(layer: nn.TransformerEncoderLayer) -> bool:
    """Whether one of an encoder layer's layers computes something else than torch's would."""
    expected: dict[str, type[nn.Module]] = {
        "self_attn": nn.MultiheadAttention,
        "linear1": nn.Linear,
        "linear2": nn.Linear,
        "norm1": nn.LayerNorm,
        "norm2": nn.LayerNorm,
    }
    return any(_differs(getattr(layer, name), kind) for name, kind in expected.items())


def _differs(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer's forward pass is another one than that of this class."""
    return type(layer).forward is not kind.forward or "forward" in vars(layer)


def _check_output_layer(module: nn.Module, name: str, attention: nn.MultiheadAttention) -> None:
    """Reject an adapter of an attention's output layer, which is never called."""
    if not _differs(attention.out_proj, nn.Linear):
        return
    if twice_applied(module.get_submodule(name.rpartition(".")[0])):
        return  # peft's own attention writes its update into the weight before each call
    found = f"{name}.out_proj has a forward of its own, and nn.MultiheadAttention never calls it"
    fix = f"adapt {name} itself, or other layers"
    raise UserError("model.clients", found, fix)


def twice_applied(part: nn.Module) -> bool:
    """Whether a layer is peft's adapter of an `nn.MultiheadAttention`."""
    kind = type(part)
    return kind.__name__ == "MultiheadAttention" and kind.__module__.startswith("peft.")


class AdapterCalls:
    """Which adapters of peft a forward pass calls.

    Some networks hand a layer's weight to an operator, as torchvision's Swin does with its `qkv`.
    An adapter there learns nothing and changes nothing.

    Args:
        module: A client's, before a forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._uncalled: dict[str, nn.Module] = {}
        for name, part in module.named_modules():
            inner = name.rpartition(".base_layer.")[0]
            merged = bool(inner) and twice_applied(module.get_submodule(inner))
            trained = any(p.requires_grad for p in part.parameters())
            if hasattr(part, "get_base_layer") and trained and not merged:
                self._uncalled[name] = part
        self._handles = []
        for name, part in self._uncalled.items():
            self._handles.append(part.register_forward_pre_hook(self._noting(name)))

    def _noting(self, name: str) -> Callable[[nn.Module, object], None]:
        """A hook that notes a call. A function, since a copy of the module shares it."""
        uncalled = self._uncalled

        def note(_: nn.Module, __: object) -> None:
            uncalled.pop(name, None)

        return note

    def close(self, *, ran: bool) -> str:
        """Stop watching; a warning that names an adapter which was not called, or nothing.

        `ran` is whether there was a forward pass.
        """
        for handle in self._handles:
            handle.remove()
        if not (ran and self._uncalled):
            return ""
        names = [*self._uncalled]
        more = f" and {len(names) - 1} others" if len(names) > 1 else ""
        return (
            f"the network does not call {names[0]}{more} in evaluation, but may read the weight "
            "there: an adapter of it has no effect; adapt other layers"
        )


def note_of_attention(module: nn.Module) -> str:
    """A warning about what peft does to an attention's output layer; empty without such a layer."""
    parts: list[tuple[str, Any]] = [*module.named_modules()]
    for name, part in parts:
        if twice_applied(part):
            return (
                f"peft adds the update of {name}.out_proj twice, and gives its factors half of the "
                "gradient"
            )
    return ""
