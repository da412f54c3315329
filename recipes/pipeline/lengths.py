"""Find sentences that are too long for fairseq to train on or to translate, before training starts."""

import shlex
from collections.abc import Sequence

from recipes.pipeline.experiment import SETS, Experiment
from recipes.run.run import StageError

LONGEST = 1024  # fairseq's default limit in tokens, including the end of the sentence
MORE_ROOM = "set --max-source-positions and --max-target-positions in fairseq_train_flags and fairseq_generate_flags"


def _set_limits(flags: str) -> bool:
    return any(word.startswith(("--max-source-positions", "--max-target-positions")) for word in shlex.split(flags))


def has_room(experiment: Experiment) -> bool:
    """Whether the flags of both the model and the search allow more than LONGEST tokens."""
    settings = experiment.settings
    return all(map(_set_limits, (settings.fairseq_train_flags, settings.fairseq_generate_flags)))


def check_lengths(
    experiment: Experiment, max_tokens: int, sets: Sequence[str] = SETS, stage: str = "stage 7 (train)"
) -> None:
    """Raise a StageError of *stage* for a line that is too long for a batch of *max_tokens*, the model or the search.

    Training lines over LONGEST are allowed: fairseq skips and reports them.
    """
    room_to_train = _set_limits(experiment.settings.fairseq_train_flags)
    existing = [name for name in sets if name != "test" or experiment.settings.test_files]
    for path in experiment.texts(experiment.in_subwords, existing):
        if not path.exists():  # the user removed it after stage 6 to save space
            continue
        roomy = has_room(experiment) if path.stem == "test" else room_to_train
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                tokens = len(line.split()) + 1
                if tokens > LONGEST and not roomy:
                    if path.stem == "train":
                        continue
                    allowed = f"the {LONGEST} that fairseq takes: divide it, or {MORE_ROOM}"
                elif tokens > max_tokens and path.stem != "test":
                    larger = "set a larger tokens_per_update, or a larger --max-tokens if you give this flag"
                    allowed = f"the {max_tokens} of a batch: divide it, or {larger}"
                else:
                    continue
                raise StageError(f"{stage}: {path}, line {number}, has {tokens} tokens, more than {allowed}")
