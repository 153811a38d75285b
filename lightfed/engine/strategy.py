"""The strategy that starts a federation's ranks.

It uses Lightning's launchers and process groups, no DDP wrapper, and sharded atomic checkpoints.
"""

import atexit
import logging
import os
import socket
import subprocess
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightfed.distributed import watch
from lightfed.distributed.cards import card_of, exchange, sharing
from lightfed.distributed.collectives import TIMEOUT, Ranks, leave
from lightfed.distributed.interface import interface_of, listen, sockets_on
from lightfed.distributed.slurm import check_launch, check_rank
from lightfed.distributed.steps import guard_process_groups, refuse_in_step
from lightfed.runs import checkpoint, federation_state
from lightfed.runs.run_logger import RunLogger
from lightfed.runs.saving import Checkpoints
from lightfed.utils.errors import UserError, require
from lightfed.utils.lightning_private import _PATH, _SubprocessScriptLauncher
from lightfed.utils.process import is_interactive, started_in

log = logging.getLogger(__name__)

T = TypeVar("T")

_LAST_WORDS = 2.0  # seconds for ranks to exit by themselves before they are killed


@cache
def _leave_at_exit() -> None:
    atexit.register(leave)


class Relaunch(_SubprocessScriptLauncher):
    """Runs the script again for each further rank, in the folder in which it was started.

    A script that changes its folder before it trains does so once more in each rank.
    """

    @override
    def _call_children_scripts(self) -> None:
        here = os.getcwd()
        os.chdir(started_in())
        try:
            super()._call_children_scripts()
        finally:
            os.chdir(here)


class FederatedStrategy(DDPStrategy):
    """Starts ranks (popen, torchrun, SLURM) over gloo or NCCL; each trains its own clients.

    All ranks compute the same server state, so nothing is wrapped or broadcast. They meet in a
    process group over a store on one interface.

    Attributes:
        ranks_per_device: number of ranks per GPU; set before the devices are known.
        checkpoints: of the run.
    """

    strategy_name = "federated"
    ranks_per_device = 1
    _shares_cards = False  # ranks have turned out to have the same GPU
    # Of the process: a trainer that fails before the ranks meet leaves it to the next one.
    _listener: ClassVar[socket.socket | None] = None

    def __init__(self, *, timeout: float = TIMEOUT.total_seconds() / 60) -> None:
        """Set how long ranks wait for each other; DDP's other settings do not apply.

        Args:
            timeout: Minutes that a rank waits for the others: at the start, at the end of a round's
                sessions or in a collective. Then the run ends.
        """
        if not timeout > 0:
            key = "trainer.strategy.init_args.timeout"
            raise UserError(key, f"{timeout:g} minutes", "give a time above 0")
        super().__init__(timeout=timedelta(minutes=timeout))
        self.checkpoints = Checkpoints()

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """Devices of this node's ranks, in order."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        repeated = [d for d in devices or [] for _ in range(self.ranks_per_device)]
        self._parallel_devices = repeated or None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        environment, devices = self.cluster_environment, self._parallel_devices
        assert environment is not None
        assert devices is not None
        if is_interactive() and not environment.creates_processes_externally:
            found = f"{len(devices)} in a notebook, whose ranks no script can start"
            fix = "give 1, or train by `lightfed fit`"
            require(len(devices) == 1, "trainer.devices", found, fix)
            self._launcher = None  # no script to run again
        elif not environment.creates_processes_externally:
            self._launcher = Relaunch(environment, self.num_processes, self.num_nodes)

    @override
    def _get_process_group_backend(self) -> str:
        # NCCL rejects two ranks on one device.
        shared = self.ranks_per_device > 1 or self._shares_cards
        return "gloo" if shared else super()._get_process_group_backend()

    def _find_shared_cards(self, store: Any) -> None:
        """Find whether ranks share a GPU though each was to have its own; rank 0 says so.

        A launcher can give two tasks the same GPU: all processes of a node then see it as their
        first. All ranks learn of it, and choose gloo.
        """
        card = card_of(self.root_device)
        ranks = sharing(exchange(store, card, rank=self.global_rank, world=self.world_size))
        self._shares_cards = bool(ranks)
        if ranks and self.global_rank == 0:
            log.warning(
                "ranks %s share a GPU, which NCCL refuses: all communicate over gloo, through "
                "pinned memory; give each a GPU of its own, or set trainer.ranks_per_device",
                ", ".join(map(str, ranks)),
            )

    def check_launch(self, nodes: int, clients: int | None) -> None:
        """Reject ranks that nothing starts or that cannot run, before they wait for each other.

        `clients` is None if unknown. A UserError names the flag, or the launcher's variable.
        """
        launcher, processes = self.cluster_environment, self.num_processes
        assert launcher is not None
        if isinstance(launcher, SLURMEnvironment | LightningEnvironment):
            check_launch(
                os.environ, processes=processes, nodes=nodes, ranks_per_device=self.ranks_per_device
            )
        elif launcher.world_size() != processes * nodes:
            found = f"{processes} ranks on {nodes} nodes, where {launcher.world_size()} are started"
            raise UserError("trainer.devices", found, "make it agree with the launcher")
        check_rank(launcher.local_rank(), processes)
        if clients is not None and processes * nodes > clients:
            found = f"{processes * nodes} ranks for {clients} clients"
            raise UserError("trainer.devices", found, "use at most one rank a client")
        launches = processes > 1 and not launcher.creates_processes_externally
        if launches and "MASTER_PORT" not in os.environ:
            # Lightning would choose a free port and give it up until rank 0 listens.
            os.environ["MASTER_PORT"] = str(self.take_port())

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # An injected sampler must not split the federation's jobs again.
        return {"num_replicas": 1, "rank": 0}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self._timeout is not None
        self.ranks = Ranks(self.root_device, timeout=self._timeout)
        _leave_at_exit()
        watch.start(self.ranks, self._address, self._interface(), self._kill_launched)
        self._relieve_observer()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.place.claim(self.ranks)

    @override
    def setup_distributed(self) -> None:
        """Connect to the other ranks; a UserError if some do not connect or cannot be reached."""
        self.set_world_ranks()
        if self.world_size == 1:
            return  # it needs neither a group nor a port
        guard_process_groups()
        if self.num_nodes == 1:
            sockets_on(interface_of(self._address, nodes=1))
        try:
            self._meet()
            super().setup_distributed()
        except (dist.DistError, OSError) as error:
            self._relieve_observer()
            self._kill_launched()  # the others would keep waiting for this one
            assert self.cluster_environment is not None
            place = f"{self._address}:{self.cluster_environment.main_port}"
            found = f"the ranks do not meet at {place} ({str(error).splitlines()[0]})"
            fix = "start all of them, at an address and a free port that all nodes reach"
            raise UserError("MASTER_ADDR", found, fix) from error

    def _meet(self) -> None:
        """Create the process group over a store on one interface; torch's store listens on all."""
        if dist.is_initialized():
            return
        assert self.cluster_environment is not None
        assert self._timeout is not None
        meeting = self._address, self.cluster_environment.main_port
        on_cards = self.root_device.type == "cuda" and self.ranks_per_device == 1
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun keeps the store
            if on_cards:
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                theirs = dist.TCPStore(
                    *meeting, is_master=False, timeout=self._timeout, wait_for_workers=False
                )
                self._find_shared_cards(dist.PrefixStore(f"attempt {attempt}", theirs))
            return
        if self.global_rank == 0 and self._listener is None:
            self.take_port(meeting[1])
        listener, FederatedStrategy._listener = self._listener, None  # the store's from here on
        store = dist.TCPStore(
            *meeting,
            self.world_size,
            is_master=listener is not None,
            timeout=self._timeout,
            master_listen_fd=listener.detach() if listener else None,
        )
        if on_cards:
            self._find_shared_cards(store)
        backend = self._get_process_group_backend()
        dist.init_process_group(
            backend,
            store=store,
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout,
            device_id=self.root_device if backend == "nccl" else None,
        )

    @property
    def _address(self) -> str:
        """Address of rank 0, for the other ranks."""
        assert self.cluster_environment is not None
        return self.cluster_environment.main_address

    def _interface(self) -> str:
        """Interface of its node on which rank 0 listens."""
        return interface_of(self._address, nodes=self.num_nodes) if self.global_rank == 0 else ""

    def take_port(self, port: int = 0) -> int:
        """Listen where ranks will meet, on one interface; the port, a free one for 0."""
        ranks = self.num_nodes * self.num_processes
        listener = FederatedStrategy._listener = listen(self._interface(), port, backlog=ranks)
        return int(listener.getsockname()[1])

    def _launched(self) -> list[subprocess.Popen[bytes]]:
        """Processes of other ranks started by this one."""
        return getattr(self.launcher, "procs", [])

    def _kill_launched(self) -> None:
        """Kill ranks that do not exit by themselves, such as stopped ones."""
        limit = time.monotonic() + _LAST_WORDS
        for process in self._launched():
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _relieve_observer(self) -> None:
        """Stop Lightning's monitor, which kills this process when a child ends, without a word.

        It is needed until the ranks are connected, and stops when its list of children is empty.
        """
        launched = self._launched()
        if launched:
            self.launcher.procs = launched.copy()  # type: ignore[union-attr]
            launched.clear()

    @override
    def on_exception(self, exception: BaseException) -> None:
        with suppress(Exception):  # this error is reported
            self.checkpoints.finish()
        watch.fail(exception)

    @override
    def barrier(self, name: str | None = None) -> None:
        refuse_in_step("strategy.barrier")
        if name != "Trainer.save_checkpoint":  # whose ranks have waited for each other's files
            self.ranks.barrier()

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        refuse_in_step("strategy.broadcast")
        assert src == 0, "broadcasts come from rank 0"
        return cast(T, self.ranks.broadcast(obj))

    @override
    def reduce(
        self, tensor: Tensor, group: Any | None = None, reduce_op: Any | None = "mean"
    ) -> Tensor:
        refuse_in_step("strategy.reduce")
        with self.ranks.collective("a reduction"):
            return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        refuse_in_step("all_gather")
        return super().all_gather(tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        refuse_in_step("strategy.reduce_boolean_decision")
        return super().reduce_boolean_decision(decision, all)

    @override
    def setup(self, trainer: L.Trainer) -> None:
        """DDPStrategy.setup without wrapping the module or broadcasting its state."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    @override
    def save_checkpoint(
        self, checkpoint_: dict[str, Any], filepath: _PATH, storage_options: Any | None = None
    ) -> None:
        self.checkpoints.save(checkpoint_, Path(filepath), self.ranks, storage_options)

    @override
    def load_checkpoint(
        self, checkpoint_path: _PATH, weights_only: bool | None = None
    ) -> dict[str, Any]:
        path = Path(checkpoint_path)
        content, self.checkpoints.spares = checkpoint.load_or_before(path, self.ranks)
        federation_state.check_parts(content, path)
        return content

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        if self.is_global_zero:
            checkpoint.remove(filepath)


StrategyRegistry.register(
    "federated", FederatedStrategy, description="Ranks of a federation; models are not wrapped"
)
