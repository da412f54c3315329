"""fairseq_rope/patches/ending.py: an input that the plugin refuses ends fairseq's programs with one line."""

import re
import shutil
import sys

import pytest
import torch
from fairseq.data import Dictionary
from torch.multiprocessing import ProcessRaisedException

from fairseq_rope.checkpoints import CheckpointError
from fairseq_rope.errors import InputError
from fairseq_rope.patches.ending import excepthook, refusal
from fairseq_rope.positions.rotary import RotaryEmbedding
from fairseq_rope.positions.scaling import RopeScaling
from tests.commands import PLUGIN, ROOT, call, run_program, training


@pytest.mark.slow
def test_the_documented_encoding_refuses_a_value_in_one_line(data_bin, tmp_path):
    (code,) = re.findall(
        r"```python\n# my_positions/__init__\.py\n(.*?)```", (ROOT / "docs/encodings.md").read_text(), re.S
    )
    (tmp_path / "my_positions").mkdir()
    (tmp_path / "my_positions" / "__init__.py").write_text(code)
    flags = ["--arch", "transformer_rope", "--position-encoding", "recency", "--recency-strength", "-1"]
    command = training(data_bin, tmp_path / "new", *flags)
    command[command.index(PLUGIN)] = "my_positions"
    done = run_program(*command, check=False, cwd=tmp_path)
    last = done.stderr.splitlines()[-1]
    assert last == "fairseq-train: error: --recency-strength -1.0: must be above 0"
    assert done.returncode == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "error, line",
    [
        (InputError("x.pt: is damaged"), "x.pt: is damaged"),
        (CheckpointError("x.pt: is damaged"), "x.pt: is damaged"),
        (ValueError("--rope-base 0.5: must be above 1"), "--rope-base 0.5: must be above 1"),
        (ValueError("invalid literal"), None),
        (RuntimeError("--path: bug"), None),
        (FileNotFoundError("x.pt"), None),
    ],
)
def test_only_refusals_end_without_a_traceback_and_only_in_fairseqs_programs(monkeypatch, capsys, error, line):
    assert refusal(error) == line
    for program, expected in (("/bin/fairseq-train", line), ("mine.py", None)):
        monkeypatch.setattr(sys, "argv", [program])
        excepthook(type(error), error, None)
        printed = capsys.readouterr().err.splitlines()
        assert printed[-1] == (f"fairseq-train: error: {line}" if expected else _last_of_traceback(error))


def _last_of_traceback(error):
    kind = type(error)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{name}: {error}"


def test_errors_of_fairseq_keep_their_traceback(data_bin):
    with pytest.raises(TypeError) as ended:
        Dictionary.load(str(data_bin / "dict.en.txt")).string(None)
    assert refusal(ended.value) is None


def test_a_refusal_that_fairseqs_trainer_hides_is_the_line(data_bin, trained, tmp_path, monkeypatch):
    """fairseq says of every error while a checkpoint loads that the architectures must match."""
    shutil.copy(trained / "checkpoint_last.pt", tmp_path)

    def load_state_dict(*args, **kwargs):
        raise errors.pop()

    monkeypatch.setattr("fairseq.models.BaseFairseqModel.load_state_dict", load_state_dict)
    errors = [InputError("--their-flag 3: is too small"), KeyError("of a user's model")]
    for expected in (None, "--their-flag 3: is too small"):
        with pytest.raises(Exception, match="ensure that the architectures match") as ended:
            call(*training(data_bin, tmp_path, "--max-epoch", 30))
        assert refusal(ended.value) == expected


def refuse_rope_base(rank):
    RotaryEmbedding(8, base=0.0)


def refuse_scaling(rank):
    RopeScaling({"rope_type": "linear", "factor": 0.5})


@pytest.mark.parametrize("refuse, flag", [(refuse_rope_base, "--rope-base 0"), (refuse_scaling, "--rope-scaling")])
def test_refusals_of_another_process_are_one_line(refuse, flag):
    """fairseq-train starts a process for each GPU."""
    with pytest.raises(ValueError) as in_this_process:
        refuse(0)
    assert str(in_this_process.value).startswith(flag)
    with pytest.raises(ProcessRaisedException) as ended:
        torch.multiprocessing.start_processes(refuse, nprocs=1, start_method="fork")
    assert refusal(ended.value) == str(in_this_process.value)
