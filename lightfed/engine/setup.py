"""What happens before the first round: sessions and their packs are made, and all is checked."""

import logging
from collections.abc import Collection
from typing import Any

import torch

from lightfed.api.fleet import Fleet
from lightfed.data.batches import batch_sizes
from lightfed.data.datamodule import FederatedDataModule
from lightfed.distributed.collectives import Ranks
from lightfed.engine.run_trainer import RunTrainer
from lightfed.local import session_setup
from lightfed.local.client_group import GroupState
from lightfed.local.client_module import ClientModule
from lightfed.local.packed.rules import Packed
from lightfed.local.session_setup import OptimizerFactory
from lightfed.models.build import blank
from lightfed.utils.errors import UserError

log = logging.getLogger(__name__)


def attach_sessions(
    fleet: Fleet,
    data: FederatedDataModule,
    trainer: RunTrainer,
    optimizer: OptimizerFactory | None,
    packed: Packed,
    *,
    evaluated: bool,
) -> None:
    """Give every client group the steppers of its sessions, side by side where they may be.

    Args:
        fleet: of this rank.
        data: partitioned.
        trainer: its precision, clipping and callbacks are those of the sessions.
        optimizer: of local training; None if the clients' modules define it.
        packed: how clients train side by side.
        evaluated: whether clients are tested in some round.
    """
    runtime = session_setup.runtime_of(trainer, clips=trainer.clipping)
    steppers = [
        session_setup.client_stepper(
            state,
            position,
            optimizer,
            runtime,
            evaluated=evaluated,
            lr_factors=fleet.algorithm.lr_factors(state.module),
        )
        for position, state in enumerate(fleet.groups)
    ]
    packings = packed.packings(fleet, steppers, data, runtime)
    fleet.training.attach(runtime, steppers, packings)


def check_ranks(ranks: Ranks, clients: int) -> None:
    """Reject ranks without a client.

    Raises:
        UserError: names the flag.
    """
    if ranks.world > clients:
        found = f"{ranks.world} ranks for {clients} clients"
        raise UserError("trainer.devices", found, "use at most one rank a client")


def check_built(kinds: Collection[str], fleet: Fleet, data: FederatedDataModule) -> None:
    """Reject what clients or evaluations cannot run on.

    Raises:
        UserError: names the evaluation, or a client and the fix.
    """
    if "global" in kinds and data.pool == "union":
        found = "global, but data.pool: union deals the test samples to clients"
        raise UserError("model.evaluate", found, "set it to [personal]")
    _check_single_samples(fleet, data)
    if data.skipped_samples and fleet.ranks.rank == 0:
        log.warning(
            "data.last_batch: drop skips %d of %d training samples a pass",
            data.skipped_samples,
            sum(data.num_samples(client) for client in range(fleet.clients)),
        )


def _check_single_samples(fleet: Fleet, data: FederatedDataModule) -> None:
    """Reject batches of one sample for models that cannot train on them, before they stop a round.

    BatchNorm cannot, for example, if its feature map is a single pixel.
    """
    capable: dict[int, bool] = {}
    for client in range(fleet.clients):
        samples = _ending_on_one(fleet, data, client)
        if samples is None:
            continue
        group = fleet.home_group(client)
        if group not in capable:
            capable[group] = _trains_on_one(fleet.groups[group], data)
        if not capable[group]:
            _refuse(client, samples, data, f"which a normalisation of group {group} cannot take")


def _ending_on_one(fleet: Fleet, data: FederatedDataModule, client: int) -> int | None:
    """Size of a client's epoch whose last batch is a single sample; None if there is none."""
    for samples in data.epoch_sizes(client):
        sizes = batch_sizes(samples, data.batch_size, data.last_batch)
        if sizes[-1] == 1 and fleet.work.batches(len(sizes)) >= len(sizes):
            return samples
    return None


def _trains_on_one(state: GroupState, data: FederatedDataModule) -> bool:
    module = state.module
    training = module.training
    module.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            sample = blank(data, samples=1).to(state.store.device)
            net: Any = module.net if isinstance(module, ClientModule) else module
            if isinstance(module, ClientModule) and hasattr(net, "losses"):
                # A network that is trained but not evaluated must accept it, too.
                net.losses(sample, torch.zeros(1, dtype=torch.int64, device=sample.device))
            else:
                module(sample)
    except NotImplementedError:
        return True  # a user's module may have no forward: unknown
    except ValueError:
        return False
    finally:
        module.train(training)
    return True


def _refuse(client: int, samples: int, data: FederatedDataModule, why: str) -> None:
    if data.batch_size == 1:
        raise UserError("data.batch_size", f"single samples, {why}", "give at least 2")
    if samples == 1:
        found = f"client {client} trains on a single sample, {why}"
        if data.chunks > 1:
            raise UserError("data.chunks", f"{data.chunks}, and {found}", "lower it")
        raise UserError("data.partition", found, "deal at least 2 samples to every client")
    found = f"{data.last_batch}, and client {client} ends on a single sample, {why}"
    raise UserError("data.last_batch", found, "set it to join")
