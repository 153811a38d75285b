"""Layers of torch that read the weight of another layer without calling it.

An adapter changes what its layer computes, not the weight that one reads there. Whoever reads the
weight gets that of the base, without a word.
"""

from collections.abc import Callable

from torch import nn

from lightfed.utils.errors import UserError


def call_every_layer(module: nn.Module) -> None:
    """Switch off the paths of evaluation that would leave adapters out.

    In evaluation an `nn.TransformerEncoderLayer` hands the weights of its layers to one operator.
    This is left as it is where all of them are layers of torch, whose forward passes compute the
    same. Where one of them is another layer, such as an adapter of peft, each is called.

    Raises:
        UserError: If an attention's output layer has an adapter, which no setting lets it call.
    """
    changed: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if isinstance(layer, nn.MultiheadAttention):
            _check_output_layer(module, name, layer)
        if isinstance(layer, nn.TransformerEncoderLayer) and _has_other_layers(layer):
            # This attribute is torch's own switch: an encoder layer whose activation is neither
            # relu nor gelu always calls its layers.
            layer.activation_relu_or_gelu = 0
            changed.add(layer)

    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoder) and not changed.isdisjoint(encoder.layers):
            # Padded batches become nested tensors only for that operator.
            encoder.enable_nested_tensor = False
            encoder.use_nested_tensor = False


def _has_other_layers(layer: nn.TransformerEncoderLayer) -> bool:
    """Return whether one of an encoder layer's layers computes something else than torch's."""
    expected: dict[str, type[nn.Module]] = {
        "self_attn": nn.MultiheadAttention,
        "linear1": nn.Linear,
        "linear2": nn.Linear,
        "norm1": nn.LayerNorm,
        "norm2": nn.LayerNorm,
    }
    return any(_differs(getattr(layer, name), kind) for name, kind in expected.items())


def _differs(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a layer's forward pass is another one than that of this class."""
    return type(layer).forward is not kind.forward or "forward" in vars(layer)


def _check_output_layer(module: nn.Module, name: str, attention: nn.MultiheadAttention) -> None:
    """Refuse an adapter of an attention's output layer, which is never called."""
    if not _differs(attention.out_proj, nn.Linear):
        return
    parent = module.get_submodule(name.rpartition(".")[0])
    if twice_applied(parent):
        # peft's own attention writes its update into the weight before each call.
        return
    raise UserError(
        key="model.clients",
        found=(
            f"{name}.out_proj has a forward of its own, and nn.MultiheadAttention never calls it"
        ),
        fix=f"adapt {name} itself, or other layers",
    )


def twice_applied(layer: nn.Module) -> bool:
    """Return whether a layer is peft's adapter of an `nn.MultiheadAttention`.

    It adds the update of the output layer twice: see `note_of_attention`.
    """
    kind = type(layer)
    return kind.__name__ == "MultiheadAttention" and kind.__module__.startswith("peft.")


class AdapterCalls:
    """Watches which adapters of peft a forward pass calls.

    Some networks hand a layer's weight to an operator, as torchvision's Swin does with its `qkv`.
    An adapter there learns nothing and changes nothing.

    Args:
        module: A client's module, before a forward pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._uncalled = {
            name: layer
            for name, layer in module.named_modules()
            if _is_adapter(layer) and not _is_merged(module, name)
        }
        self._handles = []
        for name, layer in self._uncalled.items():
            self._handles.append(layer.register_forward_pre_hook(self._hook_of(name)))

    def _hook_of(self, name: str) -> Callable[[nn.Module, object], None]:
        """Return a hook that notes a call.

        A copy of the module shares functions, so a call of the copy is noted as well.
        """
        uncalled = self._uncalled

        def note_call(_: nn.Module, __: object) -> None:
            uncalled.pop(name, None)

        return note_call

    def close(self, *, ran: bool) -> str:
        """Stop watching.

        Args:
            ran: Whether there was a forward pass.

        Returns:
            A warning that names an adapter which was not called; empty if all were.
        """
        for handle in self._handles:
            handle.remove()
        if not ran or not self._uncalled:
            return ""

        names = list(self._uncalled)
        named = names[0]
        if len(names) > 1:
            named += f" and {len(names) - 1} others"
        return (
            f"the network does not call {named} in evaluation, but may read the weight there: an "
            "adapter of it has no effect; adapt other layers"
        )


def _is_adapter(layer: nn.Module) -> bool:
    """Return whether a layer is an adapter of peft that is trained."""
    return hasattr(layer, "get_base_layer") and any(p.requires_grad for p in layer.parameters())


def _is_merged(module: nn.Module, name: str) -> bool:
    """Return whether a layer is within peft's attention, which merges it before each call."""
    attention, is_within_base, _ = name.rpartition(".base_layer.")
    return bool(is_within_base) and twice_applied(module.get_submodule(attention))


def note_of_attention(module: nn.Module) -> str:
    """Return a warning about what peft does to an attention's output layer.

    Empty without such a layer.
    """
    for name, layer in module.named_modules():
        if twice_applied(layer):
            return (
                f"peft adds the update of {name}.out_proj twice, and gives its factors half of the "
                "gradient"
            )
    return ""
