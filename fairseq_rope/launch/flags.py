"""The flags that say where processes run. They need no submitit."""

import argparse
import re
import shlex
from typing import Any

from ..errors import InputError


def add_flags(parser: Any, what: str) -> None:
    """Add the flags of SLURM to *parser*, which may be a group; each job is for one *what*, for example a run."""
    add = parser.add_argument
    where = f"slurm: one job of SLURM for each {what}, by submitit; default: this machine"
    add("--launcher", choices=("local", "slurm"), default="local", help=where)
    add("--slurm-partition", metavar="NAME", help="SLURM's partition")
    further = "a parameter of submitit's SlurmExecutor: gpus_per_node=1, mem=16GB, or time=600 (in minutes; required)"
    command = "; each setup=COMMAND adds a command"
    add("--slurm", action="append", default=[], metavar="KEY=VALUE", help=further + command)


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise an InputError if the flags of :func:`add_flags` contradict each other."""
    for flag, value in (("--slurm-partition", args.slurm_partition), ("--slurm", " ".join(args.slurm))):
        if value and args.launcher != "slurm":
            raise InputError(f"{flag} {value}: needs --launcher slurm")
    for parameter in args.slurm:
        if "=" not in parameter:
            raise InputError(f"--slurm {parameter}: must have the form KEY=VALUE")
        if parameter.startswith("additional_parameters="):
            dictionary = "submitit's additional_parameters is a dictionary, and not a flag here"
            raise InputError(f"--slurm {parameter}: {dictionary}")
        if re.fullmatch("(nodes|ntasks_per_node)=(?!1$).*", parameter, re.S):
            raise InputError(f"--slurm {parameter}: must be 1, because each job is one process")
    if args.launcher == "slurm":
        minutes = [parameter.partition("=")[2] for parameter in args.slurm if parameter.startswith("time=")]
        if not minutes:
            raise InputError("--launcher slurm: needs --slurm time=MINUTES; submitit would ask for 5 minutes")
        if not re.fullmatch("[1-9][0-9]*", minutes[-1]):
            raise InputError(f"--slurm time={minutes[-1]}: must be a number of minutes, 1 or more")


def slurm_parameters(args: argparse.Namespace, gpus: int | None = None) -> dict[str, Any] | None:
    """Return the parameters of submitit's SlurmExecutor, or None if the flags choose this machine.

    Args:
        args: the flags of :func:`add_flags`
        gpus: how many GPUs each job requests, unless ``--slurm gpus_per_node=N`` says it
    """
    if args.launcher != "slurm":
        return None
    parameters: dict[str, Any] = {}
    for parameter in args.slurm:
        key, _, value = parameter.partition("=")
        if key in ("setup", "teardown"):
            parameters.setdefault(key, []).append(value)
        elif key == "srun_args":
            parameters[key] = shlex.split(value)
        else:
            is_number = value.isdecimal() and str(int(value)) == value  # 0421 is a name
            plain = int(value) if is_number else value
            parameters[key] = {"true": True, "false": False}.get(value.lower(), plain)
    if args.slurm_partition:
        parameters["partition"] = args.slurm_partition
    if gpus:
        parameters.setdefault("gpus_per_node", gpus)
    if "cpus_per_task" in parameters:  # since SLURM 22.05, srun does not take it from sbatch
        own = parameters.get("srun_args", [])
        parameters["srun_args"] = [f"--cpus-per-task={parameters['cpus_per_task']}", *own]  # the last one counts
    return parameters
