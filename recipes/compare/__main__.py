"""Train several systems from several seeds by one recipe, and report how they differ.

    python -m recipes.compare NAME --seeds 3 [flags of the recipe]

Finished trainings are skipped, and interrupted ones resume. A run that fails does not stop the others. The report is
rewritten after every seed. It covers everything that is trained, including seeds beyond --seeds.
"""

import argparse
import dataclasses
import itertools
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fairseq_rope.errors import InputError
from recipes.compare import stage12_score_with, stage13_join, systems

try:
    from recipes.compare import same_precision, tuning
    from recipes.compare.stage15_report import SEEDS, Report, of_equal_length
    from recipes.compare.stages import finished, outdated, runs_in_folders, stages_of
    from recipes.compare.tuning import Tuning
    from recipes.run import launch
except ModuleNotFoundError as missing:  # checked now, because the report is written after hours of training
    sys.exit(f"recipes.compare: {str(missing.name).split('.')[0]} is not installed: pip install -e '.[compare]'")
from fairseq_rope.metrics import load_tokeniser
from recipes.compare.systems import System
from recipes.pipeline import fairseq_train
from recipes.pipeline.arguments import add_flags, check_start, describe_experiment
from recipes.pipeline.check_flags import check_flags
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.lengths import check_lengths
from recipes.pipeline.session import announce, at_work
from recipes.pipeline.settings import check_values
from recipes.pipeline.stage01_fetch import check_files
from recipes.pipeline.stages import OF_DATA, needed
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.command_line import RunParser, parse, refuse_lost_validations
from recipes.run.run import StageError
from recipes.run.runner import Runner
from recipes.run.yaml_file import SettingsError

DATA: tuple[TranslationStage, ...] = (*OF_DATA, stage13_join.Join())


def build_parser() -> argparse.ArgumentParser:
    parser = RunParser(
        prog="recipes.compare",
        description="Train systems from several seeds by one recipe, and report how they differ. Finished stages are "
        "skipped.",
        epilog="Flags after a lone -- are passed to fairseq-train, for all systems.",
    )
    systems.add_flags(parser)
    tuning.add_flag(parser)
    stage12_score_with.add_flags(parser)
    launch.add_flags(parser, SEEDS)
    add_flags(parser)
    return parser


@dataclasses.dataclass
class Comparison:
    """What a command compares."""

    args: argparse.Namespace
    program: str  # the command that repeats the comparison
    experiments: dict[str, Experiment]  # seed 1 of every system by its name, the baseline first
    runs: list[Experiment]  # those to train: all systems from the first seed, then all from the second, …; not empty
    failed: dict[str, str] = dataclasses.field(default_factory=dict)  # why a run has failed, by its title
    without_value: list[str] = dataclasses.field(default_factory=list)  # entries of failed for systems without a choice
    tuning: Tuning | None = None

    @property
    def baseline(self) -> Experiment:
        return next(iter(self.experiments.values()))

    def check(self) -> None:
        """Raise a StageError if the tokeniser, the launcher or fairseq does not take what the flags ask for."""
        check_files(self.baseline)  # the check that takes least time comes first
        load_tokeniser(self.baseline.tokenize)
        first = self.runs[0].seed  # an old model to start from can have the seed in its name
        checked = [dataclasses.replace(self.experiments[name], seed=first) for name in self._trained()]
        if self.tuning is not None:
            checked += [of_value[checked[0].system] for of_value in self.tuning.experiments.values()]
        devices = None
        if self.args.launcher == "slurm":
            launch.launcher_of(self.args, self.baseline)  # refuses what submitit does not know
            if self.baseline.gpus != 0:
                devices = (1, "fp32")  # SLURM's machines can have other ones than this machine
        if self.tuning is None and all(launch.is_trained(run, stages_of) for run in self.runs):
            devices = (0, "fp32")  # a model that was trained in fp16 on a GPU can be scored again on a CPU
        check_flags(checked, systems.flag(self.args), devices)

    def check_joined_lines(self) -> None:
        """Raise a StageError if a line of stage 13 is too long for a run to translate after its training."""
        for name in self._trained():
            if not all(launch.is_done(run, stages_of) for run in self.runs if run.system == name):
                stage13_join.check(self.experiments[name])

    def check_validation_set(self) -> None:
        """Raise a StageError if no run is trained, and a sentence of the validation set is too long for each of them.

        Stage 7 checks each run again: if some can be trained, they go on.
        """
        runs = self.runs if self.tuning is None else self.tuning.runs(self._trained())
        problems = []
        for run in runs:
            try:
                # With more devices, a batch has no more tokens.
                sizes = fairseq_train.batches_of(fairseq_train.command(run, 1, "fp32"))
                check_lengths(run, int(sizes["max_tokens"]), ["valid"])
            except StageError as error:
                problems.append(error)
        if problems and len(problems) == len(runs) and not any(launch.is_trained(run, stages_of) for run in runs):
            raise problems[0]

    def choose_precision(self) -> None:
        """Let new runs have the precision of the earlier ones; see :mod:`.same_precision`."""
        compared, runs = [*self.experiments.values()], [*self.runs]
        if self.tuning is not None:
            compared += [run for of_value in self.tuning.experiments.values() for run in of_value.values()]
            runs += self.tuning.runs(self._trained())
        on_this_machine = self.args.launcher != "slurm" and not self.baseline.dry_run
        same_precision.choose_precision(compared, runs, on_this_machine)

    def print_commands(
        self, runner_of: Callable[[Experiment], Runner[Experiment]], report_runner: Runner[Experiment]
    ) -> None:
        """Print the commands of all runs, for a dry run, and whether an earlier report would be moved.

        With ``--tune``, the commands are those of the runs that tune.
        """
        runs = self.runs if self.tuning is None else self.tuning.runs(self._trained())
        for run in runs:
            print(f"== {run.title}", flush=True)
            for stage in stages_of(run):
                runner_of(run).ensure(stage)
        chosen = {} if self.tuning is None else self.tuning.chosen(finished)
        in_report = {}
        for name, experiment in self.experiments.items():
            of_system = [run for run in self.runs if run.system == name]
            of_system += self.finished_runs(chosen.get(name, experiment))
            in_report[name] = [*{run.seed: run for run in of_system}.values()]
        report_runner.ensure(Report(in_report, self.args.recipe, tuning=self.tuning))

    def train(self, report_runner: Runner[Experiment]) -> None:
        """Train all runs, and write the report after every seed. Raises a StageError that names the failed runs."""
        others: dict[str, str] = {}
        unwritten: list[str] = []  # why there is no report
        runs = len(self.runs)
        if self.tuning is not None:
            runs += self._tune(self.tuning)
        systems_of_a_seed = len({run.system for run in self.runs})
        ended: Counter[int] = Counter()
        for run in self._launch(self.runs):
            ended[run.seed] += 1
            if ended[run.seed] < systems_of_a_seed:
                continue
            is_last = ended.total() == len(self.runs)
            others, unwritten = {}, []
            try:
                others = self.report(report_runner, must_be=is_last)
            except (InputError, OSError) as error:
                unwritten = [str(error)]
                if not is_last:
                    print(f"no report of these runs yet, the others go on: {error}", file=sys.stderr)
        problems = unwritten + [f"{run} is not in the report: {why}" for run, why in others.items()]
        problems = [f"{system}: {self.failed[system]}" for system in self.without_value] + problems
        if failed := [run for run in self.failed if run not in self.without_value]:
            problems.insert(0, f"{len(failed)} of {runs} runs failed: {'; '.join(failed)}")
        if problems:
            raise StageError("; ".join(problems))

    def _launch(self, runs: Sequence[Experiment]) -> Iterator[Experiment]:
        """Train *runs*, yield each when it has ended, and note the failed ones."""
        for run, failure in launch.outcomes(runs, stages_of, self.program, self.args):
            if failure:
                self.failed[run.title] = failure
                print(f"{run.title}, failed: {failure}", file=sys.stderr)
            yield run

    def _tune(self, tuned: Tuning) -> int:
        """Train the runs of *tuned*, and give each system its best value. Returns the number of these runs."""
        if self.baseline.system not in self._trained():  # --only: no report is possible without an earlier choice
            tuned.require(tuned.chosen(finished), self.baseline.system, self.failed)
        tuning_runs = tuned.runs(self._trained())
        for _ in self._launch(tuning_runs):
            pass
        chosen = tuned.chosen(finished)
        for name in self._trained():
            if name not in chosen:
                self.without_value.append(f"{name}, {tuned.setting}")
                self.failed[self.without_value[-1]] = "no training with a finite loss has ended"
        tuned.require(chosen, self.baseline.system, self.failed)
        self.experiments = {name: chosen[name] for name in self.experiments if name in chosen}
        chosen_runs = (run for run in self.runs if run.system in chosen)
        self.runs = [dataclasses.replace(chosen[run.system], seed=run.seed) for run in chosen_runs]
        return len(tuning_runs)

    def _trained(self) -> list[str]:
        return list(dict.fromkeys(run.system for run in self.runs))

    def report(self, runner: Runner[Experiment], must_be: bool) -> dict[str, str]:
        """Write the report of all finished runs. Without the baseline or another system there is none.

        Returns the finished runs that are not in the report, and why. Raises a StageError if there is no report, but
        *must_be* one.
        """
        all_finished = {name: self.finished_runs(experiment) for name, experiment in self.experiments.items()}
        in_report = {run.title: run for run in itertools.chain(*all_finished.values())}
        for title in [*self.failed]:
            if title in in_report and finished(in_report[title]):  # another process can have finished it
                del self.failed[title]
        compared, others = of_equal_length(all_finished)
        others |= self._outdated()
        # A run whose translations a program of --scorer could not score is in the report, but not in all its tables.
        failed = {f"A score of {run}" if run in in_report else run: why for run, why in self.failed.items()} | others
        baseline = self.baseline.system
        if baseline not in compared or len(compared) < 2:
            if must_be:
                lacking = f"the baseline, {baseline}, has no finished run"
                if baseline in compared:
                    lacking = "no system but the baseline has a finished run"
                why = "; ".join(f"{run}: {reason}" for run, reason in failed.items())
                raise StageError(f"no report is written, because {lacking}: {why or 'none failed'}")
            return others
        trained = (f"{name} from seeds {', '.join(str(run.seed) for run in runs)}" for name, runs in compared.items())
        print(f"== report: {'; '.join(trained)}", flush=True)
        report = Report(compared, self.args.recipe, failed, self.tuning)
        runner.ensure(report)
        print(report.summary(runner.run), flush=True)
        return others

    def _outdated(self) -> dict[str, str]:
        """What has changed since the end of each run that is not among :attr:`runs`, by its title."""
        here = {run.model for run in self.runs}
        runs = itertools.chain.from_iterable(map(runs_in_folders, self.experiments.values()))
        changes = {run.title: outdated(dataclasses.replace(run, scorers=())) for run in runs if run.model not in here}
        return {
            title: f"{changed} since its end: repeat the command with this seed (--seeds) and this system (--only)"
            for title, changed in changes.items()
            if changed
        }

    def finished_runs(self, experiment: Experiment) -> list[Experiment]:
        """The finished runs of the system of *experiment*, from any seed."""
        return [run for run in runs_in_folders(experiment) if finished(dataclasses.replace(run, scorers=()))]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison. Exits with status 1 and one sentence if a stage or a run fails, 2 if a flag is wrong."""
    parser = build_parser()
    arguments = sys.argv[1:] if argv is None else argv
    args, train_flags = parse(parser, arguments)
    tuned = None
    try:
        seeds = launch.seeds_of(args.seeds)
        launch.refuse_contradictions(args)
        compared, trained = systems.chosen(args)
        if args.tune and args.name:
            raise SettingsError(f"--name {args.name}: --tune trains each value in a folder of its own; drop --name")
        if args.tune:
            tuned = _tuning(parser, args, compared, train_flags)
        experiments = {system.name: _experiment(parser, args, system, train_flags) for system in compared}
        # Systems that need the model of another one come after it.
        ordered = [experiments[system.name] for system in sorted(trained, key=lambda system: bool(system.of))]
        runs = [dataclasses.replace(experiment, seed=seed) for seed in seeds for experiment in ordered]
        for run in runs:
            check_start(run)
        values = [experiments] if tuned is None else tuned.experiments.values()
        for experiment in itertools.chain(*(of_value.values() for of_value in values)):
            for seed in seeds:
                systems.refuse_other_training(dataclasses.replace(experiment, seed=seed))
        if not runs[0].settings.test_files:
            raise SettingsError("--set test_files=: a comparison needs a test set")
    except InputError as error:
        parser.error(str(error))
    comparison = Comparison(args, f"python -m recipes.compare {shlex.join(arguments)}", experiments, runs, tuning=tuned)
    baseline = comparison.baseline
    here = dataclasses.replace(baseline, gpus=0) if args.launcher == "slurm" else baseline  # SLURM's jobs have the GPUs
    with at_work(here, args.recipe, comparison.program) as runner_of:
        announce(baseline)
        if not baseline.dry_run:
            comparison.check()
        named = {} if tuned is None else {"--tune": tuned.setting}  # the report has a folder of its own
        report_runner = runner_of(dataclasses.replace(baseline, differs={**baseline.differs, **named}))
        for stage in needed(DATA, baseline):
            report_runner.ensure(stage)
        comparison.choose_precision()
        if baseline.dry_run:
            comparison.print_commands(runner_of, report_runner)
        else:
            comparison.check_joined_lines()
            comparison.check_validation_set()
            comparison.train(report_runner)


def _experiment(
    parser: argparse.ArgumentParser, args: argparse.Namespace, system: System, train_flags: str
) -> Experiment:
    """Seed 1 of *system*. Raises a SettingsError if its flags include one that the recipe sets itself."""
    first = launch.seeds_of(args.seeds)[0]  # the file of start_checkpoint, if its name has the seed, must exist
    experiment = describe_experiment(parser, args, system.arch, first, train_flags)
    own = experiment.settings
    settings = dataclasses.replace(
        own,
        fairseq_train_flags=f"{own.fairseq_train_flags} {system.flags}".strip(),
        fairseq_generate_flags=f"{own.fairseq_generate_flags} {system.generate}".strip(),
    )
    check_values(settings)  # refuses flags of the recipe
    refuse_lost_validations(settings.fairseq_train_flags)
    # Flags of the system are part of its name, so they do not change the label of the folder.
    experiment.scorers = stage12_score_with.chosen(args)
    return dataclasses.replace(experiment, seed=1, system=system.name, training_of=system.of, settings=settings)


def _tuning(
    parser: argparse.ArgumentParser, args: argparse.Namespace, compared: Sequence[System], train_flags: str
) -> Tuning:
    """The tuning of *compared*. Raises a SettingsError if it is not possible."""
    setting, values = tuning.read_flag(args)
    experiments = {}
    for value in values:
        with_value = argparse.Namespace(**{**vars(args), "set": [*args.set, f"{setting}={value}"]})
        experiments[value] = {system.name: _experiment(parser, with_value, system, train_flags) for system in compared}
    tuned = Tuning(setting, experiments)
    tuned.check()
    return tuned


if __name__ == "__main__":
    main()
