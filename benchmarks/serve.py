"""Exported models beside fairseq's own transformer: sentences a second.

    python -m benchmarks.serve [--size small|base] [--rounds N] [--json]

Both translate the same tokens, beam 4; every output is as long as its batch's references are
on average, since random weights know no end. CTranslate2 batches as ``fairseq_rope.translate`` does.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import ctranslate2
import torch
from fairseq.sequence_generator import SequenceGenerator

from benchmarks.alternating import in_turns, ratio, report
from benchmarks.subjects import SIZES, batches, build, dictionary
from fairseq_rope.export import to_spec, words
from fairseq_rope.translate import TOKENS

QUANTIZATIONS = (None, "int8", "int16")


class ByFairseq:
    """fairseq's own transformer, as fairseq-generate runs it."""

    def __init__(self, size: dict[str, int], samples: list, lengths: list[int]) -> None:
        vocabulary = dictionary(size["vocab"])
        self.model = build("transformer", vocabulary, size).eval()
        self.model.make_generation_fast_(beamable_mm_beam_size=4, need_attn=False)
        self.samples = samples
        self.generators = [
            SequenceGenerator(
                [self.model], vocabulary, beam_size=4, len_penalty=0.6, min_len=length, max_len_b=length
            )
            for length in lengths
        ]

    def translate(self) -> None:
        for generator, sample in zip(self.generators, self.samples, strict=True):
            generator.generate([self.model], sample)


class Exported:
    """The rotary model of the same size, converted."""

    def __init__(
        self, size: dict[str, int], samples: list, lengths: list[int], quantization: str | None, folder: Path
    ) -> None:
        vocabulary = dictionary(size["vocab"])
        spec = to_spec(build("transformer_rope", vocabulary, size).eval().cpu(), vocabulary, vocabulary)
        spec.validate()
        spec.optimize(quantization=quantization)
        folder.mkdir()
        spec.save(str(folder))
        threads = torch.get_num_threads()
        self.model = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=threads)
        names = words(vocabulary)
        self.batches = [
            [[names[n] for n in row if n not in (vocabulary.pad(), vocabulary.eos())] for row in tokens]
            for tokens in (sample["net_input"]["src_tokens"].tolist() for sample in samples)
        ]
        self.lengths = lengths

    def translate(self) -> None:
        for batch, length in zip(self.batches, self.lengths, strict=True):
            self.model.translate_batch(
                batch,
                beam_size=4,
                length_penalty=0.6,
                min_decoding_length=length,
                max_decoding_length=length,
                max_input_length=0,
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.serve", description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in args.size or SIZES:
        size = SIZES[name]
        vocabulary = dictionary(size["vocab"])
        samples = batches(vocabulary, max_tokens=TOKENS)[: 6 if name == "small" else 3]
        lengths = [round(s["ntokens"] / s["nsentences"]) for s in samples]
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            candidates = {"transformer, fairseq": ByFairseq(size, samples, lengths)}
            for quantization in QUANTIZATIONS:
                called = quantization or "float32"
                where = Path(folder) / called
                candidates[f"transformer_rope, CTranslate2, {called}"] = Exported(
                    size, samples, lengths, quantization, where
                )
            seconds = in_turns({n: one.translate for n, one in candidates.items()}, args.rounds)
        sentences = sum(s["nsentences"] for s in samples)
        first = next(iter(candidates))
        rows = [
            {
                "model": n,
                "sentences/s": sentences / statistics.median(seconds[n]),
                "times as fast": ratio(seconds, n, first),
            }
            for n in candidates
        ]
        report(f"serving, {name}, beam 4", rows, args.json)


if __name__ == "__main__":
    main()
