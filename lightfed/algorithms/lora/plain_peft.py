"""Adapters of peft as files for plain peft, whatever a rule has put before their factors."""

from copy import deepcopy
from math import sqrt
from pathlib import Path
from typing import Any

from lightfed.models.own_network import computed_tensors


def save_adapters(net: Any, folder: Path) -> None:
    """Write a model for `peft.PeftModel.from_pretrained`; one without adapters as a whole.

    A rule may compute a factor from others: A with a core, or the factors of two adapters side by
    side. The file has the factors as the layers read them, and its configuration their rank. The
    scale stays the same.

    Args:
        net: A model of peft or of transformers.
        folder: The folder to write.
    """
    tensors = net.state_dict()
    growth = 1  # how many times the configured rank the factors have
    replaced = False
    for prefix, value in computed_tensors(net).items():
        if ".lora_" not in prefix:
            continue  # a layer of the base, as with weight_norm
        replaced = True
        growth = value.numel() // tensors[f"{prefix}original"].numel()
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]
        layer, _, name = prefix.removesuffix(".").rpartition(".parametrizations.")
        tensors[f"{layer}.{name}"] = value.detach()

    if not replaced:
        net.save_pretrained(folder)
        return

    configured = dict(net.peft_config)
    try:
        for name, config in configured.items():
            net.peft_config[name] = _of_rank(config, growth)
        net.save_pretrained(folder, state_dict=tensors)
    finally:
        net.peft_config.update(configured)


def _of_rank(config: Any, growth: int) -> Any:
    """Return a peft.LoraConfig of so many times the rank, with the same scale alpha / r."""
    larger = deepcopy(config)
    factor = sqrt(growth) if config.use_rslora else growth  # of alpha / sqrt(r)
    larger.r *= growth
    larger.lora_alpha *= factor
    larger.rank_pattern = {name: rank * growth for name, rank in config.rank_pattern.items()}
    larger.alpha_pattern = {name: alpha * factor for name, alpha in config.alpha_pattern.items()}
    return larger
