"""Sentences that fairseq would not train on or translate, found before anything is trained."""

from recipes.pipeline.experiment import Experiment, StageError

LONGEST = 1024  # tokens, with the end of the sentence, that fairseq takes by default


def has_room(experiment: Experiment) -> bool:
    """Whether more than LONGEST tokens can be translated: model and search both need a flag for it."""
    settings = experiment.settings
    return all("-positions" in flags for flags in (settings.fairseq_train_flags, settings.fairseq_generate_flags))


def check_lengths(experiment: Experiment, max_tokens: int) -> None:
    """Raise a StageError for a sentence that a batch of *max_tokens*, the model or the search has no room for.

    In the training set, fairseq leaves sentences over LONGEST out and reports them.
    """
    room_to_train = "-positions" in experiment.settings.fairseq_train_flags
    for path in experiment.texts("bpe"):
        if not path.exists():  # removed to save space, once there was binary data
            continue
        roomy = has_room(experiment) if path.stem == "test" else room_to_train
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                tokens = len(line.split()) + 1
                if tokens > LONGEST and not roomy:
                    if path.stem == "train":
                        continue
                    allowed = (
                        f"the {LONGEST} that fairseq takes: divide it, or set --max-source-positions and "
                        "--max-target-positions in fairseq_train_flags and fairseq_generate_flags"
                    )
                elif tokens > max_tokens and path.stem != "test":
                    allowed = f"the {max_tokens} of a batch: divide it, or set a larger tokens_per_update"
                else:
                    continue
                where = f"stage 7 (train): {path}, line {number}"
                raise StageError(f"{where}, has {tokens} tokens, more than {allowed}")
