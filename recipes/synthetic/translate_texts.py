"""Make a training set with the translations of an exported model: back-translation or distillation.

    python -m recipes.synthetic.translate_texts distillation --source-lang en --target-lang de --model en-de \\
        --train 'data/train.{lang}.gz' --output student/train -- --jobs 2

Back-translation (Sennrich et al. 2016, arXiv:1511.06709) adds pairs with translated sources to the training set.
Distillation (Kim and Rush 2016, arXiv:1606.07947) replaces its targets. Flags after -- are those of ``translate``.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain, islice
from pathlib import Path

import regex

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import checksum, written_whole
from fairseq_rope.lines import lines_of, read_lines
from fairseq_rope.serving.exported_folder import SETTINGS, exported_settings
from recipes.text.extract import extract
from recipes.text.lines import NOT_PRINTING

PARALLEL, BACK_TRANSLATED, DISTILLED = "parallel", "back-translated", "distilled"  # the origins
# Each search, and its flags of fairseq-rope translate. Edunov et al. 2018 (arXiv:1808.09381) compare them.
SEARCHES = {"beam": [], "sampling": ["--sampling-topk", "0"], "top10": ["--sampling-topk", "10"]}


def printing(lines: Iterable[str]) -> Iterator[str]:
    """Yield *lines* with blanks for the characters that do not print, which a recipe's model has not learned."""
    return (NOT_PRINTING.sub(" ", line).strip() for line in lines)


def comparable(line: str) -> str:
    """Return *line* with equal white space and Unicode form (NFKC), and without characters that do not print."""
    return " ".join(NOT_PRINTING.sub(" ", regex.sub(r"\p{Cf}", "", unicodedata.normalize("NFKC", line))).split())


def to_translate(paths: Sequence[str], held_out: set[str], most: int | None) -> Iterator[str]:
    """Yield the first *most* lines of the monolingual texts *paths* that are not blank; None is no limit.

    Raises an InputError after the last one if a text has lines of *held_out*, which are :func:`comparable`.
    """
    refused = []
    for path in paths:
        keys = enumerate(map(comparable, lines := read_lines(path)), 1)
        if numbers := [number for number, key in keys if key in held_out]:
            refused.append(f"{path}: {len(numbers)}, the first is line {numbers[0]}")
        yield from (of_path := list(islice(filter(comparable, lines), most)))
        most = None if most is None else most - len(of_path)
    if refused:
        raise InputError(f"--monolingual: remove the lines that are also in --held-out: {'; '.join(refused)}")


def most_synthetic(parallel: int, share: float) -> int | None:
    """Return how many pairs may be added to *parallel* ones for them to be at most the *share*; None is no limit."""
    exact = Fraction(str(share))  # 0.6 of 10 pairs are 15; the nearest float would give 14
    return None if exact == 1 else int(parallel * exact / (1 - exact))


def translate(text: Path, model: str, flags: Sequence[str], folder: Path) -> tuple[Path, Path]:
    """Move *text* into *folder*, and return its new path and the file with its translations.

    The name of their folder is a checksum of *text*, *model* and *flags*. So a finished translation is not repeated,
    and an interrupted one continues.
    """
    made_from = repr([checksum(Path(model, SETTINGS)), checksum(text), *flags])
    folder /= hashlib.sha256(made_from.encode()).hexdigest()[:8]
    (folder / "translated").mkdir(parents=True, exist_ok=True)
    given, translated = folder / text.name, folder / "translated" / text.name
    if not given.exists():
        text.replace(given)
    if not translated.exists():
        words = ["translate", "--model", model, "--input", str(given), "--output-dir", str(translated.parent), *flags]
        if status := subprocess.run([sys.executable, "-m", "fairseq_rope", *words]).returncode:
            raise InputError(f"--model {model}: fairseq-rope translate ended with status {status}")
    return given, translated


def write(rows: Iterable[tuple[str, str, str]], tag: str, outputs: Sequence[str]) -> Counter[str]:
    """Write *rows* of source, target and origin to the three *outputs*, and return the number of pairs of each origin.

    New pairs with an empty side are left out, and counted as "". Back-translated sources begin with *tag*. Raises an
    InputError if *tag* is a word of a pair.
    """
    counts = Counter[str]()
    with written_whole(*outputs) as files:
        for source, target, origin in rows:
            if tag and tag in f"{source} {target}".split(" "):
                raise InputError(f"--tag {tag}: is a word of a {origin} pair: {source} | {target}; choose another tag")
            if origin != PARALLEL and not (source and target):
                counts[""] += 1
                continue
            counts[origin] += 1
            tagged = f"{tag} {source}" if tag and origin == BACK_TRANSLATED else source
            for file, cell in zip(files, (tagged, target, origin), strict=True):
                file.write(f"{cell}\n".encode())
        if not {*counts} - {""}:
            raise InputError(f"{outputs[0]}: would be empty")
    return counts


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recipes.synthetic.translate_texts", description=__doc__.partition("\n")[0])
    tools = parser.add_subparsers(dest="tool", required=True)
    for name, of_model in (("back-translation", "from target to source"), ("distillation", "from source to target")):
        flag = tools.add_parser(name).add_argument
        flag("--source-lang", required=True, metavar="LANG")
        flag("--target-lang", required=True, metavar="LANG")
        flag("--model", required=True, metavar="DIR", help=f"an exported model that translates {of_model}")
        flag("--train", required=True, nargs="+", metavar="TEMPLATE", help="parallel text, as in settings of recipes")
        flag("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.LANG of both, PREFIX.origin")
        if name == "back-translation":
            flag("--monolingual", required=True, nargs="+", metavar="FILE", help="text of the target language, or .gz")
            flag("--held-out", required=True, nargs="+", metavar="TEMPLATE", help="validation and test sets")
            flag("--search", choices=SEARCHES, default="beam", help="default: beam; sampling is from all words")
            flag("--share", type=float, default=0.5, metavar="S", help="largest share of new pairs; default: 0.5")
            flag("--tag", default="⇐", metavar="WORD", help='begins each new source; default: ⇐; "": none')
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    args, flags = build_parser().parse_args(words[:end]), words[end + 1 :]
    with ending_in_one_sentence("recipes.synthetic.translate_texts"):
        langs, is_back = (args.source_lang, args.target_lang), args.tool == "back-translation"
        source, target = (exported_settings(args.model)[side] for side in ("source", "target"))
        if (source, target) != (langs[::-1] if is_back else langs):
            raise InputError(f"--model {args.model}: translates {source} to {target}, which {args.tool} does not need")
        if is_back and not 0 < args.share <= 1:
            raise InputError(f"--share {args.share:g}: must be above 0, up to 1")
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{args.output.name}.", dir=args.output.parent) as folder:
            pairs = extract(args.train, *langs, Path(folder, "train"))
            train = [f"{folder}/train.{lang}" for lang in langs]
            lines = lines_of(train[0])
            if is_back:
                extract(args.held_out, *langs, Path(folder, "held-out"))
                held_out = {comparable(line) for line in lines_of(f"{folder}/held-out.{langs[1]}")} - {""}
                lines = to_translate(args.monolingual, held_out, most_synthetic(pairs, args.share))
            text = Path(folder, f"text.{langs[is_back]}")
            with written_whole(str(text)) as (file,):
                file.writelines(f"{line}\n".encode() for line in printing(lines))
            flags = [*SEARCHES[args.search], *flags] if is_back else flags
            files = translate(text, args.model, flags, Path(f"{args.output}.translations"))
            new = zip(*(printing(lines_of(str(path))) for path in files), strict=True)
            rows: Iterable[tuple[str, str, str]] = ((source, target, DISTILLED) for source, target in new)
            if is_back:
                old = ((source, target, PARALLEL) for source, target in zip(*map(lines_of, train), strict=True))
                rows = chain(old, ((source, target, BACK_TRANSLATED) for target, source in new))
            counts = write(rows, args.tag if is_back else "", [f"{args.output}.{end}" for end in (*langs, "origin")])
        left_out, total = counts.pop("", 0), counts.total()
        shares = ", ".join(f"{count} {origin} ({count / total:.1%})" for origin, count in counts.items())
        print(f"{args.output}: {total} pairs: {shares}; new pairs left out, with an empty side: {left_out}")


if __name__ == "__main__":
    main()
