"""Find sentences that are too long for fairseq to train on or to translate, before training starts."""

import argparse
import shlex
from collections.abc import Sequence

from recipes.pipeline.experiment import SETS, Experiment
from recipes.run.run import StageError

SEARCH_TOKENS = 8000  # a batch of the search, unless fairseq_generate_flags says something else
LARGER_BATCH = "set a larger --max-tokens in fairseq_generate_flags"
LONGEST = 1024  # fairseq's default limit in tokens, including the end of the sentence
MORE_ROOM = "set --max-source-positions and --max-target-positions in fairseq_train_flags and fairseq_generate_flags"


def limits(flags: str) -> dict[str, int]:
    """The largest number of tokens that *flags* of a fairseq program allow, by the side, "source" or "target"."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for side in ("source", "target"):
        parser.add_argument(f"--max-{side}-positions", dest=side, type=int, default=LONGEST)
    return vars(parser.parse_known_args(shlex.split(flags))[0])


def of_search(experiment: Experiment) -> dict[str, int]:
    """The largest number of tokens that both the model and the search allow, by the side."""
    settings = experiment.settings
    of_each = [limits(flags) for flags in (settings.fairseq_train_flags, settings.fairseq_generate_flags)]
    return {side: min(allowed[side] for allowed in of_each) for side in of_each[0]}


def batch_of_search(experiment: Experiment) -> int:
    """The largest number of tokens in a batch of the search."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-tokens", type=int, default=SEARCH_TOKENS)
    return parser.parse_known_args(shlex.split(experiment.settings.fairseq_generate_flags))[0].max_tokens


def check_lengths(
    experiment: Experiment, max_tokens: int, sets: Sequence[str] = SETS, stage: str = "stage 7 (train)"
) -> None:
    """Raise a StageError of *stage* for a line that is too long for a batch of *max_tokens*, the model or the search.

    The search has batches of its own. Training lines beyond the limit of the model are allowed: fairseq skips and
    reports them.
    """
    of_model, of_both = limits(experiment.settings.fairseq_train_flags), of_search(experiment)
    existing = [name for name in sets if name != "test" or experiment.settings.test_files]
    for path in experiment.texts(experiment.in_subwords, existing):
        if not path.exists():  # the user removed it after stage 6 to save space
            continue
        side = "source" if path.suffix == f".{experiment.source}" else "target"
        limit = (of_both if path.stem == "test" else of_model)[side]
        of_batch = batch_of_search(experiment) if path.stem == "test" else max_tokens
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                tokens = len(line.split()) + 1
                if tokens > limit:
                    if path.stem == "train":
                        continue
                    allowed = f"the {limit} that fairseq takes: divide it, or {MORE_ROOM}"
                elif tokens > of_batch:
                    larger = "set larger tokens_per_update and tokens_per_device, or --max-tokens if you give it"
                    if path.stem == "test":
                        larger = LARGER_BATCH
                    allowed = f"the {of_batch} of a batch: divide it, or {larger}"
                else:
                    continue
                raise StageError(f"{stage}: {path}, line {number}, has {tokens} tokens, more than {allowed}")
