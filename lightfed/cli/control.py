"""HeteroFL's control strings: their meaning and their configuration.

The released code of Diao et al. names an experiment by nine fields, such as
`1_100_0.1_iid_fix_a2-b8_bn_1_1`: federated, users, fraction, split, assignment, modes, norm, scale,
mask. `lightfed control STRING` explains one and prints its configuration. `--config` accepts
`control:CIFAR10:STRING` instead of a file.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]

from lightfed.cli.control_config import SETTINGS, Setting, configuration, setting_of
from lightfed.cli.control_string import FIELDS, Control
from lightfed.utils.errors import UserError
from lightfed.utils.keys import LEVELS

PREFIX = "control:"
_NORMS = {
    "bn": "batch normalisation without statistics, which are estimated for evaluation",
    "in": "instance normalisation",
    "ln": "layer normalisation",
    "gn": "group normalisation of 4 groups",
    "none": "no normalisation",
}


def sentences(control: Control, data: str) -> list[str]:
    """The meaning of a control string, a line per field."""
    setting, word = setting_of(data), dict(zip(FIELDS, control.text.split("_"), strict=True))
    whole = "the whole test set" if setting.rows else "the whole test set and every client's own"
    said = {
        "federated": "a federation, evaluated on " + whole,
        "users": f"{control.users} clients",
        "fraction": f"a round has {control.participants} of them, redrawn each time",
        "split": _split(control, setting),
        "assignment": _assignment(control),
        "modes": _levels(control),
        "norm": _NORMS[control.norm],
        "scale": "activations are divided by the relative width in training (Scaler)",
        "mask": "in a client's loss, logits of labels that it does not hold are zero",
    }
    if setting.rows:
        said["norm"] = "no effect: a Transformer always has layer normalisation"
        said["scale"] = "no effect: a Transformer always has Scalers"
    elif not control.scale:
        said["scale"] = "no Scaler: activations of narrow models are not rescaled"
    if not control.mask:
        said["mask"] = "no mask in the loss; output rows of absent labels are still not merged"
    size = max(len(text) for text in word.values())
    return [f"{word[name]:<{size}}  {said[name]}" for name in FIELDS]


def _split(control: Control, setting: Setting) -> str:
    if setting.rows:
        return f"the text is folded to {control.users} rows, one a client"
    if control.classes is None:
        return "every client has the same number of samples, drawn at random"
    return f"a client has samples of at most {control.classes} classes"


def _assignment(control: Control) -> str:
    weights = [weight for _, weight in control.modes]
    total = sum(weights)
    if not control.dynamic:
        over = control.users - control.unit * total
        rest = f"; the remaining {over} have the last level" if over else ""
        return f"a client keeps its level; a weight of 1 is {control.unit} clients{rest}"
    shares = ", ".join(f"{weight / total:g}" for weight in weights)
    return f"clients draw a level for every round, with probabilities {shares}"


def _levels(control: Control) -> str:
    parts, first = [], 0
    for (level, _), count in zip(control.modes, control.counts, strict=True):
        who = "" if control.dynamic else f": clients {first} to {first + count - 1}"
        parts.append(f"{level} (width {LEVELS[level]:g}{who})")
        first += count
    return f"levels {', '.join(parts)}; the global model is of level {control.modes[0][0]}"


def with_configurations(argv: Sequence[str]) -> list[str]:
    """The words of a command line with the configuration of every `control:STRING`."""
    words = list(argv)
    for position, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in ("--config", "-c") and equals and value.startswith(PREFIX):
            words[position] = f"{option}={_inline(value)}"
        elif position and words[position - 1] in ("--config", "-c") and word.startswith(PREFIX):
            words[position] = _inline(word)
    return words


def _inline(text: str) -> str:
    """A configuration in one line, with the run's name."""
    data, control = _split_data(text.removeprefix(PREFIX), None)
    config = configuration(control, data)
    config["trainer"] = {"name": f"{data}-{control.text}", **config["trainer"]}
    return json.dumps(config)


def _split_data(text: str, data: str | None) -> tuple[str, Control]:
    """Parse `CIFAR10:STRING`, or a plain string with a separate data set."""
    prefix, colon, rest = text.rpartition(":")
    if colon and data is not None:
        raise UserError("--data", f"{data} in addition to {prefix}:", "name the data set once")
    if not colon and data is None:
        fix = f"write DATA:{text} with one of {', '.join(SETTINGS)}"
        raise UserError("control.data", "no data set", fix)
    return data or prefix, Control.parse(rest)


def explained(text: str, data: str | None) -> str:
    """A configuration file: the meaning of the string as comments, then the keys."""
    name, control = _split_data(text, data)
    config = configuration(control, name)
    dump = yaml.dump(config, Dumper=_Plain, sort_keys=False, width=200, default_flow_style=None)
    whose = "those of the released code" if setting_of(name).files else "our own"
    head = [f"HeteroFL's {control.text} on {name}:", "", *sentences(control, name), ""]
    head += [f"Rounds, optimiser and batches are {whose}.", ""]
    head += [f"  lightfed fit --config {PREFIX}{name}:{control.text}"]
    return "".join(f"# {line}".rstrip() + "\n" for line in head) + dump


class _Plain(yaml.SafeDumper):
    """Writes repeated values out instead of using anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, as every command does."""

    def error(self, message: str) -> NoReturn:
        raise UserError("control", message, "see lightfed control --help")


def main(argv: Sequence[str]) -> int:
    """Run `lightfed control`; `argv` holds the words after it."""
    parser = _Parser(
        prog="lightfed control",
        description="Explain a control string of HeteroFL's released code and print the "
        f"configuration that it stands for; `lightfed fit --config {PREFIX}DATA:STRING` runs it.",
    )
    parser.add_argument(
        "string", metavar="STRING", help="1_100_0.1_iid_fix_a2-b8_bn_1_1, also with DATA: before it"
    )
    parser.add_argument("--data", help=f"one of {', '.join(SETTINGS)} (default: MNIST)")
    asked = parser.parse_args(argv)
    data = asked.data or (None if ":" in asked.string else "MNIST")
    print(explained(asked.string, data), end="")
    return 0
