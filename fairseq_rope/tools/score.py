"""Score translations: ``fairseq-rope score``.

The metrics are sacreBLEU, chrF2++ and TER of detokenised text, and the tokenised BLEU of papers, with and without the
compound split of Vaswani et al. The report always names the metric, because two metrics differ more than two systems
do. Programs of the user's choice, such as COMET, can score each sentence, too. The input is plain text or the output of
``fairseq-generate``.
"""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import __version__, metrics
from ..errors import InputError, ending_in_one_sentence, warn
from ..lines import named, read_lines
from ..scorers import Scorer, read_scorers
from ..text.generated import read_generated
from ..text.languages import TOKENIZERS, UNSPACED, default_tokenize, language
from ..text.moses import moses_round_trip
from ..text.plain import check_plain, undo_preprocessing
from . import Parser, command_parser


class Sentences(NamedTuple):
    """A reference or the translations of one system, one detokenised sentence per line."""

    path: str
    lines: list[str]
    undone: Sequence[str] = ()  # the steps of preprocessing that were undone, in this order


def build_report(
    systems: dict[str, Sentences],
    references: Sequence[Sentences],
    target_lang: str,
    tokenize: str,
    source: Sequence[str] = (),
    scorers: Sequence[Scorer] = (),
) -> dict[str, Any]:
    """Return the report that ``--json`` prints.

    Args:
        systems: by name; the first is the baseline of the paired bootstrap
        references: each has as many lines as every system
        tokenize: sacreBLEU's tokeniser, one of TOKENIZERS
        source: the source sentences; without them, no buckets by length
        scorers: programs that also score the sentences
    """
    import sacrebleu
    import sacremoses

    expected, outputs = [text.lines for text in references], [text.lines for text in systems.values()]
    built = metrics.metrics_for(target_lang, tokenize)
    counts = {metric: [sum(map(metric.count_tokens, lines)) for lines in expected] for metric in built}
    files: list[dict[str, Any]] = []
    for number, (path, lines, _) in enumerate(references):
        tokens = {metric.tokens: count[number] for metric, count in counts.items() if metric.tokens}
        files.append({"file": path, "lines": len(lines), "tokens": tokens})
        if len(tokens) > 1:
            changed = list(map(moses_round_trip(language(target_lang), built[1].sacrebleu.tokenizer), lines))
            files[-1]["sacreBLEU_after_moses"] = built[0].sacrebleu.corpus_score(changed, [lines]).score
    bootstrap = None
    if len(systems) > 1:
        drawn = {"resamples": metrics.RESAMPLES, "seed": metrics.bootstrap_seed(), "confidence": 0.95}
        bootstrap = {"baseline": next(iter(systems)), **drawn}
    columns = []
    for metric, count in counts.items():
        shared = {"name": metric.name, "what": metric.what, "reference_tokens": sum(count)}
        columns.append([{**shared, **row} for row in metrics.score_systems(metric, outputs, expected)])
    for scorer in scorers:
        better = "lower" if scorer.lower_is_better else "higher"
        described = {"name": scorer.name, "what": f"the mean over the sentences: {better} is better"}
        described["signature"] = " ".join(scorer.command.split())
        scored = metrics.score_sentences([scorer.scores(source, lines, expected) for lines in outputs])
        columns.append([{**described, **row} for row in scored])
    entries = []
    for (name, text), *rows in zip(systems.items(), *columns):
        entries.append({"name": name, "file": text.path, "undone": list(text.undone), "metrics": rows})
        if source:
            entries[-1]["sacreBLEU_by_source_length"] = metrics.by_source_length(built[0], text.lines, expected, source)
    versions = {"fairseq_rope": __version__, **{m.__name__: m.__version__ for m in (sacrebleu, sacremoses)}}
    report = {"versions": versions, "target_lang": target_lang, "references": files, "paired_bootstrap": bootstrap}
    return {**report, "systems": entries}


def format_report(report: dict[str, Any]) -> str:
    """Return the report of :func:`build_report` as text for a terminal."""
    systems, bootstrap = report["systems"], report["paired_bootstrap"]
    lines = []
    for reference in report["references"]:
        counts = ", ".join(f"{count} {name}" for name, count in reference["tokens"].items())
        lines.append(f"reference {reference['file']}: {reference['lines']} lines; tokens: {counts}")
        if "sacreBLEU_after_moses" in reference:
            after = f"{reference['sacreBLEU_after_moses']:.2f}"
            lines.append(f"  sacreBLEU {after} with itself after Moses' tokeniser and detokeniser")
    for system in systems:
        undone = f" (undone: {', '.join(system['undone'])})" if system["undone"] else ""
        lines.append(f"system {system['name']}: {system['file']}{undone}")
    names = [f"  {system['name']:{max(len(system['name']) for system in systems)}}  " for system in systems]
    for rows in zip(*(system["metrics"] for system in systems)):
        by_program = "sentence_scores" in rows[0]
        tokens = "" if by_program else f", {rows[0]['reference_tokens']} reference tokens"
        lines += ["", "{name} – {what}\n  {signature}".format(**rows[0]) + tokens]
        digits = 4 if by_program else 2
        for name, row in zip(names, rows):
            cells = f"{name}{row['score']:6.{digits}f}"
            if bootstrap:
                cells += f"   mean {row['mean']:.{digits}f} ± {row['confidence']:.{digits}f}"
                cells += "   baseline" if row["p_value"] is None else f"   p = {row['p_value']:.4f}"
            if "brevity_penalty" in row:
                cells += "   " + "/".join(f"{precision:.1f}" for precision in row["precisions"])
                cells += f"   {row['system_tokens']} tokens, brevity penalty {row['brevity_penalty']:.3f}"
            lines.append(cells)
    if "sacreBLEU_by_source_length" in systems[0]:
        widths = [max(6, len(system["name"])) for system in systems]
        heads = "  ".join(f"{system['name']:>{width}}" for width, system in zip(widths, systems))
        lines += ["", "sacreBLEU by the source's length", f"   words  sentences  {heads}"]
        for rows in zip(*(system["sacreBLEU_by_source_length"] for system in systems)):
            scores = "  ".join(f"{row['score']:{width}.2f}" for width, row in zip(widths, rows))
            lines.append(f"  {rows[0]['words']:>6}  {rows[0]['sentences']:>9}  {scores}")
    if bootstrap:
        resamples = f"{bootstrap['resamples']} resamples, seed {bootstrap['seed']}; ± is the 95% interval"
        chance = f"p: the probability that chance gives as large a difference from {bootstrap['baseline']}"
        lines += ["", f"paired bootstrap (sacrebleu): {resamples}; {chance}"]
    return "\n".join(lines)


def build_parser() -> Parser:
    """Return the parser of the command line."""
    description = (
        "Score translations with sacreBLEU, tokenised BLEU, chrF2++ and TER.\n"
        "Several systems are compared with the first by sacrebleu's paired bootstrap.\n"
        "A file may be gzipped; - is standard input."
    )
    parser = command_parser("score", description, "--sys hypotheses.de --ref test.de --src test.en --target-lang de")
    several: dict[str, Any] = {"nargs": "+", "action": "extend"}  # also in several places of a command line
    add = parser.add_argument
    add("--sys", **several, default=[], metavar="FILE", help="translations, as detokenised text")
    generated = "translations, as fairseq-generate printed them; BPE and Moses' tokenisation are undone"
    add("--generate-output", **several, default=[], metavar="FILE", help=generated)
    references = "the reference or references, as detokenised text"
    add("--ref", **several, required=True, metavar="FILE", help=references)
    add("--target-lang", required=True, metavar="LANG", help="the language of the translations, as in de")
    usual = "one for the target language, usually 13a; sacrebleu downloads flores101 and flores200"
    add("--tokenize", choices=TOKENIZERS, help=f"sacreBLEU's tokeniser; default: {usual}")
    source = "the source as plain text, for BLEU by its length in words; default: from --generate-output"
    add("--src", metavar="FILE", help=source)
    names = "names of the systems, those of --sys first; default: their files"
    add("--names", **several, metavar="NAME", help=names)
    program = (
        "also score with a program that prints one number for each sentence; {source}, {hypothesis} and {reference} in "
        "COMMAND become the names of files; the flag can be repeated"
    )
    add("--scorer", action="append", default=[], metavar="NAME=COMMAND", help=program)
    lower = "programs of --scorer whose lower scores are better, such as MetricX"
    add("--lower-is-better", **several, default=[], metavar="NAME", help=lower)
    add("--json", action="store_true", help="print the whole report as JSON")
    return parser


def _refuse_flags(args: argparse.Namespace, names: Sequence[str], paths: Sequence[str]) -> None:
    """Raise an InputError for flags that cannot be used, before a file is read."""
    from sacremoses.corpus import NonbreakingPrefixes

    lang = language(args.target_lang)
    twice = sorted({name for name in names if names.count(name) > 1})
    is_code = re.fullmatch("[a-z]{2,3}([-_][A-Za-z0-9]+)*", args.target_lang)
    for allowed, refusal in (
        (paths, "--sys or --generate-output must name a file"),
        (len(names) == len(paths), f"--names {' '.join(names)}: must be as many names as files, {len(paths)}"),
        (not twice, f"{''.join(twice[:1])}: given twice; files and --names must differ"),
        ([*paths, *args.ref, args.src].count("-") < 2, "- (standard input) can be given for one file only"),
        (is_code, f"--target-lang {args.target_lang}: must be a code like de, pt_BR or zh-Hans"),
    ):
        if not allowed:
            raise InputError(refusal)
    if lang not in UNSPACED and lang not in NonbreakingPrefixes().available_langs:
        warn("score", f"--target-lang {lang}: Moses has no list of its abbreviations, and uses the English one")
    if len(paths) > 1:
        metrics.bootstrap_seed()


def _checked(text: Sentences, reference: Sentences | None = None, is_reference: bool = False) -> Sentences:
    """Return *text*, which must have as many lines as *reference*; print warnings if it may not be plain text."""
    if reference is not None and len(text.lines) != len(reference.lines):
        expected = (
            f"the reference {named(reference.path)} has {len(reference.lines)}; both must have the same sentences"
        )
        raise InputError(f"{named(text.path)} has {len(text.lines)} lines, and {expected}")
    for warning in check_plain(named(text.path), text.lines, is_reference):
        warn("score", warning)
    return text


def score_files(args: argparse.Namespace) -> dict[str, Any]:
    """Return the report on the files that the flags name."""
    import sacrebleu  # noqa: F401  report missing packages before reading files
    import sacremoses  # noqa: F401

    paths = [*args.sys, *args.generate_output]
    names, tokenize = args.names or paths, args.tokenize or default_tokenize(args.target_lang)
    _refuse_flags(args, names, paths)
    scorers = read_scorers(args.scorer, args.lower_is_better)
    metrics.load_tokeniser(tokenize)
    references: list[Sentences] = []
    for path in args.ref:
        first = references[0] if references else None
        references.append(_checked(Sentences(path, read_lines(path)), first, is_reference=True))
    # Translations of a model after a few updates can all be empty.
    texts = [_checked(Sentences(path, read_lines(path, may_be_blank=True)), references[0]) for path in args.sys]
    source: list[str] = []
    lang, count = language(args.target_lang), len(references[0].lines)
    for path in args.generate_output:
        generated = read_generated(read_lines(path), path)
        best = generated.in_order(generated.detokenised or generated.hypotheses, count, "the reference")
        before = generated.hypotheses.values() or best  # a file may have only its D- lines
        texts.append(_checked(Sentences(path, *undo_preprocessing(best, lang, before))))
        if not source and set(range(count)) <= set(generated.sources):
            read = [generated.sources[number] for number in range(count)]
            source, _ = undo_preprocessing(read, lang, read)
    if args.src is not None:
        source = _checked(Sentences(args.src, read_lines(args.src)), references[0]).lines
    for scorer in scorers:
        # S- lines are detokenised for the target language, which is enough to count words only.
        if "{source}" in scorer.command and args.src is None:
            raise InputError(f"--scorer {scorer.name}={scorer.command}: needs the source text: give --src")
    return build_report(dict(zip(names, texts)), references, args.target_lang, tokenize, source, scorers)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    args = build_parser().parse_args(argv)
    with ending_in_one_sentence("fairseq-rope score"):
        report = score_files(args)
        print(json.dumps(report, indent=1) if args.json else format_report(report))
