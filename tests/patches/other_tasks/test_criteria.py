"""fairseq_rope/patches/other_tasks/criteria.py: another criterion than the usual one of a task gives a warning."""

import shutil

import pytest
from fairseq import tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.options import get_training_parser, parse_args_and_arch

SENTENCES = "sentence_prediction --arch roberta_rope_small --num-classes 2 --max-positions 40"


@pytest.fixture
def trained_on(text_bin, tmp_path):
    """trained_on(flags): the task and the criterion of fairseq-train with these flags."""
    for part in ("input0", "label"):
        (tmp_path / part).mkdir()
        shutil.copy(text_bin / "dict.txt", tmp_path / part)

    def build(flags):
        data = tmp_path if "sentence_prediction" in flags else text_bin
        args = parse_args_and_arch(get_training_parser(), [str(data), "--task", *flags.split()])
        cfg = convert_namespace_to_omegaconf(args)
        task = tasks.setup_task(cfg.task)
        return task, task.build_criterion(cfg.criterion)

    return build


@pytest.mark.parametrize(
    "flags, warning",
    [
        ("masked_lm --arch roberta_rope_small --criterion masked_lm", ""),
        (
            "masked_lm --arch roberta_rope_small",
            "--criterion cross_entropy with --task masked_lm: its usual criterion is masked_lm, ",
        ),
        (
            "masked_lm --arch roberta_rope_small --criterion label_smoothed_cross_entropy",
            "--criterion label_smoothed_cross_entropy with --task masked_lm: ",
        ),
        (
            "multilingual_masked_lm --arch roberta_rope_small --criterion label_smoothed_cross_entropy",
            "--criterion label_smoothed_cross_entropy with --task multilingual_masked_lm: its usual criterion is ",
        ),
        (f"{SENTENCES} --criterion sentence_prediction", ""),
        (f"{SENTENCES} --criterion sentence_prediction_adapters", "--criterion sentence_prediction_adapters with "),
        ("language_modeling --arch transformer_lm_rope", ""),
    ],
)
def test_a_warning_names_the_usual_criterion_if_another_one_runs(trained_on, caplog, flags, warning):
    _, criterion = trained_on(flags)
    *_, name = ("--criterion cross_entropy " + flags).split("--criterion ")
    assert type(criterion).__module__.split(".")[-1] == name.split()[0]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == bool(warning) and all(message.startswith(warning) for message in warnings)
