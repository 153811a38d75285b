"""Networks that `torch.compile` has wrapped, without the wrapper.

`torch.compile(network)` returns a module around the network, which puts `_orig_mod.` into the names
of its tensors and hides its class. `network.compile()` compiles the same calls and changes neither.
Here the first becomes the second, so that a client's rows, its exported files and every rule that
asks for names or classes are those of the network itself.
"""

import lightning.pytorch as L
from torch import nn

from lightfed.utils.errors import UserError
from lightfed.utils.torch_private import OptimizedModule, is_of_torch, wrap_inline

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unwrapped(network: nn.Module, key: str) -> nn.Module:
    """Return a network without the wrappers of `torch.compile` around it and around its layers.

    The calls that were compiled stay compiled.

    Args:
        network: The network. Wrapped layers are replaced in it.
        key: The key of the network, for errors.

    Raises:
        UserError: If a wrapper has hooks, which would be lost, or is around a LightningModule.
    """
    if isinstance(network, OptimizedModule):
        return unwrapped(_compiled_in_place(network, key), key)

    for layer in list(network.modules()):
        for name, child in layer._modules.items():
            if isinstance(child, OptimizedModule):
                layer._modules[name] = unwrapped(child, key)
    return network


def _compiled_in_place(wrapper: OptimizedModule, key: str) -> nn.Module:
    """Return the module within a wrapper, which now compiles its own calls."""
    inner: nn.Module = wrapper._orig_mod
    kind = type(inner).__name__

    if isinstance(inner, L.LightningModule):
        # The wrapper compiles `forward` alone. It would be called instead of `training_step`.
        raise UserError(
            key=key,
            found=f"torch.compile around {kind}, a LightningModule",
            fix="compile its network, such as self.net = torch.compile(self.net), "
            f"or call compile() of the {kind} for its forward",
        )

    for hooks in _HOOKS:
        if vars(wrapper).get(hooks):
            raise UserError(
                key=key,
                found=f"torch.compile's wrapper around {kind} has hooks",
                fix=f"register them on the {kind} before torch.compile",
            )

    call = inner._call_impl
    if is_of_torch(inner.forward):
        # torch 2.11 leaves calls of its own layers alone, but compiles what calls them. This is how
        # the wrapper does it, too.
        call = wrap_inline(call)

    # This is what `inner.compile()` does, with the settings that the wrapper was made with.
    inner._compiled_call_impl = wrapper.dynamo_ctx(call)
    return inner


def compiled_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules whose calls are compiled, by name; the module itself has the name ""."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if layer._compiled_call_impl is not None
    }


def call_uncompiled(module: nn.Module) -> None:
    """Let a module and its layers run as they are written."""
    for layer in compiled_layers(module).values():
        layer._compiled_call_impl = None


def note_of_lost(layers: dict[str, nn.Module], module: nn.Module) -> str:
    """Return a warning about compiled layers that a method no longer calls; empty for none.

    Args:
        layers: The compiled layers, before the method has changed the module.
        module: The module as the method has changed it.
    """
    present = set(module.modules())
    for layer in layers.values():
        if layer not in present:
            kind = type(layer).__name__
            return f"the method takes {kind} apart, so that what torch.compile made of it is unused"
    return ""
