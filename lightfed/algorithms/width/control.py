"""HeteroFL's control strings: `--config control:DATA:STRING`, and what it says.

The released code of Diao et al. names an experiment by nine fields, such as
`1_100_0.1_iid_fix_a2-b8_bn_1_1`. All other hyper-parameters are those of its data set. A string
stands for edits of a file in `configs/heterofl`; `lightfed configs control:DATA:STRING` prints the
edited file.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightfed.utils.errors import UserError

PREFIX = "control:"
CONFIGS = Path(__file__).parents[2] / "configs" / "heterofl"
DATA = ("MNIST", "MNIST-ResNet", "CIFAR10", "WikiText2", "Digits", "Prose")
# Of each field, in order: a regular expression of its values, and what they are.
FIELDS = {
    "federated": ("1", "1, for a federation"),
    "users": (r"0*[1-9]\d*", "the number of clients"),
    "fraction": (r"0+\.\d*[1-9]\d*|0*1(\.0+)?", "the share of a round's participants, up to 1"),
    "split": (r"iid|non-iid-[1-9]\d*", "iid, or non-iid-n for at most n classes a client"),
    "assignment": ("fix|dynamic", "fix, or dynamic for levels that clients redraw every round"),
    "modes": (r"[a-e][1-9]\d*(-[a-e][1-9]\d*)*", "levels of a to e with weights, as in a2-b8"),
    "norm": ("bn|in|ln|gn|none", "bn, in, ln, gn or none; a Transformer always has ln"),
    "scale": ("[01]", "0, or 1 for a Scaler; a Transformer always has Scalers"),
    "mask": ("[01]", "0, or 1 to set logits of absent labels to zero in a client's loss"),
}
# Arguments that no configuration states, because they are the defaults.
DEFAULTS = {"norm": "bn", "scaler": True, "assignment": "fix", "mask": True, "rows": 100}


def fields_of(string: str) -> dict[str, str]:
    """Return the words of a control string by field.

    Raises:
        UserError: Names the first invalid field, or there are too few or too many.
    """
    words = string.split("_")
    if len(words) != len(FIELDS):
        raise UserError(
            key="control",
            found=f"{len(words)} fields in {string!r}",
            fix=f"give {len(FIELDS)} of them: {'_'.join(FIELDS)}",
        )

    fields = dict(zip(FIELDS, words, strict=True))
    for name, word in fields.items():
        pattern, meaning = FIELDS[name]
        if re.fullmatch(pattern, word) is None:
            raise UserError(f"control.{name}", repr(word), f"give {meaning}")
    return fields


def configuration(text: str) -> dict[str, Any]:
    """Return the configuration of `DATA:STRING`.

    Raises:
        UserError: A field or the data set is unknown, or the data set has no such split, or there
            are fewer clients than the levels have weights.
    """
    data, _, string = text.rpartition(":")
    fields = fields_of(string)
    if data not in DATA:
        fix = f"write DATA:{string} with one of {', '.join(DATA)}"
        raise UserError("control.data", repr(data), fix)

    config: dict[str, Any] = yaml.safe_load((CONFIGS / f"{data.lower()}.yaml").read_text("utf-8"))
    _set_network(config, fields, data)
    if fields["split"] != "iid":
        _set_classes(config, fields)
    level_weights = _set_clients(config, fields)

    algorithm: dict[str, Any] = {"assignment": fields["assignment"]}
    if fields["assignment"] == "dynamic":
        algorithm["level_weights"] = level_weights
    algorithm["mask"] = fields["mask"] == "1"
    model = config["model"]
    model["algorithm"] = _with(model["algorithm"], **algorithm)
    model["fraction"] = float(fields["fraction"])
    return config


def _set_network(config: dict[str, Any], fields: dict[str, str], data: str) -> None:
    """Set the network of all clients, or of a text the number of clients."""
    source = config["data"]
    if source["partition"] == "Natural":  # a client is a row of a text
        if fields["split"] != "iid":
            raise UserError("control.split", f"{fields['split']} of {data}", "give iid")
        source["dataset"] = _with(source["dataset"], rows=int(fields["users"]))
        return

    clients = config["model"]["clients"]
    network = clients[0]["model"]
    scaler = fields["scale"] == "1"
    clients[0]["model"] = _with(network, norm=fields["norm"], scaler=scaler)


def _set_classes(config: dict[str, Any], fields: dict[str, str]) -> None:
    """Let each client have a few classes, and train for twice as long, as in the released code."""
    classes = int(fields["split"].removeprefix("non-iid-"))
    partition = _with("Classes", per_client=classes, strict_paper=True)
    config["data"]["partition"] = partition

    config["trainer"]["max_epochs"] *= 2
    schedule = config["model"]["lr_schedule"]["init_args"]
    schedule["milestones"] = [2 * milestone for milestone in schedule["milestones"]]


def _set_clients(config: dict[str, Any], fields: dict[str, str]) -> list[int]:
    """Divide the clients among the levels, and return the levels' weights."""
    levels = []
    weights = []
    for mode in fields["modes"].split("-"):
        levels.append(mode[0])
        weights.append(int(mode[1:]))

    users = int(fields["users"])
    if sum(weights) > users:
        raise UserError(
            key="control.modes",
            found=f"{fields['modes']}, for {users} clients",
            fix="lower the weights or raise users",
        )

    network = config["model"]["clients"][0]["model"]
    clients_per_weight, rest = divmod(users, sum(weights))
    groups = []
    for level, weight in zip(levels, weights, strict=True):
        groups.append({"count": clients_per_weight * weight, "level": level, "model": network})
    groups[-1]["count"] += rest  # as in the released code
    config["model"]["clients"] = groups
    return weights


def _with(node: Any, **arguments: Any) -> Any:
    """Return a class in a configuration, with those of the arguments that are no DEFAULTS."""
    new = {name: value for name, value in arguments.items() if DEFAULTS.get(name) != value}
    if not new:
        return node
    class_node: dict[str, Any] = {"class_path": node} if isinstance(node, str) else node
    return {**class_node, "init_args": {**class_node.get("init_args", {}), **new}}


def with_configurations(argv: Sequence[str]) -> list[str]:
    """Replace every `control:DATA:STRING` of a command line by its configuration, as JSON.

    The configuration names the run after the string.
    """
    words = list(argv)
    for position, word in enumerate(words):
        before, prefix, text = word.partition(PREFIX)
        if not prefix:
            continue
        # Either `--config=control:...` or `--config control:...`.
        option = before.removesuffix("=")
        if not option:
            option = words[position - 1]
        if option in ("--config", "-c"):
            config = configuration(text)
            config["trainer"]["name"] = text.replace(":", "-")
            words[position] = before + json.dumps(config)
    return words


def explain(text: str) -> None:
    """Print the configuration of `DATA:STRING`, with what its fields say as comments."""
    config = json.loads(json.dumps(configuration(text)))  # copied, so that YAML has no anchors
    _, _, string = text.rpartition(":")
    print(f"# HeteroFL: lightfed fit --config {PREFIX}{text}")
    for name, word in fields_of(string).items():
        _, meaning = FIELDS[name]
        print(f"#   {name:<12}{word:<10}  {meaning}")
    print(yaml.safe_dump(config, sort_keys=False, width=200, default_flow_style=None), end="")
