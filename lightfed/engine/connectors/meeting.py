"""How the ranks of a run meet: a process group over a store on one interface."""

import socket
import subprocess
from typing import ClassVar

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from typing_extensions import override

from lightfed.distributed import starting
from lightfed.distributed.interface import interface_of, listen, sockets_on
from lightfed.utils.errors import UserError


class MeetingStrategy(DDPStrategy):
    """Connects the ranks; one that does not come is named."""

    # Of the process: a trainer that fails before the ranks meet leaves it to the next one.
    _listener: ClassVar[socket.socket | None] = None

    @override
    def setup_distributed(self) -> None:
        """Connect to the other ranks; a UserError if some do not connect or cannot be reached."""
        self.set_world_ranks()
        if self.world_size == 1:
            return  # it needs neither a group nor a port
        if self.num_nodes == 1:
            sockets_on(interface_of(self._address, nodes=1))
        try:
            self._meet()
            super().setup_distributed()
        except (dist.DistError, OSError) as error:
            starting.connected()  # what is to be said is said here
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
        starting.limit_meeting(self._timeout.total_seconds(), self._kill_launched)
        if starting.has_store():
            return
        listener = self._taken(meeting[1])  # the store's from here on
        store = dist.TCPStore(
            *meeting,
            self.world_size,
            is_master=listener is not None,
            timeout=self._timeout,
            master_listen_fd=listener.detach() if listener else None,
        )
        dist.init_process_group(
            self._get_process_group_backend(),
            store=store,
            rank=self.global_rank,
            world_size=self.world_size,
            timeout=self._timeout,
            device_id=None if self.root_device.type == "cpu" else self.root_device,
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
        listener = MeetingStrategy._listener = listen(self._interface(), port, backlog=ranks)
        return int(listener.getsockname()[1])

    def _taken(self, port: int) -> socket.socket | None:
        """What rank 0 listens by; None on other ranks."""
        if self.global_rank == 0 and self._listener is None:
            self.take_port(port)
        found, MeetingStrategy._listener = self._listener, None
        return found

    def _launched(self) -> list[subprocess.Popen[bytes]]:
        """Processes of other ranks started by this one."""
        return getattr(self.launcher, "procs", [])

    def _kill_launched(self) -> None:
        """Kill ranks that do not exit by themselves, such as stopped ones."""
        starting.end_launched(self._launched())
