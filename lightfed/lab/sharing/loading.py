"""Code that loads a shared model, for its card."""

import json
from textwrap import dedent

from lightfed.lab.results.run import reading
from lightfed.lab.sharing.files import BASE, BESIDES, CONFIG, WEIGHTS
from lightfed.lab.sharing.shared_model import SharedModel


def snippet(model: SharedModel, *, base: str | None) -> str:
    """Return code that loads a model from the folder of its card, and what to know about it.

    Args:
        model: The model.
        base: The name of an adapter's base on the hub; None if the folder has the base.
    """
    if model.is_adapter:
        code = _of_adapters(model, base)
    elif model.adapter is not None:
        code = _of_transformers(_architecture(model, CONFIG))
    else:
        code = _of_network(model)
    parts = [f"```python\n{code.strip()}\n```"]

    entry = model.entry
    if "parts" in entry:
        parts.append(
            f"The file holds {entry['network']} as {model.run.algorithm} makes it, of these "
            f"parts: {json.dumps(entry['parts'])}."
        )
    elif "constructor" not in entry and model.adapter is None:
        parts.append(
            f"The run does not say how {entry.get('network', 'the network')} is made: its "
            "constructor has no name, or is given more than numbers and texts."
        )
    if "note" in entry:
        parts.append(f"The run tests more than this network: {entry['note']}.")
    if "besides" in entry:
        parts.append(f"`{BESIDES}` has the tensors that such a test needs.")
    if entry.get("missing"):
        missing = ", ".join(f"`{name}`" for name in entry["missing"])
        parts.append(f"These tensors stay with the clients, and are not in the file: {missing}.")
    if "unwritten" in entry and model.adapter is None:
        parts.append(
            "The frozen tensors are quantized, and in no file: the constructor has to make them as "
            "the run did."
        )
    elif "unwritten" in entry:
        parts.append("The run held the base quantized; this code loads it as the hub has it.")
    return "\n\n".join(parts)


def _of_network(model: SharedModel) -> str:
    """Return code that loads a network by torch and safetensors."""
    entry = model.entry
    constructor = str(entry.get("constructor", ""))
    module, _, name = constructor.rpartition(".")
    if not module or not name.isidentifier():
        return dedent(f"""
            from safetensors.torch import load_file

            tensors = load_file("{WEIGHTS}")  # for {entry.get("network", "the network")}
        """)

    is_whole = not entry.get("missing") and "unwritten" not in entry
    strict = "" if is_whole else ", strict=False"
    code = dedent(f"""
        import json
        from pathlib import Path

        import torch
        from safetensors.torch import load_file

        from {module} import {name}

        network = {name}(**json.loads(Path("{CONFIG}").read_text()))
        network.load_state_dict(load_file("{WEIGHTS}"){strict})
        network.eval()
    """)
    shape = model.inputs.get("shape")
    mean = model.inputs.get("mean")
    if not shape or mean is None:
        return code

    # One number for each channel, beside which the other axes are 1.
    axes = ", ".join(["-1", *["1"] * (len(shape) - 1)])
    return code + dedent(f"""
        inputs = torch.zeros(1, {", ".join(map(str, shape))})  # your samples
        mean = torch.tensor({mean}).view({axes})
        std = torch.tensor({model.inputs["std"]}).view({axes})
        with torch.no_grad():
            outputs = network((inputs - mean) / std)
    """)


def _of_transformers(architecture: str) -> str:
    """Return code that loads a whole model of transformers."""
    return dedent(f"""
        from transformers import {architecture}

        model = {architecture}.from_pretrained(".").eval()
    """)


def _of_adapters(model: SharedModel, base: str | None) -> str:
    """Return code that loads adapters on their base."""
    architecture = _architecture(model, f"{BASE}/{CONFIG}")
    return dedent(f"""
        from peft import PeftModel
        from transformers import {architecture}

        base = {architecture}.from_pretrained("{base or BASE}")
        model = PeftModel.from_pretrained(base, ".").eval()
    """)


def _architecture(model: SharedModel, path_of_config: str) -> str:
    """Return the class of a model of transformers, as its configuration names it.

    Raises:
        UserError: There is no such file, or it names no class.
    """
    assert model.adapter is not None
    with reading(model.adapter / path_of_config) as path:
        config = json.loads(path.read_text("utf-8"))
        architecture = config["architectures"][0]
        if not str(architecture).isidentifier():
            raise ValueError(f"{architecture} is no class")
        return str(architecture)
