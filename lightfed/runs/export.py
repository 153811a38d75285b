"""Exports the models that a run tests, as plain safetensors files.

A file holds what `load_state_dict` of the user's own network takes. `models.json` beside the files
says what each one is loaded into. Where a method tests more than that network, such as a mixture
with a shared one, the file holds the whole, and `models.json` says so. `inputs.json` says what the
networks take. `lightfed export` makes a folder to share of these files.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lightfed.api.fleet import Fleet
from lightfed.data.dataset import Transform
from lightfed.local.group_state import GroupState
from lightfed.models.build import build_network, class_of, constructor_arguments
from lightfed.models.client_module import NetworkClient
from lightfed.models.compiled import call_uncompiled
from lightfed.models.own_network import own_network, plain, tensors_of, tested_tensors
from lightfed.models.trials import on_trial
from lightfed.state.rows import Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import UserError
from lightfed.utils.recorded import dotted_path
from lightfed.utils.rng import seeded
from lightfed.utils.tensor_parts import is_wrapped

Exported = Literal["server", "groups", "clients"]

# The file that says what the other files are loaded into.
LIST = "models.json"

# The file that says what inputs the networks take.
INPUTS = "inputs.json"

_BASE_FILE = "base.safetensors"

# What is written in the place of a base that no safetensors file can hold.
_DIGESTS_FILE = "base.json"
_HOW_TO_GET_IT = (
    "the base is quantized, and a safetensors file holds plain tensors only: make the network as "
    "the run did, by `constructor` and `arguments` of models.json if they are there, and load the "
    "file of a model into it with strict=False; `digests` are those of its frozen tensors"
)
_DEFAULT_NOTE = (
    "the run tests `network` as its method has made it, of these `parts` if there are any"
)

# The number of samples on which the network of a file must agree with the tested model.
_SAMPLES = 4

# The types of tensors that a safetensors file can hold.
_STORED_TYPES = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip


def check(fleet: Fleet, kinds: Sequence[Exported]) -> None:
    """Refuse, before the first round, an export that would only fail after the last one.

    Raises:
        UserError: A frozen parameter has a type that a file cannot hold, or the algorithm has no
            model for a client.
    """
    if not kinds:
        return

    for state in fleet.groups:
        for name, parameter in state.live.frozen.items():
            if parameter.dtype not in _STORED_TYPES and not is_wrapped(parameter):
                raise UserError(
                    key="model.export",
                    found=f"{name} is {parameter.dtype}, which a safetensors file cannot hold",
                    fix="set it to [], or give the parameter another type",
                )

    if "groups" in kinds and fleet.stateful:
        raise UserError(
            key="model.export",
            found="groups, and each client keeps a model of its own",
            fix="write clients instead",
        )

    if "clients" in kinds or "groups" in kinds:
        clients = fleet.mine(fleet.seen) if fleet.stateful else [0]
        for client in clients[:1]:
            fleet.deployed(client)


def export(fleet: Fleet, folder: Path, *, kinds: Sequence[Exported]) -> None:
    """Write the models of a run; every rank calls it and writes its share.

    `server.safetensors` is the server's model. If the server has several, there is a file for each.
    They lack the tensors that stay with clients. `client<k>.safetensors` is the model of client k,
    and `group-<name>.safetensors` that of the first client of a group.
    Frozen parameters that all groups share are written once, as `base.safetensors`, and others are
    in the clients' files. If one of them is quantized, none of them is written, but `base.json`,
    which has their digests and says how to get them.
    A module with `export_adapter(folder)` also writes a folder, such as `client<k>/`, in a form of
    its own.

    Args:
        fleet: The federation after the last round.
        folder: The folder for the files.
        kinds: Which models to write.
    """
    if not kinds:
        return

    with torch.inference_mode(False), torch.no_grad():
        # Statistics that only tests need, such as those of batch normalization in HeteroFL, have
        # to be those of the final models.
        fleet.algorithm.evaluation_start(fleet)
        entries = _Exporter(fleet, folder).write(kinds)

    all_entries: dict[str, Any] = {}
    for entries_of_rank in fleet.ranks.gather([entries]):
        all_entries |= entries_of_rank

    # A method without a server's model may have no file to write.
    if fleet.ranks.rank == 0 and all_entries:
        _write_json(dict(sorted(all_entries.items())), folder / LIST)
        _write_json(_inputs(fleet), folder / INPUTS)


class _Exporter:
    """Writes the files of one rank."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self._fleet = fleet
        self._folder = folder
        self._shared_names = frozenset(fleet.base.shared)

        # Networks of the user's class that no method has changed, by the position of their group.
        self._untouched_networks: dict[int, nn.Module] = {}

        # The shapes of networks, by the position of their group and their width.
        self._shapes: dict[tuple[int, float], dict[str, torch.Size]] = {}

        # The tensors of `base.safetensors`, by the names of the user's network.
        first_group = fleet.groups[0]
        frozen = {}
        shared_ids = self._ids_of_shared(first_group.live.frozen)
        for name, tensor in tested_tensors(first_group.module, first_group.own).items():
            if id(tensor) in shared_ids:
                frozen[name] = tensor
        self._base = first_group.own.rename(frozen)

        # Quantized tensors are in no file. Half a base would be of no use, so it is written whole
        # or not at all.
        self._unwritten: set[str] = set()
        for state in fleet.groups:
            wrapped = {n: t for n, t in tensors_of(state.module).items() if is_wrapped(t)}
            self._unwritten |= state.own.rename(wrapped).keys()
        if self._unwritten:
            self._unwritten |= self._base.keys()
            self._base = {}

    def write(self, kinds: Sequence[Exported]) -> dict[str, Any]:
        """Write this rank's files, and return what each of them is, by its name."""
        fleet = self._fleet
        is_first = fleet.ranks.rank == 0
        entries: dict[str, Any] = {}

        if is_first and self._base:
            self._save("base", self._base)
        if is_first and self._unwritten:
            digests = {}
            for state, digests_of_group in zip(fleet.groups, fleet.base.digests, strict=True):
                digests[state.name] = digests_of_group
            content = {"how": _HOW_TO_GET_IT, "digests": digests}
            _write_json(content, self._folder / _DIGESTS_FILE)

        if is_first and "server" in kinds:
            entries |= dict(self._write_servers())

        if is_first and "groups" in kinds:
            first_clients: dict[int, int] = {}  # by the position of the group
            for client in range(fleet.clients):
                first_clients.setdefault(fleet.home_group(client), client)
            for position, client in first_clients.items():
                name = group_file(fleet.groups[position].name)
                entries[name] = self._write_client(client, name)

        if "clients" in kinds:
            if fleet.stateful:
                # An unseen client has trained no model of its own.
                clients = fleet.mine(fleet.seen)
            else:
                # Every rank has the models of all clients, so they share the work.
                clients = list(range(fleet.ranks.rank, fleet.clients, fleet.ranks.world))
            for client in clients:
                name = f"client{client}"
                entries[name] = self._write_client(client, name)
        return entries

    def _write_servers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Write the tested global model, and the server's other models as they are."""
        fleet = self._fleet
        tested = fleet.algorithm.models(fleet, "global", [])
        for path, model in fleet.algorithm.named_modules():
            if not isinstance(model, ServerModel):
                continue

            is_main = path == "model"
            name = "server" if is_main else f"server-{path}"
            if is_main and tested is not None and len(tested.clients) == 1:
                yield name, self._write_tested(name, tested, tested.clients[0])
            else:
                rows = fleet.algorithm.model_to_write(fleet, model)
                yield name, self._write_server_model(name, model, rows)

    def _write_client(self, client: int, name: str) -> dict[str, Any]:
        """Write the model that a client tests, in files of this name."""
        fleet = self._fleet
        rows = fleet.deployed(client)
        state = fleet.groups[fleet.home_group(client)]

        entry = self._write_tested(name, rows, client)
        return entry | {"client": client, "group": state.name}

    def _write_tested(self, name: str, rows: Rows, client: int) -> dict[str, Any]:
        """Write a model as it is tested, and what it is tested with besides its tensors."""
        state = self._group_of(rows)
        with rows.bound(client) as module:
            shared_ids = self._ids_of_shared(rows.live.frozen)
            tensors = {}
            for tensor_name, tensor in tested_tensors(module, state.own).items():
                if id(tensor) not in shared_ids and not is_wrapped(tensor):
                    tensors[tensor_name] = tensor

            folder: dict[str, Any] = {}
            if hasattr(module, "export_adapter"):
                module.export_adapter(self._folder / name)
                changes_base = getattr(self._fleet.algorithm, "changes_base", False)
                folder = {"folder": name, "changes_base": changes_base}

            own_tensors = state.own.rename(tensors)
            entry: dict[str, Any] = {
                "network": state.own.class_path,
                "tensors": len(own_tensors),
            }
            entry |= folder | self._constructor(state, own_tensors | self._base)
            entry |= self._base_entry()

            # The usual case: the user's network with these tensors is the tested model.
            missing = self._missing(state, own_tensors)
            if self._agrees(state, own_tensors, module):
                self._save(name, own_tensors)
                return entry

            if not state.own.fits(own_tensors):
                entry.pop("constructor", None)
                entry.pop("arguments", None)

            all_tensors = {plain(tensor_name): tensor for tensor_name, tensor in tensors.items()}
            if len(own_tensors) == len(all_tensors):
                # The network itself, which is tested with something besides its tensors.
                self._save(name, own_tensors)
            else:
                self._save(name, all_tensors)
                network = own_network(module)
                entry = {"network": _class_path(network), "tensors": len(all_tensors)}
                entry |= self._base_entry()
                entry["parts"] = {
                    part: _class_path(inner) for part, inner in network.named_children()
                }

            entry["note"] = self._fleet.algorithm.deployed_with or _DEFAULT_NOTE
            if missing:
                entry["missing"] = sorted(missing)

            loose_buffers = {}
            for buffer_name, buffer in _loose_buffers(module).items():
                if buffer_name not in tensors:
                    loose_buffers[buffer_name] = buffer
            if loose_buffers:
                entry["besides"] = f"besides/{name}.safetensors"
                self._save(f"besides/{name}", loose_buffers)
        return entry

    def _write_server_model(
        self, name: str, model: ServerModel, rows: Rows | None
    ) -> dict[str, Any]:
        """Write a server's model that is not tested alone, without what stays with clients.

        `rows` has it as a module holds it. Without them, the module holds the server's own values.
        """
        if rows is None:
            state = self._fleet.groups[0]
            layout = model.layout
            row = model.row
        else:
            state = self._group_of(rows)
            layout = state.layout
            row = rows.row(rows.clients[0])
        views = layout.floats.views(row.floats) | layout.integers.views(row.integers)

        # Rows are float32 and int64, whatever the types of the module's buffers.
        type_of = {
            tensor_name: tensor.dtype for tensor_name, tensor in tensors_of(state.module).items()
        }
        tensors = {}
        held = {entry.name for entry in (*model.layout.floats, *model.layout.integers)}
        for tensor_name, tensor in views.items():
            if tensor_name in held and tensor_name not in self._fleet.personal:
                tensors[tensor_name] = tensor.to(type_of.get(tensor_name, tensor.dtype))

        # Some models are a part of the client's module that the method has added, and not of the
        # user's network.
        part = _part_with(state.module, tensors)
        is_added = any(state.own.name_of(tensor_name) is None for tensor_name in tensors)
        if part is not None and is_added:
            path, network = part
            tensors_of_part = {
                plain(tensor_name.removeprefix(f"{path}.")): tensor
                for tensor_name, tensor in tensors.items()
            }
            self._save(name, tensors_of_part)
            return {"network": _class_path(network), "tensors": len(tensors_of_part)}

        own_tensors = state.own.rename(_with_ties(tensors, state.module))
        self._save(name, own_tensors)
        entry: dict[str, Any] = {"network": state.own.class_path, "tensors": len(own_tensors)}
        entry |= self._constructor(state, own_tensors | self._base)
        missing = sorted(self._missing(state, own_tensors))
        if missing:
            entry["missing"] = missing
            entry["note"] = "these tensors stay with the clients"
        return entry | self._base_entry()

    def _base_entry(self) -> dict[str, Any]:
        """Return which file has the base of a model, or says how to get it."""
        if self._unwritten:
            return {"unwritten": _DIGESTS_FILE}
        return {"base": _BASE_FILE} if self._base else {}

    def _missing(self, state: GroupState, own_tensors: Mapping[str, Tensor]) -> frozenset[str]:
        """Return the tensors of a group's network that neither a model's file nor the base has."""
        return state.own.expected - own_tensors.keys() - self._base.keys() - self._unwritten

    def _constructor(self, state: GroupState, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return what makes the network of these tensors, if a program can read it.

        Args:
            state: A group with that network, perhaps of another width.
            tensors: The tensors of the network by its own names; some may be missing.

        Returns:
            `constructor`, the dotted path of a class or function, and `arguments`, what it is
            called with. Nothing if it has no path, its arguments are no plain values, or it makes
            other shapes.
        """
        factory = state.group.model
        constructor = class_of(factory)
        path = dotted_path(constructor) if hasattr(constructor, "__qualname__") else ""
        if not path or "<" in path:
            return {}

        data = self._fleet.data
        # The server's model may be wider than all groups.
        for width in dict.fromkeys((state.group.width, 1.0)):
            arguments = constructor_arguments(factory, data, rate=width)
            try:
                json.dumps(arguments, allow_nan=False)
            except (TypeError, ValueError):
                return {}
            if data.task == "columns" or self._has_shapes(state, width, tensors):
                return {"constructor": path, "arguments": arguments}
        return {}

    def _has_shapes(self, state: GroupState, width: float, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether a group's network of this width has tensors of these shapes."""
        position = self._fleet.groups.index(state)
        if (position, width) not in self._shapes:
            with seeded(0), torch.device("cpu"):
                network = build_network(
                    state.group.model, self._fleet.data, key="model.export", rate=width
                )
            shapes = {name: tensor.shape for name, tensor in tensors_of(network).items()}
            self._shapes[position, width] = shapes

        shapes = self._shapes[position, width]
        return all(shapes.get(name) == tensor.shape for name, tensor in tensors.items())

    def _group_of(self, rows: Rows) -> GroupState:
        """Return the group whose module, or one like it, tests these rows."""
        groups = self._fleet.groups
        for state in groups:
            if state.live is rows.live:
                return state
        for state in groups:
            if state.layout == rows.live.layout:
                return state
        return groups[0]

    def _ids_of_shared(self, frozen: Mapping[str, Tensor]) -> set[int]:
        """Return the ids of the frozen parameters that all groups share.

        The same tensor can have another name in a module, so it is known by its id.
        """
        return {id(tensor) for name, tensor in frozen.items() if name in self._shared_names}

    def _agrees(
        self, state: GroupState, own_tensors: Mapping[str, Tensor], module: nn.Module
    ) -> bool:
        """Return whether the user's network gives the outputs of the tested module.

        Samples of named columns are not compared, but only names and shapes: what methods change in
        networks that take them shows there.

        Args:
            state: The group of the network.
            own_tensors: The tensors for the network, by its names.
            module: The tested module.
        """
        fleet = self._fleet
        position = fleet.groups.index(state)
        if fleet.data.task == "columns":
            complete = not self._missing(state, own_tensors)
            return complete and state.own.fits(own_tensors)

        if position not in self._untouched_networks:
            network = state.group.build(fleet.data, position=position, seed=fleet.seed)
            call_uncompiled(network)  # the tested module is a copy, which is not compiled either
            self._untouched_networks[position] = network.to(fleet.device).eval()
        untouched = self._untouched_networks[position]
        try:
            # The network was built with the tensors that no file has.
            loaded = own_network(untouched).load_state_dict(
                {**self._base, **own_tensors}, strict=False
            )
        except RuntimeError:
            return False
        if loaded.unexpected_keys or not self._unwritten.issuperset(loaded.missing_keys):
            return False

        batch: Any = fleet.data.global_test_batch(0)
        inputs = batch[0][:_SAMPLES].contiguous()
        try:
            # A language model draws the masks of its evaluation: both have to draw the same.
            with seeded(0, fleet.device), on_trial(module, fleet.device) as trial:
                expected = trial(inputs)
            with seeded(0, fleet.device):
                outputs = untouched(inputs)
        except NotImplementedError:
            # A user's module may have no forward.
            return True

        if not isinstance(outputs, Tensor):
            return True
        return torch.allclose(outputs, expected, atol=1e-5)

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        # Clones, because a safetensors file cannot hold two tensors that share memory.
        clones = {}
        for tensor_name, tensor in tensors.items():
            clones[tensor_name] = tensor.detach().cpu().contiguous().clone()
        _write_file(clones, self._folder / f"{name}.safetensors")


def group_file(name: str) -> str:
    """Return the name of the file of a group's model, without its suffix."""
    return "group-" + re.sub(r"[^\w.-]+", "-", name)


def _inputs(fleet: Fleet) -> dict[str, Any]:
    """Return what the networks take, as values for JSON.

    `shape` is that of a sample, None for named columns. `mean` and `std` standardize its channels,
    after a division by 255 for samples of type uint8; they are None where functions of the user or
    no arithmetic make the batches. `classes` are the names of the labels, if these are classes.
    """
    data = fleet.data
    transform = data.dataset.transform
    mean = std = None
    if isinstance(transform, Transform):
        mean = list(transform.mean)
        std = list(transform.std)
    return {
        "task": data.task,
        "classes": list(data.dataset.classes) if data.task == "classification" else [],
        "shape": None if data.task == "columns" else list(data.input_shape),
        "mean": mean,
        "std": std,
    }


def _write_json(value: Any, path: Path) -> None:
    text = json.dumps(value, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(text.encode()))


def _class_path(network: nn.Module) -> str:
    return f"{type(network).__module__}.{type(network).__qualname__}"


def _loose_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are in no state dict, without those of metrics."""
    network = module.net if isinstance(module, NetworkClient) else module

    # Metrics are modules beside the network, so of the outer module only its own buffers count.
    buffers = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
    for name, buffer in network.named_buffers():
        buffers[plain(name)] = buffer

    in_state_dict = {plain(name) for name in tensors_of(module)}
    return {name: buffer for name, buffer in buffers.items() if name not in in_state_dict}


def _part_with(module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[str, nn.Module] | None:
    """Return the path and the part of a module that has exactly these tensors, by their names."""
    for path, part in module.named_modules():
        if path and {f"{path}.{name}" for name in part.state_dict()} == tensors.keys():
            return path, part
    return None


def _with_ties(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return tensors by all names that the module gives them; a row has each of them once."""
    names_of_id: dict[int, list[str]] = {}
    for name, tensor in tensors_of(module).items():
        names_of_id.setdefault(id(tensor), []).append(name)

    complete = dict(tensors)
    for names in names_of_id.values():
        names_in_row = [name for name in names if name in tensors]
        if names_in_row:
            complete |= dict.fromkeys(names, tensors[names_in_row[0]])
    return complete


def _write_file(tensors: dict[str, Tensor], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(save(tensors)))


def export_masks(fleet: Fleet, folder: Path) -> None:
    """Write `client<k>.safetensors` with the packed `mask` of every client that has one.

    Bit i of word w is element 32 w + i of a row. Each rank writes its own clients.
    """
    if not fleet.stateful:
        return
    for client in fleet.mine(range(fleet.clients)):
        mask = fleet.kept.mask(client)
        if mask is not None:
            _write_file({"mask": mask.cpu()}, folder / f"client{client}.safetensors")
