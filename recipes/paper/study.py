"""What RoFormer's experiments share: flags, data that are made once, trainings that resume, the table and the figure.

A run is one system with one seed. It has one or more trainings, each a fairseq-train command with a folder of its own.
"""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import write_whole, written_whole
from fairseq_rope.positions import ENCODINGS
from recipes.compare.plots import rendered
from recipes.paper.results import Panels, Rows, as_markdown, draw, trained_in
from recipes.paper.runs import Data, PaperRun, Training, TrainingStage, gpus_here, stages_of
from recipes.run import launch, precision
from recipes.run.command_line import RunParser, parse, refuse_lost_validations, refuse_work
from recipes.run.lock import locked_when_free
from recipes.run.moves import Moves
from recipes.run.runner import Runner
from recipes.run.stamps import Stamps
from recipes.run.yaml_file import SettingsError, read_yaml_file

HERE = Path(__file__).parent
POSITIONS = ("--position-encoding", "--encoder-position-encoding", "--decoder-position-encoding")
LOST = ("--no-save", "--no-last-checkpoints", "--checkpoint-suffix")  # without the last checkpoint under its name
OWN_FLAGS = ("--seed", "--save-dir", *POSITIONS)  # of fairseq-train, in which the runs differ


def build_parser(name: str, description: str, encodings: Sequence[str]) -> argparse.ArgumentParser:
    """The parser with the flags that all experiments have. *encodings* are the default ones."""
    epilog = (
        "Finished trainings are skipped, interrupted ones resume. Flags after a lone -- are passed to fairseq-train."
    )
    parser = RunParser(prog=f"recipes.paper.{name}", description=description, epilog=epilog)
    add = parser.add_argument
    add("--settings", type=Path, default=HERE / "small.yaml", metavar="FILE", help="default: recipes/paper/small.yaml")
    add(
        "--work-dir", type=Path, default=HERE / "work" / name, metavar="DIR", help=f"default: recipes/paper/work/{name}"
    )
    known = f"position encodings, separated by commas: {', '.join(ENCODINGS)}; default: %(default)s"
    add("--encodings", default=",".join(encodings), metavar="NAMES", help=known)
    add(
        "--gpus",
        type=int,
        metavar="N",
        help="number of GPUs to train on; 0: train on the CPU; default: one if there is one",
    )
    add("--dry-run", action="store_true", help="print the trainings' commands, and write nothing")
    launch.add_flags(parser, 3)
    return parser


@dataclass
class Study:
    """What a command line asks for: work folder, settings, encodings, and more flags for all trainings."""

    name: str
    args: argparse.Namespace
    flags: str
    settings: dict[str, Any]  # the values of the experiment in the settings file
    encodings: list[str]
    seeds: range

    work = property(lambda self: self.args.work_dir.resolve())
    data = property(lambda self: self.work / "data")

    def run(
        self,
        data: Data,
        trainings: Callable[[str, int, Path], tuple[Training, ...]],
        report: Callable[[list[PaperRun]], tuple[Rows, Panels]],
    ) -> None:
        """Make *data*, train every encoding from every seed, and write the table and the figure of the finished runs.

        *trainings* gives those of an encoding and a seed, whose folder is the third argument. Raises an InputError if a
        run fails, after the others. A dry run makes nothing, so that the next command can still choose the settings of
        the folder.
        """
        runs = [self._run(name, seed, trainings) for seed in self.seeds for name in self.encodings]
        program = f"python -m recipes.paper.{self.name} {shlex.join(sys.argv[1:])}"
        if self.args.dry_run:
            data.prepare(runs[0], Stamps(runs[0]), Moves(runs[0]))
            print("\n".join(run.command(training) for run in runs for training in run.trainings))
            return
        with locked_when_free(self.work / ".lock") as lock:
            Runner(runs[0], [data], (lock,), program).ensure(data)
        self._warn_of_emulation(runs)
        outcomes = launch.outcomes(runs, stages_of, program, self.args)
        failed = [f"{run.title}: {why}" for run, why in outcomes if why]
        in_order = [run for name in self.encodings for run in runs if run.system == name]
        finished = [run for run in in_order if launch.is_done(run, stages_of)]
        if finished:
            rows, panels = report(finished)
            text = f"`{program}`\n\n{trained_in(finished)}{as_markdown(rows)}\n"
            curves = rendered(draw(panels), "svg")
            # Another command in this folder can end at the same time. Table and figure are of the same command.
            with locked_when_free(self.work / ".lock"):
                write_whole(self.work / "results.md", text)
                with written_whole(str(self.work / "curves.svg")) as (file,):
                    file.write(curves)
            print(f"{text}\nwritten to {self.work}: results.md, curves.svg", flush=True)
        if failed:
            raise InputError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}")

    def _run(self, system: str, seed: int, trainings: Callable[[str, int, Path], tuple[Training, ...]]) -> PaperRun:
        settings = {**self.settings, "flags after --": self.flags}
        run = PaperRun(system, seed, self.work, (), self.args.gpus, settings)
        return replace(run, trainings=trainings(system, seed, run.model))

    def _warn_of_emulation(self, runs: Sequence[PaperRun]) -> None:
        """Print a warning if a training has yet to run in bf16 on this machine's CPU, which has no instructions."""
        if self.args.launcher != "local" or precision.on_cpu() == "bf16":
            return
        for run in runs:
            stamps = Stamps(run)
            stages = (stage for stage in stages_of(run) if isinstance(stage, TrainingStage))
            for command in (run.command(stage.training) for stage in stages if not stamps.is_done(stage)):
                flag = precision.flag_in(command)
                if " --cpu " in command and precision.FLAGS.get(flag) == "bf16":
                    print(f"recipes.paper.{self.name}: warning: {flag}: {precision.EMULATED}", file=sys.stderr)
                    return


def main(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    kinds: Mapping[str, type],
    work: Callable[[Study], None],
) -> None:
    """Call *work* with the study of the flags *words*. Errors end the process with one sentence.

    *kinds* are the types of the experiment's settings by their names.
    """
    args, flags = parse(parser, sys.argv[1:] if words is None else words)
    name = parser.prog.rpartition(".")[2]
    with ending_in_one_sentence(parser.prog):
        launch.refuse_contradictions(args)
        seeds = launch.seeds_of(args.seeds)
        settings = read_settings(args.settings, name, kinds)
        encodings = args.encodings.split(",")
        for encoding in encodings:
            if encoding not in ENCODINGS or encodings.count(encoding) > 1:
                raise InputError(f"--encodings {args.encodings}: must be different ones of {', '.join(ENCODINGS)}")
        if (args.gpus or 0) < 0:
            raise InputError(f"--gpus {args.gpus}: must be 0 or more")
        if args.gpus and args.launcher == "local" and args.gpus > (available := gpus_here()):
            raise InputError(f"--gpus {args.gpus}: this machine has {available}")
        refuse_flags(flags, "after --")
        study = Study(name, args, flags, settings, encodings, seeds)
        refuse_work(study.work)
        if args.launcher == "slurm":  # refuses wrong parameters before the data are prepared
            launch.launcher_of(args, PaperRun("", 1, study.work, (), args.gpus))
        work(study)


def refuse_flags(flags: str, where: str) -> None:
    """Raise a SettingsError if an experiment cannot pass the *flags* on to fairseq-train. They are from *where*."""
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise SettingsError(f"{where}: {flags!r} cannot be divided into words ({error})") from None
    for word in words:
        if word.partition("=")[0] in OWN_FLAGS:
            raise SettingsError(f"{where}: the experiment sets {', '.join(OWN_FLAGS)}; drop {word}")
        if word.partition("=")[0] in LOST:
            raise SettingsError(f"{where}: the experiment needs the last checkpoint; drop {word}")
    try:
        refuse_lost_validations(flags)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None


def read_settings(path: Path, name: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The settings of the experiment *name* in a YAML file. Raises a SettingsError if they are not those of *kinds*."""
    values = read_yaml_file(path, f"--settings {path}")
    of = values.get(name) if isinstance(values, dict) else None
    if not isinstance(of, dict) or of.keys() != kinds.keys():
        raise SettingsError(f"{path}: {name} must have the settings {', '.join(kinds)}, and no others")
    for key, kind in kinds.items():
        if type(of[key]) is not kind:
            raise SettingsError(f"{path}: {name}: {key} is {of[key]!r}, and must be of type {kind.__name__}")
        if kind is str:  # flags for fairseq-train
            refuse_flags(of[key], f"{path}: {name}: {key}")
    return of


def existing(flag: str, path: Path) -> Path:
    """*path*, or the gzipped file of that name with ``.gz``. Raises an InputError if neither is a file."""
    for candidate in (path, Path(f"{path}.gz")):
        if candidate.is_file():
            return candidate
    raise InputError(f"{flag}: {path} is not a file")
