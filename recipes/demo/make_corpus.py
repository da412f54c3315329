"""Write an English–German parallel corpus from a grammar: no download; same seed, same files.

    python recipes/demo/make_corpus.py --output DIR [--pairs 20000] [--heldout 500] [--seed 1]

`lexicon.py` holds the words, `grammar.py` how a structure reads in the two languages; here
structures are drawn at random. No sentence of either language comes twice in train, valid and test
together, and what a translation needs is in the English: a perfect model scores 100 BLEU.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from grammar import (
    COORDINATORS,
    SUBORDINATORS,
    Clause,
    Name,
    Nominal,
    NounPhrase,
    Pair,
    Pronoun,
    RelativePronoun,
    complex_sentence,
    coordination,
    place,
    question,
    statement,
)
from lexicon import (
    ADJECTIVES,
    CLAUSAL_VERBS,
    FIXED_PLACES,
    MODALS,
    NAMES,
    NOUNS,
    PRONOUNS,
    TIMES,
    VERBS,
    Adjective,
    Adverb,
    Noun,
    Verb,
)

MAX_PAIRS = 200_000  # 300,000 draws hold some 294,000 distinct pairs: the grammar is far from spent
MIN_WORDS, MAX_WORDS = 4, 25
POSSESSIVES = ("my", "his", "her", "our")
PLACE_FRAMES = ("to:", "at:", "on:")  # the place belongs to the verb and stays behind it
UNSUITED = {"future": "S", "now": "N"}  # time -> mark of the verbs it avoids: "will love"


@cache
def nouns_of(classes: tuple[str, ...]) -> tuple[Noun, ...]:
    """The nouns in any of `classes`."""
    return tuple(noun for noun in NOUNS.values() if any(c in noun.classes for c in classes))


@cache
def adjectives_of(noun: Noun, colours: bool = True) -> tuple[Adjective, ...]:
    """The adjectives that go with `noun`."""
    return tuple(
        adjective
        for adjective in ADJECTIVES.values()
        if any(c in noun.classes for c in adjective.classes)
        and (colours or "colour" not in adjective.classes)
    )


class Composer:
    """Draws sentence pairs; everything random comes from the one generator `rng`.

    A clause's time is "now", "past", "future", "plain" (the simple present) or "simple past" (no
    modal).
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.verbs = [verb for verb in VERBS.values() if verb.base != "be"]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def noun_phrase(self, classes: tuple[str, ...], *others: Nominal | None) -> NounPhrase:
        """Draw determiner, adjective, number and a noun of `classes` that `others` do not have."""
        taken = [o.noun for o in others if isinstance(o, NounPhrase | RelativePronoun)]
        noun = self.rng.choice([noun for noun in nouns_of(classes) if noun not in taken])
        plural = bool(noun.english_plural) and self.chance(0.25)
        pool: tuple[str, ...]
        if "kin" in noun.classes:
            pool = POSSESSIVES
        elif "mass" in noun.classes:
            pool = ("", "", "the")
        elif "unique" in noun.classes:
            pool = ("the", "the", "our") if "owned" in noun.classes else ("the",)
        else:
            pool = ("these", "two", "three", "many") if plural else ("the", "a", "a", "this")
            pool += ("the", "the")
            if "person" not in noun.classes or "owned" in noun.classes:
                pool += (self.rng.choice(POSSESSIVES),)
        adjectives = adjectives_of(noun)
        adjective = self.rng.choice(adjectives) if adjectives and self.chance(0.35) else None
        return NounPhrase(self.rng.choice(pool), noun, adjective, plural)

    def person(self, *others: Nominal | None, pronouns: float = 0.4) -> Nominal:
        """Draw a pronoun, name or noun phrase for a person who is none of `others`."""
        draw = self.rng.random()
        if draw < pronouns:
            taken = [other.name for other in others if isinstance(other, Pronoun)]
            if "I" in taken or "we" in taken:
                taken += ["I", "we"]
            return Pronoun(self.rng.choice([name for name in PRONOUNS if name not in taken]))
        if draw < pronouns + 0.15:
            taken = [name for other in others if isinstance(other, Name) for name in other.names]
            return Name((self.rng.choice([name for name in NAMES if name not in taken]),))
        return self.noun_phrase(("person", "kin"), *others)

    def subject(self, verb: Verb, pronouns: float) -> Nominal:
        """Draw a subject for `verb`."""
        if "person" not in verb.subjects or (len(verb.subjects) > 1 and self.chance(0.4)):
            return self.noun_phrase(tuple(c for c in verb.subjects if c != "person"))
        if self.chance(0.06):
            return Name(tuple(self.rng.sample(NAMES, 2)))
        return self.person(pronouns=pronouns)

    def object(self, verb: Verb, subject: Nominal) -> Nominal:
        """Draw an object for `verb`, a pronoun or name among them where it takes a person."""
        if "person" in verb.objects and self.chance(0.5):
            return self.person(subject, pronouns=0.0 if "V" in verb.marks else 0.6)
        return self.noun_phrase(verb.objects, subject)

    def place(self, place_class: str, where_to: bool) -> Pair:
        """Draw where or where to."""
        if place_class in ("place", "town") and self.chance(0.3):
            return Pair(*self.rng.choice(FIXED_PLACES)[where_to])
        phrase = self.noun_phrase((place_class,))
        if not phrase.definite or phrase.plural:
            phrase = replace(phrase, determiner="the", plural=False)
        return place(phrase, where_to)

    def tense(self, verb: Verb, subject: Nominal, time: str) -> str:
        """Draw a tense of grammar.Clause for a time."""
        state = "S" in verb.marks or "N" in verb.marks
        if time == "now":
            return "present" if state else "progressive"
        if time == "plain":
            return "present"
        if time == "simple past" or (time == "past" and self.chance(0.7)):
            return "past"
        human = isinstance(subject, Pronoun | Name) or any(
            c in subject.noun.classes for c in ("person", "kin")
        )
        modals = [name for name, modal in MODALS.items() if modal.time == time]
        if "S" in verb.marks or not human:
            modals = [name for name in modals if name == "will"]
        elif "N" in verb.marks:
            modals = [name for name in modals if name in ("will", "could")]
        return self.rng.choice(modals) if modals else "past"

    def time(self, time: str) -> Adverb:
        """Draw an adverbial for a time."""
        wanted = {"plain": "habit", "simple past": "past"}.get(time, time)
        return self.rng.choice([adverb for adverb in TIMES.values() if wanted in adverb.times])

    def predication(
        self, time: str, *, pronouns: float = 0.4, adjuncts: float = 1.0, things: bool = False
    ) -> Clause:
        """Draw a clause of "be" and an adjective: The soup was too hot."""
        subject = self.person(pronouns=pronouns)
        if things and self.chance(0.6):
            subject = self.noun_phrase(("dish", "text", "tale", "clothes", "vehicle"))
        noun = NOUNS["friend"]
        if isinstance(subject, NounPhrase):
            noun = subject.noun
            determiner = "the" if subject.determiner == "a" else subject.determiner
            subject = replace(subject, determiner=determiner, adjective=None)
        human = any(c in noun.classes for c in ("person", "kin"))
        adjective = self.rng.choice(adjectives_of(noun, colours=False))
        degrees: tuple[str, ...] = ("", "very")
        if "excess" in adjective.classes and not human:
            degrees = ("", "very", "too")
        return Clause(
            subject,
            VERBS["be"],
            self.tense(VERBS["be"], subject, time),
            time=self.time(time) if human and self.chance(0.4 * adjuncts) else None,
            predicate=(self.rng.choice(degrees), adjective),
        )

    def clause(
        self,
        time: str,
        *,
        pronouns: float = 0.4,
        adjuncts: float = 1.0,
        subject: Nominal | None = None,
        verbs: Sequence[Verb] = (),
    ) -> Clause:
        """Draw a clause; `adjuncts` scales the chances of time, place, companion, beneficiary."""
        unsuited = UNSUITED.get(time)
        verb = self.rng.choice(verbs or [v for v in self.verbs if unsuited not in v.marks])
        given = subject
        subject = given or self.subject(verb, pronouns)
        tense = self.tense(verb, subject, time)
        # "They read" would be present and past at once: such a present needs its -s.
        while not given and verb.base == verb.past and tense == "present" and subject.person != 1:
            subject = self.subject(verb, pronouns)
        clause = Clause(subject, verb, tense)
        kind, _, place_class = verb.frame.partition(":")
        if f"{kind}:" in PLACE_FRAMES:
            clause = replace(clause, place=self.place(place_class, kind != "at"))
        elif "P" in verb.marks and self.chance(0.25 * adjuncts):
            clause = replace(clause, place=self.place("place", False))
        if verb.objects:
            clause = replace(clause, object=self.object(verb, subject))
        if kind == "dat acc":
            clause = replace(clause, recipient=self.person(subject))
        if "W" in verb.marks and self.chance(0.25 * adjuncts):
            companion = self.person(subject, clause.object, pronouns=0.2)
            clause = replace(clause, companion=companion)
        if "F" in verb.marks and self.chance(0.25 * adjuncts):
            clause = replace(clause, beneficiary=self.person(subject, pronouns=0.2))
        if "S" not in verb.marks and self.chance(0.55 * adjuncts):
            clause = replace(clause, time=self.time(time))
        return clause

    def fronted(self, clause: Clause) -> Clause:
        """Draw what stands first, where English allows something other than the subject."""
        phrase = clause.object
        frame = clause.verb.frame
        if (
            isinstance(phrase, NounPhrase)
            and phrase.determiner in ("this", "these")
            and frame in ("acc", "dat", "dat acc")
            and isinstance(clause.subject, Pronoun)
            and self.chance(0.8)
        ):
            return replace(clause, front="object")
        late = ("often", "always", "now")
        if clause.time and clause.time.english not in late and self.chance(0.5):
            return replace(clause, front="time")
        if clause.place and not frame.startswith(PLACE_FRAMES) and self.chance(0.4):
            return replace(clause, front="place")
        return clause

    def relative(self, head: NounPhrase) -> Clause | None:
        """Draw a relative clause about `head`, or None where no verb has a gap for it."""
        gap = RelativePronoun(head.noun, head.plural)
        time = self.rng.choice(("now", "past", "past", "plain"))
        as_subject = [
            verb
            for verb in self.verbs
            if any(c in head.noun.classes for c in verb.subjects) and verb.base != verb.past
        ]
        as_object = [
            verb
            for verb in self.verbs
            if any(c in head.noun.classes for c in verb.objects) and not verb.frame.startswith(PLACE_FRAMES)
        ]
        if as_subject and (not as_object or self.chance(0.45)):
            clause = self.clause(time, adjuncts=0.6, subject=gap, verbs=as_subject)
            return replace(clause, time=None)
        if not as_object:
            return None
        clause = self.clause(time, adjuncts=0.0, pronouns=0.6, verbs=as_object)
        if isinstance(clause.subject, NounPhrase) and clause.subject.noun == head.noun:
            return None
        return replace(clause, object=gap, front="object")

    def relative_sentence(self) -> Pair | None:
        """Draw a statement whose subject or object has a relative clause, or None."""
        clause = self.clause(self.rng.choice(("now", "past", "future")), adjuncts=0.6, pronouns=0.3)
        field = self.rng.choice(("subject", "object"))
        head = clause.subject if field == "subject" else clause.object
        if not isinstance(head, NounPhrase) or clause.verb.frame.startswith("on:"):
            return None
        if any(c in head.noun.classes for c in ("kin", "unique", "mass")):
            return None
        determiner = "the" if head.plural else self.rng.choice(("the", "a"))
        relative = self.relative(head)
        if relative is None:
            return None
        head = replace(head, determiner=determiner, relative=relative)
        front = ""
        if clause.time and "mid" not in clause.time.times:
            front = "time" if field == "object" or self.chance(0.4) else ""
        if field == "subject":
            return statement(replace(clause, subject=head, front=front))
        # What follows the relative clause could belong to it or to the main clause: nothing does.
        return statement(
            replace(clause, object=head, front=front, place=None, companion=None, beneficiary=None)
        )

    def clausal_sentence(self) -> Pair:
        """Draw a statement with dass, ob or an infinitive with zu."""
        verb = self.rng.choice(list(CLAUSAL_VERBS.values()))
        past = self.chance(0.5)
        subject = self.subject(verb, 0.4)
        adverb = self.time("past") if past and self.chance(0.4) else None
        if adverb and "mid" in adverb.times:
            adverb = None
        if verb.frame == "zu":
            actions = [
                action
                for action in self.verbs
                if "person" in action.subjects and action.frame != "none"
                if "S" not in action.marks and "N" not in action.marks
            ]
            inner = self.clause("plain", adjuncts=0.6, subject=subject, verbs=actions)
            inner = replace(inner, time=None)
        else:
            times = ("now", "future") if verb.base == "hope" else ("now", "past", "future")
            time = "past" if past else self.rng.choice(times)
            compose = self.predication if self.chance(0.25) else self.clause
            inner = compose(time, pronouns=0.6, adjuncts=0.0 if adverb else 1.0)
        return statement(
            Clause(
                subject,
                verb,
                "past" if past else "present",
                recipient=self.person(subject) if "dat" in verb.frame else None,
                time=adverb,
                front="time" if adverb else "",
                complement=inner,
            )
        )

    def complex_sentence(self) -> Pair:
        """Draw a main and a subordinate clause, at most one of them with a time."""
        conjunction = self.rng.choice(list(SUBORDINATORS))
        subordinate_time, main_time = self.rng.choice(SUBORDINATORS[conjunction][1])
        reason = conjunction in ("because", "although")
        timed = self.chance(0.3) and reason
        if reason and self.chance(0.45):
            subordinate = self.predication(subordinate_time, pronouns=0.8, adjuncts=0.7 * timed)
        else:
            verbs = [verb for verb in self.verbs if reason or not {"S", "N"} & set(verb.marks)]
            subordinate = self.clause(subordinate_time, pronouns=0.65, adjuncts=0.6, verbs=verbs)
            subordinate = subordinate if timed else replace(subordinate, time=None)
        main = self.clause(main_time, pronouns=0.5, adjuncts=0.7)
        if subordinate.time or main_time == "plain":
            main = replace(main, time=None)
        return complex_sentence(conjunction, subordinate, main, self.chance(0.5))

    def question(self) -> Pair:
        """Draw a question."""
        clause = self.clause(self.rng.choice(("now", "past", "future", "plain")), pronouns=0.4)
        words = ["", "", "why"] + ([] if clause.time else ["when"])
        if "P" in clause.verb.marks and not clause.place:
            words.append("where")
        return question(clause, self.rng.choice(words))

    def coordination(self) -> Pair:
        """Draw two main clauses, the first perhaps with a time."""
        time = self.rng.choice(("now", "past"))
        if self.chance(0.3):
            first = self.predication(time)
        else:
            first = self.fronted(self.clause(time, adjuncts=0.6))
        second = replace(self.clause(time, pronouns=0.6, adjuncts=0.6), time=None)
        return coordination(first, self.rng.choice(list(COORDINATORS)), second)

    def simple_sentence(self) -> Pair:
        """Draw a statement of one clause."""
        time = self.rng.choice(("plain", "now", "past", "past", "future"))
        if self.chance(0.1):
            return statement(self.predication(time, things=True))
        return statement(self.fronted(self.clause(time, pronouns=0.3, adjuncts=1.3)))

    def pair(self) -> Pair:
        """Draw a sentence pair of MIN_WORDS to MAX_WORDS words a side."""
        kinds = {
            self.simple_sentence: 33,
            self.question: 9,
            self.complex_sentence: 25,
            self.clausal_sentence: 12,
            self.relative_sentence: 16,
            self.coordination: 8,
        }
        while True:
            pair = self.rng.choices(list(kinds), weights=list(kinds.values()))[0]()
            if pair and all(
                MIN_WORDS <= len(side.split()) <= MAX_WORDS for side in (pair.english, pair.german)
            ):
                return pair


def distinct_pairs(seed: int) -> Iterator[Pair]:
    """Draw pairs for ever, none of whose English or German sides has come before."""
    composer = Composer(random.Random(seed))
    seen: set[str] = set()
    while True:
        pair = composer.pair()
        if pair.english not in seen and pair.german not in seen:
            seen.update((pair.english, pair.german))
            yield pair


def write_corpus(output: Path, pairs: int, heldout: int, seed: int) -> None:
    """Write {test,valid,train}.{en,de} under `output`, each complete before it has its name.

    The held-out sets are drawn first: they stay the same whatever `pairs` is.
    """
    output.mkdir(parents=True, exist_ok=True)
    source = distinct_pairs(seed)
    for split, size in (("test", heldout), ("valid", heldout), ("train", pairs)):
        drawn = [next(source) for _ in range(size)]
        for language, side in (("en", "english"), ("de", "german")):
            final = output / f"{split}.{language}"
            partial = output / f".{split}.{language}.partial"
            text = "".join(getattr(pair, side) + "\n" for pair in drawn)
            partial.write_text(text, encoding="utf-8", newline="\n")
            os.replace(partial, final)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and write the corpus."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory for the six files")
    parser.add_argument("--pairs", type=int, default=20_000, help="training pairs (20000)")
    parser.add_argument("--heldout", type=int, default=500, help="pairs each in valid and test (500)")
    parser.add_argument("--seed", type=int, default=1, help="same seed, same files (1)")
    options = parser.parse_args(arguments)
    for flag, value in (("--pairs", options.pairs), ("--heldout", options.heldout)):
        if not 1 <= value <= MAX_PAIRS:
            parser.error(f"{flag} is {value}, but must be between 1 and {MAX_PAIRS}")
    total = options.pairs + 2 * options.heldout
    if total > MAX_PAIRS:
        parser.error(
            f"--pairs {options.pairs} and twice --heldout {options.heldout} make {total} pairs, "
            f"but the grammar gives at most {MAX_PAIRS}"
        )
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}, but must be 0 or more")
    if options.output.exists() and not options.output.is_dir():
        parser.error(f"--output is {options.output}, a file, but must be a directory")
    write_corpus(options.output, options.pairs, options.heldout, options.seed)


if __name__ == "__main__":
    main()
