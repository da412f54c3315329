"""Train two architectures from several seeds by one recipe, and report how they differ.

    python -m recipes.compare NAME --seeds 3 [flags of the recipe]

Training by training, each skipped or gone on from where it was; after every seed the report is written anew.
"""

import argparse
import dataclasses
import shlex
import subprocess
import sys
from collections.abc import Sequence

from recipes.compare import stage21_join, stage22_translate_joined

try:
    from recipes.compare.page import COLOURS
    from recipes.compare.stage23_report import Report
except ModuleNotFoundError as missing:  # now, and not after the trainings
    sys.exit(
        f"recipes.compare: {str(missing.name).split('.')[0]} is not installed: pip install -e '.[plots]'"
    )
from recipes.pipeline import stage07_train
from recipes.pipeline.__main__ import TO_SCORE, add_flags, at_work, experiment, parse
from recipes.pipeline.experiment import ROOT, Experiment, StageError

# The joining before the training: what cannot be translated is told first.
ORDER = (*TO_SCORE[:6], stage21_join, *TO_SCORE[6:], stage22_translate_joined)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="recipes.compare",
        description="Train architectures from several seeds by one recipe, and report how they differ. "
        "What was done before is skipped.",
        epilog="After a lone -- stand more flags for fairseq-train, for all architectures.",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="1 to N; default: %(default)s")
    parser.add_argument(
        "--archs",
        nargs="+",
        default=["transformer", "transformer_rope"],
        metavar="ARCH",
        help="the first is the baseline; default: transformer transformer_rope",
    )
    add_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with status 1 and one sentence where a stage cannot run, 2 where a flag is wrong."""
    parser = build_parser()
    args, train_flags = parse(parser, argv)
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: must be 1 or more")
    if not 2 <= len(args.archs) <= len(COLOURS) or len(set(args.archs)) < len(args.archs):
        parser.error(f"--archs {' '.join(args.archs)}: must be 2 to {len(COLOURS)}, all different")
    seeds = range(1, args.seeds + 1)
    pairs = [[experiment(parser, args, arch, seed, train_flags) for arch in args.archs] for seed in seeds]
    x = pairs[0][0]
    words = sys.argv[1:] if argv is None else argv
    with at_work(x, args.recipe, f"python -m recipes.compare {shlex.join(words)}"):
        if not x.dry_run:
            _check_flags(pairs[0])
        for done, pair in enumerate(pairs, start=1):
            ran = False
            for number, system in enumerate(pair):
                print(f"== {system.arch}, seed {system.seed}", flush=True)
                pair[number] = system = dataclasses.replace(system, held=x.held, record=x.record)
                for stage in ORDER:
                    ran |= system.ensure(stage)
            if ran or done == args.seeds:
                print(f"== seeds 1 to {done}" if done > 1 else "== seed 1", flush=True)
                report = Report(pairs[:done], args.recipe)
                x.ensure(report)
                if not x.dry_run:
                    print(report.summary(x), flush=True)


def _check_flags(systems: Sequence[Experiment]) -> None:
    """Raise a StageError unless fairseq-train, in a process of its own, can read the flags for *systems*."""
    code = (
        "import shlex, sys, fairseq_rope.presets; from fairseq import models, options\n"
        "for arch, command in zip(sys.argv[1::2], sys.argv[2::2]):\n"
        "    print(arch, flush=True)\n"
        "    arch in models.ARCH_MODEL_REGISTRY or sys.exit('fairseq has no such architecture')\n"
        "    options.parse_args_and_arch(options.get_training_parser(), shlex.split(command)[1:])"
    )
    words = [sys.executable, "-c", code]
    for x in systems:
        words += [x.arch, stage07_train.command(x, *stage07_train.devices_and_precision(x))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        arch = done.stdout.split()[-1:] or [systems[0].arch]
        raise StageError(f"--archs {arch[0]}: {done.stderr.strip().splitlines()[-1]}")


if __name__ == "__main__":
    main()
