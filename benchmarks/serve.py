"""Exported models beside fairseq's own transformer: sentences a second, beam 4, and the time to the first.

    python -m benchmarks.serve [--size small|base] [--quantization TYPE ...] [--batch-tokens N ...]
                               [--shortlist DATA_BIN [--candidates N ...]] [--rounds N] [--json]

Both translate the same tokens, sorted by length: fairseq in batches of 64 with all threads for one, CTranslate2 in the
batches of ``fairseq-rope translate`` or those of --batch-tokens, one for each core. Random weights know no end, so that
every output of a batch is made as long as its references are on average. The first sentence is that of a new process,
less the imports: the model and Moses' rules are loaded, and a line of 20 words translated into at most 26 subwords.
There are no BPE codes to load, as there are no words.

With --shortlist, the sentences are those of the validation set in a data folder of the recipes, with its dictionary,
filled up to the size's number of words. The shortlist is that of its training set (fairseq-rope export --shortlist),
with each number of --candidates.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ctranslate2
import torch
from fairseq.data import Dictionary, LanguagePairDataset, data_utils
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import load_langpair_dataset

from benchmarks.alternating import build_parser, in_turns, ratio, report
from benchmarks.subjects import SIZES, batches, build, dictionary
from fairseq_rope.serving.ctranslate2_model import quantize, to_spec, words
from fairseq_rope.serving.ctranslate2_search import BATCH_TOKENS, DEFAULT_BATCH_TOKENS, in_batches
from fairseq_rope.serving.exported_folder import SETTINGS, SHORTLIST, checksum
from fairseq_rope.serving.shortlist import CANDIDATES, Shortlist
from fairseq_rope.serving.shortlist import build as build_shortlist

QUANTIZATIONS = ("float32", "int16", "int8")
BATCHES = 6  # of 64 sentences; enough that all cores end at about the same time
SEARCH = {"beam": 4, "lenpen": 0.6}
THREADS = torch.get_num_threads()  # now, because CTranslate2 changes torch's number when it loads a model
FIRST = """
import json, sys, time
import ctranslate2, sacremoses
from fairseq_rope.serving.translator import Translator
begun = time.perf_counter()
translator = Translator(sys.argv[1])
translator.translate(sys.argv[2])
print(time.perf_counter() - begun)
"""


class ByFairseq:
    """fairseq's own transformer, as fairseq-generate runs it."""

    def __init__(self, size: dict[str, int], vocabulary: Dictionary, samples: list[dict[str, Any]]) -> None:
        self.model = build("transformer", vocabulary, size).eval().cpu()
        self.model.make_generation_fast_(beamable_mm_beam_size=4, need_attn=False)
        self.runs = []
        for sample in samples:
            length = round(sample["ntokens"] / sample["nsentences"])
            generator = SequenceGenerator(
                [self.model], vocabulary, beam_size=4, len_penalty=0.6, min_len=length, max_len_b=length
            )
            self.runs.append((generator, sample))

    def translate(self) -> None:
        for generator, sample in self.runs:
            generator.generate([self.model], sample)


class Exported:
    """A model of *size*, transformer_rope if *arch* is not given, converted into *folder*."""

    def __init__(
        self,
        size: dict[str, int],
        vocabulary: Dictionary,
        pairs: list[tuple[list[int], int]],
        quantization: str,
        folder: Path,
        arch: str = "transformer_rope",
        shortlist: Shortlist | None = None,
        batch_tokens: int = 0,
        **options: Any,
    ) -> None:
        spec = to_spec(build(arch, vocabulary, size, **options).eval().cpu(), vocabulary, vocabulary)
        spec.validate()
        quantize(spec, quantization)
        folder.mkdir()
        spec.save(str(folder))
        self.shortlist = shortlist is not None
        if shortlist is not None:
            shortlist.write(str(folder / SHORTLIST))
        settings = {
            "moses": {"source": "en", "target": "de", "dash_splits": False}, "subwords": None,
            "positions": {"source": None, "target": None}, "max_len_b": 5, **SEARCH,
            "quantization": quantization,
        }  # fmt: skip
        settings["sha256"] = {path.name: checksum(str(path)) for path in folder.iterdir()}
        (folder / SETTINGS).write_text(json.dumps(settings))
        self.folder = folder
        self.model = ctranslate2.Translator(str(folder), inter_threads=THREADS, intra_threads=1)
        torch.set_num_threads(THREADS)
        names = words(vocabulary)
        sources = [[names[n] for n in source] for source, _ in pairs]
        order = sorted(range(len(pairs)), key=lambda n: -len(sources[n]))
        batch_tokens = batch_tokens or BATCH_TOKENS.get(quantization, DEFAULT_BATCH_TOKENS)
        self.batches = [
            ([sources[n] for n in batch], round(statistics.mean(pairs[n][1] for n in batch)))
            for batch in in_batches(order, sources, batch_tokens)
        ]

    def translate(self) -> None:
        running = [
            self.model.translate_batch(
                batch,
                beam_size=SEARCH["beam"],
                length_penalty=SEARCH["lenpen"],
                num_hypotheses=SEARCH["beam"],
                suppress_sequences=[["<blank>"]],
                return_scores=True,
                min_decoding_length=length,
                max_decoding_length=length,
                max_input_length=0,
                use_vmap=self.shortlist,
                asynchronous=True,
            )
            for batch, length in self.batches
        ]
        for results in running:
            for result in results:
                result.result()

    def first(self) -> float:
        """Seconds of a new process, after its imports, to load the model and translate a line."""
        line = " ".join(f"w{n}" for n in range(20))
        done = subprocess.run(
            [sys.executable, "-c", FIRST, str(self.folder), line], capture_output=True, text=True, check=True
        )
        return float(done.stdout)


def sentences(
    vocabulary: Dictionary, data: LanguagePairDataset | None = None
) -> tuple[list[dict[str, Any]], list[tuple[list[int], int]]]:
    """Return the batches that are translated, and the source and the target's length of each of their sentences."""
    special = (vocabulary.pad(), vocabulary.eos())
    on_the_cpu = batches(vocabulary, sentences=64, data=data, device="cpu")  # as CTranslate2's model
    samples = [sample for sample in on_the_cpu if sample["nsentences"] == 64][:BATCHES]
    pairs = [
        ([n for n in source if n not in special], len([n for n in target if n != vocabulary.pad()]))
        for sample in samples
        for source, target in zip(sample["net_input"]["src_tokens"].tolist(), sample["target"].tolist(), strict=True)
    ]
    return samples, pairs


def read_data(folder: str, count: int, most: int) -> tuple[Dictionary, LanguagePairDataset, Shortlist]:
    """Return the joined dictionary of a data *folder* with *count* words, its validation set and its shortlist.

    *most* is the number of candidates of a word, at most.
    """
    source, target = data_utils.infer_language_pair(folder)
    if source is None:
        sys.exit(f"benchmarks.serve: --shortlist {folder}: has no data of fairseq-preprocess")
    paths = [Path(folder, f"dict.{language}.txt") for language in (source, target)]
    if paths[0].read_bytes() != paths[1].read_bytes():
        sys.exit(f"benchmarks.serve: --shortlist {folder}: must have a joined dictionary")
    vocabulary = Dictionary.load(str(paths[0]))
    for number in range(count - len(vocabulary)):
        vocabulary.add_symbol(f"w{number}")

    def pairs_of(split: str) -> LanguagePairDataset:
        sides = (source, vocabulary, target, vocabulary)
        limits = {"max_source_positions": 1024, "max_target_positions": 1024}
        padding = {"left_pad_source": True, "left_pad_target": False}
        return load_langpair_dataset(
            folder, split, *sides, combine=False, dataset_impl=None, upsample_primary=1, **padding, **limits
        )

    training, names = pairs_of("train"), vocabulary.symbols

    def in_words(line: torch.Tensor) -> list[str]:
        return [names[n] for n in line.tolist()[:-1]]

    pairs = ((in_words(training.src[n]), in_words(training.tgt[n])) for n in range(len(training)))
    return vocabulary, pairs_of("valid"), build_shortlist(pairs, most)


def main() -> None:
    parser = build_parser("serve", __doc__)
    parser.add_argument("--size", choices=sorted(SIZES), action="append", help="default: all")
    parser.add_argument("--shortlist", metavar="DATA_BIN", help="also with a shortlist of the training set in DATA_BIN")
    parser.add_argument("--quantization", nargs="+", choices=QUANTIZATIONS, default=QUANTIZATIONS, help="default: all")
    for flag, default, what in (
        ("--batch-tokens", None, "tokens in a batch; default: as fairseq-rope translate"),
        ("--candidates", [CANDIDATES], "candidates of a word in the shortlist; default: as fairseq-rope export"),
    ):
        parser.add_argument(flag, nargs="+", type=int, default=default, metavar="N", help=what)
    args = parser.parse_args()
    if args.shortlist and not Path(args.shortlist).is_dir():
        parser.error(f"--shortlist {args.shortlist}: must be a data folder")
    for flag, values in (("batch-tokens", args.batch_tokens or [1]), ("candidates", args.candidates)):
        if min(values) < 1:
            parser.error(f"--{flag} {min(values)}: must be 1 or more")
    if args.candidates != [CANDIDATES] and not args.shortlist:
        parser.error(f"--candidates {args.candidates[0]}: has no use without --shortlist")
    variants = [dict.fromkeys(values) for values in (args.quantization, args.batch_tokens or [0])]
    for name in args.size or SIZES:
        size = SIZES[name]
        vocabulary, data = dictionary(size["vocab"]), None
        shortlists: dict[str, Shortlist | None] = {"": None}
        if args.shortlist:
            vocabulary, data, full = read_data(args.shortlist, size["vocab"], max(args.candidates))
            for most in args.candidates:
                # one more, which is the subword itself in a list that is full
                best = {source: targets[: most + 1] for source, targets in full.candidates.items()}
                shortlists[f", shortlist of {most}"] = Shortlist(full.frequent, best)
        samples, pairs = sentences(vocabulary, data)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            candidates: dict[str, Any] = {"transformer, fairseq": ByFairseq(size, vocabulary, samples)}
            for called, tokens, short in itertools.product(*variants, shortlists):
                path = Path(folder, str(len(candidates)))
                options = {"shortlist": shortlists[short], "batch_tokens": tokens}
                one = Exported(size, vocabulary, pairs, called, path, **options)
                tokens_a_batch = f", {tokens} tokens a batch" if tokens else ""
                candidates[f"transformer_rope, CTranslate2, {called}{tokens_a_batch}{short}"] = one
            seconds = in_turns({n: one.translate for n, one in candidates.items()}, args.rounds)
            firsts = {
                n: statistics.median(one.first() for _ in range(args.rounds))
                for n, one in candidates.items()
                if isinstance(one, Exported)
            }
        first = next(iter(candidates))
        rows = [
            {
                "model": n,
                "sentences/s": len(pairs) / statistics.median(seconds[n]),
                "times as fast": ratio(seconds, n, first),
                "load and first, s": firsts.get(n, ""),
            }
            for n in candidates
        ]
        report(f"serving, {name}, beam 4", rows, args.json)


if __name__ == "__main__":
    main()
