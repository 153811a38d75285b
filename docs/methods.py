"""The page "Which method": `python docs/methods.py` prints it, and a build of the site writes it.

A cell is what the code says: declarations of a method's class, or what happens when a small
federation of unlike clients is set up with it. Reasons are the refusals' own words.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import lightfed
from lightfed.algorithms.depth.networks import DepthConv
from lightfed.algorithms.lora.adapter_rule import AdapterRule
from lightfed.algorithms.width.ordered_dropout import OrderedDropout
from lightfed.api.algorithm import Algorithm
from lightfed.api.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.data.partition.schemes import Dirichlet
from lightfed.datasets.vision import Digits
from lightfed.distributed.collectives import Ranks
from lightfed.local import client_group
from lightfed.local.client_group import ClientGroup
from lightfed.local.hooks import Hooks
from lightfed.local.penalties import Pull
from lightfed.networks.cnn import Conv
from lightfed.networks.mlp import MLP
from lightfed.packs.known_layers import unknown
from lightfed.packs.packing import hooks_allow_packs
from lightfed.state.server_model import ServerModel
from lightfed.utils.errors import UserError

TEXT = """# Which method

## How to choose

Your clients

- differ in width: `HeteroFL`; `FedRolex`, if every part of the large model should be trained on all
  clients' data; `FjORD`, if a client should run at several widths.
- differ in depth: `MaxCommon` for networks that share their first layers; `DepthFL` for one network
  with classifiers at several depths.
- differ in architecture: one vector per class is cheapest (`FedProto`, `FedTGP`, `FedGH`, `FD`); a
  small shared network costs more and transfers more (`FML`, `FedMRL`, `PFedMoE`).
- fine-tune a large pretrained model: adapters, with `RankMean` to begin with; for the exact mean of
  their products `RoLoRA` and `FedSVD`, or `FLoRA` and `FedExLoRA`, which add it to the base;
  `FedSB` for the fewest bytes; `FedDPA` for a second adapter of each client's own.
- have one architecture and similar data: `FedAvg`; try `model.server_optimizer` first.
- drift, because data differ and sessions are long: `SCAFFOLD` or `FedDyn`; `FedNova`, if numbers of
  steps differ.
- need a model each, not one for all: `FedPer` or `FedBN`, which cost nothing; `Ditto`, which trains
  a second model; `FedRep`, `APFL` and `PFedMe` are between them.
- are slow: `FedBuff`.
- have no server: `DisPFL` or `DPSGD`.
- have servers between them and the cloud: `FedBCD`.
- are served unequally well: `QFFL`.

Whatever you choose, compare it with `Standalone` and `FedAvg`, with rates that were tuned alike.

## What each method accepts

`python docs/methods.py` writes this page from the code. The first four columns show whether a
federation of two such groups can be set up. The others are what the method's class declares:

- "late updates" are those of `model.policy` with `late: keep`;
- "side by side", "by number": `model.side_by_side` accepts a number, but `auto` trains one client
  at a time.

Below the table are the refusals, in the method's words.

"""
HEAD = {
    "widths": "different widths",
    "depths": "different depths",
    "own": "different architectures",
    "ranks": "adapters of different ranks",
    "masks": "masks",
    "part": "sends only a part",
    "rows": "clients keep rows",
    "clock": "has its own clock",
    "late": "late updates",  # also a refusal, `no_late`
    "penalties": "local penalty (a pull)",
    "packs": "side by side",
}
# What classes refuse by an attribute no_...; a new one is a column of its own.
REFUSED = [name.removeprefix("no_") for name in Hooks.__annotations__ if name.startswith("no_")]
HEAD |= {name: name.replace("_", " ") for name in REFUSED if name not in HEAD}
CLIENTS, SHORT = 80, 12


class Adapters(nn.Module):
    """A frozen layer with an adapter, of rank 16, or less in a narrower group."""

    def __init__(self, num_classes: int = 10, rate: float = 1.0) -> None:
        super().__init__()
        rank = int(16 * rate)
        self.base = nn.Linear(64, 16).requires_grad_(False)
        nn.init.constant_(self.base.weight, 0.1)
        nn.init.zeros_(self.base.bias)
        self.down, self.up = nn.Linear(64, rank, bias=False), nn.Linear(rank, 16, bias=False)
        nn.init.zeros_(self.up.weight)
        self.head = nn.Linear(16, num_classes)
        self.scaling = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) -> (B, C)."""
        x = x.flatten(1)
        return self.head(self.base(x) + self.up(self.down(x)))


Groups = Sequence[tuple[Callable[[], nn.Module], float]]
conv = partial(Conv, hidden=(8, 12), norm="none")
ordered = partial(OrderedDropout, partial(conv, scaler=False))
deep = partial(DepthConv, channels=(4, 4, 6, 6), pools=1)
features = partial(MLP, hidden=(12,))
# Pairs of groups that differ in one way; the first that a method takes counts.
UNLIKE: dict[str, Sequence[Groups]] = {
    "widths": [[(conv, 1.0), (conv, 0.4)], [(ordered, 1.0), (ordered, 0.4)]],
    "depths": [[(deep, 1.0), (deep, 0.4)]],
    "own": [[(conv, 1.0), (features, 1.0)]],
    "ranks": [[(Adapters, 1.0), (Adapters, 0.5)]],
}
ALIKE: Sequence[Groups] = [[(network, 1.0)] for network in (conv, deep, ordered, Adapters)]
NEEDED: dict[str, Any] = {  # arguments without a default
    "adapters": {"down": "up"},
    "global_layers": 1,
    "head": "net.blocks.",
    "lipschitz": 10.0,
    "mu": 0.1,
    "q": 1.0,
    "shared": features,
}


def images() -> FederatedDataModule:
    """Enough samples for all clients, which some methods hold a share of out."""
    return FederatedDataModule(Digits(), Dirichlet(alpha=0.5), batch_size=64)


def page() -> str:
    """Markdown: how to choose, the table, and the refusals with their reasons."""
    client_group._flops = lambda *_, **__: 1.0  # counting them would take most of the time
    data = images()
    data.prepare(clients=CLIENTS, seed=0, device=torch.device("cpu"))
    refusals: dict[str, list[tuple[str, str]]] = {}  # what: methods and reasons
    lines = [f"| method | {' | '.join(HEAD.values())} |", "|---|" + "---|" * len(HEAD)]
    for name, kind in sorted(methods().items(), key=lambda item: item[0].lower()):
        cells = {}
        for what, answer in answers(kind, data).items():
            cells[what] = answer if len(answer) < SHORT else "no"
            if len(answer) >= SHORT:
                refusals.setdefault(what, []).append((name, answer))
        lines.append(f"| `{name}` | {' | '.join(cells[what] for what in HEAD)} |")
    for what, refused in refusals.items():
        lines += ["", f"## Refused: {HEAD[what]}", ""]
        reasons: dict[str, list[str]] = {}
        for name, reason in refused:
            reasons.setdefault(reason.replace(name, "the method"), []).append(f"`{name}`")
        lines += [f"- {', '.join(names)}: {reason}." for reason, names in reasons.items()]
    return TEXT + "\n".join([*lines, ""])


def methods() -> dict[str, type[Algorithm]]:
    """The algorithms that a user can import."""
    found = {name: getattr(lightfed, name) for name in lightfed._HOMES}
    return {
        name: kind
        for name, kind in found.items()
        if inspect.isclass(kind) and issubclass(kind, Algorithm) and not inspect.isabstract(kind)
    }


def answers(kind: type[Algorithm], data: Any) -> dict[str, str]:
    """A cell for each column, or why not."""
    trials = {what: trial(kind, pairs, data) for what, pairs in UNLIKE.items()}
    found = {what: t if isinstance(t, str) else "yes" for what, t in trials.items()}
    fed = trial(kind, ALIKE, data)
    assert not isinstance(fed, str), f"{kind.__name__}: {fed}"
    algorithm = fed.algorithm
    found["masks"] = _yes(fed.kept.masks is not None)
    found["part"] = _yes(_sends_a_part(fed))
    found["rows"] = _yes(algorithm.stateful)
    found["clock"] = _yes(kind.timing is not None)
    pulled = trial(kind, ALIKE, data, local_penalty=Pull(0.1))
    found["penalties"] = pulled if isinstance(pulled, str) else "yes"
    for what in REFUSED:
        found[what] = getattr(algorithm, f"no_{what}") or "yes"
    if algorithm.no_policy:
        found["late"] = algorithm.no_policy
    elif found["late"] == "yes":
        assert vars(kind).get("takes_late", False), f"{kind.__name__} says nothing of late updates"
    modules = [state.module for state in fed.groups]
    packs = "by number" if any(map(unknown, modules)) else "yes"
    found["packs"] = packs if hooks_allow_packs(algorithm) else "-"
    return found


def _sends_a_part(fed: Fleet) -> bool:
    """Whether some tensors of a client never leave it."""
    algorithm: Any = fed.algorithm
    own = getattr(algorithm, "personal", None)  # what FedBN and FedPer declare
    personal = callable(own) and bool(own(fed.groups[0].module))
    parts = any(isinstance(m, ServerModel) and m.part for m in algorithm.modules())
    named = getattr(algorithm, "body", ()) or getattr(algorithm, "global_tensors", ())
    return parts or personal or bool(named)


def trial(
    kind: type[Algorithm], pairs: Sequence[Groups], data: Any, **settings: Any
) -> Fleet | str:
    """The clients of the first groups that the method takes; or what it says to the first."""
    refused = []
    for groups in pairs:
        each = CLIENTS // len(groups)
        made = [
            ClientGroup(each, network, rate=rate, name=str(i))
            for i, (network, rate) in enumerate(groups, 1)
        ]
        data.reserve(0.0)
        try:
            ranks = Ranks(torch.device("cpu"))
            return Fleet(made, method(kind), data, ranks=ranks, rounds=10, **settings)
        except UserError as error:
            refused.append(f"{error.found}; {error.fix}")
    return refused[0]


def method(kind: type[Algorithm]) -> Algorithm:
    """An algorithm with its defaults, and what it cannot do without."""
    names = [name for name, p in _arguments(kind).items() if p.default is p.empty]
    names += ["adapters"] * issubclass(kind, AdapterRule)
    return kind(**{name: NEEDED[name] for name in names if name in NEEDED})


def _arguments(kind: type) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.__init__).parameters  # type: ignore[misc]


def _yes(fact: bool) -> str:
    return "yes" if fact else "-"


if __name__ == "__main__":
    print(page())
