"""What a configuration adds to any method, checked against what the method takes."""

from collections.abc import Sequence

import numpy as np
import torch

from lightfed.devices.device_clock import DeviceClock
from lightfed.devices.devices import Devices
from lightfed.devices.policy import Policy
from lightfed.local.client_group import GroupState
from lightfed.local.hooks import Hooks, LocalPenalty
from lightfed.models.personal import personal_tensors
from lightfed.state.costs import Ledger
from lightfed.utils.errors import require


def check_additions(
    algorithm: Hooks,
    penalties: Sequence[LocalPenalty],
    *,
    server_optimizer: bool,
    keep_optimizer: bool,
    policy: Policy | None,
) -> None:
    """Refuse what the algorithm does not take, with its reason."""
    why, fix = algorithm.no_server_step, "leave it out, or choose a method that merges models"
    require(not (server_optimizer and why), "model.server_optimizer", why, fix)
    why, fix = algorithm.no_kept_optimizer, "leave it out"
    require(not (keep_optimizer and why), "model.keep_optimizer", f"true, but {why}", fix)
    pulls = [type(h).__name__ for h in (algorithm, *penalties) if h.overrides("proximal")]
    name = type(algorithm).__name__
    for penalty in penalties:
        kind = type(penalty).__name__
        of_the_method = algorithm.local_penalty
        twice = penalty is not of_the_method and type(of_the_method) is type(penalty)
        require(not twice, "model.local_penalty", f"{kind}, and {name} has one of its own", fix)
        why = algorithm.no_memory if penalty.stateful else ""
        require(not why, "model.local_penalty", f"{kind}, but with {name} {why}", fix)
    found = f"{''.join(pulls[-1:])}, and {name} has a pull of its own"
    require(len(pulls) < 2, "model.local_penalty", found, fix)
    if policy is not None:
        require(not algorithm.no_policy, "model.policy", algorithm.no_policy, fix)
        declared = vars(type(algorithm)).get("takes_late", False)
        found = f"keep, and {name} does not say that a late update fits into its mean"
        fits = policy.late == "drop" or declared
        require(fits, "model.policy.late", found, "drop late updates")


def personal_of(
    algorithm: Hooks, groups: Sequence[GroupState], chosen: Sequence[str], device: torch.device
) -> frozenset[str]:
    """Names of the algorithm's and the configured personal tensors; sets those of the groups."""
    why, found = algorithm.no_personal, set[str]()
    if why is None:
        why = "its clients keep models of their own" if algorithm.stateful else ""
    refused = f"{list(chosen)}, but of {type(algorithm).__name__} {why}"
    require(not (chosen and why), "model.personal", refused, "leave it out")
    for state in groups:
        found |= algorithm.personal(state.module) | personal_tensors(state.module, chosen)
    for state in groups:
        state.personal = state.layout.positions(found).to(device)
        shares = len(state.personal) < state.layout.parameter_numel
        fix = "choose fewer, or Standalone"
        require(shares, "model.personal", f"all tensors of group {state.name}", fix)
    return frozenset(found)


def clock_of(
    devices: Devices | None,
    policy: Policy | None,
    groups: Sequence[GroupState],
    ledger: Ledger,
    *,
    sampled: int,
    seed: int,
) -> DeviceClock | None:
    """The virtual clock of the clients' devices; None without any."""
    found, fix = "given, and sessions take no time", "give model.devices, which may be {}"
    require(policy is None or devices is not None, "model.policy", found, fix)
    if devices is None:
        return None
    if policy is not None:
        policy.check(sampled, ledger.clients)
    clients = [(state.group.count, state.group.device) for state in groups]
    values = devices.of(clients, seed=seed)
    clock = DeviceClock(devices, values, ledger, sampled=sampled, policy=policy, seed=seed)
    unknown = [state.name for state in groups if not state.flops]
    found = f"given, and the FLOPs of group {unknown[:1]} are not known"
    fits = not unknown or not np.isfinite(values["flops"]).any()
    require(fits, "model.devices.flops", found, "leave it out, or define a forward")
    return clock
