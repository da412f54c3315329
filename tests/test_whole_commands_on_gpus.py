"""fairseq's programs from start to end on one simulated GPU (tests/simulated_gpu) or a real one, beside the CPU.

Each program starts at least once as a user starts it. Most others are forked (tests/forked_programs.py).
"""

import re
import shutil
from statistics import mean

import pytest
import torch

from fairseq_rope.checkpoints import FLOAT32_COPIES, load_checkpoint
from tests.commands import ENVIRONMENT, PLUGIN, ROOT, call, outputs, scores, training, valid_losses
from tests.commands_on_gpus import (
    PROGRAMS,
    REAL_GPU,
    RECIPES,
    RESUMED,
    TRAININGS,
    are_free,
    logged,
    run_on_gpus,
    training_on_gpus,
    types_of_numbers,
)
from tests.recipes.small_demo import SMALL, one, small_corpus

EPOCHS = 2  # of training_on_gpus
UPDATES = 4  # of an epoch of the corpus
# A real GPU adds some gradients in another order each time, which can change the last printed digit.
SAME = 0.0011 if REAL_GPU else 1e-9
STEADY = ("--dropout", 0, "--log-interval", 1)


def losses_of(log):
    """The losses of all updates and of all validations."""
    return logged(log, "loss") + logged(log, "valid_loss")


def type_of_weights(state):
    """The type in which the weights of a checkpoint were trained. fairseq saves those of 16 bits as float32."""
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(weight, weight.to(dtype).to(weight.dtype)) for weight in state["model"].values()):
            return dtype
    return torch.float32


def test_fairseq_trains_and_translates_with_bf16_on_a_gpu(data_bin, trained, tmp_path):
    log = run_on_gpus(1, *training_on_gpus(data_bin, tmp_path, "--bf16", "--max-update", 2))
    assert "training on 1 devices (GPUs/TPUs)" in log and are_free(logged(log, "gb_free"))
    assert type_of_weights(load_checkpoint(str(tmp_path / "checkpoint_last.pt"))) == torch.bfloat16
    model = ["--user-dir", PLUGIN, "--path", trained / "checkpoint_last.pt", "--max-len-b", 10]
    generated = run_on_gpus(1, "fairseq-generate", data_bin, *model, "--bf16")
    assert types_of_numbers(log) == types_of_numbers(generated) == {"bfloat16"}
    assert len(outputs(generated)) == 20


# -- training ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_the_cpu(data_bin, tmp_path_factory):
    """The folder and the log of the training in float32 on the CPU."""
    folder = tmp_path_factory.mktemp("cpu")
    return folder, call(*training(data_bin, folder, *STEADY, "--max-epoch", EPOCHS))


@pytest.fixture(scope="module")
def trainings(data_bin, tmp_path_factory):
    """trainings(name): the folder and the log of a row of TRAININGS on a GPU. Each runs once."""
    done = {}

    def run(name):
        if name not in done:
            folder = tmp_path_factory.mktemp("gpu")
            flags = TRAININGS[name].flags.split()
            done[name] = folder, run_on_gpus(1, *training_on_gpus(data_bin, folder, *flags), is_forked=True)
        return done[name]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_gpu_trains_with_the_losses_of_the_cpu(trainings, on_the_cpu, name):
    expected, (folder, log) = TRAININGS[name], trainings(name)
    assert "training on 1 devices (GPUs/TPUs)" in log
    assert len(logged(log, "gb_free")) == EPOCHS * UPDATES and are_free(logged(log, "gb_free"))
    has_scale = expected.weights == torch.float16 or expected.optimizer == "AMPOptimizer"
    assert len(logged(log, "loss_scale")) == (EPOCHS * UPDATES if has_scale else 0)
    if name == "amp":  # its scale doubles after every third update
        assert logged(log, "loss_scale") == [16, 16, 32, 32, 32, 64, 64, 64]
    rounding = 0.0015 if name == "float32" else 0.05
    assert losses_of(log) == pytest.approx(losses_of(on_the_cpu[1]), abs=rounding)
    validation = {"float32"} if name == "amp" else set()  # fairseq validates without autocasting
    assert types_of_numbers(log) == {str(expected.computes).removeprefix("torch.")} | validation
    state = load_checkpoint(str(folder / "checkpoint_last.pt"))
    assert type_of_weights(state) == expected.weights
    assert state["optimizer_history"][-1]["optimizer_name"] == expected.optimizer
    assert (FLOAT32_COPIES in state["last_optimizer_state"]) == expected.has_copies


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_gpu_resumes_with_the_losses_of_an_uninterrupted_training(trainings, data_bin, tmp_path, name):
    folder, uninterrupted = trainings(name)
    shutil.copy(folder / "checkpoint1.pt", tmp_path / "checkpoint_last.pt")
    flags = TRAININGS[name].flags.split()
    log = run_on_gpus(1, *training_on_gpus(data_bin, tmp_path, *flags), is_forked=True)
    assert "Loaded checkpoint" in log
    assert logged(log, "loss") == pytest.approx(logged(uninterrupted, "loss")[UPDATES:], rel=0, abs=SAME)
    assert logged(log, "valid_loss") == pytest.approx(logged(uninterrupted, "valid_loss")[1:], rel=0, abs=SAME)


@pytest.mark.slow
def test_a_gpu_continues_the_training_of_a_cpu_and_a_cpu_that_of_a_gpu(trainings, on_the_cpu, data_bin, tmp_path):
    folder, uninterrupted = on_the_cpu
    second = float(valid_losses(uninterrupted)[2])
    shutil.copy(folder / "checkpoint1.pt", tmp_path / "checkpoint_last.pt")
    on_gpu = run_on_gpus(1, *training_on_gpus(data_bin, tmp_path), is_forked=True)
    assert "Loaded checkpoint" in on_gpu
    assert logged(on_gpu, "valid_loss") == [pytest.approx(second, rel=0, abs=SAME)]
    for name, flags, rounding in (("float32", [], 0.0015), ("bf16", ["--bf16"], 0.02)):
        folder, log = trainings(name)
        begun = tmp_path / name
        begun.mkdir()
        shutil.copy(folder / "checkpoint1.pt", begun / "checkpoint_last.pt")
        on_cpu = call(*training(data_bin, begun, *STEADY, "--max-epoch", EPOCHS, *flags))
        assert logged(on_cpu, "loss") == pytest.approx(logged(log, "loss")[UPDATES:], abs=rounding)


@pytest.mark.slow
def test_update_freq_2_has_the_losses_of_batches_of_twice_the_size(data_bin, tmp_path):
    sizes = ["--max-tokens", 4000, "--max-epoch", 3, "--eval-bleu", "--eval-bleu-args", '{"beam": 1, "max_len_b": 10}']
    sizes += ["--eval-bleu-detok", "space"]
    sizes += ["--required-batch-size-multiple", 1]
    halves = ["--batch-size", 100, "--update-freq", 2]
    log = run_on_gpus(1, *training_on_gpus(data_bin, tmp_path / "gpu", *sizes, *halves), is_forked=True)
    expected = call(*training(data_bin, tmp_path / "cpu", *STEADY, *sizes, "--batch-size", 200))
    assert losses_of(log) == pytest.approx(losses_of(expected), abs=0.0015) and len(losses_of(log)) == 6
    assert logged(log, "valid_bleu") == logged(expected, "valid_bleu") and len(logged(log, "valid_bleu")) == 3


@pytest.mark.slow
def test_a_training_goes_on_after_the_gpu_ran_out_of_memory(data_bin, tmp_path):
    failures = "backward:2,embedding:9"  # in the second update, and in the encoder in the first validation
    command = training_on_gpus(data_bin, tmp_path, "--fp16", "--max-epoch", 1)
    log = run_on_gpus(1, *command, out_of_memory=failures)
    assert log.count("OOM: Ran out of memory with exception: CUDA out of memory") == 2
    assert "attempting to recover from OOM in forward/backward pass" in log
    assert "ran out of memory in validation step, retrying batch" in log
    assert ("memory of simulated GPU 0" if not REAL_GPU else "CUDA memory summary") in log
    assert logged(log, "train_num_updates") == [UPDATES - 1] and len(logged(log, "valid_loss")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_training_with_cpu_uses_no_gpu_of_the_machine(data_bin, tmp_path, gpus):
    if REAL_GPU and torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, and this machine has {torch.cuda.device_count()}")
    log = run_on_gpus(gpus, *training(data_bin, tmp_path, *STEADY, "--max-update", 1, "--clip-norm", 1))
    assert "GPU: not used" in log and "training on 1 devices" in log


# -- translating, validating -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def language_model(text_bin, tmp_path_factory):
    """The folder with checkpoint_last.pt of a tiny language model."""
    folder = tmp_path_factory.mktemp("language_model")
    sizes = "--decoder-embed-dim 32 --decoder-ffn-embed-dim 32 --decoder-layers 1 --decoder-attention-heads 2"
    flags = f"--task language_modeling --arch transformer_lm_rope {sizes} --tokens-per-sample 64"
    words = training(text_bin, folder, without=("--share-all-embeddings ", "--label-smoothing 0.1 "))
    call(*words, *flags.split(), "--criterion", "cross_entropy", "--max-epoch", 2, "--no-epoch-checkpoints")
    return folder


@pytest.fixture(scope="module")
def commands(data_bin, text_bin, trained, language_model):
    """The words of the commands in PROGRAMS for tiny models, without the program."""
    common = ["--user-dir", PLUGIN, "--max-tokens", 500, "--path"]
    in_pairs = [data_bin, *common, trained / "checkpoint_last.pt"]
    translate = [*in_pairs, "--beam", 4, "--max-len-b", 10]
    validate = "--task translation --valid-subset test --log-format json".split()
    in_text = [text_bin, *common, language_model / "checkpoint_last.pt", "--gen-subset", "test"]
    return {
        "fairseq-generate": translate,
        "fairseq-interactive": [*translate, "--buffer-size", 20],
        "fairseq-validate": [*in_pairs, *validate],
        "fairseq-eval-lm": [*in_text, "--tokens-per-sample", 64],
    }


def numbers(program, printed):
    """The scores of all translations, or the loss."""
    if program == "fairseq-eval-lm":
        return [float(loss) for loss in re.findall(r"Loss \(base 2\): ([\d.]+)", printed)]
    if program == "fairseq-validate":
        return logged(printed, "test_loss")
    return [score for _, of_sentence in sorted(scores(printed).items()) for score in of_sentence]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_compute_on_a_gpu_what_they_compute_on_the_cpu(program, commands, data_bin):
    source = (data_bin.parent / "text" / "test.en").read_text() if program == "fairseq-interactive" else ""
    on_cpu = call(program, *commands[program], "--cpu", stdin=source)
    expected, translations = numbers(program, on_cpu), outputs(on_cpu)
    assert expected
    for flag in PROGRAMS[program]:
        is_forked = flag != ""
        printed = run_on_gpus(1, program, *commands[program], *flag.split(), input=source, is_forked=is_forked)
        assert types_of_numbers(printed) == {{"": "float32", "--fp16": "float16", "--bf16": "bfloat16"}[flag]}
        if not flag:
            assert outputs(printed) == translations
            assert numbers(program, printed) == pytest.approx(expected, abs=1e-4)
        else:  # almost equal translations change places
            assert mean(numbers(program, printed)) == pytest.approx(mean(expected), rel=0.02)
            same = sum(outputs(printed)[number] == text for number, text in translations.items())
            assert same >= 0.5 * len(translations)


# -- recipes -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("gpus, precision", RECIPES)
def test_a_recipe_uses_as_many_gpus_as_its_setting_says_in_a_job_of_slurm_too(gpus, precision, tmp_path, monkeypatch):
    """With SLURM's variables of a job with one task of no given number, for which fairseq ends with a TypeError."""
    job = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "WORLD_SIZE": "1", "RANK": "0"}
    for name, value in {**job, "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setitem(ENVIRONMENT, name, value)
    words = [f"data={small_corpus(60)}", f"work={tmp_path}", f"gpus={gpus}", f"precision={precision}"]
    words += ["export_quantization=float32", "--until", "export"]
    printed = run_on_gpus(gpus, "python", "-m", "recipes", "demo", *SMALL, *words, cwd=ROOT, is_forked=True)
    assert f"on {gpus} GPU{'s' * (gpus > 1)} in {precision.replace('auto', 'bf16')}" in printed
    log = one(tmp_path, "train-*/log").read_text()
    assert f"training on {gpus} devices (GPUs/TPUs)" in log and are_free(logged(log, "train_gb_free"))
    assert "GPU: used, linear layers in float32" in one(tmp_path, "translate-*/log").read_text()
