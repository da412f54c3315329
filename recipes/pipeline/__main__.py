"""Run a recipe: its stages in order, each skipped where it was done before."""

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from recipes.pipeline import (
    stage01_fetch,
    stage02_extract,
    stage03_tokenise,
    stage04_clean,
    stage05_bpe,
    stage06_binarise,
    stage07_train,
    stage08_average,
    stage09_translate,
    stage10_score,
    stage11_export,
)
from recipes.pipeline.experiment import ROOT, Experiment, StageError, write_whole
from recipes.pipeline.machine import MachineError, check_machine, describe
from recipes.pipeline.settings import SettingsError, check_values, read_settings

STAGES = (
    stage01_fetch,
    stage02_extract,
    stage03_tokenise,
    stage04_clean,
    stage05_bpe,
    stage06_binarise,
    stage07_train,
    stage08_average,
    stage09_translate,
    stage10_score,
    stage11_export,
)
TO_SCORE = STAGES[:10]  # what runs unless more is asked for
OURS = ("--arch", "--seed", "--save-dir")  # flags of fairseq-train by which folders are named, and -a


def build_parser() -> argparse.ArgumentParser:
    numbers = ", ".join(f"{stage.NUMBER} {stage.TITLE}" for stage in STAGES)
    parser = argparse.ArgumentParser(
        prog="run.sh",
        description="Run a recipe from text to BLEU. What was done before is skipped.",
        epilog=f"After a lone -- stand more flags for fairseq-train. Stages: {numbers}",
    )
    add = parser.add_argument
    add("--stage", type=int, default=1, metavar="N", help="the first stage; default: %(default)s")
    add("--stop-stage", type=int, metavar="N", help="the last; default: 10, or --stage if that is beyond it")
    add("--arch", default="transformer_rope", help="default: %(default)s; transformer is the baseline")
    add("--seed", type=int, default=1, help="seed of the model; default: %(default)s")
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what is run, in which folder and on what."""
    recipes = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/settings.yaml"))
    add = parser.add_argument
    add("recipe", choices=recipes, help=argparse.SUPPRESS)
    add(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="a folder with files of the corpus, which is only read; what it lacks is downloaded",
    )
    add(
        "--manifest",
        metavar="FILE",
        help="names, sizes, checksums and addresses of these files; default: the recipe's manifest.tsv; "
        "none: take those in --data-dir as they are",
    )
    add("--work-dir", type=Path, metavar="DIR", help="default: recipes/NAME/work")
    add("--gpus", type=int, metavar="N", help="train on so many; 0: on the CPU; default: all that there are")
    add("--bpe", choices=("subword-nmt", "sentencepiece"), default="subword-nmt", help="default: %(default)s")
    add("--dry-run", action="store_true", help="print every command, run none")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="another value for one of settings.yaml",
    )


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> tuple[argparse.Namespace, str]:
    """The flags of *parser*, and the words after a lone ``--``, quoted for a shell."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args, unknown = parser.parse_known_args(words[:end])
    if unknown:
        parser.error(f"{unknown[0]}: no flag of this; flags for fairseq-train stand after a lone --")
    return args, shlex.join(words[end + 1 :])


def experiment(
    parser: argparse.ArgumentParser, args: argparse.Namespace, arch: str, seed: int, train_flags: str
) -> Experiment:
    """The experiment that *args*, of :func:`add_flags`, describe; *parser* tells of what cannot be."""
    if args.gpus is not None and args.gpus < 0:
        parser.error(f"--gpus {args.gpus}: must be 0 or more")
    if args.data_dir is not None and not args.data_dir.is_dir():
        parser.error(f"--data-dir {args.data_dir}: must be a folder that exists")
    folder = ROOT / "recipes" / args.recipe
    manifest = _manifest(parser, args.manifest, folder)
    try:
        settings = read_settings(folder / "settings.yaml", args.set)
        check_values(settings)
    except SettingsError as error:
        parser.error(str(error))
    if seed < 0:
        parser.error(f"--seed {seed}: must be 0 or more")
    if not re.fullmatch(r"\w+", arch):
        parser.error(f"--arch {arch}: must be a name of letters, digits and _")
    if settings.get("corpus_generator") and (args.data_dir or args.manifest):
        parser.error(f"--data-dir, --manifest: {args.recipe} writes its corpus itself, and reads no files")
    settings["fairseq_train_flags"] = f"{settings['fairseq_train_flags']} {train_flags}".strip()
    for word in shlex.split(settings["fairseq_train_flags"]):
        if word.partition("=")[0] in OURS or word.startswith("-a"):
            parser.error(f"{word} among the flags for fairseq-train: it is set by the recipe's own flags")
    work = (args.work_dir or folder / "work").resolve()
    if ":" in str(work):
        parser.error(f"--work-dir {work}: must have no colon in it, at which fairseq divides paths")
    data_dir = args.data_dir and args.data_dir.resolve()
    if data_dir is not None:
        if data_dir == work or work in data_dir.parents or data_dir in work.parents:
            parser.error(f"--data-dir {data_dir}: must not be in --work-dir {work}, nor that in it")
    return Experiment(
        settings,
        work,
        arch,
        seed,
        bpe=args.bpe,
        gpus=args.gpus,
        data_dir=data_dir,
        manifest=manifest,
        dry_run=args.dry_run,
        stages=STAGES,
    )


@contextlib.contextmanager
def at_work(x: Experiment, recipe: str, program: str) -> Iterator[None]:
    """Hold the work folder of *x*; what goes wrong, or a signal, ends the process with one sentence.

    Args:
        program: what was called, as a command from the project's root
    """
    try:
        if not x.dry_run:
            check_machine(x)
            x.work.mkdir(parents=True, exist_ok=True)
            x.held = (_lock(x.work, recipe),)
            for name in ("SIGTERM", "SIGHUP"):  # so that the command that runs is ended too
                signal.signal(getattr(signal, name), _stop)
            x.record = lambda folder: _keep(x, program, folder)
        yield
    except (StageError, MachineError) as error:
        sys.exit(f"recipes/{recipe}: {error}")
    except OSError as error:
        sys.exit(f"recipes/{recipe}: {error.filename or x.work}: {error.strerror or error}")
    except KeyboardInterrupt:
        _stop(signal.SIGINT, None)


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with status 1 and one sentence where a stage cannot run, 2 where a flag is wrong."""
    parser = build_parser()
    args, train_flags = parse(parser, argv)
    first, last = STAGES[0].NUMBER, STAGES[-1].NUMBER
    if args.stop_stage is None:
        args.stop_stage = max(args.stage, TO_SCORE[-1].NUMBER)
    if not first <= args.stage <= args.stop_stage <= last:
        parser.error(
            f"--stage {args.stage} --stop-stage {args.stop_stage}: must be "
            f"{first} <= stage <= stop-stage <= {last}"
        )
    x = experiment(parser, args, args.arch, args.seed, train_flags)
    chosen = [stage for stage in STAGES if args.stage <= stage.NUMBER <= args.stop_stage]
    called = f"bash recipes/{args.recipe}/run.sh {shlex.join(sys.argv[2:])}".strip()
    with at_work(x, args.recipe, called):
        if not x.dry_run:
            x.refuse_stale_inputs(chosen[0])
            if stage07_train in chosen:
                stage07_train.check_devices(x)
        for stage in chosen:
            x.ensure(stage)
        if stage10_score in chosen and not x.dry_run:
            stage10_score.report(x)


def _manifest(parser: argparse.ArgumentParser, given: str | None, folder: Path) -> Path | None:
    if given == "none":
        return None
    if given is None:
        own = folder / "manifest.tsv"
        return own if own.exists() else None
    if not Path(given).is_file():
        parser.error(f"--manifest {given}: must be a file that exists, or none")
    return Path(given).resolve()


def _lock(work: Path, recipe: str) -> int:
    """A descriptor that holds *work* for this run and the commands that it starts."""
    lock = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"recipes/{recipe}: another run is at work in {work}, or a command that it left behind")
    except OSError as error:  # some network file systems have no locks
        print(
            f"recipes/{recipe}: {work}: no lock ({error.strerror}); start no second run there",
            file=sys.stderr,
        )
    return lock


def _keep(x: Experiment, program: str, folder: Path) -> None:
    """Keep what a row of RESULTS.md needs to know beside the score, as of the last stage that ran."""
    dump = {"sort_keys": False, "allow_unicode": True}
    write_whole(folder / "settings.yaml", yaml.safe_dump(x.settings, **dump))
    write_whole(folder / "run.yaml", yaml.safe_dump({"command": program, **describe()}, **dump))


def _stop(number: int, _frame: object) -> None:
    print("recipes: stopped; the same command goes on from here", file=sys.stderr)
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
