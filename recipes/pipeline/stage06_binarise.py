"""Stage 6: one joined dictionary, and fairseq's binary data (fairseq-preprocess)."""

import os
import re
from pathlib import Path

from recipes.pipeline.experiment import SETS, Experiment, StageError
from recipes.text.lines import count_lines

NUMBER = 6
TITLE = "binarise"
PER_MODEL = False
SETTINGS = ("source_lang", "target_lang")


def inputs(x: Experiment) -> list[Path]:
    return [x.work / "bpe" / x.subword_model, *x.texts("bpe")]


def outputs(x: Experiment) -> list[Path]:
    pair = f"{x.source}-{x.target}"
    names = [
        f"{n}.{pair}.{lang}.{end}" for n in SETS for lang in (x.source, x.target) for end in ("bin", "idx")
    ]
    names += [f"dict.{x.source}.txt", f"dict.{x.target}.txt", x.subword_model]
    return [x.work / "data-bin" / name for name in names]


def run(x: Experiment) -> None:
    final, part = x.work / "data-bin", x.work / "data-bin.tmp"
    x.command(f"rm -rf {x.shell(part)}")
    prefixes = " ".join(f"--{n}pref {x.shell(x.work / 'bpe' / n)}" for n in SETS)
    x.command(
        f"fairseq-preprocess --source-lang {x.source} --target-lang {x.target} {prefixes} "
        f"--joined-dictionary --workers {os.cpu_count()} --destdir {x.shell(part)}"
    )
    # The subwords go where the dictionaries go: neither is of use without the other.
    x.command(f"cp {x.shell(inputs(x)[0])} {x.shell(part / x.subword_model)}")
    if not x.dry_run:
        check_counts(x, part / "preprocess.log")
    x.command(f"rm -rf {x.shell(final)} && mv {x.shell(part)} {x.shell(final)}")


def check_counts(x: Experiment, log: Path) -> None:
    """Raise a StageError if fairseq-preprocess counted another number of sentences than there are lines."""
    found = re.findall(r"\] (.+): (\d+) sents,", log.read_text(encoding="utf-8"))
    counted = {name: int(count) for name, count in found}
    for path in x.texts("bpe"):
        lines = count_lines(str(path))
        if counted.get(x.named(path)) != lines:
            raise StageError(f"stage {NUMBER} ({TITLE}): {path} has {lines} lines, but {log} counts others")
