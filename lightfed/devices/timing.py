"""Makes the clock of a fleet from the devices of its clients and the policy of its server."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightfed.api.clock import Clock
from lightfed.api.fleet import Fleet
from lightfed.devices.device_clock import DeviceClock
from lightfed.devices.devices import KEY as DEVICES
from lightfed.devices.devices import Devices
from lightfed.devices.policy import KEY as POLICY
from lightfed.devices.policy import Policy
from lightfed.local.group_state import GroupState
from lightfed.local.hooks import Hooks
from lightfed.utils.errors import UserError


@dataclass(frozen=True)
class Timing:
    """Makes a fleet's clock: `Fleet(..., timing=Timing(devices, policy))`.

    A method that needs virtual time names its default as `timing` in its class.

    Attributes:
        devices: The clients' devices. By default those of the algorithm's own timing; if that has
            none either, rounds take no time.
        policy: When the server merges; by default when all clients have sent.
    """

    devices: Devices | None = None
    policy: Policy | None = None

    def __call__(self, fleet: Fleet) -> Clock:
        """Return the clock of a fleet that has its groups and its ledger.

        Raises:
            UserError: The method takes no policy, or not this one; there is a policy, but there are
                no devices; or a device has a speed, and the FLOPs of its group are not known.
        """
        devices = self.devices
        if devices is None and isinstance(fleet.algorithm.timing, Timing):
            devices = fleet.algorithm.timing.devices

        if self.policy is not None:
            check_policy(self.policy, fleet.algorithm)
            if devices is None:
                raise UserError(
                    POLICY,
                    "given, but sessions take no time",
                    "give model.devices, which may be {}",
                )
            self.policy.check(fleet.sampled, len(fleet.seen))
        if devices is None:
            return Clock(fleet.sampled, fleet.clients, fleet.seed, fleet.seen)

        counts = {state.name: state.group.count for state in fleet.groups}
        rates = devices.of(counts, seed=fleet.seed)
        if np.isfinite(rates["flops"]).any():
            check_flops(fleet.groups, "flops")
        if rates["joules_per_flop"].any():
            check_flops(fleet.groups, "joules_per_flop")
        return DeviceClock(
            devices,
            rates,
            fleet.ledger,
            sampled=fleet.sampled,
            policy=self.policy,
            seed=fleet.seed,
            seen=fleet.seen,
        )


def check_policy(policy: Policy, algorithm: Hooks) -> None:
    """Refuse a policy that the method cannot work with."""
    if algorithm.no_policy:
        raise UserError(POLICY, algorithm.no_policy, "leave it out")

    # A subclass changes the mean: every class has to say of itself that late updates fit into it.
    why_not = algorithm.no_late
    if not why_not and not vars(type(algorithm)).get("takes_late", False):
        name = type(algorithm).__name__
        why_not = f"{name} does not say that a late update fits into its mean"
    if policy.late == "keep" and why_not:
        raise UserError(f"{POLICY}.late", f"keep, but {why_not}", "drop late updates")


def check_flops(groups: Sequence[GroupState], name: str) -> None:
    """Refuse a price of FLOPs for a group whose FLOPs cannot be counted.

    Args:
        groups: The groups of the fleet.
        name: What of the devices has the price: their speed, or their energy.
    """
    for state in groups:
        if not state.flops:
            found = f"given, and the FLOPs of group {[state.name]} are not known"
            raise UserError(f"{DEVICES}.{name}", found, "leave it out, or define a forward")


def clock_of(fleet: Fleet) -> DeviceClock:
    """Return the clock of a fleet, for a method that sets the time by a rule of its own.

    Raises:
        AssertionError: The fleet has no devices: the class of the method names no `timing`.
    """
    assert isinstance(fleet.clock, DeviceClock), "name a timing in the class of the method"
    return fleet.clock
