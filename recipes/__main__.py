"""Train and score translation models from raw text, one or several to compare.

    python -m recipes RECIPE [systems=FILE] [seeds=N] [data=DIR] [work=DIR] [KEY=VALUE …]
        [--until STEP] [--jobs N | --run K | --list | --report | --dry-run]

RECIPE is a folder of recipes/, or the path of another one, with settings.yaml. Finished steps are skipped, and
interrupted ones go on.

  systems=FILE     YAML with the settings of each system by its name, the baseline first; or one of recipes/systems/:
                   baseline, encodings, block
  seeds=N          train each from seeds 1 to N, or FIRST-LAST; default: 1
  data=DIR         folder with the files of the corpus; default: they are downloaded
  manifest=none    do not check sizes and checksums of files, and download none
  work=DIR         folder for everything that is written; default: RECIPE/work
  --until STEP     stop after a step: {steps}
  --jobs N         N runs at a time on this machine
  --run K          only the run with number K, as --list counts them
  --list           print the runs and the table of models, and run nothing
  --report         only make the report of what is finished
  --dry-run        print which steps are finished and which would run

Settings, with their values in this recipe:
{settings}
"""

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.lines import lines_of
from fairseq_rope.metrics import load_tokeniser
from fairseq_rope.tools import escape_unencodable_output
from recipes import jobs, machine, models
from recipes.compared import Report
from recipes.corpus import Corpus
from recipes.plan import Plan, Run, ensure_sweep, read_systems, seeds_of
from recipes.report import page
from recipes.script import ROOT
from recipes.settings import FIELDS, described, read_words, read_yaml
from recipes.steps import STEPS, Pipeline
from recipes.text.fetch import read_manifest
from recipes.work import Busy, Step, StepError, Work

OF_COMMAND = ("systems", "seeds", "data", "work", "manifest")


def recipe_folder(name: str) -> Path:
    """Return the folder of a recipe: one of ours by its name, or a path. Raises an InputError if there is none."""
    for folder in (Path(name), ROOT / "recipes" / name):
        if (folder / "settings.yaml").is_file():
            return folder
    known = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/settings.yaml"))
    raise InputError(f"{name}: is not a folder with settings.yaml; the recipes are {', '.join(known)}")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, str], list[str]]:
    """Return the flags, the words of the command itself, and those that are settings."""
    parser = argparse.ArgumentParser(prog="recipes", add_help=False, allow_abbrev=False)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--until", choices=[*STEPS], default="score")
    parser.add_argument("--help", "-h", action="store_true")
    one_of = parser.add_mutually_exclusive_group()
    one_of.add_argument("--jobs", type=int, default=1)
    one_of.add_argument("--run", type=int)
    for flag in ("--list", "--report", "--dry-run"):
        one_of.add_argument(flag, action="store_true")
    args = parser.parse_intermixed_args(argv)
    own, words = dict[str, str](), list[str]()
    for word in args.words:
        key, equals, value = word.partition("=")
        if equals and key in OF_COMMAND:
            own[key] = value
        else:
            words.append(word)
    return args, own, words


def plan_of(recipe: str, own: Mapping[str, str], words: Sequence[str]) -> Plan:
    """Return all runs of a command, with every setting checked."""
    folder = recipe_folder(recipe)
    given = read_words(words)
    settings = read_yaml(folder / "settings.yaml")
    path = Path(own["systems"]) if own.get("systems") else None
    if path is not None and not path.suffix:
        path = ROOT / "recipes" / "systems" / f"{path}.yaml"
    arch = str(given.get("arch", settings.get("arch", FIELDS["arch"].default)))
    default = folder / "manifest.tsv"
    name = own.get("manifest") or (str(default) if default.exists() else "none")
    manifest = None if name == "none" else Path(name).absolute()
    work = Work(Path(own.get("work", folder / "work")).absolute())
    if any(character in str(work.path) for character in ":,"):
        raise InputError(f"work={work.path}: fairseq divides paths at colons and commas")
    data = Path(own["data"]).absolute() if "data" in own else None
    if data is not None and not data.is_dir():
        raise InputError(f"data={own['data']}: is not a folder")
    if data is None and (folder / "corpus").is_dir():
        data = (folder / "corpus").absolute()
    corpus = Corpus(work, data, manifest, read_manifest(manifest) if manifest else {})
    systems, seeds = read_systems(path, arch), seeds_of(own.get("seeds", "1"))
    return Plan(folder.resolve().name, settings, given, systems, seeds, corpus)


class Command:
    """What one call does."""

    def __init__(self, args: argparse.Namespace, own: Mapping[str, str], words: Sequence[str]) -> None:
        self.args, self.plan = args, plan_of(args.recipe, own, words)
        self.work = self.plan.corpus.work
        self.words = [args.recipe, *(f"{name}={value}" for name, value in own.items()), *words]
        self.failed: dict[str, str] = {}

    def main(self) -> None:
        args, runs = self.args, self.plan.runs
        if args.list:
            for number, run in enumerate(runs, 1):
                print(f"{number:4}  {run.title}: {self.state(run)}")
            models.write(self.work)
            print(f"\n{models.table(self.work)}", end="")
        elif args.dry_run:
            self.print_steps()
        elif args.report:
            self.report()
        elif args.run is not None:
            if not 1 <= args.run <= len(runs):
                raise InputError(f"--run {args.run}: must be 1 to {len(runs)}")
            self.check()
            self.print_end(runs[args.run - 1], self.do(runs[args.run - 1]))
        else:
            self.check()
            self.do_all(runs)

    def check(self) -> None:
        """Raise an InputError for a file, a tokeniser or a machine that would stop the runs after a while."""
        run = self.plan.runs[0]
        s = self.plan.settings(run)
        machine.check_room(self.work.path, s.disk_gb)
        machine.devices(s.gpus, s.precision)
        pipeline = Pipeline(run.seed, s, s.precision, self.plan.corpus)
        for name in pipeline.sets:
            pipeline.text(name)
        if pipeline.bpe and pipeline.tests:
            load_tokeniser(pipeline.tokenize)

    @property
    def trains(self) -> bool:
        """Whether the runs train."""
        return [*STEPS].index(self.args.until) >= [*STEPS].index("train")

    def state(self, run: Run) -> str:
        """Whether *run* has finished, is running, or waits."""
        try:
            pipeline = self.plan.pipeline(run)
        except StepError:
            return "waits for its sweep"
        if all(step.is_finished(self.work) for step in self.steps(run, pipeline)):
            return "finished"
        name = pipeline.train.name
        return models.state(self.work, name) if (self.work.path / name).exists() else "not begun"

    def steps(self, run: Run, pipeline: Pipeline) -> list[Step]:
        """Return the last steps of *run*. A run of a sweep is only trained."""
        return [pipeline.train] if run.setting and self.trains else STEPS[self.args.until](pipeline)

    def do(self, run: Run) -> Pipeline:
        """Do one run, with all that it needs."""
        if not run.setting and self.trains:
            ensure_sweep(self.plan, run.system, self.do)
        pipeline = self.plan.pipeline(run)
        try:
            for step in self.steps(run, pipeline):
                self.work.ensure(step)
        finally:
            models.write(self.work)
        self.link(pipeline)
        return pipeline

    def do_all(self, runs: Sequence[Run]) -> None:
        """Do all runs, one after another or several at a time, and the report if there are several systems or seeds."""
        last = None
        if self.args.jobs > 1 and len(runs) > 1 and self.trains:
            self.work.ensure(self.plan.pipeline(runs[0]).data_bin)  # the jobs share it
            gpus = machine.devices(self.plan.settings(runs[0]).gpus, "auto")
            words = [*self.words, "--until", self.args.until]
            for number, failure in jobs.outcomes(self.plan, range(1, len(runs) + 1), words, self.args.jobs, gpus):
                self.note(runs[number - 1], failure)
        else:
            waiting = [*runs]
            self.work.waits = False
            while waiting:
                run = waiting.pop(0)
                if len(runs) > 1:
                    print(f"== run {runs.index(run) + 1} of {len(runs)}: {run.title}", flush=True)
                try:
                    last = run, self.do(run)
                except Busy:  # do the others first
                    self.work.waits = all(self.state(other) == "running" for other in waiting)
                    waiting.append(run)
                    continue
                except StepError as error:
                    if len(runs) == 1:
                        raise
                    self.note(run, str(error))
                self.work.waits = False
        problems = [f"{len(self.failed)} of {len(runs)} runs failed"] if self.failed else []
        if self.args.until in ("score", "export") and len(runs) > 1:
            try:
                self.report()
            except StepError as error:
                problems.append(str(error))
        elif last is not None:
            self.print_end(*last)
        if problems:
            raise StepError("; ".join([*problems, *(f"{run}: {why}" for run, why in self.failed.items())]))

    def note(self, run: Run, failure: str) -> None:
        """Note that *run* has ended, and why if it failed."""
        print(f"{run.title}: {failure or 'finished'}", file=sys.stderr if failure else sys.stdout, flush=True)
        if failure:
            self.failed[run.title] = failure

    def report(self) -> None:
        """Make the report of the finished runs, and print its headline."""
        report = Report.of(self.plan, shlex.join(["python", "-m", "recipes", *self.words]), self.failed)
        folder = self.work.ensure(report)
        self.work.link("report", report)
        for line in page.verdict(folder):
            print(line)
        print(f"report: {self.work.path / 'report' / 'report.html'}", flush=True)

    def link(self, pipeline: Pipeline) -> None:
        """Let plain names in the work folder lead to what this run has made."""
        targets: list[tuple[str, Step, str]] = [("data-bin", pipeline.data_bin, ""), ("model", pipeline.average, "")]
        targets.append(("exported", pipeline.export, "ctranslate2"))
        for name in pipeline.tests[:1]:
            targets += [("translations", pipeline.translate(name), ""), ("score", pipeline.score(name), "")]
        for name, step, inside in targets:
            if step.is_finished(self.work):
                self.work.link(name, step, inside)

    def print_end(self, run: Run, pipeline: Pipeline) -> None:
        """Print where the results are, and translations and scores if there are any."""
        steps = self.steps(run, pipeline)
        tests = pipeline.tests if self.args.until in ("score", "export") and not run.setting else []
        for step in [*steps, pipeline.average] if tests else steps:
            print(f"{step.kind:12} {self.work.folder(step)}", flush=True)
        for name in tests:
            self.print_score(pipeline, name)

    def print_score(self, pipeline: Pipeline, name: str) -> None:
        """Print five translations of a test set, and all its scores."""
        text, translations = (self.work.folder(step) for step in (pipeline.text(name), pipeline.translate(name)))
        source, target = pipeline.langs
        files = (text / f"text.{source}", translations / f"hypotheses.{target}", text / f"text.{target}")
        columns = [list(lines_of(str(path))) for path in files]
        total = len(columns[0])
        print(f"\nfive translations of the test set{'' if name == 'test' else ' ' + name}:")
        for number in range(0, total, max(1, total // 5))[:5]:
            for label, lines in zip(("source", "model", "reference"), columns, strict=True):
                print(f"  {label:>9}  {lines[number]}")
            print()
        score = json.loads((self.work.folder(pipeline.score(name)) / "score.json").read_text())
        metrics = score["systems"][0]["metrics"]
        for metric in metrics[1:]:
            print(f"{metric['name'] + ':':32} {metric['score']:.2f}")
        print(f"signature:         {metrics[0]['signature']}")
        ceiling = score["references"][0]["sacreBLEU_after_moses"] if pipeline.bpe == "subword-nmt" else 100.0
        below = f" (the reference after Moses' tokeniser and detokeniser: {ceiling:.2f})" if ceiling < 99 else ""
        print(f"sacreBLEU {metrics[0]['score']:.2f}{below}", flush=True)

    def print_steps(self) -> None:
        """Print the steps of all runs, and which of them are finished."""
        printed = set()
        for run in self.plan.runs:
            try:
                pipeline = self.plan.pipeline(run)
            except StepError as error:
                print(f"== {error}")
                continue
            print(f"== {run.title}")
            for step in _in_order(self.steps(run, pipeline)):
                if step.name not in printed:
                    state = "finished" if step.is_finished(self.work) else "would run"
                    print(f"  {state:10} {step.name}")
                    printed.add(step.name)


def _in_order(steps: Sequence[Step]) -> list[Step]:
    """Return *steps* and all that they need, each after what it needs."""
    ordered: dict[str, Step] = {}
    for step in steps:
        ordered |= {one.name: one for one in _in_order([*step.inputs.values()])}
        ordered[step.name] = step
    return [*ordered.values()]


def help_of(recipe: str | None) -> str:
    """Return the help, with the settings of *recipe* if one is named."""
    own = read_yaml(recipe_folder(recipe) / "settings.yaml") if recipe else {}
    return (__doc__ or "").format(steps=", ".join(STEPS), settings=described(own)).strip()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command. Ends with status 1 and one sentence if a step or run fails, or a setting is wrong."""
    escape_unencodable_output()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the commands of a step end, too
    args, own, words = parse(sys.argv[1:] if argv is None else argv)
    with ending_in_one_sentence("recipes"):
        if args.help or args.recipe is None:
            print(help_of(args.recipe))
            return
        if args.jobs < 1:
            raise InputError(f"--jobs {args.jobs}: must be at least 1")
        Command(args, own, words).main()


if __name__ == "__main__":
    main()
