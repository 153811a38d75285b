"""When the server closes a round, and what happens to late updates and to clients that leave.

Over-selection with a deadline is that of Bonawitz et al. (MLSys 2019). A quorum with a grace period
is that of Decoupled DiLoCo (arXiv:2604.21428). A quorum of K with late updates that are kept is the
buffer of FedBuff (Nguyen et al., AISTATS 2022), for any method that takes late updates. Clients
that leave and send what they have done are those of FedProx and FedNova. A learned deadline is
smoothed over rounds as the round-trip times of TCP are (RFC 6298, section 2.3), and is a quantile
instead of a mean plus deviations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightfed.utils.counts import rounded_up
from lightfed.utils.errors import UserError
from lightfed.utils.rng import numpy_generator

KEY = "model.policy"


@dataclass(frozen=True)
class LearnedDeadline:
    """A deadline that follows the arrivals of earlier rounds.

    With q_t the quantile of the durations of the sessions whose updates arrived while round t was
    under way, those of earlier rounds among them,

        d_0 = infinity,   d_1 = q_0,   d_{t+1} = (1 - g) d_t + g q_t

    The first round waits for all. A round in which nothing arrives changes nothing. An update that
    comes too late is measured when it arrives, so that slow clients are neither forgotten nor known
    too early.

    Attributes:
        quantile: The share of the sessions that shall be in time, in (0, 1].
        weight: g, the weight of the newest round, in (0, 1].
    """

    quantile: float
    weight: float = 0.5

    def check(self) -> None:
        """Refuse values that are outside of their range.

        Raises:
            UserError: It names the key.
        """
        for name in ("quantile", "weight"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise UserError(
                    f"{KEY}.deadline.{name}", str(value), "give a number above 0 and at most 1"
                )

    def after(self, seconds: float | None, durations: Sequence[float]) -> float | None:
        """Return the deadline of the next round, in virtual seconds.

        Args:
            seconds: d_t, the deadline of this round; None if it had none.
            durations: Of the sessions whose updates arrived in this round, in seconds.
        """
        if len(durations) == 0:
            return seconds

        # The smallest duration that at least this share of the sessions did not exceed: one that
        # was measured, so that a quantile of 1 waits for the slowest.
        newest = float(np.quantile(durations, self.quantile, method="inverted_cdf"))
        if seconds is None:
            return newest
        return (1 - self.weight) * seconds + self.weight * newest


@dataclass(frozen=True)
class Policy:
    """What the server waits for; by default for all clients of a round, none of which leaves.

    Attributes:
        deadline: Virtual seconds after which the server merges what it has; or how it learns them.
        over_select: Share of clients that are asked in addition. The round ends when the configured
            number of clients have answered.
        quorum: Number of updates after which the server waits no longer than `grace`.
        grace: Virtual seconds that the server still waits after the quorum.
        late: "drop" discards a late update. "keep" keeps it until it arrives, and merges it in that
            round, as a change from what its client was sent. The client is not asked before.
        exponent: e; a kept update that is tau rounds late has the weight (1 + tau)^-e in the mean.
        dropout: Probability that a client leaves during its session.
        partial: Whether what a leaving client has done, a share of its steps drawn uniformly, is
            sent ("keep") or lost ("lose").
    """

    deadline: float | LearnedDeadline | None = None
    over_select: float = 0.0
    quorum: int | None = None
    grace: float = 0.0
    late: Literal["drop", "keep"] = "drop"
    exponent: float = 0.5
    dropout: float = 0.0
    partial: Literal["keep", "lose"] = "lose"

    @property
    def waits(self) -> bool:
        """Whether the server waits for all clients of a round."""
        return self.deadline is None and self.quorum is None and not self.over_select

    @property
    def drops_late(self) -> bool:
        """Whether a session may come to nothing because it takes too long."""
        return not self.waits and self.late == "drop"

    def check(self, sampled: int, clients: int) -> None:
        """Refuse values that do not fit a federation.

        Args:
            sampled: Number of clients in a round.
            clients: Number of clients in the federation.

        Raises:
            UserError: A value is out of its range, does not fit the federation, or has no effect.
        """
        self._check_waiting(sampled, clients)

        if self.late == "keep" and self.waits:
            raise UserError(
                f"{KEY}.late", "keep, but no update can be late", "give a deadline or a quorum"
            )

        if not 0 <= self.dropout < 1:
            raise UserError(f"{KEY}.dropout", str(self.dropout), "give a probability below 1")

        if not self.exponent >= 0:
            raise UserError(f"{KEY}.exponent", str(self.exponent), "give 0 or more")

    def _check_waiting(self, sampled: int, clients: int) -> None:
        """Refuse unusable numbers of updates and times to wait for; arguments as for `check`."""
        asked = self.selected(sampled)

        if isinstance(self.deadline, LearnedDeadline):
            self.deadline.check()
        elif self.deadline is not None and not self.deadline > 0:
            raise UserError(f"{KEY}.deadline", str(self.deadline), "give seconds > 0")

        if self.quorum is not None:
            if not 1 <= self.quorum <= asked:
                raise UserError(
                    f"{KEY}.quorum",
                    f"{self.quorum} of {asked} clients",
                    "give at least 1 and at most all of a round",
                )
            if self.over_select:
                raise UserError(
                    f"{KEY}.quorum", "given together with over_select", "give one of the two"
                )

        if not self.over_select >= 0:
            raise UserError(f"{KEY}.over_select", str(self.over_select), "give 0 or more")
        if asked > clients:
            raise UserError(
                f"{KEY}.over_select",
                f"{self.over_select:g} more than {sampled} of {clients} clients",
                "lower it or model.fraction",
            )

        if not self.grace >= 0:
            raise UserError(f"{KEY}.grace", str(self.grace), "give 0 or more")
        if self.grace and self.quorum is None and not self.over_select:
            raise UserError(f"{KEY}.grace", "given without a quorum", "give a quorum")

    def selected(self, sampled: int) -> int:
        """Return the number of clients to ask, so that `sampled` of them answer."""
        return rounded_up(sampled * (1 + self.over_select))

    def enough(self, sampled: int, under_way: int) -> int:
        """Return the number of updates that the server waits for.

        Args:
            sampled: Number of clients in a round.
            under_way: Number of updates that have not arrived.
        """
        if self.over_select:
            wanted = sampled
        elif self.quorum is not None:
            wanted = self.quorum
        else:
            wanted = under_way
        return min(wanted, under_way)

    def leaving(self, clients: Sequence[int], *, of: int, t: int, seed: int) -> dict[int, float]:
        """Return the clients that leave in round t, and the share of their steps they complete.

        Args:
            clients: The clients of the round.
            of: Number of clients in the federation. All of them have draws, so that a client's
                draw does not depend on who else takes part.
            t: Number of the round.
            seed: Of the run.
        """
        if not self.dropout:
            return {}

        draws, shares = numpy_generator(seed, "dropout", t).random((2, of))
        return {client: float(shares[client]) for client in clients if draws[client] < self.dropout}
