"""The fields of a control string of HeteroFL's released code."""

import re
from dataclasses import dataclass
from typing import NoReturn

from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import UserError

LEVELS = "abcde"
FIELDS = ("federated", "users", "fraction", "split", "assignment", "modes", "norm", "scale", "mask")
NORMS = ("bn", "in", "ln", "gn", "none")


@dataclass(frozen=True)
class Control:
    """A control string, field by field.

    Attributes:
        text: as it was written.
        users: number of clients.
        fraction: of them that take part in a round.
        classes: of a client in `non-iid-n`; None for iid.
        dynamic: clients draw a level for every round, and do not keep one.
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
        """Read a control string.

        Raises:
            UserError: naming the first field that means nothing.
        """
        words = text.split("_")
        if len(words) != len(FIELDS):
            fix = f"give {len(FIELDS)} of them: {'_'.join(FIELDS)}"
            raise UserError("control", f"{len(words)} fields in {text!r}", fix)
        word = dict(zip(FIELDS, words, strict=True))
        if word["federated"] != "1":
            _refuse("federated", word, "give 1: lightfed trains federations only")
        users = int(word["users"]) if word["users"].isdecimal() else 0
        if users < 1:
            _refuse("users", word, "give a number of clients, such as 100")
        if (
            not re.fullmatch(r"\d+(\.\d+)?", word["fraction"])
            or not 0 < float(word["fraction"]) <= 1
        ):
            _refuse(
                "fraction", word, "give the share of a round's participants, above 0 and up to 1"
            )
        split = re.fullmatch(r"iid|non-iid-([1-9]\d*)", word["split"])
        if split is None:
            _refuse(
                "split", word, "give iid, or non-iid-n with n classes a client, as in non-iid-2"
            )
        if word["assignment"] not in ("fix", "dynamic"):
            _refuse("assignment", word, "give fix or dynamic")
        if word["norm"] not in NORMS:
            _refuse("norm", word, f"give one of {', '.join(NORMS)}")
        for name in ("scale", "mask"):
            if word[name] not in ("0", "1"):
                _refuse(name, word, "give 0 or 1")
        return cls(
            text,
            users,
            float(word["fraction"]),
            int(split[1]) if split[1] else None,
            word["assignment"] == "dynamic",
            _modes(word, users),
            word["norm"],
            word["scale"] == "1",
            word["mask"] == "1",
        )

    @property
    def participants(self) -> int:
        """Clients of a round."""
        return rounded_up(self.fraction * self.users)

    @property
    def unit(self) -> int:
        """Clients that a weight of 1 stands for."""
        return self.users // sum(weight for _, weight in self.modes)

    @property
    def counts(self) -> list[int]:
        """Clients of every mode; what the division leaves over goes to the last."""
        counts = [weight * self.unit for _, weight in self.modes]
        return [*counts[:-1], self.users - sum(counts[:-1])]


def width(level: str) -> float:
    """The rate of a level: a 1, b 1/2, ..., e 1/16."""
    return 0.5 ** LEVELS.index(level)


def _modes(word: dict[str, str], users: int) -> tuple[tuple[str, int], ...]:
    found = [re.fullmatch(rf"([{LEVELS}])([1-9]\d*)", mode) for mode in word["modes"].split("-")]
    modes = [(mode[1], int(mode[2])) for mode in found if mode is not None]
    if len(modes) < len(found):
        _refuse("modes", word, "give levels of a to e with weights of 1 or more, as in a2-b8")
    first, widest = modes[0][0], min(level for level, _ in modes)
    if first > widest:
        found_levels = (
            f"{word['modes']}, where level {widest} is wider than the global level {first}"
        )
        raise UserError("control.modes", found_levels, "put the widest level first")
    total = sum(weight for _, weight in modes)
    if total > users:
        found_sum = f"{word['modes']}, whose weights add up to {total}, for {users} clients"
        raise UserError("control.modes", found_sum, "lower the weights or raise users")
    return tuple(modes)


def _refuse(name: str, word: dict[str, str], fix: str) -> NoReturn:
    raise UserError(f"control.{name}", repr(word[name]), fix)
