"""Which networks can train side by side without a trial, because every layer is known."""

import sys
from typing import Any

import lightning.pytorch as L
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, type_before_parametrizations

from lightfed.models.client_module import ClientModule
from lightfed.models.image_format import channels_first
from lightfed.utils.torch_private import _BatchNorm

# The layers that `model.side_by_side: auto` packs. tests/packs/test_what_packs.py compares each of
# them with clients that train alone. A network of this package is known if its class declares
# `packs`: then its forward only calls its layers, and operators that do not mix samples. A layer
# with adapters of a user's own can declare it as well. A layer that mixes the samples of a batch
# declares "even": then clients share a pack only if their batches are equally large.
#
# A network that computes its losses itself (`ClientModule`) is known if its class also declares
# `packs_losses`. Then its losses only call its layers, and operators on single samples, and are
# means over the samples whose label is not UNLABELLED: a pack fills up small batches with others.
# tests/packs/test_losses.py compares each with clients alone.
LAYERS: tuple[type[nn.Module], ...] = (
    nn.Sequential,
    nn.ModuleList,  # these three are never called: others keep their parts in them
    nn.ModuleDict,
    nn.ParameterDict,
    ParametrizationList,  # calls its parts, of which each has to be known
    nn.Identity,
    nn.Flatten,
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.Dropout,
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Softmax,
)

# The adapters of linear layers in peft, and what wraps a network that has them, by the module that
# defines each. They are looked up among the modules that are imported: peft is no requirement.
PEFT_LAYERS: tuple[tuple[str, str], ...] = (
    ("peft.peft_model", "PeftModel"),
    ("peft.tuners.lora.model", "LoraModel"),
    ("peft.tuners.lora.layer", "Linear"),
)


def is_cross_entropy(module: L.LightningModule) -> bool:
    """Return whether the module's loss is the cross-entropy of what its network returns."""
    return type(module) is ClientModule and not hasattr(module.net, "losses")


def _unknown_loss(module: L.LightningModule) -> str:
    """Return why the module's loss is not known; empty if it is."""
    if type(module) is not ClientModule:
        return f"{type(module).__name__} has its own training step"
    if is_cross_entropy(module):
        return ""

    # `vars`, as for layers: a class that inherits the declaration may have other losses.
    network = module.net
    if not vars(type(network)).get("packs_losses", False) or "losses" in vars(network):
        return f"{type(network).__name__} has its own losses"
    return ""


def unknown(module: L.LightningModule) -> str:
    """Return why `auto` does not know what the module's training step does; empty if it does."""
    obstacle = _unknown_loss(module)
    if obstacle:
        return obstacle

    network: Any = module.net
    obstacle = unknown_layer(network)
    if obstacle:
        return obstacle

    return shared_parts(module)


def unknown_layer(network: nn.Module) -> str:
    """Return which layer of the network is not known, and why; empty if all are known."""
    peft_layers = _imported_layers_of_peft()
    for name, layer in network.named_modules():
        kind = type_before_parametrizations(layer)

        if layer._compiled_call_impl is not None:
            return f"{name or 'the network'} is compiled"

        # `vars`, not `hasattr`: a user's class that inherits from a network of this package may
        # have another forward.
        declares_packs = vars(kind).get("packs") in (True, "even")
        is_known = kind in LAYERS or kind in peft_layers or declares_packs
        if not is_known:
            return f"{name or 'the network'} is a {kind.__name__}"

        if "forward" in vars(layer) or not _has_known_hooks(layer):
            return f"{name or 'the network'} has hooks"

        # Without a momentum the layer reads its counter of batches as a number. `vmap` has a
        # counter for each client, and cannot.
        if isinstance(layer, _BatchNorm) and layer.momentum is None:
            return f"{name} has no momentum"

        if isinstance(layer, nn.Softmax) and layer.dim not in (1, -1):
            return f"{name} may mix samples"

        # Such as DoRA's, which computes other things; and a forward that first takes adapters out
        # of the weight that all clients share.
        if getattr(layer, "lora_variant", None) or getattr(layer, "merged", False) is True:
            return f"{name} has merged adapters or a variant of them"

    return ""


def shared_parts(module: nn.Module) -> str:
    """Return which parts of the module have several names; empty if every part has one."""
    layer_names = list(module.named_modules(remove_duplicate=False))
    if len(layer_names) > len(list(module.modules())):
        return "a layer has several names"

    parameter_names = list(module.named_parameters(remove_duplicate=False))
    if len(parameter_names) > len(list(module.parameters())):
        return "layers share parameters"

    return ""


def may_mix_samples(module: L.LightningModule) -> bool:
    """Return whether the layers or the loss of the module may mix the samples of a batch.

    Those of a batch that was filled up, that is: a pack computes the statistics of known batch
    normalization from the others.
    """
    if _unknown_loss(module):
        return True

    network: Any = module.net
    return bool(unknown_layer(network)) or has_mixing_layers(network)


def has_mixing_layers(network: nn.Module) -> bool:
    """Return whether a layer declares that it mixes the samples of a batch."""
    return any(vars(type(layer)).get("packs") == "even" for layer in network.modules())


def listens_to_gradients(layer: nn.Module) -> bool:
    """Return whether something is called with the gradients of a layer.

    In a pack it would get the gradients of several clients.
    """
    if layer._backward_hooks or layer._backward_pre_hooks:
        return True

    for parameter in layer._parameters.values():
        if parameter is None:
            continue
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return True

    return False


def _imported_layers_of_peft() -> list[type[nn.Module]]:
    """Return the classes of `PEFT_LAYERS`; none if peft has not been imported."""
    layers = []
    for module, name in PEFT_LAYERS:
        layer = getattr(sys.modules.get(module), name, None)
        if layer is not None:
            layers.append(layer)
    return layers


def _has_known_hooks(layer: nn.Module) -> bool:
    """Return whether a layer has no hooks except those of this package."""
    for hook in layer._forward_pre_hooks.values():
        if hook is not channels_first:
            return False

    for hook in layer._forward_hooks.values():
        # A hook of this package that can read the outputs of K clients says so.
        if not getattr(hook, "stacked", False):
            return False

    return not listens_to_gradients(layer)
