"""When the server closes a round, and what becomes of updates that are late or of clients that go.

Over-selection with a deadline is that of Bonawitz et al. (MLSys 2019), a quorum with a grace window
that of Decoupled DiLoCo (arXiv:2604.21428). A quorum of K with late updates that are kept is the
buffer of FedBuff (Nguyen et al., AISTATS 2022) for means of models. Clients that leave and send
what they have done are those of FedProx and FedNova.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import require
from lightfed.utils.rng import numpy_generator

KEY = "model.policy"


@dataclass(frozen=True)
class Policy:
    """What the server waits for; by default for all clients of a round, which never leave it.

    Attributes:
        deadline: Virtual seconds after which the server merges what it has.
        over_select: Share of clients that are asked in addition; the round ends when as many as
            configured have answered.
        quorum: Number of updates after which the server waits no longer than `grace`.
        grace: Virtual seconds that it still waits after the quorum.
        late: A late update is dropped; or kept until it arrives, and merged in that round as an
            update of the model of that time. Its client is not asked before.
        exponent: e; a kept update that is tau rounds late has the weight (1 + tau)^-e in the mean.
        dropout: Probability that a client leaves during its session.
        partial: What it has done until then, a share of its steps drawn uniformly, is sent (keep)
            or lost (lose).
    """

    deadline: float | None = None
    over_select: float = 0.0
    quorum: int | None = None
    grace: float = 0.0
    late: Literal["drop", "keep"] = "drop"
    exponent: float = 0.5
    dropout: float = 0.0
    partial: Literal["keep", "lose"] = "lose"

    @property
    def waits(self) -> bool:
        """Whether the server waits for all."""
        return self.deadline is None and self.quorum is None and not self.over_select

    @property
    def drops_late(self) -> bool:
        """Whether a session may come to nothing because it takes too long."""
        return not self.waits and self.late == "drop"

    def check(self, sampled: int, clients: int) -> None:
        """Reject values that do not fit a federation of so many clients, some of them sampled."""
        deadline, quorum, many = self.deadline, self.quorum, self.selected(sampled)
        asked = f"{self.over_select:g} more than {sampled} of {clients} clients"
        early = quorum is not None or self.over_select > 0
        for name, fits, found, fix in (
            ("deadline", deadline is None or deadline > 0, deadline, "give seconds > 0"),
            ("quorum", quorum is None or 1 <= quorum <= many, f"{quorum} of {many} clients",
             "give at least 1 and at most all of a round"),
            ("quorum", quorum is None or not self.over_select, "given, and over_select",
             "give one of the two"),
            ("over_select", self.over_select >= 0, self.over_select, "give 0 or more"),
            ("over_select", many <= clients, asked, "lower it or model.fraction"),
            ("grace", self.grace >= 0, self.grace, "give 0 or more"),
            ("grace", early or not self.grace, "given without a quorum", "give a quorum"),
            ("late", self.late == "drop" or not self.waits, "keep, and none is late",
             "give a deadline or a quorum"),
            ("dropout", 0 <= self.dropout < 1, self.dropout, "give a probability below 1"),
            ("exponent", self.exponent >= 0, self.exponent, "give 0 or more"),
        ):  # fmt: skip
            require(fits, f"{KEY}.{name}", found, fix)

    def selected(self, sampled: int) -> int:
        """The number of clients to ask for so many answers."""
        return rounded_up(sampled * (1 + self.over_select))

    def enough(self, sampled: int, under_way: int) -> int:
        """The number of updates that the server waits for, of those under way."""
        wanted = sampled if self.over_select else self.quorum or under_way
        return min(wanted, under_way)

    def leaving(self, clients: Sequence[int], *, of: int, t: int, seed: int) -> dict[int, float]:
        """The clients that leave in round t, and the share of their sessions that they do.

        `of` so many clients each has the draws at its number.
        """
        if not self.dropout:
            return {}
        draws, shares = numpy_generator(seed, "dropout", t).random((2, of))
        return {k: float(shares[k]) for k in clients if draws[k] < self.dropout}
