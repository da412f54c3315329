"""What RoFormer's experiments share: flags, data that are made once, trainings that resume, the table and the figure.

A run is one system with one seed. It has one or more trainings, each a fairseq-train command with a folder of its own.
"""

import argparse
import functools
import json
import shlex
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError, ending_in_one_sentence, sentence_of
from fairseq_rope.files import write_whole, written_whole
from fairseq_rope.positions import ENCODINGS
from recipes.compare import launch
from recipes.compare.plots import figure_of, rendered, style
from recipes.compare.tables import spread
from recipes.pipeline import precision
from recipes.pipeline.arguments import Parser, parse, refuse_work
from recipes.pipeline.commands import quoted, run_logged
from recipes.pipeline.experiment import StageError
from recipes.pipeline.history import logged
from recipes.pipeline.lock import locked_when_free
from recipes.pipeline.machine import describe
from recipes.pipeline.settings import SettingsError, read_yaml_file
from recipes.text.fetch import checksum_of

HERE = Path(__file__).parent
POSITIONS = ("--position-encoding", "--encoder-position-encoding", "--decoder-position-encoding")
OWN_FLAGS = ("--seed", "--save-dir", *POSITIONS)  # of fairseq-train, in which the runs differ
ON_ONE_GPU = ("f1", "spearman")  # metrics for which fairseq cannot join the predictions of several GPUs
Rows = Mapping[str, Mapping[str, Mapping[int, float]]]  # system: column: seed: value
Panels = Mapping[str, Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]]  # y axis: system: curves


@dataclass(frozen=True)
class Training:
    """A fairseq-train command of a run."""

    name: str  # of its folder in the run's
    data: Path  # binary data
    task: str  # of fairseq
    flags: str  # for fairseq-train
    start: Path | None = None  # the checkpoint from which it starts
    metric: str = "loss"  # a name in fairseq's log, which chooses the checkpoint that is tested, if it is not the loss


@dataclass(frozen=True)
class Run:
    """One system with one seed, as :mod:`recipes.compare.launch` runs it."""

    system: str
    seed: int
    work: Path
    trainings: tuple[Training, ...]
    gpus: int | None = None  # None: all of them; 0: the CPU
    training_of = ""  # no run waits for the training of another one

    title = property(lambda self: f"{self.system}, seed {self.seed}")
    model = property(lambda self: self.work / f"{self.system}.seed{self.seed}")

    @property
    def description(self) -> str:
        return self.title

    def devices(self, training: Training) -> int:
        """The number of GPUs for *training*; 0: the CPU."""
        gpus = gpus_here() if self.gpus is None else self.gpus
        return min(gpus, 1) if training.metric in ON_ONE_GPU else gpus

    def command(self, training: Training) -> str:
        """The command of *training*. It resumes from its last checkpoint."""
        gpus = self.devices(training)
        device = f"--distributed-world-size {gpus}" if gpus else "--cpu"
        start = f" --finetune-from-model {quoted(training.start)}" if training.start else ""
        best = f" --best-checkpoint-metric {training.metric} --maximize-best-checkpoint-metric"
        return (
            f"fairseq-train {quoted(training.data)} --user-dir fairseq_rope {device} --seed {self.seed} "
            f"--save-dir {quoted(self.model / training.name)} --no-epoch-checkpoints --log-format json "
            f"--task {training.task} {training.flags}{start}{'' if training.metric == 'loss' else best}"
        )

    def result(self, training: str) -> dict[str, Any] | None:
        """The validations and the test of a finished training, or None."""
        path = self.model / training / "done.json"
        return json.loads(path.read_text()) if path.exists() else None


def gpus_here() -> int:
    """The number of GPUs of this machine."""
    import torch

    return torch.cuda.device_count()


def is_finished(run: Run) -> bool:
    return all(run.result(training.name) for training in run.trainings)


def train(run: Run, program: str, on_signal: bool = False, gpu: str | None = None) -> str:
    """Run the trainings of *run* that are not finished. Returns why it failed, or "".

    *on_signal* and *gpu* are the arguments of :func:`.launch.begin_job`.
    """
    launch.begin_job(on_signal, gpu)
    try:
        with locked_when_free(run.model / ".lock") as lock:
            for training in run.trainings:
                if run.result(training.name) is None:
                    _train(run, training, program, (lock,))
    except (StageError, InputError) as error:
        return str(error)
    except OSError as error:
        return sentence_of(error, run.model)
    return ""


def _train(run: Run, training: Training, program: str, locks: tuple[int, ...]) -> None:
    folder, command = run.model / training.name, run.command(training)
    history = folder / "history.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with history.open("a") as file:
        process = {**describe(), "command": command, "program": program}
        file.write("\n" + json.dumps({"process": process}) + "\n")
    print(f"{run.title}: {training.name}\n  $ {command}", flush=True)
    log = functools.partial(run_logged, run, log=folder / "log", locks=locks)
    log(f"{command} 2>&1 | python -m recipes.pipeline.history {quoted(history)}", on_line=_print_validation)
    validations = [entry for line in history.read_text().splitlines() if "valid_loss" in (entry := logged(line))]
    key = f"valid_{training.metric}"
    if not validations or key not in validations[-1]:
        raise StageError(f"{run.title}: {training.name} ended without {key} in {history}")
    tested: dict[str, Any] = {}
    if any(training.data.glob("**/test.bin")):
        name = "last" if training.metric == "loss" else "best"
        entries: list[dict[str, Any]] = []
        log(
            f"fairseq-validate {quoted(training.data)} --user-dir fairseq_rope --task {training.task} --batch-size 8 "
            f"--path {quoted(folder / f'checkpoint_{name}.pt')} --valid-subset test --log-format json"
            f"{'' if run.devices(training) else ' --cpu'}",
            on_line=lambda line: entries.append(logged(line)),
        )
        tested = next((entry for entry in reversed(entries) if "test_loss" in entry), {})
        if not tested:
            raise StageError(f"{run.title}: {training.name}: fairseq-validate printed no test_loss: {folder / 'log'}")
    write_whole(folder / "done.json", json.dumps({"valid": validations, "test": tested}) + "\n")


def _print_validation(line: str) -> None:
    entry = logged(line)
    if "valid_loss" in entry:
        print(f"  update {entry['valid_num_updates']}: validation loss {entry['valid_loss']}", flush=True)


# -- the command line --------------------------------------------------------------------------------


def build_parser(name: str, description: str, encodings: Sequence[str]) -> argparse.ArgumentParser:
    """The parser with the flags that all experiments have. *encodings* are the default ones."""
    epilog = (
        "Finished trainings are skipped, interrupted ones resume. Flags after a lone -- are passed to fairseq-train."
    )
    parser = Parser(prog=f"recipes.paper.{name}", description=description, epilog=epilog)
    add = parser.add_argument
    add("--settings", type=Path, default=HERE / "small.yaml", metavar="FILE", help="default: recipes/paper/small.yaml")
    add(
        "--work-dir", type=Path, default=HERE / "work" / name, metavar="DIR", help=f"default: recipes/paper/work/{name}"
    )
    known = f"position encodings, separated by commas: {', '.join(ENCODINGS)}; default: %(default)s"
    add("--encodings", default=",".join(encodings), metavar="NAMES", help=known)
    add("--gpus", type=int, metavar="N", help="number of GPUs to train on; 0: train on the CPU; default: all GPUs")
    add("--dry-run", action="store_true", help="print the trainings' commands, and write nothing")
    launch.add_flags(parser, 3)
    return parser


@dataclass
class Experiment:
    """What a command line asks for: work folder, settings, encodings, and more flags for all trainings."""

    name: str
    args: argparse.Namespace
    flags: str
    settings: dict[str, Any]  # the values of the experiment in the settings file
    encodings: list[str]
    seeds: range

    work = property(lambda self: self.args.work_dir.resolve())
    data = property(lambda self: self.work / "data")

    def prepare(self, sources: Mapping[str, Path], make: Callable[[Path], None], more: object = None) -> None:
        """Make the binary data, with *make*, in a folder that gets its name when it is complete.

        *sources* are the files that it reads, by their names. Raises an InputError if the work folder was begun with
        other settings, files or flags, since its trainings cannot be compared with others. *more* must also be equal.
        A dry run makes nothing, so that the next command can still choose the settings of the folder.
        """
        depends: dict[str, Any] = {**self.settings, "flags after --": self.flags, "more": more}
        depends |= {name: checksum_of(path, "sha256") for name, path in sources.items()}
        depends = json.loads(json.dumps(depends))
        path = self.work / "settings.json"
        if self.args.dry_run:
            self._refuse_another(path, depends)
            return
        with locked_when_free(self.work / ".lock"):
            if path.exists():
                self._refuse_another(path, depends)
                return
            print(f"data: {', '.join(map(str, sources.values()))}", flush=True)
            for folder in (made := self.work / "data.tmp"), self.data:
                shutil.rmtree(folder, ignore_errors=True)
            make(made)
            made.rename(self.data)
            write_whole(path, json.dumps(depends, indent=1, ensure_ascii=False) + "\n")

    def _refuse_another(self, path: Path, depends: Mapping[str, Any]) -> None:
        """Raise an InputError if the settings in *path*, if it exists, differ from *depends*."""
        before = json.loads(path.read_text()) if path.exists() else depends
        changed = ", ".join(key for key in {**before, **depends} if before.get(key) != depends.get(key))
        if changed:
            other = f"was begun with another value of {changed}; choose another folder"
            raise InputError(f"--work-dir {self.work}: {other}")

    def run(
        self,
        trainings: Callable[[str, int, Path], tuple[Training, ...]],
        report: Callable[[list[Run]], tuple[Rows, Panels]],
    ) -> None:
        """Train every encoding from every seed, and write the table and the figure of the finished runs.

        *trainings* gives those of an encoding and a seed, whose folder is the third argument. Raises an InputError if a
        run fails, after the others.
        """
        runs = [
            Run(name, seed, self.work, trainings(name, seed, self.work / f"{name}.seed{seed}"), self.args.gpus)
            for seed in self.seeds
            for name in self.encodings
        ]
        program = f"python -m recipes.paper.{self.name} {shlex.join(sys.argv[1:])}"
        if self.args.dry_run:
            print("\n".join(run.command(each) for run in runs for each in run.trainings))
            return
        unfinished = [run.command(each) for run in runs for each in run.trainings if not run.result(each.name)]
        flags = [flag for command in unfinished if " --cpu " in command and (flag := precision.flag_in(command))]
        slow = [flag for flag in flags if precision.FLAGS[flag] == "bf16" and precision.on_cpu() != "bf16"]
        if slow and self.args.launcher == "local":
            print(f"recipes.paper.{self.name}: warning: {slow[0]}: {precision.EMULATED}", file=sys.stderr)
        ended = launch.outcomes(runs, program, self.args, train, is_finished)
        failed = [why if why.startswith(run.title) else f"{run.title}: {why}" for run, why in ended if why]
        finished = [run for name in self.encodings for run in runs if run.system == name and is_finished(run)]
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


def main(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None,
    kinds: Mapping[str, type],
    work: Callable[[Experiment], None],
) -> None:
    """Call *work* with the experiment of the flags *words*. Errors end the process with one sentence.

    *kinds* are the types of the experiment's settings by their names.
    """
    args, flags = parse(parser, sys.argv[1:] if words is None else words)
    name = parser.prog.rpartition(".")[2]
    with ending_in_one_sentence(parser.prog):
        launch.check(args)
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
        for word in shlex.split(flags):
            if word.partition("=")[0] in OWN_FLAGS:
                raise InputError(f"{word} after --: the experiment sets {', '.join(OWN_FLAGS)}; drop the flag")
        experiment = Experiment(name, args, flags, settings, encodings, seeds)
        refuse_work(experiment.work)
        try:
            if args.launcher == "slurm":  # refuses wrong parameters before the data are prepared
                launch.slurm_executor(args, Run("", 1, experiment.work, (), args.gpus))
            work(experiment)
        except StageError as error:
            raise InputError(str(error)) from None


def read_settings(path: Path, name: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The settings of the experiment *name* in a YAML file. Raises a SettingsError if they are not those of *kinds*."""
    values = read_yaml_file(path, f"--settings {path}")
    of = values.get(name) if isinstance(values, dict) else None
    if not isinstance(of, dict) or of.keys() != kinds.keys():
        raise SettingsError(f"{path}: {name} must have the settings {', '.join(kinds)}, and no others")
    for key, kind in kinds.items():
        if type(of[key]) is not kind:
            raise SettingsError(f"{path}: {name}: {key} is {of[key]!r}, and must be of type {kind.__name__}")
    return of


def existing(flag: str, path: Path) -> Path:
    """*path*, or the gzipped file of that name with ``.gz``. Raises an InputError if neither is a file."""
    for each in (path, path.with_name(f"{path.name}.gz")):
        if each.is_file():
            return each
    raise InputError(f"{flag}: {path} is not a file")


# -- results -----------------------------------------------------------------------------------------


def curves_of(runs: Sequence[Run], training: str) -> dict[str, list[tuple[list[int], list[float]]]]:
    """The validation losses of a training, as updates and losses, of each run by system."""
    curves: dict[str, list[tuple[list[int], list[float]]]] = {}
    for run in runs:
        curves.setdefault(run.system, []).append(curve_of((run.result(training) or {})["valid"], "loss"))
    return curves


def curve_of(validations: list[dict[str, str]], metric: str) -> tuple[list[int], list[float]]:
    """The updates and the values of *metric* of the *validations* in fairseq's log, in order.

    If an interrupted run validated at the same update twice, the later one counts.
    """
    by_update = {int(entry["valid_num_updates"]): float(entry[f"valid_{metric}"]) for entry in validations}
    return sorted(by_update), [by_update[update] for update in sorted(by_update)]


def trained_in(runs: Sequence[Run]) -> str:
    """A paragraph with precision and device of all trainings of *runs*; "" if none has noted them."""
    histories = [run.model / training.name / "history.jsonl" for run in runs for training in run.trainings]
    kinds = dict.fromkeys(precision.described(precision.last_process(path)) for path in histories)
    kinds.pop("", None)
    differ = "The trainings differ in precision or device: " if len(kinds) > 1 else "Trained in "
    return f"{differ}{', '.join(kinds)}.\n\n" if kinds else ""


def as_markdown(rows: Rows) -> str:
    """A table of *rows*: means over seeds with standard deviations, and the differences to the first system.

    A difference is that of each common seed, and then their mean and standard deviation. A column has as many decimals
    as its values.
    """
    first, columns = next(iter(rows)), list(next(iter(rows.values())))
    head = ["system", "seeds", *(cell for column in columns for cell in (column, f"difference to {first}"))]
    lines = [head, ["---", "---", *("---:" for _ in head[2:])]]
    for system, values in rows.items():
        cells = [system, ", ".join(map(str, values[columns[0]]))]
        for column in columns:
            of_first = rows[first][column]
            digits = decimals(value for row in rows.values() for value in row[column].values())
            differences = [value - of_first[seed] for seed, value in values[column].items() if seed in of_first]
            cells.append(spread([*values[column].values()], digits))
            cells.append("" if system == first else spread_of_differences(differences, digits))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def decimals(values: Iterable[float]) -> int:
    """The number of decimals of *values*, which fairseq has rounded in its log: from 1 to 3."""
    return max((len(f"{value:.3f}".rstrip("0").partition(".")[2]) for value in values), default=0) or 1


def spread_of_differences(differences: Sequence[float], digits: int) -> str:
    """Mean and standard deviation of *differences*, with a sign."""
    if not differences:
        return "no common seed"
    spreads = f" ± {statistics.stdev(differences):.{digits}f}" if len(differences) > 1 else ""
    return f"{statistics.mean(differences):+.{digits}f}{spreads}"


def draw(panels: Panels) -> Any:
    """A figure with one plot for each of *panels*: a line for each seed, against updates."""
    systems = list(dict.fromkeys(system for panel in panels.values() for system in panel))

    def fill(*all_axes: Any) -> None:
        for axes, (label, panel) in zip(all_axes, panels.items(), strict=True):
            for system, curves in panel.items():
                for number, (updates, values) in enumerate(curves):
                    look = {**style(systems, system), "label": None if number else system, "alpha": 0.8}
                    axes.plot(updates, values, **look)
            axes.set(xlabel="updates", ylabel=label)

    return figure_of({system: system for system in systems}, len(panels), fill)
