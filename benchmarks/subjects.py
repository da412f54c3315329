"""What is measured: fairseq's transformer and ours in two sizes, on batches of real lengths."""

import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary, LanguagePairDataset, data_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import fairseq_rope.plugin  # noqa: F401  registers the architectures
from recipes.machine import cpu_computes_bf16

# "small" is a model for 100,000 pairs; "base" is Vaswani's and RoFormer's.
SIZES = {
    "small": {"layers": 3, "width": 256, "ffn_width": 1024, "heads": 4, "vocab": 8000},
    "base": {"layers": 6, "width": 512, "ffn_width": 2048, "heads": 8, "vocab": 37000},
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

HAS_FAST_BFLOAT16 = DEVICE == "cpu" and cpu_computes_bf16()  # then there are rows for it

# Tokens of the sentences of newstest2013, every third of its 3000 pairs, in a joint BPE of 37,000; the end of
# the sentence is one.
LENGTHS = [
    tuple(map(int, line.split("\t"))) for line in Path(__file__).with_name("lengths.tsv").read_text().splitlines()[1:]
]


def dictionary(size: int) -> Dictionary:
    """A dictionary of *size* entries."""
    words = Dictionary()
    for number in range(size - len(words)):
        words.add_symbol(f"w{number}")
    return words


def build(arch: str, words: Dictionary, size: dict[str, int], **options: Any) -> torch.nn.Module:
    """A model with random weights, the same ones for architectures with the same parameters."""
    torch.manual_seed(1)
    args = Namespace(arch=arch, share_all_embeddings=True, dropout=0.1, **options)
    for side in ("encoder", "decoder"):
        setattr(args, f"{side}_layers", size["layers"])
        setattr(args, f"{side}_embed_dim", size["width"])
        setattr(args, f"{side}_ffn_embed_dim", size["ffn_width"])
        setattr(args, f"{side}_attention_heads", size["heads"])
    ARCH_CONFIG_REGISTRY[arch](args)
    cfg = SimpleNamespace(left_pad_target=False)  # as in the task of translation
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, cfg=cfg)
    return ARCH_MODEL_REGISTRY[arch].build_model(args, task).to(DEVICE)


def dataset(words: Dictionary, copies: int = 1) -> LanguagePairDataset:
    """Pairs of LENGTHS, each length so many times, of words drawn as rarely as real ones (Zipf's law)."""
    draw = random.Random(1)
    first, last = words.nspecial, len(words) - 1

    def sentence(length: int) -> torch.Tensor:
        ranks = [int((last - first) ** draw.random()) for _ in range(length - 1)]
        return torch.tensor([first + rank for rank in ranks] + [words.eos()])

    pairs = [[sentence(length) for length in pair] for pair in LENGTHS * copies]
    sources, targets = zip(*pairs, strict=True)
    sizes = [[len(text) for text in side] for side in (sources, targets)]
    return LanguagePairDataset(
        sources, sizes[0], words, targets, sizes[1], words, left_pad_source=True, left_pad_target=False
    )


def batches(
    words: Dictionary,
    max_tokens: int = 0,
    sentences: int = 0,
    data: LanguagePairDataset | None = None,
    device: str = DEVICE,
) -> list[dict[str, Any]]:
    """Batches as fairseq composes them: sorted by length, of *max_tokens* or of a number of *sentences*."""
    data = data or dataset(words)
    found = data_utils.batch_by_size(
        data.ordered_indices(), data.num_tokens, max_tokens=max_tokens or None, max_sentences=sentences or None
    )
    shuffled = random.Random(1).sample(range(len(found)), len(found))
    samples = [data.collater([data[i] for i in found[number]]) for number in shuffled]
    return [on_device(sample, device) for sample in samples]


def on_device(sample: dict[str, Any], device: str = DEVICE) -> dict[str, Any]:
    """*sample* with its tensors on *device*, by default the one that is measured."""
    return {
        key: on_device(value, device)
        if isinstance(value, dict)
        else value.to(device)
        if torch.is_tensor(value)
        else value
        for key, value in sample.items()
    }
