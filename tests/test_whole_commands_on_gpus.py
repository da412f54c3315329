"""fairseq's programs from start to end on one simulated GPU (tests/simulated_gpu) or a real one, beside the CPU."""

import shutil
from statistics import mean

import pytest
import torch

from benchmarks.subjects import on_device
from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.patches.optimizers import FLOAT32_COPIES
from fairseq_rope.search.ensemble import SWITCH
from tests.commands import ENVIRONMENT, PLUGIN, ROOT, call, outputs, scores, training
from tests.commands_on_gpus import REAL_GPU, logged, run_on_gpus, training_on_gpus, types_of_numbers
from tests.every_model import FUSED, MODELS, PLAIN, TOLERANCE, batch, build, gradient, search
from tests.recipes.small_demo import SMALL, one, small_corpus

EPOCHS = 2  # of training_on_gpus
UPDATES = 4  # of an epoch of the corpus
# A real GPU adds some gradients in another order each time, which can change the last printed digit.
SAME = 0.0011 if REAL_GPU else 1e-9
STEADY = ("--dropout", 0, "--log-interval", 1)
HALF, BRAIN, SINGLE = "float16", "bfloat16", "float32"
# Flags of fairseq-train; the type of numbers of the linear layers and of the weights; fairseq's optimizer; whether the
# checkpoint has float32 copies of the weights.
TRAININGS = [
    ("", SINGLE, SINGLE, "FairseqAdam", False),
    ("--fp16", HALF, HALF, "FP16Optimizer", True),
    ("--bf16", BRAIN, BRAIN, "FP16Optimizer", True),
    ("--memory-efficient-fp16", HALF, HALF, "MemoryEfficientFP16Optimizer", False),
    ("--memory-efficient-bf16", BRAIN, BRAIN, "MemoryEfficientFP16Optimizer", False),
    ("--fp16 --fp16-no-flatten-grads", HALF, HALF, "FP16Optimizer", True),
    ("--amp", HALF, SINGLE, "AMPOptimizer", False),
]
RESUMED = ("", "--fp16", "--bf16")  # to the last digit
RECIPES = [(1, "fp16"), (1 if REAL_GPU and torch.cuda.device_count() == 1 else 2, "auto")]


def losses_of(log):
    """The losses of all updates and of all validations."""
    return logged(log, "loss") + logged(log, "valid_loss")


def type_of_weights(state):
    """The type in which the weights of a checkpoint were trained. fairseq saves those of 16 bits as float32."""
    for dtype in (BRAIN, HALF):
        narrow = getattr(torch, dtype)
        if all(torch.equal(weight, weight.to(narrow).to(weight.dtype)) for weight in state["model"].values()):
            return dtype
    return SINGLE


def resumed(folder, begun, train):
    """The losses of the second epoch of the training in *folder*, which *train* continues in the new folder *begun*."""
    begun.mkdir()
    shutil.copy(folder / "checkpoint1.pt", begun / "checkpoint_last.pt")
    log = train(begun)
    assert "Loaded checkpoint" in log
    return losses_of(log)


@pytest.mark.slow
def test_fairseq_trains_and_translates_with_bf16_on_a_gpu(data_bin, trained, tmp_path):
    log = run_on_gpus(1, *training_on_gpus(data_bin, tmp_path, "--bf16", "--max-update", 2))
    assert "training on 1 devices (GPUs/TPUs)" in log and min(logged(log, "gb_free")) > 0
    assert type_of_weights(load_checkpoint(str(tmp_path / "checkpoint_last.pt"))) == BRAIN
    model = ["--user-dir", PLUGIN, "--path", trained / "checkpoint_last.pt", "--max-len-b", 10]
    generated = run_on_gpus(1, "fairseq-generate", data_bin, *model, "--bf16")
    assert types_of_numbers(log) == types_of_numbers(generated) == {BRAIN}
    assert len(outputs(generated)) == 20


@pytest.fixture(scope="module")
def on_the_cpu(data_bin, tmp_path_factory):
    """The folder and the log of the training in float32 on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    return folder, call(*training(data_bin, folder, *STEADY, "--max-epoch", EPOCHS))


@pytest.mark.nightly
@pytest.mark.parametrize("flags, computes, weights, optimizer, has_copies", TRAININGS)
def test_a_gpu_trains_and_resumes_with_the_losses_of_the_cpu(
    on_the_cpu, data_bin, tmp_path, flags, computes, weights, optimizer, has_copies
):
    def train(folder):
        return run_on_gpus(1, *training_on_gpus(data_bin, folder, *flags.split()))

    log = train(tmp_path / "gpu")
    assert "training on 1 devices (GPUs/TPUs)" in log and min(logged(log, "gb_free")) > 0
    has_scale = weights == HALF or optimizer == "AMPOptimizer"
    assert len(logged(log, "loss_scale")) == (EPOCHS * UPDATES if has_scale else 0)
    assert losses_of(log) == pytest.approx(losses_of(on_the_cpu[1]), abs=0.05 if flags else 0.0015)
    validation = {SINGLE} if optimizer == "AMPOptimizer" else set()  # fairseq validates without autocasting
    assert types_of_numbers(log) == {computes} | validation
    state = load_checkpoint(str(tmp_path / "gpu" / "checkpoint_last.pt"))
    assert type_of_weights(state) == weights
    assert state["optimizer_history"][-1]["optimizer_name"] == optimizer
    assert (FLOAT32_COPIES in state["last_optimizer_state"]) == has_copies
    if flags in RESUMED:
        expected = logged(log, "loss")[UPDATES:] + logged(log, "valid_loss")[1:]
        again = resumed(tmp_path / "gpu", tmp_path / "again", train)
        assert again == pytest.approx(expected, rel=0, abs=SAME)


@pytest.mark.nightly
def test_a_gpu_continues_the_training_of_a_cpu_and_a_cpu_that_of_a_gpu(on_the_cpu, data_bin, tmp_path):
    def on_gpu(folder):
        return run_on_gpus(1, *training_on_gpus(data_bin, folder))

    def on_cpu(folder):
        return call(*training(data_bin, folder, *STEADY, "--max-epoch", EPOCHS))

    expected = logged(on_the_cpu[1], "loss")[UPDATES:] + logged(on_the_cpu[1], "valid_loss")[1:]
    assert resumed(on_the_cpu[0], tmp_path / "1", on_gpu) == pytest.approx(expected, abs=0.0015)
    on_gpu(tmp_path / "gpu")
    assert resumed(tmp_path / "gpu", tmp_path / "2", on_cpu) == pytest.approx(expected, abs=0.0015)


@pytest.mark.nightly
def test_a_training_with_cpu_uses_no_gpu_of_the_machine(data_bin, tmp_path):
    log = run_on_gpus(1, *training(data_bin, tmp_path, *STEADY, "--max-update", 1, "--clip-norm", 1))
    assert "GPU: not used" in log and "training on 1 devices" in log


@pytest.mark.nightly
@pytest.mark.parametrize("flag, computes", [("", SINGLE), ("--fp16", HALF), ("--bf16", BRAIN)])
def test_programs_compute_on_a_gpu_what_they_compute_on_the_cpu(flag, computes, trained, data_bin):
    common = [data_bin, "--user-dir", PLUGIN, "--max-tokens", 500, "--path", trained / "checkpoint_last.pt"]
    commands = {
        "fairseq-generate": [*common, "--beam", 4, "--max-len-b", 10],
        "fairseq-validate": [*common, *"--task translation --valid-subset test --log-format json".split()],
    }
    printed = {}
    for program, words in commands.items():
        on_gpu = run_on_gpus(1, program, *words, *flag.split())
        assert types_of_numbers(on_gpu) == {computes}
        printed[program] = on_gpu, call(program, *words, "--cpu")
    of_gpu, of_cpu = (logged(each, "test_loss") for each in printed["fairseq-validate"])
    assert of_gpu == pytest.approx(of_cpu, rel=0.02 if flag else 1e-4)
    on_gpu, on_cpu = printed["fairseq-generate"]
    of_gpu, of_cpu = ([score for some in scores(each).values() for score in some] for each in (on_gpu, on_cpu))
    same = sum(outputs(on_gpu)[number] == text for number, text in outputs(on_cpu).items())
    if flag:  # almost equal translations change places
        assert mean(of_gpu) == pytest.approx(mean(of_cpu), rel=0.02) and same >= 10
    else:
        assert sorted(of_gpu) == pytest.approx(sorted(of_cpu), abs=1e-4) and same == 20


@pytest.mark.nightly
@pytest.mark.parametrize("gpus, precision", RECIPES)
def test_a_recipe_uses_as_many_gpus_as_its_setting_says_in_a_job_of_slurm_too(gpus, precision, tmp_path, monkeypatch):
    """With SLURM's variables of a job with one task of no given number, for which fairseq ends with a TypeError."""
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "WORLD_SIZE": "1", "RANK": "0"}
    for name, value in {**job, "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    words = [f"data={small_corpus(60, 60)}", f"work={tmp_path}", f"gpus={gpus}", f"precision={precision}"]
    run_on_gpus(
        gpus, "python", "-m", "recipes", "demo", *SMALL, *words, "export_quantization=float32", "--until", "export",
        cwd=ROOT,
    )  # fmt: skip
    log = one(tmp_path, "train-*/log").read_text()
    assert f"training on {gpus} devices (GPUs/TPUs)" in log
    assert f"--{precision.replace('auto', 'bf16')}" in one(tmp_path, "train-*/script.sh").read_text()
    assert "GPU: used, linear layers in float32" in one(tmp_path, "translate-*/log").read_text()


@pytest.mark.nightly
@pytest.mark.skipif(not REAL_GPU, reason="needs a GPU: make test-gpu")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_has_the_gradients_and_the_hypotheses_of_the_cpu(name, dtype, monkeypatch):
    def on_gpu():
        return build(MODELS[name]).to("cuda", dtype)

    expected, sample = gradient(build(MODELS[name]).train(), PLAIN, batch()), on_device(batch(), "cuda")
    for criterion in (PLAIN, FUSED):
        found = gradient(on_gpu().train(), criterion, sample)
        assert float((found - expected).norm() / expected.norm()) < TOLERANCE[dtype]
    for fast in "01" if dtype == torch.float32 else "":
        monkeypatch.setenv(SWITCH, fast)
        assert search(on_gpu(), sample)[0] == search(build(MODELS[name]), batch())[0]
