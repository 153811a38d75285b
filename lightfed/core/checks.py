"""What can be checked only when the data is dealt and the models are built."""

import torch

from lightfed.core.cohort import CohortState, blank
from lightfed.core.fleet import Fleet
from lightfed.data.datamodule import FederatedDataModule
from lightfed.utils.errors import UserError


def check_single_samples(fleet: Fleet, data: FederatedDataModule) -> None:
    """Refuse batches of one sample for models that cannot train on one, before they stop a round.

    BatchNorm, for one, cannot where its feature map is a single pixel.

    Raises:
        UserError: naming the client and what would help.
    """
    capable: dict[int, bool] = {}
    for client in range(fleet.clients):
        batches, samples = data.num_batches(client), data.num_samples(client)
        last = samples - (batches - 1) * data.batch_size
        if last != 1 or fleet.work.batches(batches) < batches:
            continue
        cohort = fleet.home_cohort(client)
        if cohort not in capable:
            capable[cohort] = _trains_on_one(fleet.cohorts[cohort], data)
        if not capable[cohort]:
            _refuse(client, samples, data, f"which a normalisation of cohort {cohort} cannot take")


def _trains_on_one(state: CohortState, data: FederatedDataModule) -> bool:
    module = state.module
    training = module.training
    module.train()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module(blank(data, samples=1).to(state.store.device))
    except NotImplementedError:
        return True  # a user's module may have no forward, and then nobody knows
    except ValueError:
        return False
    finally:
        module.train(training)
    return True


def _refuse(client: int, samples: int, data: FederatedDataModule, why: str) -> None:
    if data.batch_size == 1:
        raise UserError("data.batch_size", f"single samples, {why}", "give at least 2")
    if samples == 1:
        found = f"client {client} holds a single sample, {why}"
        raise UserError("data.partition", found, "deal at least 2 samples to every client")
    found = f"{data.last_batch}, and client {client} ends on a single sample, {why}"
    raise UserError("data.last_batch", found, "set it to join")
