"""Train two architectures from several seeds by one recipe, and report how they differ.

    python -m recipes.compare NAME --seeds 3 [flags of the recipe]

Training by training, each skipped or gone on from where it was; after every seed the report is written anew.
It has all seeds that are trained, also those beyond --seeds.
"""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence

from recipes.compare.stage21_join import Join
from recipes.compare.stage22_translate_joined import TranslateJoined

try:
    from recipes.compare.page import COLOURS
    from recipes.compare.stage23_report import SEEDS, Report
except ModuleNotFoundError as missing:  # now, and not after the trainings
    sys.exit(f"recipes.compare: {str(missing.name).split('.')[0]} is not installed: pip install -e '.[plots]'")
from recipes.pipeline.arguments import add_flags, describe_experiment, parse
from recipes.pipeline.check_flags import check_flags
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.runner import Runner
from recipes.pipeline.session import announce, at_work
from recipes.pipeline.stage10_score import check_tokenize
from recipes.pipeline.stages import TO_SCORE

# Joining comes before training, so that lines which cannot be translated are reported first.
ORDER = (*TO_SCORE[:6], Join(), *TO_SCORE[6:], TranslateJoined())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recipes.compare",
        description="Train architectures from several seeds by one recipe, and report how they differ. "
        "What was done before is skipped.",
        epilog="After a lone -- stand more flags for fairseq-train, for all architectures.",
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, metavar="N", help="1 to N at least; default: %(default)s")
    archs, baseline_first = ["transformer", "transformer_rope"], "the first is the baseline; default: %(default)s"
    parser.add_argument("--archs", nargs="+", default=archs, metavar="ARCH", help=baseline_first)
    add_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with status 1 and one sentence where a stage cannot run, 2 where a flag is wrong."""
    parser = build_parser()
    words = sys.argv[1:] if argv is None else argv
    args, train_flags = parse(parser, words)
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: must be 1 or more")
    if not 2 <= len(args.archs) <= len(COLOURS) or len(set(args.archs)) < len(args.archs):
        parser.error(f"--archs {' '.join(args.archs)}: must be 2 to {len(COLOURS)}, all different")
    seeds = range(1, args.seeds + 1)
    pairs = [[describe_experiment(parser, args, arch, seed, train_flags) for arch in args.archs] for seed in seeds]
    experiment = pairs[0][0]
    program = f"python -m recipes.compare {shlex.join(words)}"
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
                reported = _and_trained_before(pairs, done)
                print(f"== seeds 1 to {len(reported)}" if len(reported) > 1 else "== seed 1", flush=True)
                report = Report(reported, args.recipe)
                report_runner.ensure(report)
                if not experiment.dry_run:
                    print(report.summary(experiment), flush=True)


def _and_trained_before(pairs: list[list[Experiment]], done: int) -> list[list[Experiment]]:
    """The first *done* of *pairs*, and those of further seeds for which there is nothing left to do."""
    reported = pairs[:done]
    while True:
        seed = len(reported) + 1
        more = [dataclasses.replace(system, seed=seed) for system in pairs[0]]
        if not all(Runner(system).stamps.is_done(stage) for system in more for stage in ORDER):
            return reported
        reported.append(more)


if __name__ == "__main__":
    main()
