"""A throw-away SLURM cluster on this machine: one controller, two nodes that are named, not real.

Everything lies in one folder, nothing in /etc: SLURM_CONF is the only switch. The daemons are
children of the test process and end with it.
"""

import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
NODES = ("n0", "n1")
GPUS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")  # devices of any machine
POLL = 0.2  # seconds
PATIENCE = 120.0  # seconds for what takes some ten with the machine for oneself
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")

_SLURM_CONF = """\
ClusterName=throwaway
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdPidFile={root}/run/%n.pid
SlurmdLogFile={root}/log/%n.log
SlurmdSpoolDir={root}/spool/%n
StateSaveLocation={root}/state
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
CredType=cred/munge
# A container owns no cgroups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
# Names of nodes that are not real do not resolve.
TaskProlog={root}/prolog.sh
MpiDefault=none
SwitchType=switch/none
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=1,batch_sched_delay=0
ReturnToService=0
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
MinJobAge=3600
JobRequeue=1
# The port on which ranks meet follows from the number of the job: other clusters have others.
FirstJobId={first_job}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""
# More is claimed than there is: commands of the documentation fit on a node.
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
    f" CPUs=64 RealMemory=100000 Gres=gpu:{len(GPUS)} State=UNKNOWN\n"
)


def missing() -> list[str]:
    """The programs that are not installed; Debian has them in slurm-wlm and munge."""
    return [name for name in DAEMONS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


class Cluster:
    """The cluster and its commands.

    Args:
        root: folder for all its files; a short path, for a socket lies in it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._user = pwd.getpwuid(os.getuid()).pw_name
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.environment = inherited | {"SLURM_CONF": str(root / "slurm.conf"), "PATH": _path()}

    # Its life.

    def start(self) -> None:
        """Write the files, start the daemons and wait until both nodes are idle."""
        self._write()
        run = self.root / "run"
        self._spawn(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={run}/munge.key"),
            *(f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid"),
            *(f"--log-file={self.root}/log/munged.log", f"--seed-file={run}/munge.seed"),
        )
        until(lambda: (run / "munge.socket").exists(), "munged listens")
        self._spawn("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self._spawn(name, "slurmd", "-D", "-N", name)
        until(self.idle, "the nodes are idle")

    def stop(self) -> None:
        """End jobs, then the daemons, in the order in which they need each other."""
        with suppress(AssertionError):
            self.command("scancel", "--user", self._user)
            until(lambda: not self.command("squeue", "--noheader"), "no job is left", seconds=30)
        for daemon in reversed(self._daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def power_off(self, node: str, job: "Job") -> None:
        """End a node and the job on it at once, without a word to anybody.

        The controller is stated; it would find out after SlurmdTimeout.
        """
        victims = [process for step in job.steps() for process in _family(step)]
        for pid in (self._daemons[node].pid, *victims):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons.pop(node).wait()
        self.command("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")

    def power_on(self, node: str) -> None:
        """Start a node again and wait until it takes jobs."""
        self._spawn(node, "slurmd", "-D", "-N", node)
        self.command("scontrol", "update", f"NodeName={node}", "State=RESUME")
        until(self.idle, "the node is back")

    def _write(self) -> None:
        for name in ("run", "log", "spool", "state"):
            (self.root / name).mkdir(parents=True)
        key = self.root / "run" / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().split(".")[0]
        ports = _free_ports(1 + len(NODES))
        text = _SLURM_CONF.format(
            root=self.root, host=host, user=self._user, controller_port=ports[0],
            first_job=1000 + secrets.randbelow(8000),
        )  # fmt: skip
        for name, port in zip(NODES, ports[1:], strict=True):
            text += _NODE.format(name=name, host=host, port=port)
        (self.root / "slurm.conf").write_text(text)
        gres = [f"NodeName={n} Name=gpu File={d}\n" for n in NODES for d in GPUS]
        (self.root / "gres.conf").write_text("".join(gres))
        prolog = self.root / "prolog.sh"
        prolog.write_text("#!/bin/sh\necho export MASTER_ADDR=127.0.0.1\n")
        prolog.chmod(0o755)

    def _spawn(self, name: str, *words: str) -> None:
        with (self.root / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def idle(self) -> bool:
        """Whether both nodes are there and have nothing to do."""
        with suppress(AssertionError):
            states = self.command("sinfo", "--noheader", "--Node", "-p", "main", "-o", "%T")
            return states.split() == ["idle"] * len(NODES)
        return False

    # Its commands.

    def command(self, *words: str, cwd: Path | None = None, **variables: str) -> str:
        """What a command of SLURM prints; fails with what it complains about."""
        done = subprocess.run(
            words, env=self.environment | variables, cwd=cwd, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: str, cwd: Path, **variables: str) -> "Job":
        """`sbatch` with these words in a folder, and with these variables for the job."""
        number = self.command("sbatch", "--parsable", *words, cwd=cwd, **variables)
        return Job(self, number)


class Job:
    """A job, or a task of a job array.

    Args:
        cluster: where it is.
        number: as SLURM writes it, "17" or "17_2".
    """

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster, self.number = cluster, number

    def facts(self) -> dict[str, str]:
        """What `scontrol show job` knows."""
        text = self.cluster.command("scontrol", "--oneliner", "show", "job", self.number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    @property
    def state(self) -> str:
        return self.facts()["JobState"]

    @property
    def restarts(self) -> int:
        return int(self.facts()["Restarts"])

    def cancel(self, *words: str) -> None:
        self.cluster.command("scancel", *words, self.number)

    def requeue(self) -> None:
        self.cluster.command("scontrol", "requeue", self.number)

    def update(self, *changes: str) -> None:
        """`scontrol update` with changes such as "TimeLimit=2"."""
        self.cluster.command("scontrol", "update", f"JobId={self.number}", *changes)

    def release(self) -> None:
        """Wait until a requeued job is back in the queue, then start it two seconds later.

        SLURM would hold it back for two minutes, in which the last of its first start goes: steps
        bear the number of the job, so what is left of the old ones would be ended with the new. A
        node also refuses a start in the same second in which it revoked the first one.
        """
        until(lambda: self.state == "PENDING", f"job {self.number} is back in the queue")
        until(lambda: not self.steps(), f"the steps of job {self.number} are gone")
        self.update("StartTime=now+2seconds")

    def steps(self) -> list[int]:
        """The processes by which nodes hold steps of this job."""
        title = f"slurmstepd: [{self.facts()['JobId']}."
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                if (process / "cmdline").read_text(errors="replace").startswith(title):
                    found.append(int(process.name))
        return found

    def end(self, *, seconds: float = PATIENCE) -> dict[str, str]:
        """Wait until it is over; what is known of it then."""
        until(lambda: self.state in ENDED, f"job {self.number} is over", seconds=seconds)
        return self.facts()


def until(reached: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
    """Ask again and again; fails with `what` did not happen in time."""
    limit = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < limit, f"not within {seconds:.0f} s: {what}"
        time.sleep(POLL)


def _family(pid: int) -> list[int]:
    """A process and all below it."""
    with suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(p for child in children for p in _family(int(child)))]
    return []


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]
