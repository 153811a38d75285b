"""HeteroFL's control strings: `--config control:DATA:STRING`, and what it says.

The released code of Diao et al. names an experiment by nine fields, such as
`1_100_0.1_iid_fix_a2-b8_bn_1_1`. All other hyper-parameters are those of its data set: a string
stands for edits of a file in `configs/heterofl`, which
`lightfed configs control:DATA:STRING` prints.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightfed.utils.errors import require

PREFIX = "control:"
CONFIGS = Path(__file__).parents[2] / "configs" / "heterofl"
DATA = ("MNIST", "MNIST-ResNet", "CIFAR10", "WikiText2", "Digits", "Prose")
# By field: a regular expression of its values, and what they are.
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
USUAL = {"norm": "bn", "scaler": True, "assignment": "fix", "mask": True, "rows": 100}


def fields_of(string: str) -> dict[str, str]:
    """The words of a control string by field; a UserError names the first invalid one."""
    words = string.split("_")
    fix = f"give {len(FIELDS)} of them: {'_'.join(FIELDS)}"
    require(len(words) == len(FIELDS), "control", f"{len(words)} fields in {string!r}", fix)
    for word, (name, (pattern, meaning)) in zip(words, FIELDS.items(), strict=True):
        fits = re.fullmatch(pattern, word) is not None
        require(fits, f"control.{name}", repr(word), f"give {meaning}")
    return dict(zip(FIELDS, words, strict=True))


def configuration(text: str) -> dict[str, Any]:
    """The configuration of `DATA:STRING`.

    A UserError if a field or the data set is not known, or the data set has no such split.
    """
    data, _, string = text.rpartition(":")
    word = fields_of(string)
    fix = f"write DATA:{string} with one of {', '.join(DATA)}"
    require(data in DATA, "control.data", repr(data), fix)
    config = yaml.safe_load((CONFIGS / f"{data.lower()}.yaml").read_text("utf-8"))
    model, source, users = config["model"], config["data"], int(word["users"])
    network = model["clients"][0]["model"]
    if source["partition"] == "Natural":  # a client is a row of a text
        require(word["split"] == "iid", "control.split", f"{word['split']} of {data}", "give iid")
        source["dataset"] = _with(source["dataset"], rows=users)
    else:
        network = _with(network, norm=word["norm"], scaler=word["scale"] == "1")
    if word["split"] != "iid":
        classes = int(word["split"].removeprefix("non-iid-"))
        source["partition"] = _with("Classes", per_client=classes, strict_paper=True)
        config["trainer"]["max_epochs"] *= 2
        schedule = model["lr_schedule"]["init_args"]
        schedule["milestones"] = [2 * t for t in schedule["milestones"]]
    modes = [(mode[0], int(mode[1:])) for mode in word["modes"].split("-")]
    weights = [weight for _, weight in modes]
    found, fix = f"{word['modes']}, for {users} clients", "lower the weights or raise users"
    require(sum(weights) <= users, "control.modes", found, fix)
    size, rest = divmod(users, sum(weights))
    model["clients"] = [
        {"count": size * weight, "level": level, "model": network} for level, weight in modes
    ]
    model["clients"][-1]["count"] += rest  # as in the released code
    redrawn = {"level_weights": weights} if word["assignment"] == "dynamic" else {}
    switches = {"assignment": word["assignment"], **redrawn, "mask": word["mask"] == "1"}
    model["algorithm"] = _with(model["algorithm"], **switches)
    model["fraction"] = float(word["fraction"])
    return config


def _with(node: Any, **arguments: Any) -> Any:
    """A class in a configuration, with those of the arguments that are not USUAL."""
    new = {name: value for name, value in arguments.items() if USUAL.get(name) != value}
    found: dict[str, Any] = {"class_path": node} if isinstance(node, str) else node
    return {**found, "init_args": {**found.get("init_args", {}), **new}} if new else node


def with_configurations(argv: Sequence[str]) -> list[str]:
    """A command line with the configuration of every `control:DATA:STRING`, and its run's name."""
    words = list(argv)
    for position, word in enumerate(words):
        head, prefix, text = word.partition(PREFIX)
        if prefix and (head.removesuffix("=") or words[position - 1]) in ("--config", "-c"):
            config = configuration(text)
            config["trainer"]["name"] = text.replace(":", "-")
            words[position] = head + json.dumps(config)
    return words


def explain(text: str) -> None:
    """Print the configuration of `DATA:STRING`, with what its fields say as comments."""
    content = json.loads(json.dumps(configuration(text)))  # without anchors
    print(f"# HeteroFL: lightfed fit --config {PREFIX}{text}")
    for name, word in fields_of(text.rpartition(":")[2]).items():
        print(f"#   {name:<12}{word:<10}  {FIELDS[name][1]}")
    print(yaml.safe_dump(content, sort_keys=False, width=200, default_flow_style=None), end="")
