"""Exports the models that a run tests, as plain safetensors files.

A file holds what `load_state_dict` of the user's own network takes. `models.json` beside the files
says what each one is loaded into. Where a method tests more than that network, such as a mixture
with a shared one, the file holds the whole, and `models.json` says so.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lightfed.api.fleet import Fleet
from lightfed.local.client_group import GroupState
from lightfed.models.client_module import NetworkClient
from lightfed.models.own_network import own_network, plain, tensors_of
from lightfed.models.trials import on_trial
from lightfed.state.rows import Rows
from lightfed.state.server_model import ServerModel
from lightfed.utils.atomic_io import write_atomically
from lightfed.utils.errors import require
from lightfed.utils.rng import seeded

Exported = Literal["server", "clients"]
LIST = "models.json"
_NOTE = "the run tests `network` as its method has made it, of these `parts` if there are any"
_SAMPLES = 4  # of a batch on which a file's network must agree with the tested model

# The types of a safetensors file.
_STORED = frozenset(
    {
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64,
        torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.uint8,
        torch.int8, torch.int16, torch.int32, torch.int64,
    }
)  # fmt: skip


def check(fleet: Fleet, kinds: Sequence[Exported]) -> None:
    """Reject an export that would only fail after the last round."""
    for state in fleet.groups if kinds else ():
        for name, p in state.live.frozen.items():
            found = f"{name} is {p.dtype}, which a safetensors file cannot hold"
            fix = "set it to [], or give the parameter another type"
            require(p.dtype in _STORED, "model.export", found, fix)
    if "clients" in kinds:
        here = fleet.mine(range(fleet.clients)) if fleet.stateful else [0]
        for client in here[:1]:
            fleet.deployed(client)


def export(fleet: Fleet, folder: Path, *, kinds: Sequence[Exported]) -> None:
    """Write each rank's share of `server.safetensors` (one a model), `client<k>.safetensors`.

    Called on every rank. The server's files lack tensors that stay with clients. Frozen parameters
    that all groups share are written once, as `base.safetensors`; others are in the clients' files.
    A module with `export_adapter(folder)` also writes `client<k>/` in a form of its own.
    """
    if not kinds:
        return
    with torch.inference_mode(False), torch.no_grad():
        # Statistics that only tests need, such as those of batch normalisation in HeteroFL, are
        # those of the final models.
        fleet.algorithm.evaluation_start(fleet)
        entries = _Exporter(fleet, folder).write(kinds)

    every: dict[str, Any] = {}
    for part in fleet.ranks.gather([entries]):
        every |= part
    # A method without a server's model may have no file to write.
    if fleet.ranks.rank == 0 and every:
        text = json.dumps(dict(sorted(every.items())), indent=1) + "\n"
        write_atomically(folder / LIST, lambda file: file.write(text.encode()))


class _Exporter:
    """Writes the files of one rank."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self._fleet, self._folder = fleet, folder
        self._shared = frozenset(fleet.base.shared)
        self._networks: dict[int, nn.Module] = {}  # fresh ones of the user's class, by group
        # What stays in memory as `base.safetensors`, by the user's names.
        self._base = self._renamed(fleet.groups[0], self._frozen_in_all(fleet.groups[0]))

    def write(self, kinds: Sequence[Exported]) -> dict[str, Any]:
        """Write this rank's files; returns what each is, by its name."""
        fleet = self._fleet
        entries: dict[str, Any] = {}
        if fleet.ranks.rank == 0 and self._base:
            self._save("base", self._base)
        if "server" in kinds and fleet.ranks.rank == 0:
            entries |= dict(self._servers())
        if "clients" in kinds:
            rank, world = fleet.ranks.rank, fleet.ranks.world
            share = range(rank, fleet.clients, world)
            for client in fleet.mine(range(fleet.clients)) if fleet.stateful else share:
                entries[f"client{client}"] = self._client(client)
        return entries

    def _servers(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The tested global model, and the server's other models as they are."""
        fleet = self._fleet
        rows = fleet.algorithm.models(fleet, "global", [])
        for path, model in fleet.algorithm.named_modules():
            if not isinstance(model, ServerModel):
                continue
            name = "server" if path == "model" else f"server-{path}"
            if path == "model" and rows is not None and len(rows.clients) == 1:
                yield name, self._tested(name, rows, rows.clients[0])
            else:
                yield name, self._part(name, model)

    def _client(self, client: int) -> dict[str, Any]:
        """A client's tested model."""
        fleet, name = self._fleet, f"client{client}"
        rows, state = fleet.deployed(client), fleet.groups[fleet.home_group(client)]
        entry = self._tested(name, rows, client)
        if hasattr(state.module, "export_adapter"):
            with rows.bound(client) as module:
                module.export_adapter(self._folder / name)
        return entry

    def _tested(self, name: str, rows: Rows, client: int) -> dict[str, Any]:
        """Write a model as it is tested, and whatever it is tested with besides."""
        state = self._group_of(rows)
        with rows.bound(client) as module:
            frozen = {id(p) for n, p in rows.live.frozen.items() if n in self._shared}
            tensors = {n: t for n, t in tensors_of(module).items() if id(t) not in frozen}
            own = self._renamed(state, tensors)
            entry: dict[str, Any] = {"network": state.own.class_path, "tensors": len(own)}
            if self._base:
                entry["base"] = "base.safetensors"

            missing = state.own.expected - own.keys() - self._base.keys()
            if self._agrees(state, own, module):
                self._save(name, own)
                return entry

            whole = {plain(n): t for n, t in tensors.items()}
            if len(own) == len(whole):
                # The network itself, which is tested with something besides its tensors.
                self._save(name, own)
            else:
                self._save(name, whole)
                network = own_network(module)
                entry |= {"network": _path(network), "tensors": len(whole)}
                entry["parts"] = {part: _path(inner) for part, inner in network.named_children()}
            entry["note"] = self._fleet.algorithm.deployed_with or _NOTE
            if missing:
                entry["missing"] = sorted(missing)

            loose = {n: b for n, b in _loose(module).items() if n not in tensors}
            if loose:
                entry["besides"] = f"besides/{name}.safetensors"
                self._save(f"besides/{name}", loose)
        return entry

    def _part(self, name: str, model: ServerModel) -> dict[str, Any]:
        """Write a server's model that is not tested alone, without what stays with clients."""
        fleet, state = self._fleet, self._fleet.groups[0]
        views = model.layout.floats.views(model.row.floats)
        views |= model.layout.integers.views(model.row.integers)
        # Rows are float32 and int64, whatever the types of the module's buffers.
        types = {n: tensor.dtype for n, tensor in tensors_of(state.module).items()}
        tensors = {}
        for n, tensor in views.items():
            if n not in fleet.personal:
                tensors[n] = tensor.to(types.get(n, tensor.dtype))

        within = _whole_part(state.module, tensors)
        if within is not None and any(state.own.name_of(n) is None for n in tensors):
            path, network = within
            named = {plain(n.removeprefix(f"{path}.")): t for n, t in tensors.items()}
            self._save(name, named)
            return {"network": _path(network), "tensors": len(named)}

        own = self._renamed(state, _with_ties(tensors, state.module))
        self._save(name, own)
        entry: dict[str, Any] = {"network": state.own.class_path, "tensors": len(own)}
        if missing := sorted(state.own.expected - own.keys() - self._base.keys()):
            entry |= {"missing": missing, "note": "these tensors stay with the clients"}
        if self._base:
            entry["base"] = "base.safetensors"
        return entry

    def _group_of(self, rows: Rows) -> GroupState:
        """The group whose module, or one like it, tests these rows."""
        groups = self._fleet.groups
        same = [state for state in groups if state.live is rows.live]
        alike = [state for state in groups if state.layout == rows.live.layout]
        return [*same, *alike, groups[0]][0]

    def _frozen_in_all(self, state: GroupState) -> dict[str, Tensor]:
        frozen = {id(p) for name, p in state.live.frozen.items() if name in self._shared}
        return {n: t for n, t in tensors_of(state.module).items() if id(t) in frozen}

    def _renamed(self, state: GroupState, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return state.own.rename(tensors)

    def _agrees(self, state: GroupState, own: Mapping[str, Tensor], module: nn.Module) -> bool:
        """Whether the user's network with these tensors gives the outputs of the tested module.

        Samples of named columns are not compared: no method changes networks that take them.
        """
        fleet, position = self._fleet, self._fleet.groups.index(state)
        if fleet.data.task == "columns":
            return own.keys() | self._base.keys() >= state.own.expected
        if position not in self._networks:
            built = state.group.build(fleet.data, position=position, seed=fleet.seed)
            self._networks[position] = built.to(fleet.device).eval()
        fresh = self._networks[position]
        try:
            own_network(fresh).load_state_dict({**self._base, **own})
        except RuntimeError:
            return False

        batch: Any = fleet.data.global_test_batch(0)
        x = batch[0][:_SAMPLES].contiguous()
        try:
            # A language model draws the masks of its evaluation.
            with seeded(0, fleet.device), on_trial(module, fleet.device) as trial:
                expected = trial(x)
            with seeded(0, fleet.device):
                found = fresh(x)
        except NotImplementedError:  # a user's module may have no forward
            return True
        return not isinstance(found, Tensor) or torch.allclose(found, expected, atol=1e-5)

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        # Clones, because files of safetensors hold no two tensors in one memory.
        whole = {n: tensor.detach().cpu().contiguous().clone() for n, tensor in tensors.items()}
        _save(whole, self._folder / f"{name}.safetensors")


def _path(network: nn.Module) -> str:
    return f"{type(network).__module__}.{type(network).__qualname__}"


def _loose(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that no state dict has, without those of metrics."""
    network = module.net if isinstance(module, NetworkClient) else module
    own = {plain(name): buffer for name, buffer in network.named_buffers()}
    direct = {name: b for name, b in module._buffers.items() if b is not None}
    kept = {plain(name) for name in tensors_of(module)}
    return {name: b for name, b in (direct | own).items() if name not in kept}


def _whole_part(module: nn.Module, names: Mapping[str, Tensor]) -> tuple[str, nn.Module] | None:
    """The part of a module that has exactly these tensors; None without one."""
    for path, part in module.named_modules():
        if path and {f"{path}.{name}" for name in part.state_dict()} == names.keys():
            return path, part
    return None


def _with_ties(tensors: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """The tensors by all names that the module gives them; a row has each of them once."""
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors_of(module).items():
        tied.setdefault(id(tensor), []).append(name)

    found = dict(tensors)
    for names in tied.values():
        held = next((tensors[name] for name in names if name in tensors), None)
        if held is not None:
            found |= dict.fromkeys(names, held)
    return found


def _save(tensors: dict[str, Tensor], path: Path) -> None:
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
            _save({"mask": mask.cpu()}, folder / f"client{client}.safetensors")
