"""Train two architectures from several seeds by one recipe, and report how they differ.

    python -m recipes.compare NAME --seeds 3 [flags of the recipe]

Finished trainings are skipped, and interrupted ones resume. The report is rewritten after every seed. It covers all
trained seeds, including those beyond --seeds.
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence

from recipes.compare.stage21_join import Join
from recipes.compare.stage22_translate_joined import TranslateJoined

try:
    from recipes.compare.stage23_report import SEEDS, Report
except ModuleNotFoundError as missing:  # checked now, because the report is written after hours of training
    sys.exit(f"recipes.compare: {str(missing.name).split('.')[0]} is not installed: pip install -e '.[plots]'")
from recipes.pipeline.arguments import add_flags, describe_experiment, parse
from recipes.pipeline.check_flags import check_flags
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.runner import Runner
from recipes.pipeline.session import announce, at_work
from recipes.pipeline.stage10_score import check_tokenize
from recipes.pipeline.stages import TO_SCORE

# Joining comes before training, so that lines that are too long to translate are reported early.
ORDER = (*TO_SCORE[:6], Join(), *TO_SCORE[6:], TranslateJoined())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recipes.compare",
        description="Train architectures from several seeds by one recipe, and report how they differ. "
        "Finished stages are skipped.",
        epilog="Flags after a lone -- are passed to fairseq-train, for all architectures.",
    )
    parser.add_argument(
        "--seeds", type=int, default=SEEDS, metavar="N", help="train seeds 1 to N; default: %(default)s"
    )
    archs, help_archs = ["transformer", "transformer_rope"], "the first is the baseline; default: %(default)s"
    parser.add_argument("--archs", nargs="+", default=archs, metavar="ARCH", help=help_archs)
    add_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison. Exits with status 1 and one sentence if a stage fails, 2 if a flag is wrong."""
    parser = build_parser()
    arguments = sys.argv[1:] if argv is None else argv
    args, train_flags = parse(parser, arguments)
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: must be 1 or more")
    if len(args.archs) < 2 or len(set(args.archs)) < len(args.archs):
        parser.error(f"--archs {' '.join(args.archs)}: must be 2 or more, all different")
    seeds = range(1, args.seeds + 1)
    pairs = [[describe_experiment(parser, args, arch, seed, train_flags) for arch in args.archs] for seed in seeds]
    experiment = pairs[0][0]
    program = f"python -m recipes.compare {shlex.join(arguments)}"
    with at_work(experiment, args.recipe, program) as runner_of:
        announce(experiment)
        if not experiment.dry_run:
            check_tokenize(experiment)
            check_flags(pairs[0], "--archs")
        report_runner = runner_of(experiment)
        for done, pair in enumerate(pairs, start=1):
            ran = False
            for system in pair:
                print(f"== {system.arch}, seed {system.seed}", flush=True)
                runner = runner_of(system)
                for stage in ORDER:
                    ran |= runner.ensure(stage)
            if ran or done == args.seeds:
                reported = _with_further_seeds(pairs, done)
                print(f"== seeds 1 to {len(reported)}" if len(reported) > 1 else "== seed 1", flush=True)
                runs = {system.system: [pair[n] for pair in reported] for n, system in enumerate(pairs[0])}
                report = Report(runs, args.recipe)
                report_runner.ensure(report)
                if not experiment.dry_run:
                    print(report.summary(experiment), flush=True)


def _with_further_seeds(pairs: list[list[Experiment]], done: int) -> list[list[Experiment]]:
    """The first *done* of *pairs*, and the pairs of the following seeds whose stages are all finished."""
    reported = pairs[:done]
    while True:
        seed = len(reported) + 1
        more = [dataclasses.replace(system, seed=seed) for system in pairs[0]]
        if not all(Runner(system).stamps.is_done(stage) for system in more for stage in ORDER):
            return reported
        reported.append(more)


if __name__ == "__main__":
    main()
