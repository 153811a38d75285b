"""The files beside a model card: weights and configuration, as programs of the hub read them."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from shutil import copyfile
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from lightfed.lab.results.run import reading
from lightfed.lab.sharing.shared_model import SharedModel
from lightfed.utils.errors import UserError

# What a file gets: bytes, a copy of another file, or tensors.
Content = bytes | Path | Mapping[str, Tensor]

# Names that ModelHubMixin and transformers look for.
WEIGHTS = "model.safetensors"
CONFIG = "config.json"

ADAPTER_CONFIG = "adapter_config.json"
BASE = "base"
BESIDES = "besides.safetensors"

# What peft puts into the names of a base's tensors.
_OF_PEFT = re.compile(r"^base_model\.model\.|\.base_layer(?=\.)|\.original_module(?=\.)")
# Tensors that belong to the adapters, and not to the base.
_OF_ADAPTERS = re.compile(r"\.lora_|\.modules_to_save\.")


def contents(model: SharedModel, base: str | None) -> dict[str, Content]:
    """Return the files of a model to share, without its card, by their path in the folder.

    Args:
        model: The model.
        base: The name of an adapter's base on the hub; None to share the base, too.

    Raises:
        UserError: A file of the run is missing or damaged, or the base is not that of the hub.
    """
    if base is not None and not model.is_adapter:
        found = f"{base}, and {model.name} of {model.run.folder} is no adapter"
        raise UserError("--base", found, "leave it out")

    if model.is_adapter:
        files = _adapter_files(model, base)
    elif model.adapter is not None:
        files = _files_of_transformers(model.adapter)
    else:
        files = _plain_files(model)

    besides = model.entry.get("besides")
    if besides is not None:
        files[BESIDES] = model.models / str(besides)
    return files


def _plain_files(model: SharedModel) -> dict[str, Content]:
    """Return the weights of a network, and the arguments of its constructor if they are known."""
    files: dict[str, Content] = {WEIGHTS: all_tensors(model)}
    if "arguments" in model.entry:
        # The arguments alone: ModelHubMixin passes all keys of this file to the constructor.
        files[CONFIG] = _json(model.entry["arguments"])
    return files


def _files_of_transformers(folder: Path) -> dict[str, Content]:
    """Return the files of a whole model of transformers."""
    files: dict[str, Content] = {}
    with reading(folder):
        for path in sorted(folder.iterdir()):
            if path.is_file() and path.name != "README.md":
                files[path.name] = path
    return files


def _adapter_files(model: SharedModel, base: str | None) -> dict[str, Content]:
    """Return the files of adapters, and those of the model below them unless the hub has it."""
    assert model.adapter is not None
    if base is not None and model.entry.get("changes_base"):
        found = f"{base}, and {model.run.algorithm} has changed the base"
        raise UserError("--base", found, "leave it out: the changed base is written, too")

    if base is None and "unwritten" in model.entry:
        found = f"not given, and no file has the quantized base of {model.name}"
        raise UserError("--base", found, "name the base on the hub that was quantized")

    files = _files_of_transformers(model.adapter)
    with reading(model.adapter / ADAPTER_CONFIG) as path:
        config = json.loads(path.read_text("utf-8"))
        # In a run it is a folder of the machine, which nobody else has.
        config["base_model_name_or_path"] = base
        files[ADAPTER_CONFIG] = _json(config)

    if base is None:
        files[f"{BASE}/{CONFIG}"] = model.adapter / BASE / CONFIG
        files[f"{BASE}/{WEIGHTS}"] = _base_tensors(model)
    return files


def _base_tensors(model: SharedModel) -> dict[str, Tensor]:
    """Return the tensors of the model below the adapters, by its own names."""
    tensors = {}
    for name, tensor in all_tensors(model).items():
        if _OF_ADAPTERS.search(name) is None:
            tensors[_OF_PEFT.sub("", name)] = tensor
    return tensors


def all_tensors(model: SharedModel) -> dict[str, Tensor]:
    """Return the tensors of a model by the names of the user's network, those of a base included.

    Raises:
        UserError: A file is missing or damaged.
    """
    tensors: dict[str, Tensor] = {}
    names = [f"{model.name}.safetensors"]
    if "base" in model.entry:
        names.insert(0, str(model.entry["base"]))
    for name in names:
        with reading(model.models / name) as path:
            tensors |= load_file(path)
    return tensors


def write(content: Content, path: Path) -> None:
    """Write a file, or leave the one that is there untouched.

    Raises:
        UserError: The folder cannot be written.
    """
    temporary = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            temporary.write_bytes(content)
        elif isinstance(content, Path):
            copyfile(content, temporary)
        else:
            # transformers refuses a file that does not name its format.
            save_file(dict(content), temporary, metadata={"format": "pt"})
        temporary.replace(path)
    except OSError as error:
        found = f"{path} cannot be written ({error.strerror})"
        raise UserError("--output", found, "name a folder that can be written") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
