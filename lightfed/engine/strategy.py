"""The strategy that starts the ranks of a federation and connects them.

It uses Lightning's launchers and torch's process groups. There is no DDP wrapper around the model,
and each rank writes its own part of a checkpoint.
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
from lightfed.utils.errors import UserError
from lightfed.utils.lightning_private import _PATH, _SubprocessScriptLauncher
from lightfed.utils.process import is_interactive, started_in

log = logging.getLogger(__name__)

T = TypeVar("T")

# How many seconds other ranks have to exit by themselves before they are killed.
_SECONDS_TO_EXIT = 2.0


@cache
def _leave_at_exit() -> None:
    """Leave the process group when the process exits; registered once, however many trainers."""
    atexit.register(leave)


class Relaunch(_SubprocessScriptLauncher):
    """Runs the script again for each further rank, in the folder in which it was started.

    A script that changes its folder before it trains does so again in each rank. Started in the
    folder where rank 0 is by then, it would not find itself, or change to a wrong one.
    """

    @override
    def _call_children_scripts(self) -> None:
        current_folder = os.getcwd()
        os.chdir(started_in())
        try:
            super()._call_children_scripts()
        finally:
            os.chdir(current_folder)


class FederatedStrategy(DDPStrategy):
    """Starts the ranks, each of which trains its own clients, and connects them by gloo or NCCL.

    This process starts the other ranks of its node, unless torchrun or SLURM have started them. All
    ranks compute the same server state, so no model is wrapped or broadcast. The ranks meet at a
    store that listens on a single network interface.

    Attributes:
        ranks_per_device: The number of ranks per GPU; set before the devices are known.
        ranks: The connected ranks; there from `setup_environment` on.
        checkpoints: Writes the checkpoints of the run.
        listener: The socket on which rank 0 listens for the others, until they meet. It is shared
            by all trainers of a process: if one of them fails before its ranks meet, the next one
            takes the socket over.
    """

    strategy_name = "federated"
    ranks_per_device = 1
    listener: ClassVar[socket.socket | None] = None
    _shares_cards = False  # whether ranks have turned out to have the same GPU

    def __init__(self, *, timeout: float = TIMEOUT.total_seconds() / 60) -> None:
        """Set how long ranks wait for each other; DDP's other settings do not apply.

        Args:
            timeout: Minutes that a rank waits for the others: at the start, at the end of a round's
                sessions or in a collective. Then the run ends.
        """
        if not timeout > 0:  # also refuses NaN
            key = "trainer.strategy.init_args.timeout"
            raise UserError(key, f"{timeout:g} minutes", "give a time above 0")
        super().__init__(timeout=timedelta(minutes=timeout))
        self.checkpoints = Checkpoints()

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this node's ranks, in the order of the ranks."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        # Lightning gives each device once, but several ranks may share it.
        device_of_rank: list[torch.device] = []
        for device in devices or []:
            device_of_rank += [device] * self.ranks_per_device
        self._parallel_devices = device_of_rank or None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        environment = self.cluster_environment
        devices = self._parallel_devices
        assert environment is not None
        assert devices is not None
        if environment.creates_processes_externally:
            return

        if not is_interactive():
            self._launcher = Relaunch(environment, self.num_processes, self.num_nodes)
            return
        # A notebook is no script that other ranks could run.
        if len(devices) != 1:
            found = f"{len(devices)} in a notebook, whose ranks no script can start"
            raise UserError("trainer.devices", found, "give 1, or train by `lightfed fit`")
        self._launcher = None

    @override
    def _get_process_group_backend(self) -> str:
        if self.ranks_per_device > 1 or self._shares_cards:
            return "gloo"  # NCCL rejects two ranks on one device
        return super()._get_process_group_backend()

    def _find_shared_cards(self, store: Any) -> None:
        """Find out whether ranks share a GPU although each should have its own.

        A launcher can give two tasks the same GPU: then all processes of a node see it as their
        first. All ranks learn of it and choose gloo, and rank 0 warns.

        Args:
            store: A store that all ranks reach.
        """
        card = card_of(self.root_device)
        cards = exchange(store, card, rank=self.global_rank, world=self.world_size)
        sharing_ranks = sharing(cards)
        self._shares_cards = bool(sharing_ranks)
        if sharing_ranks and self.global_rank == 0:
            log.warning(
                "ranks %s share a GPU, which NCCL does not support: all ranks communicate over "
                "gloo, through pinned memory; give each its own GPU, or set "
                "trainer.ranks_per_device",
                ", ".join(map(str, sharing_ranks)),
            )

    def check_launch(self, nodes: int, clients: int | None) -> None:
        """Refuse ranks that nothing starts or that cannot run, before they wait for each other.

        Args:
            nodes: The number of nodes, as given to the Trainer.
            clients: The number of clients; None if it is unknown.

        Raises:
            UserError: The ranks cannot run. It names the flag, or the variable of the launcher.
        """
        launcher = self.cluster_environment
        assert launcher is not None
        ranks_of_node = self.num_processes
        ranks = ranks_of_node * nodes

        if isinstance(launcher, SLURMEnvironment | LightningEnvironment):
            check_launch(
                os.environ,
                processes=ranks_of_node,
                nodes=nodes,
                ranks_per_device=self.ranks_per_device,
            )
        elif launcher.world_size() != ranks:
            started = launcher.world_size()
            found = f"{ranks_of_node} ranks on {nodes} nodes, where {started} are started"
            raise UserError("trainer.devices", found, "make it agree with the launcher")
        check_rank(launcher.local_rank(), ranks_of_node)
        if clients is not None and ranks > clients:
            found = f"{ranks} ranks for {clients} clients"
            raise UserError("trainer.devices", found, "use at most one rank a client")

        starts_ranks = ranks_of_node > 1 and not launcher.creates_processes_externally
        if starts_ranks and "MASTER_PORT" not in os.environ:
            # Lightning would find a free port and give it up until rank 0 listens. Another process
            # could take it in between, so it is taken here and kept.
            os.environ["MASTER_PORT"] = str(self.take_port())

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # Each rank's loader has the jobs of that rank alone. An injected sampler must not split
        # them again.
        return {"num_replicas": 1, "rank": 0}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self._timeout is not None
        self.ranks = Ranks(self.root_device, timeout=self._timeout)
        _leave_at_exit()
        watch.start(self.ranks, self._address, self._interface(), self._kill_launched)
        self._relieve_observer()

        # Only now all ranks can be asked whether they agree on the run folder.
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if trainer.state.fn == TrainerFn.FITTING:
            for logger in trainer.loggers:
                if isinstance(logger, RunLogger):
                    logger.place.claim(self.ranks)

    @override
    def setup_distributed(self) -> None:
        """Connect to the other ranks.

        Raises:
            UserError: Some ranks do not connect, or cannot be reached.
        """
        self.set_world_ranks()
        if self.world_size == 1:
            return  # a single rank needs neither a process group nor a port

        guard_process_groups()
        if self.num_nodes == 1:
            sockets_on(interface_of(self._address, nodes=1))
        try:
            self.meet()
            super().setup_distributed()
        except (dist.DistError, OSError) as error:
            self._relieve_observer()
            self._kill_launched()  # the others would keep waiting for this one
            assert self.cluster_environment is not None
            address = f"{self._address}:{self.cluster_environment.main_port}"
            found = f"the ranks do not meet at {address} ({str(error).splitlines()[0]})"
            fix = "start all of them, at an address and a free port that all nodes reach"
            raise UserError("MASTER_ADDR", found, fix) from error

    def meet(self) -> None:
        """Create the process group, over a store that listens on one interface.

        Torch would make a store that listens on all interfaces.
        """
        if dist.is_initialized():
            return
        assert self._timeout is not None
        may_share_cards = self.root_device.type == "cuda" and self.ranks_per_device == 1

        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            # Torchrun keeps a store, over which torch makes the process group by itself.
            if may_share_cards:
                self._find_shared_cards(self._store_of_torchrun())
            return

        store = self._make_store()
        if may_share_cards:
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

    def _store_of_torchrun(self) -> dist.Store:
        """Connect to the store that torchrun keeps for its ranks."""
        assert self._timeout is not None
        store = dist.TCPStore(
            self._address,
            self._port,
            is_master=False,
            timeout=self._timeout,
            wait_for_workers=False,
        )
        # The store outlives ranks that torchrun restarts: what they have written must not count.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return dist.PrefixStore(f"attempt {attempt}", store)

    def _make_store(self) -> dist.Store:
        """Make the store at which the ranks meet; rank 0 keeps it."""
        assert self._timeout is not None
        port = self._port
        if self.global_rank == 0 and self.listener is None:
            self.take_port(port)

        # From here on the socket belongs to the store, which closes it.
        listener = self.listener
        FederatedStrategy.listener = None
        return dist.TCPStore(
            self._address,
            port,
            self.world_size,
            is_master=listener is not None,
            timeout=self._timeout,
            master_listen_fd=listener.detach() if listener else None,
        )

    @property
    def _address(self) -> str:
        """The address of rank 0, at which the other ranks reach it."""
        assert self.cluster_environment is not None
        return self.cluster_environment.main_address

    @property
    def _port(self) -> int:
        """The port at which the ranks meet."""
        assert self.cluster_environment is not None
        return self.cluster_environment.main_port

    def _interface(self) -> str:
        """Return the interface of its node on which rank 0 listens; "" on other ranks."""
        if self.global_rank != 0:
            return ""
        return interface_of(self._address, nodes=self.num_nodes)

    def take_port(self, port: int = 0) -> int:
        """Listen on one interface for the ranks that will meet here.

        Args:
            port: Where to listen; 0 for any free port.

        Returns:
            The port that has been taken.
        """
        ranks = self.num_nodes * self.num_processes
        listener = listen(self._interface(), port, backlog=ranks)
        FederatedStrategy.listener = listener
        return int(listener.getsockname()[1])

    def _launched(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes of other ranks that this one has started."""
        return getattr(self.launcher, "procs", [])

    def _kill_launched(self) -> None:
        """Kill ranks that do not exit by themselves, such as stopped ones."""
        deadline = time.monotonic() + _SECONDS_TO_EXIT
        for process in self._launched():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _relieve_observer(self) -> None:
        """Stop Lightning's monitor, which kills this process without a word when a child ends.

        It is needed until the ranks are connected; from then on they watch each other. The monitor
        holds the launcher's list of children, and stops when that list is empty. So the launcher
        gets a copy, and the list is emptied.
        """
        launched = self._launched()
        if launched:
            self.launcher.procs = launched.copy()  # type: ignore[union-attr]
            launched.clear()

    @override
    def on_exception(self, exception: BaseException) -> None:
        # A checkpoint may be under way, and may fail for the same reason. The first error is the
        # one to report.
        with suppress(Exception):
            self.checkpoints.finish()
        watch.fail(exception)

    @override
    def barrier(self, name: str | None = None) -> None:
        refuse_in_step("strategy.barrier")
        if name == "Trainer.save_checkpoint":
            return  # its ranks have already waited for each other's files
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
        """Do what DDPStrategy.setup does, but wrap no module and broadcast no state."""
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
