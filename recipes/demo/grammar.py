"""The synchronous grammar of the demo corpus: one structure, its English and its German sentence.

English order is subject, verb, objects, place, companion, time. German puts the finite verb second
in main clauses and last in subordinate ones, the rest of the verb at the clause's end; between the
two stand pronouns, time, companion, definite objects, place, indefinite objects, in this order.
The English simple past is the German perfect (of "be" and modals: the simple past), and what stands
first in English stands first in German, so that an English sentence has one translation.

    >>> from lexicon import VERBS
    >>> clause = Clause(Pronoun("she"), VERBS["call"], "past", noun_phrase("the", "doctor"))
    >>> statement(clause)
    Pair(english='She called the doctor.', german='Sie hat den Arzt angerufen.')
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lexicon import (
    ADJECTIVE_ENDINGS,
    ADJECTIVES,
    CONTRACTIONS,
    DETERMINER_ENDINGS,
    DETERMINERS,
    IRREGULAR_PRESENT,
    MODALS,
    NOUNS,
    PLACES,
    PRONOUNS,
    RELATIVE_PRONOUNS,
    Adjective,
    Adverb,
    Noun,
    Verb,
)

PLURAL = 3  # column of the endings' tables after der, die, das


@dataclass(frozen=True)
class Pair:
    """A sentence or phrase in both languages."""

    english: str
    german: str


def join(*parts: str) -> str:
    """Join the parts that are not empty by spaces."""
    return " ".join(part for part in parts if part)


def ending(table: dict[str, str], case: str, column: int) -> str:
    """Look up an ending of `table` ("-" stands for none); columns are der, die, das, plural."""
    return table[case].split()[column].replace("-", "")


# --- Noun phrases: english(as_object) and german(case); person 0, 1, 2 is that of ich, er, wir ---


@dataclass(frozen=True)
class Pronoun:
    """A personal pronoun, named by its English subject form."""

    name: str

    @property
    def person(self) -> int:
        return PRONOUNS[self.name][2]

    def english(self, as_object: bool = False) -> str:
        return PRONOUNS[self.name][0][as_object]

    def german(self, case: str) -> str:
        return PRONOUNS[self.name][1][("nom", "acc", "dat").index(case)]


@dataclass(frozen=True)
class Name:
    """A proper name, or two joined by "and"."""

    names: tuple[str, ...]

    @property
    def person(self) -> int:
        return len(self.names)

    def english(self, as_object: bool = False) -> str:
        return " and ".join(self.names)

    def german(self, case: str) -> str:
        return " und ".join(self.names)


@dataclass(frozen=True)
class RelativePronoun:
    """The gap of a relative clause, agreeing with `noun`."""

    noun: Noun
    plural: bool = False

    @property
    def person(self) -> int:
        return 2 if self.plural else 1

    def english(self, as_object: bool = False, after_preposition: bool = False) -> str:
        if "person" not in self.noun.classes:
            return "which" if after_preposition else "that"
        return "whom" if as_object else "who"

    def german(self, case: str) -> str:
        column = PLURAL if self.plural else self.noun.gender
        return RELATIVE_PRONOUNS[case].split()[column]


@dataclass(frozen=True)
class NounPhrase:
    """Determiner, adjective and noun; the clause places `relative`, which German may move."""

    determiner: str
    noun: Noun
    adjective: Adjective | None = None
    plural: bool = False
    relative: Clause | None = None

    @property
    def person(self) -> int:
        return 2 if self.plural else 1

    @property
    def definite(self) -> bool:
        return self.determiner not in ("a", "", "two", "three", "many")

    def english(self, as_object: bool = False) -> str:
        noun = self.noun.english_plural if self.plural else self.noun.english
        words = join(self.adjective.english if self.adjective else "", noun)
        determiner = "an" if self.determiner == "a" and words[0] in "aeiou" else self.determiner
        return join(determiner, words, self.relative.english() if self.relative else "")

    def german(self, case: str) -> str:
        column = PLURAL if self.plural else self.noun.gender
        determiner, own_row, adjective_row = DETERMINERS[self.determiner]
        if own_row:
            determiner += ending(DETERMINER_ENDINGS[own_row], case, column)
        adjective = ""
        if self.adjective:
            adjective = self.adjective.stem + ending(ADJECTIVE_ENDINGS[adjective_row], case, column)
        if not self.plural:
            noun = self.noun.german if case == "nom" else self.noun.oblique
        else:
            noun = self.noun.german_plural
            if case == "dat" and noun[-1] not in "ns":
                noun += "n"
        return join(determiner, adjective, noun)


Nominal = Pronoun | Name | RelativePronoun | NounPhrase


def noun_phrase(
    determiner: str,
    noun: str,
    adjective: str = "",
    plural: bool = False,
    relative: Clause | None = None,
) -> NounPhrase:
    """Build a noun phrase from English words (the noun in the singular)."""
    adjective_entry = ADJECTIVES[adjective] if adjective else None
    return NounPhrase(determiner, NOUNS[noun], adjective_entry, plural, relative)


def prepositional(preposition: str, nominal: Nominal, case: str) -> str:
    """Put a German preposition before a phrase, in dem → im and the like."""
    words = f"{preposition} {nominal.german(case)}"
    if isinstance(nominal, NounPhrase) and nominal.determiner == "the":
        first_two = " ".join(words.split()[:2])
        words = CONTRACTIONS.get(first_two, first_two) + words[len(first_two) :]
    return words


def place(phrase: NounPhrase, where_to: bool = False) -> Pair:
    """Build "in the garden / im Garten" or, with `where_to`, "to the garden / in den Garten"."""
    english, german, case = PLACES[phrase.noun.english][where_to]
    return Pair(f"{english} {phrase.english(True)}", prepositional(german, phrase, case))


# --- Verbs ---


def english_third(base: str) -> str:
    """The third person singular of an English verb: "picks up", "watches"."""
    word, space, particle = base.partition(" ")
    if word.endswith(("s", "sh", "ch", "x", "o")):
        word += "es"
    elif word.endswith("y") and word[-2] not in "aeiou":
        word = word[:-1] + "ies"
    else:
        word += "s"
    return word + space + particle


def english_verb(verb: Verb, tense: str, person: int, question: bool = False) -> tuple[str, str]:
    """The English auxiliary ("" if none, "do" only in questions) and the rest of the verb."""
    be = ("am", "is", "are")[person]
    do = ("do", "does", "do")[person]
    if tense in MODALS:
        modal = MODALS[tense]
        if modal.plain and question:
            return "did" if modal.time == "past" else do, f"{modal.plain} {verb.base}"
        if modal.plain:
            return "", f"{modal.english[person]} {verb.base}"
        first, _, more = modal.english[person].partition(" ")
        return first, join(more, verb.base)
    if tense == "progressive":
        return be, verb.gerund
    if verb.base == "be":
        return be if tense == "present" else ("was", "was", "were")[person], ""
    if question:
        return do if tense == "present" else "did", verb.base
    if tense == "past":
        return "", verb.past
    return "", english_third(verb.base) if person == 1 else verb.base


def german_present(infinitive: str, third: str, person: int) -> str:
    """The present for ich, er or wir, without the separable prefix."""
    first = infinitive[:-1] if infinitive.endswith("en") else infinitive[:-1] + "e"
    return IRREGULAR_PRESENT.get(infinitive, (first, third, infinitive))[person]


def german_verb(verb: Verb, tense: str, person: int) -> tuple[str, str, str]:
    """The finite verb, what ends a main clause, and the whole group that ends a verb-final one."""
    if tense in MODALS:
        finite, rest = MODALS[tense].german[person], verb.prefix + verb.infinitive
    elif tense in ("present", "progressive"):
        finite = german_present(verb.infinitive, verb.third, person)
        return finite, verb.prefix, verb.prefix + finite
    elif verb.base == "be":
        return ("war", "war", "waren")[person], "", ("war", "war", "waren")[person]
    else:
        finite, rest = german_present(verb.auxiliary, "", person), verb.participle
    return finite, rest, f"{rest} {finite}"


# --- Clauses ---


@dataclass(frozen=True)
class Clause:
    """A clause in both languages; `front` names the field that stands first, "" the subject.

    `tense` is "present", "progressive", "past" or a key of MODALS, `predicate` a degree ("",
    "very", "too") and an adjective after "be", `complement` the object clause of a verb from
    CLAUSAL_VERBS.
    """

    subject: Nominal
    verb: Verb
    tense: str = "present"
    object: Nominal | None = None
    recipient: Nominal | None = None
    beneficiary: Nominal | None = None
    place: Pair | None = None
    companion: Nominal | None = None
    time: Adverb | None = None
    predicate: tuple[str, Adjective] | None = None
    front: str = ""
    complement: Clause | None = None

    @property
    def _preposition(self) -> tuple[str, str, str]:
        """The object's English preposition, German preposition and case."""
        english, colon, rest = self.verb.frame.partition(":")
        if colon and " " in rest:  # "for:auf acc", not "to:place"
            german, case = rest.split()
            return english, german, case
        return "", "", "dat" if self.verb.frame == "dat" else "acc"

    def _english_parts(self) -> dict[str, str]:
        parts = {}
        if self.recipient:
            parts["recipient"] = self.recipient.english(True)
        if self.predicate:
            parts["predicate"] = join(self.predicate[0], self.predicate[1].english)
        if self.object:
            preposition = self._preposition[0]
            if isinstance(self.object, RelativePronoun):
                words = self.object.english(True, after_preposition=bool(preposition))
            else:
                words = self.object.english(True)
            parts["object"] = join(preposition, words)
        if self.beneficiary:
            parts["beneficiary"] = "for " + self.beneficiary.english(True)
        if self.place:
            parts["place"] = self.place.english
        if self.companion:
            parts["companion"] = "with " + self.companion.english(True)
        if self.time and "mid" not in self.time.times:
            parts["time"] = self.time.english
        return parts

    def english(self, question: bool = False, infinitive: bool = False) -> str:
        """The English clause without end mark, as a statement, question or "to ..."."""
        parts = self._english_parts()
        first = parts.pop(self.front, "")
        middle = self.time.english if self.time and "mid" in self.time.times else ""
        if middle and self.front == "time":
            first, middle = middle, ""
        auxiliary, verb = english_verb(self.verb, self.tense, self.subject.person, question)
        subject = self.subject.english()
        if infinitive:
            head = ["to", self.verb.base]
        elif question:
            head = [auxiliary, subject, middle, verb]
        else:
            head = [first, subject, auxiliary, middle, verb]
        if self.complement and self.verb.frame == "zu":
            tail = self.complement.english(infinitive=True)
        elif self.complement:
            tail = f"{self.verb.frame.split()[0]} {self.complement.english()}"
        else:
            tail = ""
        return join(*head, *parts.values(), tail)

    def _german_parts(self) -> dict[str, str]:
        """What stands between subject and clause end, in German order."""
        _, preposition, case = self._preposition
        parts: dict[str, str] = {}
        if isinstance(self.recipient, Pronoun):
            parts["recipient"] = self.recipient.german("dat")
        if isinstance(self.object, Pronoun) and not preposition:
            parts["object"] = self.object.german(case)
        if self.time:
            parts["time"] = self.time.german
        if self.companion:
            parts["companion"] = "mit " + self.companion.german("dat")
        if self.recipient:
            parts.setdefault("recipient", self.recipient.german("dat"))
        objects: dict[str, str] = {}
        if self.object and "object" not in parts:
            objects["object"] = (
                prepositional(preposition, self.object, case) if preposition else self.object.german(case)
            )
        if self.beneficiary:
            objects["beneficiary"] = "für " + self.beneficiary.german("acc")
        indefinite = isinstance(self.object, NounPhrase) and not self.object.definite
        goal = self.verb.frame.startswith(("to:", "on:"))
        if self.place and (preposition or indefinite) and not goal:
            parts["place"] = self.place.german
        parts.update(objects)
        if self.place:
            parts.setdefault("place", self.place.german)
        if self.predicate:
            degree, adjective = self.predicate
            parts["predicate"] = join({"very": "sehr", "too": "zu"}.get(degree, ""), adjective.german)
        return parts

    def _german_subject(self) -> str:
        subject = self.subject.german("nom")
        if isinstance(self.subject, NounPhrase) and self.subject.relative:
            subject += f", {self.subject.relative.german_verb_final()},"
        return subject

    def _german_after(self) -> str:
        """What follows the clause's end: the object's relative clause, the object clause."""
        if isinstance(self.object, NounPhrase) and self.object.relative:
            return f", {self.object.relative.german_verb_final()}"
        if not self.complement:
            return ""
        if self.verb.frame == "zu":
            return f", {self.complement.german_infinitive()}"
        conjunction = {"that": "dass", "whether": "ob"}[self.verb.frame.split()[0]]
        return f", {conjunction} {self.complement.german_verb_final()}"

    def german_main(self, first: str = "", question: bool = False) -> str:
        """The clause with its finite verb second, after `first` if given; first in a question."""
        finite, rest, _ = german_verb(self.verb, self.tense, self.subject.person)
        parts = self._german_parts()
        subject = self._german_subject()
        first = first or parts.pop(self.front, "")
        if first or question:
            head = [first, finite, subject]
        else:
            head = [subject, finite]
        return join(*head, *parts.values(), rest) + self._german_after()

    def german_verb_final(self) -> str:
        """The clause with its finite verb last, as after a conjunction or a relative pronoun."""
        group = german_verb(self.verb, self.tense, self.subject.person)[2]
        parts = self._german_parts()
        first = parts.pop(self.front, "")
        return join(first, self._german_subject(), *parts.values(), group) + self._german_after()

    def german_infinitive(self) -> str:
        """The clause as an infinitive with "zu", which a separable prefix takes in: anzurufen."""
        verb = self.verb
        group = f"{verb.prefix}zu{verb.infinitive}" if verb.prefix else f"zu {verb.infinitive}"
        return join(*self._german_parts().values(), group)


# --- Sentences ---


def finish(english: str, german: str, mark: str = ".") -> Pair:
    """Add capital and end mark, and write double commas once."""

    def one(text: str) -> str:
        text = re.sub(r",+", ",", text).rstrip(",")
        return text[0].upper() + text[1:] + mark

    return Pair(one(english), one(german))


def statement(clause: Clause) -> Pair:
    """A main clause."""
    return finish(clause.english(), clause.german_main())


def question(clause: Clause, word: str = "") -> Pair:
    """A question, with "why", "when" or "where" if `word` is given."""
    german = {"": "", "why": "warum", "when": "wann", "where": "wo"}[word]
    english = join(word, clause.english(question=True))
    return finish(english, clause.german_main(german, question=True), "?")


# English conjunction -> German, and the (subordinate, main) times that go with it.
SUBORDINATORS = {
    "because": ("weil", (("now", "now"), ("past", "past"), ("now", "future"))),
    "although": ("obwohl", (("now", "now"), ("past", "past"))),
    "if": ("wenn", (("plain", "future"), ("plain", "plain"))),
    "when": ("als", (("simple past", "simple past"),)),
    "while": ("während", (("now", "now"), ("simple past", "simple past"))),
    "before": ("bevor", (("simple past", "past"), ("plain", "future"))),
    "as soon as": ("sobald", (("plain", "future"),)),
}
# English conjunction -> German, and whether it takes the first place (deshalb geht er).
COORDINATORS = {"and": ("und", False), "but": ("aber", False), "so": ("deshalb", True)}


def complex_sentence(
    conjunction: str, subordinate: Clause, main: Clause, subordinate_first: bool = False
) -> Pair:
    """Main and subordinate clause, either of them first."""
    german = f"{SUBORDINATORS[conjunction][0]} {subordinate.german_verb_final()}"
    english = f"{conjunction} {subordinate.english()}"
    if subordinate_first:
        return finish(f"{english}, {main.english()}", main.german_main(german + ","))
    comma = "," if conjunction == "although" else ""
    return finish(f"{main.english()}{comma} {english}", f"{main.german_main()}, {german}")


def coordination(first: Clause, conjunction: str, second: Clause) -> Pair:
    """Two main clauses; German has no comma before "und"."""
    german, inverts = COORDINATORS[conjunction]
    if inverts:
        second_german = second.german_main(german)
    else:
        second_german = f"{german} {second.german_main()}"
    comma = "" if conjunction == "and" else ","
    return finish(
        f"{first.english()}, {conjunction} {second.english()}",
        f"{first.german_main()}{comma} {second_german}",
    )
