"""Run a recipe: its stages in order, each skipped where it was done before."""

import argparse
import fcntl
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from recipes.pipeline import (
    stage01_corpus,
    stage03_tokenise,
    stage05_bpe,
    stage06_binarise,
    stage07_train,
    stage08_average,
    stage09_translate,
    stage10_score,
)
from recipes.pipeline.experiment import ROOT, Experiment, StageError, write_whole
from recipes.pipeline.settings import SettingsError, read_settings

STAGES = (
    stage01_corpus,
    stage03_tokenise,
    stage05_bpe,
    stage06_binarise,
    stage07_train,
    stage08_average,
    stage09_translate,
    stage10_score,
)


def build_parser() -> argparse.ArgumentParser:
    recipes = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/settings.yaml"))
    numbers = ", ".join(f"{stage.NUMBER} {stage.TITLE}" for stage in STAGES)
    parser = argparse.ArgumentParser(
        prog="run.sh",
        description="Run a recipe from text to BLEU. What was done before is skipped.",
        epilog=f"stages: {numbers}",
    )
    parser.add_argument("recipe", choices=recipes, help=argparse.SUPPRESS)
    parser.add_argument(
        "--arch", default="transformer_rope", help="default: %(default)s; transformer is the baseline"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the model; default: %(default)s")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="default: recipes/NAME/work")
    parser.add_argument(
        "--stage", type=int, default=1, metavar="N", help="the first stage; default: %(default)s"
    )
    parser.add_argument(
        "--stop-stage", type=int, default=10, metavar="N", help="the last; default: %(default)s"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another value for one of settings.yaml",
    )
    parser.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help="more flags for fairseq-train (after a lone --)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with status 1 and one sentence where a stage cannot run, 2 where a flag is wrong."""
    parser = build_parser()
    args = parser.parse_args(argv)
    first, last = STAGES[0].NUMBER, STAGES[-1].NUMBER
    if not first <= args.stage <= args.stop_stage <= last:
        parser.error(
            f"--stage {args.stage} --stop-stage {args.stop_stage}: must be "
            f"{first} <= stage <= stop-stage <= {last}"
        )
    folder = ROOT / "recipes" / args.recipe
    try:
        settings = read_settings(folder / "settings.yaml", args.set)
    except SettingsError as error:
        parser.error(str(error))
    if args.flags:
        settings["fairseq_train_flags"] += " " + shlex.join(args.flags)
    work = (args.work_dir or folder / "work").resolve()
    work.mkdir(parents=True, exist_ok=True)
    lock = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"recipes/{args.recipe}: another run is at work in {work}, or a command that it left behind")
    for name in ("SIGTERM", "SIGHUP"):  # so that the command that runs is ended too
        signal.signal(getattr(signal, name), _stop)
    x = Experiment(settings, work, args.arch, args.seed, held=(lock,))
    write_whole(x.model / "settings.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    try:
        for stage in STAGES:
            if args.stage <= stage.NUMBER <= args.stop_stage:
                x.ensure(stage)
        if args.stop_stage == last:
            stage10_score.report(x)
    except StageError as error:
        sys.exit(f"recipes/{args.recipe}: {error}")
    except OSError as error:
        sys.exit(f"recipes/{args.recipe}: {error.filename or work}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _stop(number: int, _frame: object) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
