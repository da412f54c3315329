"""Each part of the block beside fairseq's transformer and transformer_rope: training, generation, int8 export, memory.

    python -m benchmarks.block [--size small|base] [--batch 16] [--rounds N] [--only NAME …] [--no-memory] [--json]

Training steps use fairseq's criterion for all. Generation is beam search with beam 4, as in benchmarks.generate.
Exported models translate with CTranslate2, as in benchmarks.serve.
"""

import tempfile
from pathlib import Path

from benchmarks.alternating import build_parser, in_turns, ratio, report
from benchmarks.encodings import add_flags, table
from benchmarks.serve import Exported, sentences
from benchmarks.subjects import SIZES, dictionary
from benchmarks.train import Candidate

ROPE = "transformer_rope"
SYSTEMS = {
    "transformer": Candidate("transformer"),
    ROPE: Candidate(ROPE),
    "transformer_rope_llama": Candidate("transformer_rope_llama"),
    "RMSNorm": Candidate(ROPE, options={"norm_type": "rms"}),
    "SwiGLU": Candidate(ROPE, options={"ffn_type": "glu", "scale_glu_width": True, "activation_fn": "swish"}),
    "2 key-value heads": Candidate(ROPE, options={f"{part}_kv_heads": 2 for part in ("encoder", "decoder", "cross")}),
    "QK norm": Candidate(ROPE, options={"qk_norm": True}),
    "no biases": Candidate(ROPE, options={"no_projection_bias": True}),
    "linear attention": Candidate(ROPE, options={"attention_type": "linear"}),
}


def exported_seconds(candidates: dict[str, Candidate], size_name: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each round of each of *candidates* that CTranslate2 can run, in int8."""
    size = SIZES[size_name]
    vocabulary = dictionary(size["vocab"])
    _, pairs = sentences(vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        exported = {
            name: Exported(size, vocabulary, pairs, "int8", Path(folder, name), each.arch, **each.options)
            for name, each in candidates.items()
            if each.options.get("attention_type") != "linear"
        }
        return in_turns({name: one.translate for name, one in exported.items()}, rounds)


def main() -> None:
    parser = build_parser("block", __doc__)
    add_flags(parser)
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), metavar="NAME", help=f"of {', '.join(SYSTEMS)}")
    args = parser.parse_args()
    candidates = {name: SYSTEMS[name] for name in SYSTEMS if name in {"transformer", ROPE, *(args.only or SYSTEMS)}}
    rows = table(candidates, args)
    seconds = exported_seconds(candidates, args.size, args.rounds)
    for row in rows:
        name = str(row["model"])
        row[f"int8 export, of {ROPE}'s speed"] = ratio(seconds, name, ROPE) if name in seconds else "not exported"
    report(f"the block, {args.size}, generation in batches of {args.batch}", rows, args.json)


if __name__ == "__main__":
    main()
