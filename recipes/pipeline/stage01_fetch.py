"""Stage 1: check the files of a corpus, and download those that are missing (``recipes.text.fetch``)."""

import shlex
from pathlib import Path

from recipes.pipeline.experiment import ROOT, SETS, Experiment, StageError, fill

NUMBER = 1
TITLE = "fetch"
PER_MODEL = False
SETTINGS = (
    "corpus_generator",
    "corpus_pairs",
    "corpus_heldout",
    "corpus_seed",
    "train_files",
    "valid_files",
    "test_files",
    "source_lang",
    "target_lang",
)


def inputs(x: Experiment) -> list[Path]:
    generator = x.settings.get("corpus_generator")
    if generator:
        return sorted((ROOT / generator).parent.glob("*.py"))
    known = [] if x.manifest is None else [x.manifest]
    own = [] if x.data_dir is None else [x.data_dir / file for file in x.files()]
    return [*known, *(path for path in own if path.exists())]


def outputs(x: Experiment) -> list[Path]:
    return [x.fetched(file) for file in x.files()]


def run(x: Experiment) -> None:
    downloads = x.work / "downloads"
    if x.settings.get("corpus_generator"):
        # The generator writes whole files only, and finds those of an earlier run in its way.
        part = x.work / "downloads.tmp"
        x.command(f"rm -rf {x.shell(part)} {x.shell(downloads)}")
        x.command(
            f"python {x.quoted('corpus_generator')} --output {x.shell(part)} "
            f"--pairs {x.quoted('corpus_pairs')} --heldout {x.quoted('corpus_heldout')} "
            f"--seed {x.quoted('corpus_seed')} "
            f"&& mv {x.shell(part)} {x.shell(downloads)}"
        )
        return
    if x.data_dir is not None:
        for template in (t.partition(":")[0] for n in SETS for t in x.templates(n)):
            pair = [
                x.data_dir / fill(template, x.source, "src"),
                x.data_dir / fill(template, x.target, "ref"),
            ]
            if pair[0].exists() != pair[1].exists():
                here, lacks = pair if pair[0].exists() else reversed(pair)
                raise StageError(
                    f"--data-dir {x.data_dir}: has {here.name} and not {lacks.name}; give both or none"
                )
    data_dir = "" if x.data_dir is None else f"--data-dir {x.shell(x.data_dir)} "
    manifest = "none" if x.manifest is None else x.shell(x.manifest)
    x.tool(
        f"python -m recipes.text.fetch --manifest {manifest} --output {x.shell(downloads)} "
        f"{data_dir}{shlex.join(x.files())}"
    )
