"""Every method's exported files, loaded by plain torch, have the accuracy that the run reports."""

import csv
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightfed.federation import Federation
from lightfed.models.build import build_network
from lightfed.networks.layers import Scaler
from lightfed.testing.digest import fit
from tests.algorithms.lora.low_rank import Adapted
from tests.promises.conformance.cases import CASES, CLIENTS
from tests.tiers import by_default

# A method of each way to export: the user's network, statistics, moving slices, a network around
# it, parts of it, mixtures, prototypes, adapters, several servers.
DEFAULT = (
    "heterofl", "fedrolex", "fedavg", "moon", "fedper", "fml", "fedapen", "fedproto", "fjord",
    "fedgh", "flora", "fedbcd", "apfl", "fedavg_drop_statistics", "feddpa",
)  # fmt: skip
Classifier = Callable[[Tensor], Tensor]


@dataclass
class Exported:
    """The files of a run, and what it reports."""

    federation: Federation
    folder: Path

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        entries: dict[str, dict[str, Any]] = json.loads((self.folder / "models.json").read_text())
        return entries

    def tensors(self, name: str) -> dict[str, Tensor]:
        base = self.folder / "base.safetensors"
        frozen = load_file(base) if base.is_file() else {}
        return frozen | load_file(self.folder / f"{name}.safetensors")

    def group(self, name: str) -> int:
        """Of a client, or of the module that tests the server's model."""
        fleet = self.federation.fleet
        if name.startswith("client"):
            return fleet.home_group(int(name.removeprefix("client")))
        rows = fleet.algorithm.models(fleet, "global", [])
        assert rows is not None
        tested = [state.live is rows.live for state in fleet.groups]
        return tested.index(True) if any(tested) else 0  # HeteroFL tests in a module of its own

    def is_tested(self, name: str) -> bool:
        """Whether a file of the server's is a model whose accuracy is reported."""
        fleet = self.federation.fleet
        rows = fleet.algorithm.models(fleet, "global", [])
        return name == "server" and rows is not None and len(rows.clients) == 1

    def own(self, name: str) -> nn.Module:
        """The user's own network, as its class makes it."""
        group, data = self.federation.groups[self.group(name)], self.federation.fleet.data
        return build_network(group.model, data, rate=group.width, key="model").eval()

    def prepared(self, name: str) -> nn.Module:
        """The network that the method makes of it."""
        fleet, position = self.federation.fleet, self.group(name)
        module = fleet.groups[position].group.build(fleet.data, position=position, seed=0)
        fleet.prepare(module, fleet.data)
        network: nn.Module = module.net  # type: ignore[assignment]
        return network.eval()

    def accuracy(self, name: str, classify: Classifier) -> float:
        """Over the samples on which the run tests this model."""
        data = self.federation.fleet.data
        batches: Iterable[tuple[Tensor, Tensor]]
        if name.startswith("client"):
            batches = data.test_batches(int(name.removeprefix("client")))
        else:
            batches = map(data.global_test_batch, range(data.global_test_batches()))
        right = total = 0
        with torch.no_grad():
            for x, y in batches:
                right += int((classify(x).argmax(1) == y).sum())
                total += len(y)
        return right / total

    def reported(self, name: str) -> float:
        if not name.startswith("client"):
            with (self.folder.parent / "metrics.csv").open() as file:
                return float(list(csv.DictReader(file))[-1]["global/accuracy"])
        with (self.folder.parent / "clients.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if f"client{row['client']}" == name]
        return float(rows[-1]["accuracy"])


def exported(case: str, folder: Path, **arguments: Any) -> Exported:
    found = CASES[case]
    asked = {
        "export": ("server", "clients"),
        "evaluate": ("global", "personal"),
        "eval_clients": None,
    }
    found = replace(found, federation=found.federation | asked | arguments)
    _, federation = fit(found, folder, rounds=1)
    return Exported(federation, folder / "run" / "models")


def heterofl(run: Exported, name: str) -> Classifier:
    """As the note of HeteroFL says."""
    network = run.own(name)
    network.load_state_dict(run.tensors(name))
    for layer in network.modules():
        if isinstance(layer, Scaler):
            layer.train()
    besides = load_file(run.folder / run.entries[name]["besides"])
    return lambda x: network(x).masked_fill(besides["absent_labels"], 0.0)


def prototypes(run: Exported, name: str) -> Classifier:
    """As the note of FedProto says; its networks here end in a linear layer."""
    network = run.own(name)
    network.load_state_dict(run.tensors(name))
    besides = load_file(run.folder / run.entries[name]["besides"])
    features: list[Tensor] = []
    last = [layer for layer in network.modules() if isinstance(layer, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))

    def classify(x: Tensor) -> Tensor:
        network(x)
        distances = torch.cdist(features.pop(), besides["common"])
        return (-distances).masked_fill(~besides["common_seen"], -torch.inf)

    return classify


def composite(run: Exported, name: str) -> Classifier:
    """The network that `models.json` names, made by its method."""
    network = run.prepared(name)
    entry = run.entries[name]
    assert entry["network"] == f"{type(network).__module__}.{type(network).__qualname__}"
    network.load_state_dict(run.tensors(name))
    return network


def nested(run: Exported, name: str) -> Classifier:
    """As the note of FjORD says."""
    network: Any = run.own(name)
    network.nest(run.federation.algorithm.widths)
    network.eval().load_state_dict(run.tensors(name))
    classify: Classifier = network
    return classify


def batch_norms(run: Exported, name: str) -> Classifier:
    """As the note of FedAvg(buffers="drop") says."""
    network = run.own(name)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
    network.load_state_dict(run.tensors(name))
    return network


def two_adapters(run: Exported, name: str) -> Classifier:
    """As the note of FedDPA says."""
    group, data = run.federation.groups[run.group(name)], run.federation.fleet.data
    network = build_network(group.model, data, rate=2 * group.width, key="model").eval()
    for layer, of_one_adapter in zip(network.modules(), run.own(name).modules(), strict=True):
        if isinstance(layer, Adapted):
            layer.scaling = of_one_adapter.scaling
    network.load_state_dict(run.tensors(name))
    return network


# What to do by a file's note; of all other methods the user's own network is the tested one.
BY_NOTE: dict[str, Callable[[Exported, str], Classifier]] = {
    "HeteroFL": heterofl, "FedRolex": heterofl, "FedProto": prototypes, "FedTGP": prototypes,
    "FjORD": nested, "FedAvg": batch_norms,
    "FedDPA": two_adapters,
    "APFL": composite, "FedAPEN": composite, "FedMRL": composite, "PFedMoE": composite,
}  # fmt: skip


@pytest.mark.parametrize("case", by_default(CASES, *DEFAULT))
def test_a_loaded_file_has_the_accuracy_of_the_run(case: str, tmp_path: Path) -> None:
    run = exported(case, tmp_path)
    method, entries = type(run.federation.algorithm).__name__, run.entries
    assert {f"client{k}" for k in range(CASES[case].clients)} <= entries.keys()
    files = {path.stem for path in run.folder.glob("*.safetensors")}
    assert files == entries.keys() | ({"base"} & files)
    assert not any("_orig_mod" in key for name in files for key in run.tensors(name))

    for name, entry in entries.items():
        if not name.startswith("client") and not run.is_tested(name):
            continue
        if "note" in entry:
            classify = BY_NOTE[method](run, name)
        else:
            network = run.own(name)
            network.load_state_dict(run.tensors(name))
            classify = network
        if CASES[case].data().task == "classification" and case != "metric_objects":
            assert run.accuracy(name, classify) == pytest.approx(run.reported(name), abs=1e-6), name


def test_a_shared_network_loads_into_its_own_class(tmp_path: Path) -> None:
    run = exported("fml", tmp_path)
    shared = build_network(run.federation.algorithm.shared, run.federation.fleet.data, key="shared")
    shared.load_state_dict(run.tensors("server"))
    assert run.entries["server"]["network"].endswith(type(shared).__name__)


def test_the_name_of_a_compiled_network_is_that_of_the_network(tmp_path: Path) -> None:
    case = replace(CASES["fedavg"], model=compiled)
    federation = {"export": ("server",), "evaluate": ("global",), "side_by_side": "off"}
    _, made = fit(replace(case, federation=case.federation | federation), tmp_path, rounds=1)
    tensors = load_file(tmp_path / "run" / "models" / "server.safetensors")
    network = CASES["fedavg"].model()
    network.load_state_dict(tensors)
    assert made.fleet.clients == CLIENTS


def compiled() -> nn.Module:
    """A network in torch.compile's wrapper; the eager backend compiles nothing."""
    return torch.compile(CASES["fedavg"].model(), backend="eager")  # type: ignore[return-value]
