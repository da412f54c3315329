"""Starts SLURM on this machine alone: munged, slurmctld, and one slurmd for each node. There is no accounting."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo")
SECONDS = 120  # for a daemon to start, and for the state of a job to change

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until the credential of its first start has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Only one of the jobs that request it can run on a node at a time.
GresTypes=first
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
# Nodes can have more CPUs here than this machine, and a node that is silent for some seconds is down.
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=5
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
"""


def lacking():
    """What a test of SLURM needs and this machine does not have, as the reason to skip it; "" if it has all."""
    if os.name != "posix" or os.geteuid() != 0:
        return "SLURM's daemons need root, and the tests run as another user"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"no {', '.join(missing)} on this machine: install slurm-wlm and munge"
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"SLURM needs an address for this machine's name, {socket.gethostname()}: add it to /etc/hosts"
    return ""


def free_ports(count):
    """The numbers of *count* ports that no program listens on."""
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class RealSlurm:
    """SLURM with *nodes* of *cpus* CPUs each, named n1, n2, …. *folder* gets its files. Ends as a context manager."""

    def __init__(self, folder, nodes=2, cpus=8):
        self.folder, self.nodes = Path(folder), [f"n{number}" for number in range(1, nodes + 1)]
        (self.folder / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(1 + nodes)
        lines = [CONFIGURATION.format(host=host, port=port, folder=self.folder)]
        for name, own_port in zip(self.nodes, ports, strict=True):
            address = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={own_port}"
            lines.append(f"NodeName={name} {address} CPUs={cpus} Gres=first:1 RealMemory=4000 State=UNKNOWN\n")
        lines.append(f"PartitionName=all Nodes={','.join(self.nodes)} Default=YES LLN=YES MaxTime=INFINITE State=UP\n")
        self.configuration = self.folder / "slurm.conf"
        self.configuration.write_text("".join(lines))
        self.environment = {**os.environ, "SLURM_CONF": str(self.configuration)}

    def __enter__(self):
        try:
            self._start_munged()
            self._start("slurmctld")
            self.wait_until(lambda: self.ask("scontrol", "ping").returncode == 0, "slurmctld does not answer")
            for name in self.nodes:
                self._start("slurmd", "-N", name)
            self.wait_for_nodes()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        while processes := [pid for pid, _, _ in self._processes()]:
            kill(processes)

    def _start_munged(self):
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
        names |= {"log-file": "munged.log", "seed-file": "munge.seed"}
        self._start("munged", "--force", *(f"--{flag}={self.folder / name}" for flag, name in names.items()))

    def start_node(self, name):
        self._start("slurmd", "-N", name)
        self.wait_for_nodes()

    def kill_node(self, name):
        """Kill the daemon of a node and all processes of its jobs, as if it had no power any more."""
        jobs = self.do("squeue", "--noheader", f"--nodelist={name}", "--format=%A").split()
        kill([int((self.folder / f"slurmd.{name}.pid").read_text())])
        kill([pid for job in jobs for pid in self.processes(job)])

    def processes(self, job_id):
        """The process ids of a job, and of SLURM's own processes that watch it."""
        number = self.shown(job_id, "JobId")
        return [
            pid
            for pid, command, variables in self._processes()
            if command.startswith(f"slurmstepd: [{number}.") or f"SLURM_JOBID={number}".encode() in variables
        ]

    def _processes(self):
        """The process ids, commands and environments of daemons, jobs and commands with this SLURM."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                variables = (folder / "environ").read_bytes().split(b"\0")
                if f"SLURM_CONF={self.configuration}".encode() in variables:
                    yield int(folder.name), (folder / "cmdline").read_text(), variables

    def wait_for_nodes(self):
        def idle():
            states = self.ask("sinfo", "--noheader", "--Node", "--format=%t").stdout.split()
            return states == ["idle"] * len(self.nodes)

        self.wait_until(idle, "the nodes are not idle")

    def ask(self, *command):
        """Run a program of SLURM. Returns the finished process."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=SECONDS)

    def do(self, *command):
        """Run a program of SLURM, which must succeed. Returns what it prints."""
        done = self.ask(*command)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def state(self, job_id):
        """The state of a job, by SLURM's name."""
        return self.shown(job_id, "JobState")

    def shown(self, job_id, key):
        words = self.do("scontrol", "--oneliner", "show", "job", job_id).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{key}="))

    def wait_until(self, condition, otherwise):
        """Wait for *condition*, or fail with *otherwise*, a text or its function, and the end of slurmctld's log."""
        latest = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > latest:
                log = self.folder / "slurmctld.log"
                last = log.read_text()[-3000:] if log.exists() else ""
                raise AssertionError(f"{otherwise() if callable(otherwise) else otherwise} after {SECONDS} s\n{last}")
            time.sleep(0.2)

    def _start(self, *command):
        done = subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True, timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}"


def kill(pids):
    """Kill the processes that have not ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
