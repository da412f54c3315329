"""Models exported with the command fairseq-rope export, and text for them."""

import random

from fairseq_rope.tools import export

WORDS = "the a dog cat sees takes red blue big old house book under over".split()


def sentences(count, seed=1):
    """Random sentences of the words that the trained model knows."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(count)]


def exported(trained, data_bin, output, *more):
    """Export the last checkpoint of the folder *trained*, or that checkpoint itself, into the folder *output*."""
    checkpoint = trained if trained.is_file() else trained / "checkpoint_last.pt"
    export.main(["--path", str(checkpoint), "--data", str(data_bin), "--output", str(output), *map(str, more)])
    return output
