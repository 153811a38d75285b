"""The fields of a control string of HeteroFL's released code."""

import re
from dataclasses import dataclass

from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import UserError
from lightfed.utils.keys import LEVELS

NORMS = ("bn", "in", "ln", "gn", "none")
# By field: a regular expression of its values, and the fix for the error message.
_ALLOWED = {
    "federated": ("1", "give 1: lightfed trains federations only"),
    "users": (r"0*[1-9]\d*", "give a number of clients, such as 100"),
    "fraction": (
        r"0+\.\d*[1-9]\d*|0*1(\.0+)?",
        "give the share of a round's participants, above 0 and up to 1",
    ),
    "split": (
        r"iid|non-iid-[1-9]\d*",
        "give iid, or non-iid-n with n classes a client, as in non-iid-2",
    ),
    "assignment": ("fix|dynamic", "give fix or dynamic"),
    "modes": (
        rf"[{''.join(LEVELS)}][1-9]\d*(-[{''.join(LEVELS)}][1-9]\d*)*",
        "give levels of a to e with weights of 1 or more, as in a2-b8",
    ),
    "norm": ("|".join(NORMS), f"give one of {', '.join(NORMS)}"),
    "scale": ("[01]", "give 0 or 1"),
    "mask": ("[01]", "give 0 or 1"),
}
FIELDS = tuple(_ALLOWED)


@dataclass(frozen=True)
class Control:
    """A control string, field by field.

    Attributes:
        text: the whole string.
        users: number of clients.
        fraction: share of them that take part in a round.
        classes: per client in `non-iid-n`; None for iid.
        dynamic: clients draw a new level in every round.
        modes: level and weight, in order; the first is the level of the global model.
        norm: layer of the models.
        scale: Scaler in the models.
        mask: masked cross-entropy.
    """

    text: str
    users: int
    fraction: float
    classes: int | None
    dynamic: bool
    modes: tuple[tuple[str, int], ...]
    norm: str
    scale: bool
    mask: bool

    @classmethod
    def parse(cls, text: str) -> "Control":
        """Read a control string; a UserError names the first invalid field."""
        words = text.split("_")
        if len(words) != len(FIELDS):
            fix = f"give {len(FIELDS)} of them: {'_'.join(FIELDS)}"
            raise UserError("control", f"{len(words)} fields in {text!r}", fix)
        word = dict(zip(FIELDS, words, strict=True))
        for name, (pattern, fix) in _ALLOWED.items():
            if not re.fullmatch(pattern, word[name]):
                raise UserError(f"control.{name}", repr(word[name]), fix)
        users, classes = int(word["users"]), word["split"].removeprefix("non-iid-")
        return cls(
            text,
            users,
            float(word["fraction"]),
            None if classes == "iid" else int(classes),
            word["assignment"] == "dynamic",
            _modes(word["modes"], users),
            word["norm"],
            word["scale"] == "1",
            word["mask"] == "1",
        )

    @property
    def participants(self) -> int:
        """Number of clients in a round."""
        return rounded_up(self.fraction * self.users)

    @property
    def unit(self) -> int:
        """Number of clients for a weight of 1."""
        return self.users // sum(weight for _, weight in self.modes)

    @property
    def counts(self) -> list[int]:
        """Number of clients of every mode; the last one takes the remainder."""
        counts = [weight * self.unit for _, weight in self.modes]
        return [*counts[:-1], self.users - sum(counts[:-1])]


def _modes(text: str, users: int) -> tuple[tuple[str, int], ...]:
    modes = [(mode[0], int(mode[1:])) for mode in text.split("-")]
    first, widest = modes[0][0], min(level for level, _ in modes)
    if first > widest:
        found = f"{text}, where level {widest} is wider than the global level {first}"
        raise UserError("control.modes", found, "put the widest level first")
    total = sum(weight for _, weight in modes)
    if total > users:
        found = f"{text}, whose weights add up to {total}, for {users} clients"
        raise UserError("control.modes", found, "lower the weights or raise users")
    return tuple(modes)
