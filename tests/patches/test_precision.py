"""fairseq_rope/patches/precision.py: --bf16 and --fp16 do what they say."""

import functools
import re
import shutil
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.speech_to_text.s2t_transformer import S2TTransformerModel, s2t_transformer_s
from fairseq.trainer import Trainer
from torch import nn

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.patches.linear import Linear
from fairseq_rope.patches.optimizers import FLOAT32_COPIES
from tests.commands import PLUGIN, call, outputs, run_program, train, valid_losses

FEW = ["--max-tokens", 250, "--log-interval", 1]


def parsed(*flags):
    words = ["data", "--user-dir", str(PLUGIN), "--arch", "transformer_rope_tiny", "-s", "en", "-t", "de", *flags]
    return options.parse_args_and_arch(options.get_training_parser(), words)


@pytest.mark.parametrize("flag", ["--bf16", "--memory-efficient-bf16"])
def test_only_tpu_means_a_tpu(flag):
    args = parsed(flag)
    assert (args.bf16, args.tpu, args.fp16) == (True, False, False)
    assert parsed(flag, "--tpu").tpu and parsed("--tpu").tpu and not parsed().tpu


@pytest.mark.parametrize("flag, cls", [("--bf16", Linear), ("--memory-efficient-fp16", Linear), (None, nn.Linear)])
def test_in_16_bits_on_a_cpu_linear_layers_have_products_of_few_sizes(data_bin, flag, cls):
    words = [data_bin, "--user-dir", PLUGIN, "--arch", "transformer_rope_tiny", "--cpu", "--max-tokens", 250, flag]
    args = options.parse_args_and_arch(options.get_training_parser(), [str(word) for word in words if word])
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    layer = trainer.model.decoder.layers[0]
    assert {type(layer.fc1), type(layer.self_attn.q_proj), type(trainer.model.decoder.output_projection)} == {cls}


def by_hydra(data, folder, *overrides, check=True):
    (folder / "rope.yaml").write_text(f"""
common: {{user_dir: {PLUGIN}, cpu: true, seed: 3}}
task: {{_name: translation, data: {data}, source_lang: en, target_lang: de}}
model: {{_name: transformer_rope, encoder: {{embed_dim: 64, ffn_embed_dim: 64, layers: 2, attention_heads: 2}},
  decoder: {{embed_dim: 64, ffn_embed_dim: 64, layers: 2, attention_heads: 2}}, share_all_embeddings: true, dropout: 0}}
criterion: {{_name: cross_entropy}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
dataset: {{max_tokens: 500, num_workers: 0}}
optimization: {{lr: [0.01], max_epoch: 1}}
checkpoint: {{save_dir: {folder / "model"}}}
""")
    words = ["--config-dir", folder, "--config-name", "rope", f"hydra.run.dir={folder}", *overrides]
    return run_program("fairseq-hydra-train", *words, check=check, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "memory_efficient_fp16"])
def test_hydra_trains_in_16_bits(data_bin, tmp_path, name):
    by_hydra(data_bin, tmp_path, f"common.{name}=true")
    state = load_checkpoint(str(tmp_path / "model" / "checkpoint_last.pt"))
    assert_rounded(state, torch.bfloat16 if "bf16" in name else torch.float16)
    expected = "FP16Optimizer" if name == "bf16" else "MemoryEfficientFP16Optimizer"
    assert state["optimizer_history"][-1]["optimizer_name"] == expected


@pytest.mark.slow
def test_each_training_of_a_sweep_has_a_best_checkpoint_of_its_own(data_bin, tmp_path):
    """hydra makes both in one process; the second one, with a rate near 0, stays worse than the first one."""
    flags = ["optimization.lr=[0.01],[1e-9]", f"hydra.sweep.dir={tmp_path}", "checkpoint.save_dir=model"]
    by_hydra(data_bin, tmp_path, *flags, "checkpoint.patience=1", "optimization.max_epoch=3", "-m")
    states = [load_checkpoint(str(tmp_path / str(job) / "model" / "checkpoint_best.pt")) for job in (0, 1)]
    best = [state["extra_state"]["best"] for state in states]
    assert best[0] < best[1]
    assert [state["extra_state"]["val_loss"] for state in states] == best


def assert_rounded(state, dtype):
    """The weights in *state*, which fairseq writes in float32, are numbers of *dtype*."""
    weights = state["model"].values()
    assert all(torch.equal(weight, weight.to(dtype).float()) for weight in weights)
    assert not all(torch.equal(weight, weight.to(torch.float8_e4m3fn).float()) for weight in weights)


def losses_of(data, folder, *flags):
    return {epoch: float(loss) for epoch, loss in valid_losses(train(data, folder, *FEW, *flags)).items()}


@pytest.fixture(scope="module")
def in_float32(data_bin, tmp_path_factory):
    """in_float32(*flags): the losses of two epochs in float32 with *flags*."""
    return functools.cache(
        lambda *flags: losses_of(data_bin, tmp_path_factory.mktemp("float32"), *flags, "--max-epoch", 2)
    )


@pytest.mark.parametrize(
    "flags, dtype",
    [
        (["--bf16"], torch.bfloat16),
        pytest.param(
            ["--bf16", "--criterion", "fused_label_smoothed_cross_entropy"], torch.bfloat16, marks=pytest.mark.slow
        ),
        pytest.param(["--memory-efficient-bf16"], torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(["--memory-efficient-fp16"], torch.float16, marks=pytest.mark.slow),
        pytest.param(["--fp16", "--fp16-no-flatten-grads"], torch.float16, marks=pytest.mark.slow),
        pytest.param(["--bf16", "--arch", "transformer_tiny"], torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(
            ["--bf16", "--attention-dropout", 0.1, "--update-freq", 2], torch.bfloat16, marks=pytest.mark.slow
        ),
    ],
)
def test_16_bits_train_on_a_cpu_close_to_float32_and_resume_to_the_last_bit(
    data_bin, tmp_path, in_float32, flags, dtype
):
    whole = losses_of(data_bin, tmp_path / "whole", *flags, "--max-epoch", 2)
    expected = in_float32(*(flag for flag in flags if "16" not in str(flag)))
    assert whole == pytest.approx(expected, rel=0.02) and len(whole) == 2
    if flags == ["--bf16"]:  # a training that has ended goes on
        train(data_bin, tmp_path / "resumed", *FEW, *flags, "--max-epoch", 1)
    else:
        (tmp_path / "resumed").mkdir()
        shutil.copy(tmp_path / "whole" / "checkpoint1.pt", tmp_path / "resumed" / "checkpoint_last.pt")
    assert losses_of(data_bin, tmp_path / "resumed", *flags, "--max-epoch", 2) == {2: whole[2]}

    one, other = (load_checkpoint(str(tmp_path / name / "checkpoint_last.pt")) for name in ("whole", "resumed"))
    assert_rounded(one, dtype)
    for name, weight in one["model"].items():
        assert torch.equal(weight, other["model"][name])
    copies = [state["last_optimizer_state"].get(FLOAT32_COPIES, []) for state in (one, other)]
    assert len(copies[0]) == len(copies[1]) and all(map(torch.equal, *copies))
    assert bool(copies[0]) == ("--memory-efficient" not in " ".join(map(str, flags)))
    # the checkpoint is one of fairseq's: it loads in float32
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "whole" / "checkpoint_last.pt")])
    assert next(model.parameters()).dtype == torch.float32


def test_copies_that_are_none_are_not_used_and_a_training_in_another_type_says_so(data_bin, tmp_path):
    train(data_bin, tmp_path, "--bf16", "--max-update", 3)  # the first has the learning rate 0
    path = str(tmp_path / "checkpoint_last.pt")
    state = load_checkpoint(path)
    for copies in (5, [None], [torch.ones(2, dtype=torch.int64)]):
        damaged = {**state["last_optimizer_state"], FLOAT32_COPIES: copies}
        torch.save({**state, "last_optimizer_state": damaged}, path)
        log = train(data_bin, tmp_path, "--bf16", "--max-update", 4, "--no-save")
        assert "float32_params in the checkpoint are not those of this model" in log
    torch.save(state, path)
    log = train(data_bin, tmp_path, "--fp16", "--fp16-no-flatten-grads", "--max-update", 4, "--no-save")
    assert "weights in the checkpoint are not their float32_params rounded to torch.float16" in log


# -- programs that load models -------------------------------------------------------------------------


@pytest.fixture
def types(monkeypatch):
    """The types of the embeddings that are looked up."""
    seen, embedding = set(), torch.nn.functional.embedding

    def recording(tokens, weight, *args, **kwargs):
        seen.add(weight.dtype)
        return embedding(tokens, weight, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "embedding", recording)
    return seen


def in_type(types, dtype, *command, **stdin):
    """The output of *command*, which looks up embeddings of *dtype* only."""
    types.clear()
    printed = call(*command, **stdin)
    assert types == {dtype}
    return printed


@pytest.mark.parametrize("flags", [[], ["--bf16"]])
def test_models_of_speech_keep_their_type(flags, caplog):
    """fairseq-generate does not convert the features of sounds, which are their input, to bfloat16."""
    args = Namespace(input_feat_per_channel=4, input_channels=1, encoder_layers=1, decoder_layers=1)
    args.max_source_positions = args.max_target_positions = 20
    s2t_transformer_s(args)
    model = S2TTransformerModel.build_model(args, Namespace(target_dictionary=Dictionary())).eval()
    cfg = convert_namespace_to_omegaconf(parsed("--lr", "0.1", *flags))
    cfg.common_eval.path = "model.pt"
    model.prepare_for_inference_(cfg)
    assert model(torch.rand(2, 9, 4), torch.tensor([9, 7]), torch.tensor([[2], [2]]))[0].dtype == torch.float32
    assert ("--bf16: has no effect" in caplog.text) == bool(flags)


OTHER_SEARCHES = [("generate", "0"), ("interactive", "1")]
SMALL = {f"{side}_{name}": 8 for side in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim")}
SMALL |= {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}


@pytest.mark.parametrize(
    "arch, options, reason",
    [
        ("transformer_rope", {"adaptive_softmax_cutoff": "10,20"}, "adaptive softmax would round probabilities"),
        ("nonautoregressive_transformer", {}, "this model is not autoregressive, and would round lengths"),
        ("transformer_rope", {}, None),
    ],
)
def test_models_with_which_fairseq_would_round_results_keep_their_type(build, caplog, arch, options, reason):
    model = build(arch, **SMALL, **options)
    cfg = convert_namespace_to_omegaconf(parsed("--lr", "0.1", "--bf16"))
    cfg.common_eval.path = "model.pt"
    model.prepare_for_inference_(cfg)
    kept = {weight.dtype for weight in model.parameters()}
    assert kept == ({torch.bfloat16} if reason is None else {torch.float32})
    assert (f"--bf16: has no effect, because {reason}" in caplog.text) == (reason is not None)


@pytest.mark.parametrize(
    "program, fast",
    [("generate", "1"), ("interactive", "0"), *(pytest.param(*row, marks=pytest.mark.slow) for row in OTHER_SEARCHES)],
)
def test_programs_translate_in_the_type_of_the_flag(data_bin, trained, program, fast, types, monkeypatch):
    monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", fast)
    text = {"stdin": (data_bin.parent / "text" / "test.en").read_text()} if program == "interactive" else {}
    words = [f"fairseq-{program}", data_bin, "--path", trained / "checkpoint_last.pt", "-s", "en", "-t", "de"]
    words += ["--user-dir", PLUGIN, "--cpu", "--beam", 2, "--max-len-b", 12, *(["--buffer-size", 20] if text else [])]
    in_float32 = outputs(in_type(types, torch.float32, *words, **text))
    translated = outputs(in_type(types, torch.bfloat16, *words, "--bf16", **text))
    assert len(translated) == 20  # near ties are many: the model has seen 200 sentences
    assert sum(translated[number] == in_float32[number] for number in in_float32) >= 12


def test_fairseq_validate_computes_in_the_type_of_the_flag(data_bin, trained, types):
    words = ["fairseq-validate", data_bin, "--path", trained / "checkpoint_last.pt", "--user-dir", PLUGIN, "--cpu"]
    words += ["--task", "translation", "--batch-size", 20, "--log-format", "json"]
    printed = in_type(types, torch.float32, *words), in_type(types, torch.bfloat16, *words, "--bf16")
    expected, loss = (float(re.search(r'"valid_loss": "([\d.]+)"', text)[1]) for text in printed)
    assert loss == pytest.approx(expected, rel=0.01)


def test_fairseq_eval_lm_computes_in_the_type_of_the_flag(text_bin, tmp_path, types):
    training_flags = "--task language_modeling --arch transformer_lm_rope --decoder-layers 1 --max-update 1 --cpu"
    training_flags += " --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --optimizer sgd --lr 0.1"
    training_flags += " --decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --max-tokens 200 --tokens-per-sample 32"
    call("fairseq-train", text_bin, "--user-dir", PLUGIN, *training_flags.split(), "--save-dir", tmp_path)
    words = ["fairseq-eval-lm", text_bin, "--path", tmp_path / "checkpoint_last.pt", "--user-dir", PLUGIN, "--cpu"]
    words += ["--tokens-per-sample", 32]
    printed = in_type(types, torch.float32, *words), in_type(types, torch.bfloat16, *words, "--bf16")
    expected, loss = (float(re.search(r"Loss \(base 2\): ([\d.]+)", text)[1]) for text in printed)
    assert loss > 1 and loss == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_programs_that_are_started_by_python_m_translate_in_fp16_on_a_cpu(data_bin, trained):
    words = ["-m", "fairseq_cli.interactive", data_bin, "-s", "en", "-t", "de", "--user-dir", PLUGIN, "--cpu", "--fp16"]
    words += ["--path", trained / "checkpoint_last.pt", "--beam", 2, "--max-len-b", 9]
    assert "\nH-0\t" in run_program("python", *words, input="the dog sees\n").stdout


def test_a_model_that_was_trained_in_bfloat16_is_loaded_in_float32_unless_requested(data_bin, tmp_path):
    from fairseq_rope.transformer import TransformerRopeModel

    train(data_bin, tmp_path, "--bf16", "--max-update", 1)
    for given, dtype in (({}, torch.float32), ({"bf16": True}, torch.bfloat16)):
        hub = TransformerRopeModel.from_pretrained(str(tmp_path), "checkpoint_last.pt", str(data_bin), **given)
        assert {parameter.dtype for parameter in hub.parameters()} == {dtype}
        assert isinstance(hub.translate("the dog sees"), str)
