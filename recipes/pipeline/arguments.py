"""The command line of a recipe, and the experiment that it describes."""

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from fairseq_rope.errors import InputError, sentence_of
from fairseq_rope.serving.exported_folder import exported_settings
from fairseq_rope.text.languages import TOKENIZERS, UNSPACED, default_tokenize, language
from fairseq_rope.text.subwords import SUBWORDS
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.lengths import MORE_ROOM, of_search
from recipes.pipeline.settings import NAMES_MODEL, Settings, check_values, read_settings
from recipes.run.command_line import LARGEST_SEED, refuse_work
from recipes.run.run import ROOT
from recipes.run.yaml_file import SettingsError
from recipes.text import fetch

# What stages write into the work folder, besides the models' folders.
WRITTEN = (
    *("downloads", "raw", "tokenised", "clean", "bpe", "segments", "data-bin", "joined", "compare", "jobs", "locks"),
    *("commands", "logs", "stamps", "settings.yaml", "run.yaml"),
)
PLUGIN = str(ROOT / "fairseq_rope")
LISTED = 12  # the most names of files in a message


def add_flags(parser: argparse.ArgumentParser, recipe_is_known: bool = False) -> None:
    """Add the flags for the recipe, its folders, its device and its settings.

    If *recipe_is_known*, since the user runs its own ``run.sh``, the help leaves out the recipe.
    """
    add = parser.add_argument
    named = argparse.SUPPRESS if recipe_is_known else "a folder with settings.yaml, or the name of one in recipes/"
    add("recipe", type=_recipe, help=named)
    data_dir = "folder with at least one of the corpus' files, which is never written to; the others are downloaded; "
    add("--data-dir", type=Path, metavar="DIR", help=data_dir + "default: the recipe's corpus/ if it has one")
    manifest = "names, sizes, checksums and URLs of these files; default: the recipe's manifest.tsv; none: use the "
    add("--manifest", metavar="FILE", help=manifest + "files in --data-dir without checking them")
    add("--work-dir", type=Path, metavar="DIR", help="default: recipes/NAME/work")
    add("--gpus", type=int, metavar="N", help="number of GPUs to train on; 0: train on the CPU; default: all GPUs")
    name = "the model's folder is ARCH.seedS.NAME; default: ARCH.seedS for the recipe's own settings, and "
    add("--name", metavar="NAME", help=name + "ARCH.seedS.HASH for others")
    bpe = "default: subword-nmt, or sentencepiece for languages that Moses' tokeniser does not split"
    add("--bpe", choices=("subword-nmt", "sentencepiece"), help=bpe)
    add("--tokenize", choices=TOKENIZERS, help="sacreBLEU's tokeniser; default: by the target language")
    add("--dry-run", action="store_true", help="print the commands without running them")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting of settings.yaml")


def describe_experiment(
    parser: argparse.ArgumentParser, args: argparse.Namespace, arch: str, seed: int, train_flags: str
) -> Experiment:
    """The experiment that *args* of :func:`add_flags` describe. At an error, *parser* ends the process."""
    try:
        return _describe(args, arch, seed, train_flags)
    except InputError as error:
        parser.error(str(error))


def _describe(args: argparse.Namespace, arch: str, seed: int, train_flags: str) -> Experiment:
    folder = ROOT / "recipes" / args.recipe
    work = (args.work_dir or folder / "work").resolve()
    _refuse_flags(args, arch, seed, work)
    own = read_settings(folder / "settings.yaml")
    settings = read_settings(folder / "settings.yaml", args.set)
    settings.fairseq_train_flags = f"{settings.fairseq_train_flags} {train_flags}".strip()
    check_values(settings)
    for values in (own, settings):
        _resolve(values, settings.target_lang)
    usual_bpe = _usual_bpe(settings, args.bpe)
    differs = {name: getattr(settings, name) for name in NAMES_MODEL if getattr(settings, name) != getattr(own, name)}
    if args.bpe not in (None, usual_bpe):
        differs["--bpe"] = args.bpe
    data_dir = args.data_dir or folder / "corpus"  # a recipe may contain its corpus
    experiment = Experiment(
        settings,
        work,
        arch,
        seed,
        name=args.name or "",
        differs=differs,
        bpe=args.bpe or usual_bpe,
        tokenize=args.tokenize or default_tokenize(settings.target_lang),
        gpus=args.gpus,
        data_dir=data_dir.resolve() if data_dir.is_dir() else None,
        manifest=None if args.manifest in (None, "none") else Path(args.manifest).resolve(),
        dry_run=args.dry_run,
    )
    if args.data_dir is not None:
        _refuse_other_names(args.data_dir, experiment)
    _refuse_to_write_over_data(experiment)
    if settings.user_dir == PLUGIN:
        settings.user_dir = ""
    if settings.user_dir and not Path(settings.user_dir).is_dir():
        raise SettingsError(f"--set user_dir={settings.user_dir}: must be a folder that exists")
    check_translator(experiment)
    if "{system}" not in settings.start_checkpoint:  # else the systems of a comparison must have their names
        check_start(experiment)
    limit = min(of_search(experiment).values())
    if settings.segment_tokens >= limit:
        allowed = f"must be below the {limit} tokens that fairseq takes, or {MORE_ROOM}"
        raise SettingsError(f"--set segment_tokens={settings.segment_tokens}: {allowed}")
    if args.manifest is None and _fits(folder / "manifest.tsv", experiment):
        experiment.manifest = folder / "manifest.tsv"
    return experiment


def _resolve(settings: Settings, target: str) -> None:
    """Make the paths in *settings* absolute. Raises a SettingsError if ``~`` names a user that does not exist."""

    def absolute(name: str, path: str) -> str:
        try:
            return str(Path(path).expanduser().resolve())
        except RuntimeError as error:
            raise SettingsError(f"--set {name}={path}: {error}") from None

    settings.fairseq_train_flags = settings.fairseq_train_flags.strip()
    for name in ("start_checkpoint", "start_data", "back_translation_model", "distillation_model", "user_dir"):
        if getattr(settings, name):
            setattr(settings, name, absolute(name, getattr(settings, name)))
    texts = shlex.split(settings.back_translation_files.replace("{lang}", target))
    settings.back_translation_files = shlex.join(absolute("back_translation_files", text) for text in texts)


def own_settings(recipe: str) -> Settings:
    """The settings in settings.yaml of *recipe*, as a model folder has them."""
    own = read_settings(ROOT / "recipes" / recipe / "settings.yaml")
    _resolve(own, own.target_lang)
    if own.user_dir == PLUGIN:
        own.user_dir = ""
    return own


def _refuse_flags(args: argparse.Namespace, arch: str, seed: int, work: Path) -> None:
    naming = "consist of letters, digits, _ and -, and must not begin with old-"
    has_manifest = args.manifest in (None, "none") or Path(args.manifest).is_file()
    for allowed, refusal in (
        (args.gpus is None or args.gpus >= 0, f"--gpus {args.gpus}: must be 0 or more"),
        (not args.data_dir or args.data_dir.is_dir(), f"--data-dir {args.data_dir}: must be a folder that exists"),
        (0 <= seed <= LARGEST_SEED, f"--seed {seed}: must be from 0 to {LARGEST_SEED}"),
        (re.fullmatch(r"\w+", arch), f"--arch {arch}: must be a name of letters, digits and _"),
        (args.name is None or re.fullmatch(r"(?!old-)[\w-]+", args.name), f"--name {args.name}: must {naming}"),
        (has_manifest, f"--manifest {args.manifest}: must be a file that exists, or none"),
    ):
        if not allowed:
            raise SettingsError(refusal)
    refuse_work(work)


def _usual_bpe(settings: Settings, asked: str | None) -> str:
    """The default subwords for the languages. Raises a SettingsError if the *asked* ones cannot split them."""
    languages = [language(code) for code in (settings.source_lang, settings.target_lang)]
    unspaced = [lang for lang in languages if lang in UNSPACED]
    if asked == "subword-nmt" and unspaced:
        needs = f"needs spaces between words, and {unspaced[0]} has none; use --bpe sentencepiece"
        raise SettingsError(f"--bpe subword-nmt: {needs}")
    return "sentencepiece" if unspaced or "ko" in languages else "subword-nmt"


def _refuse_other_names(folder: Path, experiment: Experiment) -> None:
    """Raise a SettingsError if none of the corpus' files is in *folder*, which the user has named.

    Otherwise a recipe with a manifest would ignore the user's files, and train on its own corpus.
    """
    files = experiment.files()
    if any((folder / file).exists() for file in files):
        return
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise SettingsError(f"--data-dir {sentence_of(error)}") from None
    names = [f"{path.name}/" if path.is_dir() else path.name for path in paths]
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    there = f"it has {', '.join(names[:LISTED])}{more}" if names else "it is empty"
    settings = _settings_for(names, experiment)
    raise SettingsError(
        f"--data-dir {folder}: has none of the recipe's files, {', '.join(files)}; {there}; name your files "
        f"with {settings} (docs/your_own_data.md)"
    )


def _settings_for(names: Sequence[str], experiment: Experiment) -> str:
    """The flags that name the pairs among the files *names*, as far as the names say which sets they are."""
    source, target = (f"(?<![A-Za-z]){re.escape(lang)}(?![A-Za-z])" for lang in (experiment.source, experiment.target))
    templates = [re.sub(source, "{lang}", name) for name in names if re.search(source, name)]
    pairs = [template for template in templates if template.replace("{lang}", experiment.target) in names]
    flags = []
    for name, pattern in {"train": "train", "valid": "val|dev", "test": "test"}.items():
        fitting = [template for template in pairs if re.search(pattern, template, re.IGNORECASE)]
        template = fitting[0] if fitting else "NAME.{lang}"
        needs_quotes = re.search(r"[\s'\"\\]", template)  # the setting is split as by a shell
        value = shlex.quote(template) if needs_quotes else template
        flags.append(f"--set {shlex.quote(f'{name}_files={value}')}")
    return " ".join(flags)


def _refuse_to_write_over_data(experiment: Experiment) -> None:
    folder, work = experiment.data_dir, experiment.work
    for path in (folder / file for file in experiment.files() if folder):
        if work in path.parents and path.relative_to(work).parts[0] in (*WRITTEN, experiment.model.name):
            raise SettingsError(f"--data-dir {folder}: the recipe would overwrite {path}, or write into its folder")


def check_start(experiment: Experiment) -> None:
    """Raise a SettingsError if a file of the old model, from which the training starts, does not exist."""
    checkpoint, folder = experiment.start_checkpoint, experiment.start_data
    if checkpoint is None or folder is None:
        return
    if not checkpoint.is_file():
        raise SettingsError(f"--set start_checkpoint={checkpoint}: must be a file that exists")
    for path in (*experiment.start_dictionaries, folder / experiment.subwords):
        if not path.is_file():
            kinds = (kind.replace("_", "-") for kind, name in SUBWORDS.items() if (folder / name).is_file())
            instead = "".join(f"; it has the subwords of --bpe {kind}" for kind in kinds)
            missing = path.name + (instead if path.name == experiment.subwords else "")
            raise SettingsError(f"--set start_data={folder}: must have a file {missing}")


def check_translator(experiment: Experiment) -> None:
    """Raise a SettingsError if the model of back-translation or distillation, or a text for it, cannot be used."""
    settings = experiment.settings
    if not experiment.translator:
        return
    name = "back_translation_model" if settings.back_translation_model else "distillation_model"
    try:
        exported = exported_settings(experiment.translator)
    except InputError as error:
        raise SettingsError(f"--set {name}={experiment.translator}: {str(error).partition(': ')[2]}") from None
    languages, needed = (exported["source"], exported["target"]), (experiment.source, experiment.target)
    if settings.back_translation_model:
        needed = needed[1], needed[0]
    if languages != needed:
        translates = f"translates {languages[0]} to {languages[1]}, and must translate {needed[0]} to {needed[1]}"
        raise SettingsError(f"--set {name}={experiment.translator}: {translates}")
    for text in shlex.split(settings.back_translation_files):
        if not Path(text).is_file():
            raise SettingsError(f"--set back_translation_files={text}: must be a file that exists")


def _fits(manifest: Path, experiment: Experiment) -> bool:
    """Whether *manifest* lists the recipe's files. A copied recipe may have other files than its manifest."""
    if not manifest.exists():
        return False
    known, files = fetch.read_manifest(manifest), experiment.files()
    unknown = [file for file in files if file not in known]
    if unknown and unknown != files:
        use = "write their absolute paths, or use the files in --data-dir unchecked with --manifest none"
        raise SettingsError(f"{manifest}: has no {', '.join(unknown)}: add their URLs, {use}")
    if unknown and experiment.data_dir is None:
        none = f"has none of the recipe's files, {', '.join(files)}"
        raise SettingsError(f"{manifest}: {none}: add their URLs, or name their folder with --data-dir")
    return not unknown


def _recipe(name: str) -> str:
    """The name of a recipe in recipes/, or the absolute path of another folder with settings.yaml."""
    recipes = ROOT / "recipes"
    for folder in (recipes / name, Path(name)):
        if (folder / "settings.yaml").is_file():
            folder = folder.resolve()
            return folder.name if folder.parent == recipes else str(folder)
    known = ", ".join(sorted(path.parent.name for path in recipes.glob("*/settings.yaml")))
    raise argparse.ArgumentTypeError(f"{name} must be a folder with settings.yaml, or one of {known}")


def called(recipe: str, words: Sequence[str]) -> str:
    """The command that runs *recipe* with *words* in the current folder, where relative paths in *words* start."""
    recipes = ROOT.joinpath("recipes") if Path.cwd() != ROOT else Path("recipes")
    if words and not words[0].startswith("-"):  # the recipe comes first, as its own run.sh puts it
        if not Path(recipe).is_absolute():
            return f"bash {shlex.quote(str(recipes / recipe / 'run.sh'))} {shlex.join(words[1:])}".strip()
        words = [recipe, *words[1:]]
    return f"bash {shlex.quote(str(recipes / 'pipeline' / 'run.sh'))} {shlex.join(words)}"
