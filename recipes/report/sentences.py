"""The sentences at the top of the report: which system is better, and what limits this result."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from recipes.report.comparison import as_good
from recipes.report.results import BLEU, Results, all_runs, at_end, of_fewer_seeds, ranked
from recipes.report.significance import SIGNIFICANT
from recipes.report.tables import interval, p_text, spread

NOTED = ("commit", "versions", "hardware", "batches")  # facts about every training process
LOW = 5  # sacreBLEU; below it, texts share few words with their references
STEEP = 0.1  # bits a token that the loss falls in the last fifth of the updates


def listed(words: Sequence[str]) -> str:
    """Return *words* as in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _are(words: Sequence[str]) -> str:
    return f"{listed(words)} {'is' if len(words) == 1 else 'are'}"


def sentences_on(results: Results) -> list[str]:
    """Return sentences on the systems, on missing runs, and on trainings that are not comparable."""
    first, *others = results["test_sets"]
    sentences = _of_scores(results, first[BLEU], f" on {first['name']}" if others else "")
    sentences += [_of_scores(results, one[BLEU], f" on {one['name']}")[0] for one in others]
    single = [name for name in ranked(results) if len(results["runs"][name]) == 1]
    fewer = of_fewer_seeds(results["runs"])
    sentences += [f"One seed: sentences only, for {listed(single)}. Other seeds can differ."] if single else []
    sentences += [f"Fewer seeds than others: {listed(fewer)}. Compare differences, not means."] if fewer else []
    sentences += _early(results)
    for system, sweep in results["sweeps"].items():
        end = f"of {system} is at an end of the range: a value outside it can be better."
        sentences += [f"The chosen {sweep['setting']} {end}"] if at_end(sweep) else []
    missing = [f"{run} is missing: {' '.join(reason.split())}" for run, reason in results["missing"].items()]
    return sentences + missing + _training_differences(results)


def _of_scores(results: Results, compared: Mapping[str, Any], on: str) -> list[str]:
    """Return sentences on the scores of a test set, first the best system. *on* names the test set."""
    baseline, systems, best = results["baseline"], ranked(results), compared["best"]
    against, scores = compared["against_baseline"], compared["scores"]
    if max(statistics.mean(by_seed.values()) for by_seed in scores.values()) < LOW:
        return [f"No system reaches {LOW} sacreBLEU{on}, so there is no verdict."]
    lead = f", {interval(against[best])} against {baseline}" if best in against else ""
    sentences = [f"{best} has the best result{on}: sacreBLEU {spread(scores[best].values())}{lead}."]
    tested = [name for name in systems if name in compared["against_best"]]  # those with a seed of the best
    equal = [name for name in tested if as_good(compared["against_best"][name])]
    if tested:
        sentences.append(f"The test {'does not show' if equal else 'shows'} that {_are(equal or tested)} worse.")
    kinds: dict[str, list[str]] = {"better than": [], "worse than": [], "indistinguishable from": []}
    for name in (name for name in systems if name in against):
        difference, significant = against[name]["difference"], against[name]["p_holm"] <= SIGNIFICANT
        kind = ("better than" if difference > 0 else "worse than") if significant else "indistinguishable from"
        seeds = ", ".join(f"{scores[name][seed] - scores[baseline][seed]:+.2f}" for seed in against[name]["seeds"])
        details = f"{interval(against[name])}, p {p_text(against[name])}; by seed {seeds}"
        kinds[kind].append(f"{name} ({details if len(against) == 1 else f'{difference:+.2f}'})")
    sentences += [f"{_are(names)} {kind} the baseline {baseline}." for kind, names in kinds.items() if names]
    apart = [name for name in systems if name not in (*against, baseline)]
    return sentences + ([f"No seed in common with the baseline: {listed(apart)}."] if apart else [])


def _early(results: Results) -> list[str]:
    """Return a paragraph if the systems are trained too briefly for conclusions."""
    sentences = []
    limited = [(name, run) for name, run in all_runs(results) if not run["converged"]]
    if names := [*dict.fromkeys(name for name, run in limited if run["patience"])]:
        reached = f"Trainings of {listed(names)} reached the limit of epochs or updates"
        sentences.append(f"{reached} before the validation loss stopped falling.")
    falls = [(name, run["last_fall"]) for name, run in limited if run["last_fall"] > STEEP]
    if falls:
        fell = f"fell by up to {max(fall for _, fall in falls):.2f} bits a token"
        names = [*dict.fromkeys(name for name, _ in falls)]
        sentences.append(f"In the last fifth of the updates, the validation loss of {listed(names)} {fell}.")
    return [" ".join([*sentences, "This is early: longer training can change the order."])] if sentences else []


def _training_differences(results: Results) -> list[str]:
    """Return a sentence if code, versions, hardware or batches differ between the trainings."""
    processes = [process for _, run in all_runs(results) for process in run["processes"]]
    values = {name: [*dict.fromkeys(plain(one.get(name, "not noted")) for one in processes)] for name in NOTED}
    differing = [f"{name} ({'; '.join(several)})" for name, several in values.items() if len(several) > 1]
    return [f"The trainings differ in {', '.join(differing)}."] if differing else []


def plain(value: Any) -> str:
    """Return *value*, a fact about a process, as words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {plain(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
