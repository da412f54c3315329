"""Run a recipe: its stages in order. Finished stages are skipped."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from fairseq_rope.metrics import load_tokeniser
from recipes.pipeline.arguments import add_flags, called, describe_experiment, own_settings
from recipes.pipeline.check_flags import check_flags
from recipes.pipeline.fairseq_train import check_devices, warning
from recipes.pipeline.listing import model_table
from recipes.pipeline.session import announce, at_work
from recipes.pipeline.settings import describe_settings
from recipes.pipeline.stage01_fetch import check_files
from recipes.pipeline.stage10_score import print_report
from recipes.pipeline.stages import AVERAGE, EXPORT, SCORE, STAGES, TO_SCORE, TRAIN, TRANSLATE, needed
from recipes.run.command_line import RunParser, parse
from recipes.run.lock import locked_when_free


def build_parser(recipe_is_known: bool = False) -> argparse.ArgumentParser:
    """The parser of the command line. See :func:`add_flags` for *recipe_is_known*."""
    numbers = ", ".join(f"{stage.number} {stage.title}" for stage in STAGES if not stage.label)
    parser = RunParser(
        prog="run.sh",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run a recipe from text to BLEU. Finished stages are skipped.",
        epilog=f"Flags after a lone -- are passed to fairseq-train.\n\nStages: {numbers}\n\n"
        f"Settings, in settings.yaml or as --set KEY=VALUE:\n{describe_settings()}",
    )
    add = parser.add_argument
    add("--stage", type=int, default=1, metavar="N", help="the first stage; default: %(default)s")
    add("--stop-stage", type=int, metavar="N", help="the last stage; default: 10, or --stage if it is greater")
    add("--arch", default="transformer_rope", help="default: %(default)s; transformer is the baseline")
    add("--seed", type=int, default=1, help="seed of the model; default: %(default)s")
    add("--list", action="store_true", help="print a table of the trained models with settings and scores; run nothing")
    add_flags(parser, recipe_is_known)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the recipe. Exits with status 1 and one sentence if a stage fails, 2 if a flag is wrong."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = build_parser(recipe_is_known=bool(words) and not words[0].startswith("-"))
    args, train_flags = parse(parser, words)
    first, last = STAGES[0].number, STAGES[-1].number
    stop = max(args.stage, TO_SCORE[-1].number) if args.stop_stage is None else args.stop_stage
    if not first <= args.stage <= stop <= last:
        parser.error(f"--stage {args.stage} --stop-stage {stop}: must be {first} <= stage <= stop-stage <= {last}")
    experiment = describe_experiment(parser, args, args.arch, args.seed, train_flags)
    if args.list:
        print(model_table(experiment.work, own_settings(args.recipe)))
        return
    chosen = needed([stage for stage in STAGES if args.stage <= stage.number <= stop], experiment)
    if not chosen:
        parser.error(f"--stage {args.stage}: needs a test set, and test_files is empty")
    with at_work(experiment, args.recipe, called(args.recipe, words)) as runner_of:
        runner = runner_of(experiment)
        announce(experiment)
        if not experiment.dry_run:
            experiment.sharing  # noqa: B018  refuses an old model of other sizes
            runner.refuse_stale_inputs(*chosen)
            if SCORE in chosen:
                load_tokeniser(experiment.tokenize)
        trains, translates, exports = (
            stage in chosen and (experiment.dry_run or not runner.stamps.is_done(stage))
            for stage in (TRAIN, TRANSLATE, EXPORT)
        )
        if trains and not experiment.dry_run:
            resumed = TRAIN.resumed(experiment)
            check_devices(experiment, resumed)
            slow = warning(experiment, resumed)
            if slow:
                print(f"{Path('recipes') / args.recipe}: warning: {slow}", file=sys.stderr)
        if exports and not experiment.dry_run:
            EXPORT.check_programs(experiment)
        if args.stage == first:
            check_files(experiment)  # before fairseq is imported
        if trains or translates or exports:  # a model that was trained in fp16 on a GPU can translate on a CPU
            quantization = experiment.settings.export_quantization if exports else ""
            check_flags([experiment], devices=None if trains else (0, "fp32"), quantization=quantization)
        with contextlib.ExitStack() as ended:
            if not experiment.dry_run and any(stage.per_model for stage in chosen):  # a comparison may be training it
                runner.locks += (ended.enter_context(locked_when_free(experiment.lock)),)
            for stage in chosen:
                runner.ensure(stage)
        if SCORE in chosen and not experiment.dry_run:
            print_report(experiment)
        elif AVERAGE in chosen and not experiment.settings.test_files:
            print(f"test_files is empty, so the model has no score: {experiment.averaged}", flush=True)


if __name__ == "__main__":
    main()
