"""Language models trained with fairseq's commands, and what fairseq-rope makes from their checkpoints."""

import pytest

from fairseq_rope.errors import InputError
from fairseq_rope.tools import average, convert_layout, export
from tests.commands import PLUGIN, call, valid_losses

RESTART = ("--reset-optimizer", "--max-update", 2)


def fit(flags, data, save_dir, *more):
    """Train the model of *flags*. Returns the log."""
    return call("fairseq-train", data, "--user-dir", PLUGIN, *flags.split(), "--save-dir", save_dir, *more)


def losses_of(log):
    return {epoch: float(loss) for epoch, loss in valid_losses(log).items()}


def averaged(folder):
    """The path of the average of the two checkpoints of updates 2 and 4 in *folder*."""
    average.main(["--inputs", str(folder), "--num-update-checkpoints", "2", "--output", str(folder / "average.pt")])
    return folder / "average.pt"


def converted(checkpoint):
    """The path of *checkpoint* in the other layout."""
    output = checkpoint.with_name("half.pt")
    convert_layout.main(["--path", str(checkpoint), "--rope-layout", "half", "--output", str(output)])
    return output


def assert_resumes(flags, data, folder, *more):
    """Training that resumes has the losses of uninterrupted training to update 4; both layouts start alike."""
    losses = losses_of(fit(flags, data, folder / "whole", *more, "--max-update", 4))
    fit(flags, data, folder / "halves", *more, "--max-update", 2)
    first = folder / "halves" / "checkpoint_last.pt"
    anew = [
        losses_of(fit(flags, data, folder / layout, *more, "--restore-file", path, "--rope-layout", layout, *RESTART))
        for layout, path in (("interleaved", first), ("half", converted(first)))
    ]
    assert anew[1] == pytest.approx(anew[0], abs=2e-3)
    resumed = fit(flags, data, folder / "halves", *more, "--max-update", 4)
    assert losses_of(resumed) == losses
    last = folder / "whole" / "checkpoint_last.pt"
    with pytest.raises(InputError, match="was trained with --rope-base 10000.0, not 500.0"):
        fit(flags, data, folder / "whole", *more, "--rope-base", 500)
    with pytest.raises(SystemExit, match="it is a .*Rope.* with the task .*, and must be a model of --task transl"):
        export.main(["--path", str(last), "--data", str(data), "--output", str(folder / "exported")])
    return last
