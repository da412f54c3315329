"""The demo corpus: its German against sentences written by hand, its files, its command line."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "recipes" / "demo"
sys.path.insert(0, str(DEMO))

import make_corpus  # noqa: E402
from grammar import (  # noqa: E402
    Clause,
    Name,
    Pair,
    Pronoun,
    RelativePronoun,
    complex_sentence,
    coordination,
    noun_phrase,
    place,
    question,
    statement,
)
from lexicon import (  # noqa: E402
    ADJECTIVES,
    CLAUSAL_VERBS,
    FIXED_PLACES,
    NOUNS,
    PLACES,
    TIMES,
    VERBS,
)

FILES = sorted(f"{split}.{lang}" for split in ("train", "valid", "test") for lang in ("en", "de"))


def clause(subject, verb, tense="present", **fields):
    """A Clause from English words: a subject by pronoun, a verb by base, a time by its phrase."""
    if isinstance(subject, str):
        subject = Pronoun(subject) if subject in ("I", "he", "she", "we", "they") else Name((subject,))
    if "time" in fields:
        fields["time"] = TIMES[fields["time"]]
    return Clause(subject, VERBS.get(verb) or CLAUSAL_VERBS[verb], tense, **fields)


np = noun_phrase


def be(subject, adjective, tense="present", degree="", **fields):
    return clause(subject, "be", tense, predicate=(degree, ADJECTIVES[adjective]), **fields)


def with_relative(determiner, noun, make, plural=False, adjective=""):
    """A noun phrase with the relative clause that `make` builds from its relative pronoun."""
    gap = RelativePronoun(NOUNS[noun], plural)
    return np(determiner, noun, adjective, plural, relative=make(gap))


GARDEN = place(np("the", "garden"))
HOME = Pair(*FIXED_PLACES[0][1])

# Phenomenon: derivation, English, German. Both sides are written by hand.
SENTENCES = {
    "subject first, verb second": (
        statement(clause("she", "read", object=np("the", "book"), time="every evening")),
        "She reads the book every evening.",
        "Sie liest jeden Abend das Buch.",
    ),
    "inversion after a time": (
        statement(clause("he", "visit", "past", object=np("his", "sister"), time="yesterday", front="time")),
        "Yesterday he visited his sister.",
        "Gestern hat er seine Schwester besucht.",
    ),
    "inversion after a place": (
        statement(
            clause(
                "Anna",
                "drink",
                "progressive",
                object=np("", "tea", "hot"),
                place=GARDEN,
                front="place",
            )
        ),
        "In the garden Anna is drinking hot tea.",
        "Im Garten trinkt Anna heißen Tee.",
    ),
    "inversion after an object": (
        statement(
            clause("I", "write", "past", object=np("this", "letter"), time="on Monday", front="object")
        ),
        "This letter I wrote on Monday.",
        "Diesen Brief habe ich am Montag geschrieben.",
    ),
    "inversion after a subordinate clause, weil": (
        complex_sentence(
            "because",
            be("he", "tired", degree="very"),
            clause("he", "go", "progressive", place=HOME),
            True,
        ),
        "Because he is very tired, he is going home.",
        "Weil er sehr müde ist, geht er nach Hause.",
    ),
    "obwohl": (
        complex_sentence("although", be("we", "sick", "past"), clause("we", "work", "past")),
        "We worked, although we were sick.",
        "Wir haben gearbeitet, obwohl wir krank waren.",
    ),
    "wenn, and werden at the second place": (
        complex_sentence("if", clause("she", "arrive"), clause("I", "call", "will", object=Pronoun("he"))),
        "I will call him if she arrives.",
        "Ich werde ihn anrufen, wenn sie ankommt.",
    ),
    "als, haben and sein at the end": (
        complex_sentence(
            "when",
            clause(np("the", "train"), "arrive", "past"),
            clause(np("my", "brother"), "fall asleep", "past"),
            True,
        ),
        "When the train arrived, my brother fell asleep.",
        "Als der Zug angekommen ist, ist mein Bruder eingeschlafen.",
    ),
    "dass, with a modal at the end": (
        statement(
            clause(
                "they",
                "know that",
                complement=clause("Max", "open", "must", object=np("the", "door")),
            )
        ),
        "They know that Max must open the door.",
        "Sie wissen, dass Max die Tür aufmachen muss.",
    ),
    "ob": (
        statement(clause("I", "ask whether", "past", complement=be(np("the", "soup"), "hot", "past", "too"))),
        "I asked whether the soup was too hot.",
        "Ich habe gefragt, ob die Suppe zu heiß war.",
    ),
    "zu taken in by the prefix": (
        statement(clause("he", "try zu", complement=clause("he", "call", object=np("a", "doctor")))),
        "He tries to call a doctor.",
        "Er versucht, einen Arzt anzurufen.",
    ),
    "zu before a plain infinitive, fängt an": (
        statement(
            clause(
                np("the", "child"),
                "begin zu",
                complement=clause("he", "eat", object=np("a", "apple")),
            )
        ),
        "The child begins to eat an apple.",
        "Das Kind fängt an, einen Apfel zu essen.",
    ),
    "prefix at the end": (
        statement(clause("she", "call", "progressive", object=np("her", "mother"), time="now")),
        "She is calling her mother now.",
        "Sie ruft jetzt ihre Mutter an.",
    ),
    "prefix joined, verb final": (
        complex_sentence(
            "because",
            clause("she", "call", "progressive", object=Pronoun("they")),
            clause("we", "laugh", "progressive"),
        ),
        "We are laughing because she is calling them.",
        "Wir lachen, weil sie sie anruft.",
    ),
    "participle with prefix": (
        statement(clause("I", "pick up", "past", object=np("the", "child", plural=True))),
        "I picked up the children.",
        "Ich habe die Kinder abgeholt.",
    ),
    "modal with infinitive at the end": (
        statement(clause("Peter", "repair", "wants to", object=np("his", "car", "old"), time="tomorrow")),
        "Peter wants to repair his old car tomorrow.",
        "Peter will morgen sein altes Auto reparieren.",
    ),
    "modal in the past": (
        statement(clause("we", "tidy up", "had to", object=np("the", "kitchen"))),
        "We had to tidy up the kitchen.",
        "Wir mussten die Küche aufräumen.",
    ),
    "dative verb, weak noun": (
        statement(clause("he", "help", "past", object=np("a", "student", "young"))),
        "He helped a young student.",
        "Er hat einem jungen Studenten geholfen.",
    ),
    "dative before accusative": (
        statement(
            clause(
                "she",
                "give",
                "past",
                recipient=np("the", "child", plural=True),
                object=np("two", "apple", "fresh", True),
            )
        ),
        "She gave the children two fresh apples.",
        "Sie hat den Kindern zwei frische Äpfel gegeben.",
    ),
    "pronoun before time": (
        statement(
            clause(
                "I",
                "show",
                "will",
                recipient=Pronoun("she"),
                object=np("the", "picture"),
                time="tonight",
            )
        ),
        "I will show her the picture tonight.",
        "Ich werde ihr heute Abend das Bild zeigen.",
    ),
    "where with the dative": (
        statement(
            clause(np("the", "key", plural=True), "lie", "progressive", place=place(np("the", "table")))
        ),
        "The keys are lying on the table.",
        "Die Schlüssel liegen auf dem Tisch.",
    ),
    "where to with the accusative": (
        statement(clause("she", "lay", "past", object=np("a", "key"), place=place(np("the", "table"), True))),
        "She laid a key on the table.",
        "Sie hat einen Schlüssel auf den Tisch gelegt.",
    ),
    "definite object before place": (
        statement(clause("he", "feed", "past", object=np("the", "dog"), place=GARDEN)),
        "He fed the dog in the garden.",
        "Er hat den Hund im Garten gefüttert.",
    ),
    "indefinite object behind place": (
        statement(clause("he", "feed", "past", object=np("a", "dog"), place=GARDEN)),
        "He fed a dog in the garden.",
        "Er hat im Garten einen Hund gefüttert.",
    ),
    "time, companion, goal": (
        statement(
            clause(
                "we",
                "go",
                companion=np("our", "friend", plural=True),
                place=place(np("the", "station"), True),
                time="every morning",
            )
        ),
        "We go to the station with our friends every morning.",
        "Wir gehen jeden Morgen mit unseren Freunden zum Bahnhof.",
    ),
    "zur": (
        statement(clause("he", "come", "past", place=place(np("the", "school"), True))),
        "He came to the school.",
        "Er ist zur Schule gekommen.",
    ),
    "vom before an adjective": (
        statement(clause("I", "dream", "past", object=np("the", "car", "new"), time="often")),
        "I often dreamt of the new car.",
        "Ich habe oft vom neuen Auto geträumt.",
    ),
    "ins": (
        statement(clause("we", "travel", "could", place=place(np("the", "village", "small"), True))),
        "We could travel to the small village.",
        "Wir konnten ins kleine Dorf reisen.",
    ),
    "am": (
        statement(clause("he", "wait", "past", object=Pronoun("I"), place=place(np("the", "station")))),
        "He waited for me at the station.",
        "Er hat am Bahnhof auf mich gewartet.",
    ),
    "für with the accusative": (
        statement(
            clause(
                "I",
                "buy",
                "past",
                object=np("a", "coat", "expensive"),
                beneficiary=np("my", "neighbour"),
            )
        ),
        "I bought an expensive coat for my neighbour.",
        "Ich habe einen teuren Mantel für meinen Nachbarn gekauft.",
    ),
    "object behind a preposition": (
        statement(
            clause(
                "they",
                "wait",
                "progressive",
                object=np("the", "bus"),
                place=place(np("the", "market")),
            )
        ),
        "They are waiting for the bus at the market.",
        "Sie warten auf dem Markt auf den Bus.",
    ),
    "relative pronoun, subject": (
        statement(
            clause(
                with_relative(
                    "the",
                    "woman",
                    lambda gap: clause(gap, "live", place=Pair("in Berlin", "in Berlin")),
                ),
                "sing",
                time="often",
            )
        ),
        "The woman who lives in Berlin often sings.",
        "Die Frau, die in Berlin wohnt, singt oft.",
    ),
    "relative pronoun, accusative, behind the verb's end": (
        statement(
            clause(
                "I",
                "see",
                "past",
                object=with_relative(
                    "a", "man", lambda gap: clause("Anna", "know", object=gap, front="object")
                ),
            )
        ),
        "I saw a man whom Anna knows.",
        "Ich habe einen Mann gesehen, den Anna kennt.",
    ),
    "relative pronoun, dative plural": (
        statement(
            clause(
                with_relative(
                    "the",
                    "boy",
                    lambda gap: clause("he", "help", "past", object=gap, front="object"),
                    plural=True,
                ),
                "thank",
                "progressive",
                object=Pronoun("he"),
            )
        ),
        "The boys whom he helped are thanking him.",
        "Die Jungen, denen er geholfen hat, danken ihm.",
    ),
    "relative pronoun behind a preposition, neuter": (
        statement(
            clause(
                "she",
                "find",
                "past",
                object=with_relative(
                    "the",
                    "dress",
                    lambda gap: clause("she", "dream", "past", object=gap, front="object"),
                ),
            )
        ),
        "She found the dress of which she dreamt.",
        "Sie hat das Kleid gefunden, von dem sie geträumt hat.",
    ),
    "question": (
        question(clause("Julia", "invite", "past", object=np("the", "colleague")), "why"),
        "Why did Julia invite the colleague?",
        "Warum hat Julia den Kollegen eingeladen?",
    ),
    "question with a prefix": (
        question(clause("he", "get up", "present", time="often")),
        "Does he often get up?",
        "Steht er oft auf?",
    ),
    "und without, aber with a comma": (
        coordination(
            clause("I", "close", "past", object=np("the", "window")),
            "and",
            clause("he", "sleep", "past"),
        ),
        "I closed the window, and he slept.",
        "Ich habe das Fenster zugemacht und er hat geschlafen.",
    ),
    "deshalb takes the first place": (
        coordination(
            be("Paul", "hungry"),
            "so",
            clause("he", "order", "progressive", object=np("a", "potato soup")),
        ),
        "Paul is hungry, so he is ordering a potato soup.",
        "Paul ist hungrig, deshalb bestellt er eine Kartoffelsuppe.",
    ),
}

# Determiner, adjective and noun in nominative, accusative, dative.
DECLENSIONS = [
    (np("the", "dog", "old"), "der alte Hund|den alten Hund|dem alten Hund"),
    (np("a", "dog", "old"), "ein alter Hund|einen alten Hund|einem alten Hund"),
    (np("this", "cat", "small"), "diese kleine Katze|diese kleine Katze|dieser kleinen Katze"),
    (np("my", "cat", "small"), "meine kleine Katze|meine kleine Katze|meiner kleinen Katze"),
    (np("the", "horse", "big"), "das große Pferd|das große Pferd|dem großen Pferd"),
    (np("our", "horse", "big"), "unser großes Pferd|unser großes Pferd|unserem großen Pferd"),
    (np("the", "boy", plural=True), "die Jungen|die Jungen|den Jungen"),
    (np("the", "boy"), "der Junge|den Jungen|dem Jungen"),
    (np("her", "book", "new", True), "ihre neuen Bücher|ihre neuen Bücher|ihren neuen Büchern"),
    (np("two", "cup", "green", True), "zwei grüne Tassen|zwei grüne Tassen|zwei grünen Tassen"),
    (
        np("many", "car", "fast", True),
        "viele schnelle Autos|viele schnelle Autos|vielen schnellen Autos",
    ),
    (np("", "coffee", "hot"), "heißer Kaffee|heißen Kaffee|heißem Kaffee"),
    (np("", "milk", "cold"), "kalte Milch|kalte Milch|kalter Milch"),
    (np("", "bread", "fresh"), "frisches Brot|frisches Brot|frischem Brot"),
    (np("a", "forest", "dark"), "ein dunkler Wald|einen dunklen Wald|einem dunklen Wald"),
    (Pronoun("she"), "sie|sie|ihr"),
    (Pronoun("they"), "sie|sie|ihnen"),
]


@pytest.mark.parametrize("phenomenon", SENTENCES)
def test_a_derivation_reads_as_a_person_writes_it(phenomenon):
    pair, english, german = SENTENCES[phenomenon]
    assert pair == Pair(english, german)


@pytest.mark.parametrize(("phrase", "forms"), DECLENSIONS, ids=lambda value: str(value)[:24])
def test_phrases_decline_as_in_the_grammar_book(phrase, forms):
    assert "|".join(phrase.german(case) for case in ("nom", "acc", "dat")) == forms


def run(*arguments, hash_seed="0"):
    return subprocess.run(
        [sys.executable, str(DEMO / "make_corpus.py"), *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
    )


def corpus(directory, **options):
    """Write a small corpus through the command line and return {file name: bytes}."""
    hash_seed = options.pop("hash_seed", "0")
    options = {"pairs": 1500, "heldout": 200, **options}
    flags = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    done = run("--output", directory, *flags, hash_seed=hash_seed)
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("corpus") / "new" / "folder")


def lines(content):
    text = content.decode("utf-8")
    assert text.endswith("\n") and "\r" not in text
    return text[:-1].split("\n")


def test_the_same_seed_gives_the_same_bytes_whatever_the_hash_seed(small, tmp_path):
    assert corpus(tmp_path, hash_seed="12345") == small


def test_another_seed_gives_another_corpus(small, tmp_path):
    other = corpus(tmp_path, seed=2)
    assert all(other[name] != small[name] for name in FILES)


def test_more_training_pairs_leave_the_held_out_sets_as_they_are(small, tmp_path):
    other = corpus(tmp_path, pairs=1600)
    assert other["test.de"] == small["test.de"] and other["valid.en"] == small["valid.en"]
    assert other["train.en"].startswith(small["train.en"])


def test_the_six_files_hold_the_pairs_asked_for_and_nothing_else_is_left(small):
    sizes = {name: len(lines(content)) for name, content in small.items()}
    expected = {"train": 1500, "valid": 200, "test": 200}
    assert sizes == {name: expected[name.split(".")[0]] for name in FILES}


@pytest.mark.parametrize("language", ["en", "de"])
def test_no_sentence_occurs_twice_in_any_of_the_sets(small, language):
    everything = [
        line for split in ("train", "valid", "test") for line in lines(small[f"{split}.{language}"])
    ]
    assert len(set(everything)) == len(everything) == 1900


# None: all verbs. The others: verbs whose English forms invite confusion (read/read, lie/lay/laid),
# alone, so that many sentences come up again and again.
@pytest.mark.parametrize("verbs", [None, ("read",), ("lie", "lay"), ("call", "look for", "look at")])
def test_an_english_sentence_has_one_german_translation(verbs):
    composer = make_corpus.Composer(random.Random(11))
    if verbs:
        composer.verbs = [VERBS[verb] for verb in verbs]
    draw = composer.simple_sentence if verbs else composer.pair
    german = {}
    seen_again = 0
    for _ in range(20_000):
        pair = draw()
        seen_again += pair.english in german
        assert german.setdefault(pair.english, pair.german) == pair.german, pair.english
    assert seen_again > (200 if verbs else 10), "too few repetitions to show anything"


def test_a_pair_is_dropped_if_either_side_has_come_before(monkeypatch):
    drawn = [
        Pair("One.", "Eins."),
        Pair("One.", "Eine."),
        Pair("A.", "Eins."),
        Pair("Two.", "Zwei."),
    ]
    source = iter(drawn)
    monkeypatch.setattr(make_corpus.Composer, "pair", lambda composer: next(source))
    pairs = make_corpus.distinct_pairs(1)
    assert [next(pairs), next(pairs)] == [drawn[0], drawn[3]]


def test_sentences_are_natural_text_of_4_to_25_words(small):
    for name in FILES:
        for line in lines(small[name]):
            assert line[0].isupper() and line[-1] in ".?", line
            assert 4 <= len(line.split()) <= 25, line
            for wrong in ("  ", " ,", " .", ",,", ",.", ",?", "+", "*", "-", "|"):
                assert wrong not in line, line


def test_questions_are_questions_on_both_sides(small):
    english, german = lines(small["train.en"]), lines(small["train.de"])
    marks = [(e[-1], g[-1]) for e, g in zip(english, german, strict=True)]
    assert set(marks) == {(".", "."), ("?", "?")}


def test_sentences_are_about_as_long_as_a_model_of_order_needs(small):
    words = [len(line.split()) for line in lines(small["train.en"])]
    assert 9 <= sum(words) / len(words) <= 12


def test_every_class_that_a_verb_or_adjective_names_has_a_noun():
    classes = {c for noun in NOUNS.values() for c in noun.classes}
    marks = {"colour", "excess"}
    for adjective in ADJECTIVES.values():
        assert set(adjective.classes) - marks <= classes, adjective
    for verb in VERBS.values():
        assert set(verb.subjects + verb.objects) <= classes, verb
        kind, colon, rest = verb.frame.partition(":")
        if kind in ("to", "at", "on"):
            places = [noun.english for noun in NOUNS.values() if rest in noun.classes]
            assert places and set(places) <= set(PLACES), verb


def test_a_noun_in_the_singular_only_is_never_put_in_the_plural():
    composer = make_corpus.Composer(random.Random(3))
    drawn = [composer.noun_phrase(("kin", "place", "drink", "door", "food")) for _ in range(2000)]
    assert any(phrase.plural for phrase in drawn)
    assert all(phrase.noun.english_plural for phrase in drawn if phrase.plural)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--pairs", "-5"], ["--pairs", "-5", "between 1 and 200000"]),
        (["--pairs", "0"], ["--pairs", "0", "between 1 and 200000"]),
        (["--pairs", "900000000"], ["--pairs", "900000000", "between 1 and 200000"]),
        (["--heldout", "-1"], ["--heldout", "-1", "between 1 and 200000"]),
        (["--pairs", "199000", "--heldout", "600"], ["--pairs 199000", "--heldout 600", "200200"]),
        (["--seed", "-3"], ["--seed", "-3", "0 or more"]),
        (["--pairs", "many"], ["--pairs", "many", "int"]),
        (["--pears", "3"], ["--pears"]),
    ],
)
def test_a_bad_value_is_refused_by_name_and_nothing_is_written(tmp_path, flags, named):
    done = run("--output", tmp_path / "corpus", *flags)
    assert done.returncode == 2
    message = done.stderr.splitlines()[-1]
    assert all(words in message for words in named), message
    assert not (tmp_path / "corpus").exists()


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "corpus").write_text("mine")
    done = run("--output", tmp_path / "corpus")
    assert done.returncode == 2 and "--output" in done.stderr
    assert (tmp_path / "corpus").read_text() == "mine"
