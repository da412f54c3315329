"""Run a recipe: its stages in order, each skipped where it was done before."""

import argparse
import contextlib
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from fairseq_rope.tools.score import TOKENIZERS, UNSPACED, default_tokenize, language
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
from recipes.pipeline.experiment import ROOT, Experiment, StageError, holder, note_holder, write_whole
from recipes.pipeline.machine import MachineError, check_machine, describe
from recipes.pipeline.settings import SettingsError, check_values, read_settings
from recipes.text import fetch

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
# What stages write into the work folder, beside the models' folders.
WRITTEN = (
    *("downloads", "raw", "tokenised", "clean", "bpe", "data-bin", "joined", "compare"),
    *("commands", "logs", "stamps", "settings.yaml", "run.yaml"),
)
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
    add = parser.add_argument
    add("recipe", type=_recipe, help="a folder with settings.yaml, or the name of one in recipes/")
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
    add(
        "--name",
        metavar="NAME",
        help="the model's folder is ARCH.seedS.NAME; default: ARCH.seedS for the recipe's own settings, and "
        "ARCH.seedS.HASH for others",
    )
    add(
        "--bpe",
        choices=("subword-nmt", "sentencepiece"),
        help="default: subword-nmt, or sentencepiece for languages that Moses' tokeniser does not divide",
    )
    add("--tokenize", choices=TOKENIZERS, help="sacreBLEU's tokeniser; default: by the target language")
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
        own = read_settings(folder / "settings.yaml")
        settings = read_settings(folder / "settings.yaml", args.set)
        check_values(settings)
    except SettingsError as error:
        parser.error(str(error))
    if seed < 0:
        parser.error(f"--seed {seed}: must be 0 or more")
    if not re.fullmatch(r"\w+", arch):
        parser.error(f"--arch {arch}: must be a name of letters, digits and _")
    if args.name is not None and not re.fullmatch(r"(?!old-)[\w-]+", args.name):
        parser.error(f"--name {args.name}: must be of letters, digits, _ and -, and not begin with old-")
    if settings.get("corpus_generator") and (args.data_dir or args.manifest):
        parser.error(f"--data-dir, --manifest: {args.recipe} writes its corpus itself, and reads no files")
    settings["fairseq_train_flags"] = f"{settings['fairseq_train_flags']} {train_flags}".strip()
    for word in shlex.split(settings["fairseq_train_flags"]):
        if word.partition("=")[0] in OURS or word.startswith("-a"):
            parser.error(f"{word} among the flags for fairseq-train: it is set by the recipe's own flags")
    languages = [language(settings[name]) for name in ("source_lang", "target_lang")]
    usual_bpe = "sentencepiece" if {*languages} & {*UNSPACED, "ko"} else "subword-nmt"
    unspaced = [lang for lang in languages if lang in UNSPACED]
    if args.bpe == "subword-nmt" and unspaced:
        parser.error(
            f"--bpe subword-nmt: divides words, and {unspaced[0]} is written without blanks between them; "
            "sentencepiece is for such languages"
        )
    differs = {name: settings[name] for name in stage07_train.NAMED_BY if settings[name] != own[name]}
    if args.bpe not in (None, usual_bpe):
        differs["--bpe"] = args.bpe
    work = (args.work_dir or folder / "work").resolve()
    if ":" in str(work):
        parser.error(f"--work-dir {work}: must have no colon in it, at which fairseq divides paths")
    x = Experiment(
        settings,
        work,
        arch,
        seed,
        name=args.name or "",
        differs=differs,
        bpe=args.bpe or usual_bpe,
        tokenize=args.tokenize or default_tokenize(settings["target_lang"]),
        gpus=args.gpus,
        data_dir=args.data_dir and args.data_dir.resolve(),
        manifest=manifest,
        dry_run=args.dry_run,
        stages=STAGES,
    )
    _check_files(parser, x, args.manifest)
    return x


def _check_files(parser: argparse.ArgumentParser, x: Experiment, manifest: str | None) -> None:
    """Refuse files that the recipe would write over, and leave out a manifest of other files than its own.

    Args:
        manifest: the flag; None if it was not given, and the manifest is the one beside the settings
    """
    if x.data_dir is not None:
        for path in (x.data_dir / file for file in x.files()):
            if x.work in path.parents and path.relative_to(x.work).parts[0] in (*WRITTEN, x.model.name):
                parser.error(f"--data-dir {x.data_dir}: the recipe would write over {path}, or beside it")
    if x.manifest is None or manifest is not None:
        return
    try:
        known = fetch.read_manifest(x.manifest)
    except fetch.FetchError as error:
        parser.error(str(error))
    if not known.keys() & {*x.files()}:  # that of a recipe whose folder was copied
        if x.data_dir is None:
            parser.error(
                f"{x.manifest}: has none of the recipe's files, {', '.join(x.files())}: write there where to "
                "fetch them, or say with --data-dir where they are"
            )
        x.manifest = None


def _recipe(given: str) -> str:
    """The name of a recipe in recipes/, or the absolute path of another folder with settings.yaml."""
    recipes = ROOT / "recipes"
    for folder in (recipes / given, Path(given)):
        if (folder / "settings.yaml").is_file():
            folder = folder.resolve()
            return folder.name if folder.parent == recipes else str(folder)
    known = ", ".join(sorted(path.parent.name for path in recipes.glob("*/settings.yaml")))
    raise argparse.ArgumentTypeError(f"{given} is no folder with settings.yaml, and none of {known}")


_PARSE = """
import difflib, shlex, sys
from fairseq import models, options
for arch, train, generate in zip(sys.argv[1::3], sys.argv[2::3], sys.argv[3::3]):
    print(arch, flush=True)
    sys.argv = shlex.split(train)  # where fairseq looks for --user-dir
    parser = options.get_training_parser()
    if arch not in models.ARCH_MODEL_REGISTRY:
        near = difflib.get_close_matches(arch, models.ARCH_MODEL_REGISTRY, n=1, cutoff=0)
        sys.exit(f"fairseq has no such architecture; the nearest is {near[0]}")
    options.parse_args_and_arch(parser)
    sys.argv = shlex.split(generate)
    options.parse_args_and_arch(options.get_generation_parser())
"""


def check_flags(systems: Sequence[Experiment], flag: str = "--arch") -> None:
    """Raise a StageError unless fairseq, in a process of its own, knows the architectures and all flags."""
    words = [sys.executable, "-c", _PARSE]
    for x in systems:
        generate = stage09_translate.command(x, x.work / "data-bin", "test")
        words += [x.arch, stage07_train.command(x, *stage07_train.devices_and_precision(x)), generate]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        arch = done.stdout.split()[-1:] or [systems[0].arch]
        raise StageError(f"{flag} {arch[0]}: {done.stderr.strip().splitlines()[-1]}")


@contextlib.contextmanager
def at_work(x: Experiment, recipe: str, program: str) -> Iterator[None]:
    """Hold the work folder of *x*; what goes wrong, or a signal, ends the process with one sentence.

    Args:
        recipe: its name or folder
        program: what was called, as a command from the project's root
    """
    recipe = str(Path("recipes") / recipe)
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
        sys.exit(f"{recipe}: {error}")
    except OSError as error:
        sys.exit(f"{recipe}: {error.filename or x.work}: {error.strerror or error}")
    except KeyboardInterrupt:
        _stop(signal.SIGINT, None)


def announce(x: Experiment) -> None:
    """Print what is decided by the settings and the languages, and the user may not expect."""
    if x.differs:
        print(f"model folder: {x.model.name}, since {', '.join(x.differs)} differs from the recipe's own")
    print(f"target language {x.target}: scored with sacreBLEU's tokeniser {x.tokenize}", flush=True)


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
    called = f"bash {shlex.quote(str(Path('recipes') / args.recipe))}/run.sh {shlex.join(sys.argv[2:])}"
    with at_work(x, args.recipe, called.strip()):
        announce(x)
        if not x.dry_run:
            x.refuse_stale_inputs(chosen[0])
            if stage10_score in chosen:
                stage10_score.check_tokenize(x)
            if stage07_train in chosen:
                stage07_train.check_devices(x)
            if any(stage in chosen and not x.is_done(stage) for stage in (stage07_train, stage09_translate)):
                check_flags([x])
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
    path = work / ".lock"
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"{recipe}: another run is at work in {work}: {holder(path)}")
    except OSError as error:  # some network file systems have no locks
        print(f"{recipe}: {work}: no lock ({error.strerror}); start no second run there", file=sys.stderr)
    note_holder(lock)
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
