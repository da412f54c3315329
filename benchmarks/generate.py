"""Generation beside fairseq's transformer: sentences a second through SequenceGenerator, beam 4.

    python -m benchmarks.generate [--size small|base] [--batch 1 --batch 16 …] [--rounds N] [--long] [--json]

Weights are random, and an untrained model ends no sentence; so the search ends each where its reference
does, and until then takes the words that the model likes best. On a CPU that computes bfloat16 in hardware, the last
row of each batch size is a search with --bf16. With --long, batches of one are translated to
outputs of up to 1,000 tokens, to see what a token costs late in a sentence.
"""

import math
import statistics
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.search import BeamSearch
from fairseq.sequence_generator import SequenceGenerator

from benchmarks.alternating import build_parser, in_turns, ratio, report
from benchmarks.subjects import DEVICE, HAS_FAST_BFLOAT16, SIZES, batches, build, dictionary

ARCHS = ("transformer", "transformer_rope")
BF16 = "transformer_rope, bf16"
CANDIDATES = (*ARCHS, BF16) if HAS_FAST_BFLOAT16 else ARCHS
SENTENCES = {1: 16, 16: 128, 128: 384, 512: 1024}  # a round translates so many, in batches of …


class EndingAtLengths(BeamSearch):
    """Beam search in which sentence i has lengths[i] tokens, the end of the sentence being one."""

    def __init__(self, words: Dictionary, lengths: dict[int, int]) -> None:
        super().__init__(words)
        self.lengths = lengths

    def step(
        self,
        step: int,
        lprobs: torch.Tensor,
        scores: torch.Tensor,
        prev_output_tokens: torch.Tensor | None = None,
        original_batch_idxs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        lprobs[:, :, self.eos] = -math.inf
        for row, number in enumerate(original_batch_idxs.tolist()):
            if self.lengths[number] <= step + 1:
                lprobs[row] = -math.inf
                lprobs[row, :, self.eos] = 0.0
        return super().step(step, lprobs, scores, prev_output_tokens, original_batch_idxs)


class Translating:
    """A model and batches, and their translation."""

    def __init__(self, name: str, size_name: str, batch: int, length: int = 0, **options: Any) -> None:
        size = SIZES[size_name]
        words = dictionary(size["vocab"])
        arch, _, precision = name.partition(", ")
        self.model = build(arch, words, size, **options).eval()
        if precision:
            self.model.bfloat16()
        elif DEVICE == "cuda":
            self.model.half()
        self.model.make_generation_fast_(beamable_mm_beam_size=4, need_attn=False)
        count = 1 if length else SENTENCES[batch] // batch
        self.batches = batches(words, sentences=batch)[:count]
        lengths = {}
        for sample in self.batches:
            of = sample["target"].ne(words.pad()).sum(1).tolist()
            lengths.update(zip(sample["id"].tolist(), [length or n for n in of], strict=True))
        self.generator = SequenceGenerator(
            [self.model],
            words,
            beam_size=4,
            max_len_a=1,
            max_len_b=length + 50,
            max_len=length + 300,
            len_penalty=0.6,
            search_strategy=EndingAtLengths(words, lengths),
        )

    def translate(self) -> list:
        return [self.generator.generate([self.model], sample) for sample in self.batches]


def main() -> None:
    parser = build_parser("generate", __doc__)
    parser.add_argument("--size", choices=sorted(SIZES), action="append", help="default: all")
    parser.add_argument("--batch", type=int, choices=sorted(SENTENCES), action="append", help="default: 1, 16, 128")
    parser.add_argument("--long", action="store_true", help="what a token costs as the output grows")
    args = parser.parse_args()
    for size in args.size or SIZES:
        if args.long:
            report(f"milliseconds a token, {size}, batch 1, beam 4", growing(size, args.rounds), args.json)
            continue
        rows = []
        for batch in args.batch or (1, 16, 128):
            translating = {name: Translating(name, size, batch) for name in CANDIDATES}
            seconds = in_turns({name: one.translate for name, one in translating.items()}, args.rounds)
            for name in CANDIDATES:
                rows.append(
                    {
                        "model": name,
                        "batch": batch,
                        "sentences/s": SENTENCES[batch] / statistics.median(seconds[name]),
                        "times as fast": ratio(seconds, name, ARCHS[0]),
                    }
                )
        report(f"generation, {size}, beam 4", rows, args.json)


def growing(size: str, rounds: int) -> list[dict[str, object]]:
    """A row for each length of output: what its last tokens cost, those since the length before."""
    rows, before = [], {arch: 0.0 for arch in ARCHS}
    lengths = (125, 250, 500, 1000)
    for number, length in enumerate(lengths):
        translating = {arch: Translating(arch, size, 1, length) for arch in ARCHS}
        seconds = in_turns({arch: one.translate for arch, one in translating.items()}, rounds)
        tokens = length - (lengths[number - 1] if number else 0)
        row: dict[str, object] = {"tokens": f"{length - tokens} to {length}"}
        for arch in ARCHS:
            total = statistics.median(seconds[arch])
            row[arch] = 1000 * (total - before[arch]) / tokens
            before[arch] = total
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
