"""Models exported with the command fairseq-rope export."""

from fairseq_rope.tools import export


def exported(trained, data_bin, output, *more):
    """Export the last checkpoint of the folder *trained*, or that checkpoint itself, into the folder *output*."""
    checkpoint = trained if trained.is_file() else trained / "checkpoint_last.pt"
    export.main(["--path", str(checkpoint), "--data", str(data_bin), "--output", str(output), *map(str, more)])
    return output
