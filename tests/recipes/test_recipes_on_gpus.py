"""The commands that the recipes build for GPUs run on simulated ones (tests/simulated_gpu), as they are built."""

import contextlib
import json
import random
import re
import socket

import pytest

from tests.commands import ENVIRONMENT, ROOT
from tests.commands_on_gpus import RECIPES, are_free, run_on_gpus
from tests.recipes.small_demo import SHORT_OUTPUTS, SMALL, label, run_here, setting_flags, small_corpus

SHORT = [*SMALL, *SHORT_OUTPUTS, "layers=1", "max_epochs=1", "average_checkpoints=1"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A work folder of the demo with the stages before the training."""
    folder = tmp_path_factory.mktemp("work")
    run_here(["demo", *words(folder, "--stop-stage", "6", "--gpus", "0")])
    return folder


def words(work, *flags):
    return [
        "--data-dir",
        str(small_corpus(train=60)),
        "--work-dir",
        str(work),
        *setting_flags(*SHORT),
        *map(str, flags),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("gpus, precision", RECIPES)
def test_a_recipe_trains_translates_scores_and_exports_on_gpus(work, gpus, precision):
    seed = 1 + RECIPES.index((gpus, precision))
    own = ["--gpus", gpus, "--seed", seed, "--set", f"precision={precision}", "--set", "export_quantization=float32"]
    last = 11 if gpus == 1 else 9
    stages = ["--stage", 7, "--stop-stage", last]
    printed = run_on_gpus(
        gpus, "python", "-m", "recipes.pipeline", "demo", *words(work, *own, *stages), cwd=ROOT, is_forked=True
    )
    model = work / f"transformer_rope.seed{seed}.{label('demo', SHORT)}"
    expected = {"auto": "bf16"}.get(precision, precision)
    assert f"on {gpus} GPU{'s' * (gpus > 1)} in {expected}" in printed
    train, generate = (
        re.search(rf"^{name} .*$", (model / "commands" / f"{stage}.sh").read_text(), re.M)[0]
        for name, stage in (("fairseq-train", "stage07_train"), ("fairseq-generate", "stage09_translate"))
    )
    assert f"--distributed-world-size {gpus} --{expected}" in train and "--cpu" not in train + generate
    log = (model / "logs" / "stage07_train.log").read_text()
    history = [json.loads(line) for line in (model / "checkpoints" / "history.jsonl").read_text().splitlines() if line]
    assert f"training on {gpus} devices (GPUs/TPUs)" in log
    (free,) = [entry["train_gb_free"] for entry in history if "train_gb_free" in entry]
    assert are_free([free])
    translations = model / "logs" / "stage09_translate.log"
    assert "GPU: used, linear layers in float32" in translations.read_text()
    assert len((model / "hypotheses.de").read_text().splitlines()) == 12
    assert (model / "ctranslate2" / "model.bin").exists() == (last == 11)


@pytest.fixture
def job_whose_port_is_taken():
    """The number of a job whose port, which fairseq takes from the number, another program has."""
    for number in range(1, 50):
        with contextlib.suppress(OSError):
            server = socket.create_server(("localhost", random.Random(number).randint(10000, 60000)))
            break
    with server:
        yield number


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [0, 2])
def test_a_recipe_in_an_allocation_of_two_gpus_uses_as_many_as_its_flag_says(
    work, gpus, job_whose_port_is_taken, monkeypatch
):
    """With SLURM's variables of a job with one task of no given number, for which fairseq ends with a TypeError.

    Another training of the same job has the port that fairseq takes from the number of the job.
    """
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in {**job, "WORLD_SIZE": "1", "RANK": "0"}.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    monkeypatch.setitem(ENVIRONMENT, "SLURM_JOB_ID", str(job_whose_port_is_taken))
    own = ["--gpus", gpus, "--seed", 10 + gpus, "--stage", 7, "--stop-stage", 7]
    run_on_gpus(2, "python", "-m", "recipes.pipeline", "demo", *words(work, *own), cwd=ROOT, is_forked=True)
    log = work / f"transformer_rope.seed{10 + gpus}.{label('demo', SHORT)}" / "logs" / "stage07_train.log"
    assert f"training on {max(1, gpus)} devices (GPUs/TPUs)" in log.read_text()


@pytest.mark.slow
def test_runs_share_a_gpu_if_there_are_more_jobs_than_gpus(work):
    own = words(work, "--gpus", 1, "--jobs", 2, "--seeds", 1, "--set", "precision=fp16")
    printed = run_on_gpus(1, "python", "-m", "recipes.compare", "demo", *own, cwd=ROOT, is_forked=True)
    assert printed.index("== transformer_rope, seed 1: begun") < printed.index(", seed 1: done")
    model = work / f"transformer.seed1.{label('demo', [*SHORT, 'precision=fp16'])}"
    assert "training on 1 devices (GPUs/TPUs)" in (model / "logs" / "stage07_train.log").read_text()
