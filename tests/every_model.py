"""One small model of every kind, and batches with padding on both sides."""

import itertools
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor, nn

import fairseq_rope.plugin  # noqa: F401  registers the models and the criterion
from benchmarks.generate import EndingAtLengths
from fairseq_rope.positions import ENCODINGS

WORDS = Dictionary()
for number in range(60):
    WORDS.add_symbol(f"w{number}")
TASK = SimpleNamespace(source_dictionary=WORDS, target_dictionary=WORDS, cfg=SimpleNamespace(left_pad_target=False))
LAYERS = 2
PLAIN, FUSED = "label_smoothed_cross_entropy", "fused_label_smoothed_cross_entropy"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 0.05, torch.bfloat16: 0.25}
KV_HEADS = {"encoder_kv_heads": 2, "decoder_kv_heads": 2, "cross_kv_heads": 2}
DYNAMIC = '{"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 4}'
# the options of transformer_rope for each encoding, and for the parts of the block
MODELS = {
    name: {"position_encoding": name} if len(encoding.sides) == 2 else {"decoder_position_encoding": name}
    for name, encoding in ENCODINGS.items()
} | {
    "shape": {"position_encoding": "shape", "shape_max_shift": 0},  # a GPU draws other numbers than the CPU
    "layout half": {"rope_layout": "half", "rope_fraction": 0.5},
    "dynamic scaling": {"rope_scaling": DYNAMIC},
    "length scaling": {"attention_length_scaling": 20.0},
    "qk-norm, kv heads": {"qk_norm": True, **KV_HEADS},
    "t5, kv heads": {"position_encoding": "t5", **KV_HEADS},
    "llama": {"norm_type": "rms", "ffn_type": "glu", "activation_fn": "swish", "no_projection_bias": True},
    "linear, elu1": {"attention_type": "linear"},
    "linear, favor": {"attention_type": "linear", "feature_map": "favor"},
}


def build(options: dict[str, Any], arch: str = "transformer_rope") -> nn.Module:
    """Return the model with *options* and random weights."""
    torch.manual_seed(1)
    args = Namespace(arch=arch, share_all_embeddings=True, **{"dropout": 0.0, **options})
    sizes = {"layers": LAYERS, "embed_dim": 32, "ffn_embed_dim": 64, "attention_heads": 4}
    for side, (name, size) in itertools.product(("encoder", "decoder"), sizes.items()):
        setattr(args, f"{side}_{name}", size)
    ARCH_CONFIG_REGISTRY[arch](args)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, TASK)


def batch() -> dict[str, Any]:
    """Return three pairs; the second source is padded on the left, and the third target on the right."""
    random = torch.Generator().manual_seed(2)
    source, target = (torch.randint(WORDS.nspecial, len(WORDS), (3, n), generator=random) for n in (9, 7))
    source[:, -1], target[:, -1] = WORDS.eos(), WORDS.eos()
    previous = target.roll(1, 1)
    source[1, :3], target[2, 4:], previous[2, 4:], target[2, 3] = WORDS.pad(), WORDS.pad(), WORDS.pad(), WORDS.eos()
    inputs = {"src_tokens": source, "src_lengths": source.ne(WORDS.pad()).sum(1), "prev_output_tokens": previous}
    return {"id": torch.arange(3), "net_input": inputs, "target": target, "ntokens": int(target.ne(WORDS.pad()).sum())}


def gradient(model: nn.Module, criterion: str, sample: dict[str, Any]) -> Tensor:
    """Return the gradient of all parameters, on the CPU: float32 (N)."""
    model.zero_grad(set_to_none=True)
    CRITERION_REGISTRY[criterion](TASK, sentence_avg=False, label_smoothing=0.1)(model, sample)[0].backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.float().flatten() for grad in grads]).cpu()


def search(model: nn.Module, sample: dict[str, Any]) -> tuple[list[list[list[int]]], int]:
    """Return the tokens of all hypotheses, and the number of steps."""
    model.eval().make_generation_fast_(beamable_mm_beam_size=4, need_attn=False)
    ends = EndingAtLengths(WORDS, {0: 4, 1: 7, 2: 10})
    generator = SequenceGenerator([model], WORDS, beam_size=4, max_len_b=16, search_strategy=ends)
    found = [[hypothesis["tokens"].tolist() for hypothesis in one] for one in generator.generate([model], sample)]
    return found, max(len(tokens) for hypotheses in found for tokens in hypotheses)
