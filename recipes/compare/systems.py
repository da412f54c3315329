"""The systems of a comparison: each is a name and flags of fairseq-train, from a YAML file or the command line.

A system of a file can also be the model of another system, with further flags of fairseq-generate.
"""

import argparse
import dataclasses
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.pipeline.experiment import Experiment
from recipes.run.yaml_file import SettingsError, read_yaml_file


@dataclass(frozen=True)
class System:
    """A model to compare. Its flags are quoted for a shell."""

    name: str  # in folders and in the report
    arch: str
    flags: str = ""  # further flags for fairseq-train
    of: str = ""  # the system whose model it translates with; "": it is trained itself
    generate: str = ""  # further flags for fairseq-generate


def _check_name(name: str, where: str) -> None:
    if not re.fullmatch(r"\w[\w-]*", name):
        raise SettingsError(f"{where}: the system's name {name} must consist of letters, digits, _ and -")


def read_system(name: str, flags: str, where: str) -> System:
    """The system *name* with *flags*, which include --arch. Raises a SettingsError that begins with *where*."""
    _check_name(name, where)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--arch", "-a")
    try:
        parsed, further = parser.parse_known_args(shlex.split(flags))
    except (ValueError, argparse.ArgumentError) as error:
        raise SettingsError(f"{where}: the flags of {name}, {flags}, cannot be read: {error}") from None
    if parsed.arch is None:
        example = f"--arch transformer_rope {flags}".rstrip()
        whose = f"the flags of {name}, {flags}," if flags else f"the flags of {name}"
        raise SettingsError(f"{where}: {whose} must contain --arch, like {example}")
    return System(name, parsed.arch, shlex.join(further))


def _with_other_search(name: str, entry: dict[str, Any], systems: Mapping[str, System], where: str) -> System:
    """The system *name*, which translates with the model of one of *systems*, as its *entry* in the file says.

    Raises a SettingsError that begins with *where*.
    """
    _check_name(name, where)
    if {*entry} != {"of", "generate"}:
        keys = ", ".join(map(str, entry)) or "no keys"
        raise SettingsError(f"{where}: {name} has {keys}, and must have of and generate")
    owner, generate = str(entry["of"]), entry["generate"]
    if owner not in systems:
        must = "must be a system with flags of fairseq-train in the file"
        raise SettingsError(f"{where}: {name} is of {owner}, which {must}")
    try:
        words = shlex.split(generate) if isinstance(generate, str) else []
    except ValueError as error:
        raise SettingsError(f"{where}: the flags of {name}, {generate}, cannot be read: {error}") from None
    if not words:
        raise SettingsError(f"{where}: generate of {name} must be flags of fairseq-generate, not {generate!r}")
    return dataclasses.replace(systems[owner], name=name, of=owner, generate=generate.strip())


def read_systems(path: Path) -> list[System]:
    """The systems in the YAML file *path*, which maps names to flags. Raises a SettingsError that names the file."""
    where = f"--systems {path}"
    contents = read_yaml_file(path, where)
    if not isinstance(contents, dict) or not all(isinstance(flags, (str, dict)) for flags in contents.values()):
        raise SettingsError(f"{where}: must be lines of the form NAME: flags of fairseq-train")
    if not contents:
        raise SettingsError(f"{where}: has no system")
    number = next((name for name in contents if not isinstance(name, str)), None)
    if number is not None:
        raise SettingsError(f"{where}: YAML reads a system's name as {number!r}: write it in quotes")
    trained = {name: read_system(name, flags, where) for name, flags in contents.items() if isinstance(flags, str)}
    return [
        _with_other_search(name, entry, trained, where) if isinstance(entry, dict) else trained[name]
        for name, entry in contents.items()
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose systems."""
    add = parser.add_argument
    archs = "systems without further flags; default: transformer transformer_rope, without --systems and --system"
    add("--archs", nargs="+", action="extend", metavar="ARCH", help=archs)
    add("--systems", type=Path, metavar="FILE", help="a YAML file with a line NAME: FLAGS for each system")
    add("--system", action="append", default=[], metavar="NAME=FLAGS", help="a system: 'half=--arch … --rope-…'")
    add("--baseline", metavar="NAME", help="the system that others are compared with; default: the first")
    only = "train only these; the report also contains the finished runs of others"
    add("--only", nargs="+", action="extend", metavar="NAME", help=only)


def chosen(args: argparse.Namespace) -> tuple[list[System], list[System]]:
    """All systems, the baseline first, and those to train. Raises a SettingsError that names the flag."""
    if args.archs and (args.systems or args.system):
        raise SettingsError("--archs: cannot be combined with --systems or --system")
    systems = [System(arch, arch) for arch in args.archs or ()] + (read_systems(args.systems) if args.systems else [])
    for argument in args.system:
        name, equals, flags = argument.partition("=")
        where = f"--system {argument}"
        if not equals:
            raise SettingsError(f"{where}: must have the form NAME=FLAGS, as in '{argument}=--arch transformer'")
        systems.append(read_system(name.strip(), flags, where))
    systems = systems or [System(arch, arch) for arch in ("transformer", "transformer_rope")]
    names = [system.name for system in systems]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise SettingsError(f"{flag(args)} {' '.join(names)}: names {twice} twice; give each system another name")
    if len(systems) < 2:
        name = "transformer_rope" if names[0] == "transformer" else "transformer"
        row = f"{name}: --arch {name}"
        added = {"--archs": name, "--system": f"--system '{name}=--arch {name}'", "--systems": f"the line '{row}'"}
        raise SettingsError(f"{flag(args)} {names[0]}: a comparison needs a second system; add {added[flag(args)]}")
    chosen_names = {"--baseline": [args.baseline] if args.baseline else [], "--only": args.only or []}
    for option, values in chosen_names.items():
        for name in values:
            if name not in names:
                raise SettingsError(f"{option} {name}: must be one of {', '.join(names)}")
    baseline = args.baseline or names[0]
    systems.sort(key=lambda system: system.name != baseline)
    return systems, [system for system in systems if not args.only or system.name in args.only]


def refuse_other_training(run: Experiment) -> None:
    """Raise a SettingsError if *run* has the model of another system, and its folder has a training of its own."""
    if run.training_of and any(run.checkpoints.glob("checkpoint*.pt")):
        has = f"{run.checkpoints} has the checkpoints of an earlier training"
        raise SettingsError(f"{run.system} is of {run.training_of}, and {has}: give the system another name")


def flag(args: argparse.Namespace) -> str:
    """The flag that names the systems, for messages."""
    return "--systems" if args.systems else "--system" if args.system else "--archs"
