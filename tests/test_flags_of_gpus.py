"""Each flag for GPUs in a recipe or a page of the documentation runs on simulated GPUs, or has a reason not to."""

import re
from dataclasses import fields

from fairseq.dataclass.configs import CommonConfig, DistributedTrainingConfig

from recipes.pipeline import fairseq_train, stage09_translate
from recipes.pipeline.settings import FIELDS
from tests.commands import ROOT
from tests.commands_on_gpus import FINE_TUNING_ON_TWO_GPUS, ON_TWO_GPUS, PROGRAMS, RECIPES, SEVERAL_PROCESSES, TRAININGS
from tests.recipes.small_demo import describe

OF_COMMON = re.compile("fp16|bf16|amp|tpu|cpu|loss_scale|model_parallel|empty_cache|all_gather")
OF_FAIRSEQ = {field.name for field in fields(DistributedTrainingConfig)}
OF_FAIRSEQ |= {field.name for field in fields(CommonConfig) if OF_COMMON.search(field.name)}
OF_LAUNCHERS = re.compile("gpus|nproc|nnodes|nodes$|ntasks|rdzv|no_python")
WITH_VALUE = ("--ddp-backend", "--distributed-backend")  # flags whose values choose another program
NOT_RUN = {
    "--gpus-per-task": "the documentation says that it does not work",
    "--ddp-backend fully_sharded": "needs fairscale, which is not installed",
    "--tpu": "needs torch_xla; tests/patches/test_precision.py refuses it without",
}
PAGES = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/*.md")]
FILES = [path for kind in ("py", "yaml", "sh") for path in ROOT.glob(f"recipes/*/*.{kind}")]


def flags_for_gpus(text):
    """The flags in *text* that choose devices, processes or precision; with its value if it is one of WITH_VALUE."""
    found = set()
    for flag, value in re.findall(r"(?<![\w-])(--[a-z][\w-]*)(?:[ =]([a-z]\w*))?", text):
        name = flag[2:].replace("-", "_")
        if name in OF_FAIRSEQ or OF_LAUNCHERS.match(name):
            found.add(f"{flag} {value}".strip() if flag in WITH_VALUE else flag)
    return found


def built(gpus, precision):
    """The commands of the stages 7 and 9 on *gpus* GPUs."""
    experiment = describe("demo", "--gpus", gpus)
    train = fairseq_train.command(experiment, gpus, precision)
    return f"{train} {stage09_translate.command(experiment, experiment.data_bin, 'test')}"


def test_each_flag_for_gpus_runs_on_simulated_ones_or_has_a_reason_not_to():
    run = [*(each.flags for each in TRAININGS.values()), *sum(PROGRAMS.values(), ()), *SEVERAL_PROCESSES, *ON_TWO_GPUS]
    run += ["--gpus", *(built(gpus, {"auto": "bf16"}.get(precision, precision)) for gpus, precision in RECIPES)]
    run.append(FINE_TUNING_ON_TWO_GPUS)
    covered = {*NOT_RUN}.union(*map(flags_for_gpus, run))
    named = {str(path.relative_to(ROOT)): path.read_text() for path in (*PAGES, *FILES)}
    ignored = "## Flags that a program accepts and ignores"  # test_flags.py has them
    named["docs/compatibility.md"] = re.sub(rf"(?s){ignored}.*?(?=\n## |\Z)", "", named["docs/compatibility.md"])
    choices = [choice for choice in FIELDS["precision"].metadata["choices"] if choice != "auto"]
    named |= {f"stages 7 and 9, {gpus} GPUs, {choice}": built(gpus, choice) for gpus in range(3) for choice in choices}
    assert {*NOT_RUN} <= set().union(*map(flags_for_gpus, named.values())), "a reason for a flag that nothing names"
    missing = {place: more for place, text in named.items() if (more := flags_for_gpus(text) - covered)}
    assert missing == {}, "add a run to a table of tests/commands_on_gpus.py, or a reason to NOT_RUN"


def test_the_commands_for_several_processes_are_those_of_the_documentation():
    page = re.sub(r" *\\\n *", " ", (ROOT / "docs" / "training.md").read_text())
    assert [command for command in SEVERAL_PROCESSES[1:] if f"\n    {command}\n" not in page] == []
    commands = re.findall(
        r"^    ((?:env|torchrun|srun|fairseq-train) .*(?:SLURM|--distributed|--nproc).*)$", page, re.M
    )
    by_hand = [
        command for command in commands if "tcp://127.0.0.1:PORT" in command
    ]  # tests/test_distributed.py runs it
    assert {*commands} - {*by_hand} == {*SEVERAL_PROCESSES[1:]} and len(by_hand) == 1


def test_a_new_flag_would_be_found():
    text = "`--cpu-offload`, --bf16 and --ddp-backend slowmo, but not --batch-size; torchrun --nproc_per_node=2"
    expected = {"--cpu-offload", "--bf16", "--ddp-backend slowmo", "--nproc_per_node"}
    assert flags_for_gpus(text) == expected
