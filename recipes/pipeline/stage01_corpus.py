"""Stage 1: get the corpus, six text files of raw sentences.

Here: from a recipe's own generator, called with ``--output DIR --pairs N --heldout N --seed S``.
"""

from pathlib import Path

from recipes.pipeline.experiment import ROOT, Experiment

NUMBER = 1
TITLE = "make the corpus"
PER_MODEL = False
SETTINGS = ("corpus_generator", "corpus_pairs", "corpus_heldout", "corpus_seed")


def inputs(x: Experiment) -> list[Path]:
    return sorted((ROOT / x.settings["corpus_generator"]).parent.glob("*.py"))


def outputs(x: Experiment) -> list[Path]:
    return x.texts("raw")


def run(x: Experiment) -> None:
    s = x.settings
    x.command(
        f"python {s['corpus_generator']} --output {x.shell(x.work / 'raw')} --pairs {s['corpus_pairs']} "
        f"--heldout {s['corpus_heldout']} --seed {s['corpus_seed']}"
    )
