"""The words of the demo corpus: English–German tables and the records they are read into.

One row a word, columns divided by ``|``, forms of one word by ``/``. The last columns name classes
("person", "food", ...) by which verbs and adjectives choose the nouns they go with, so that people
eat soup and not houses. An English entry has one German entry only: the corpus relies on it.
"""

from __future__ import annotations

from dataclasses import dataclass

# English singular/plural | German article, singular/plural | classes.
# A German singular with * takes the plural's form outside the nominative (den Studenten).
# Plural "-": the noun is used in the singular only. A "unique" noun takes the definite article;
# a person or place is "owned" where "our ..." is natural; "mass" nouns do without an article.
_NOUNS = """
man/men | der Mann/Männer | person adult
woman/women | die Frau/Frauen | person adult
child/children | das Kind/Kinder | person owned
girl/girls | das Mädchen/Mädchen | person
boy/boys | der Junge*/Jungen | person
teacher/teachers | der Lehrer/Lehrer | person adult owned
music teacher/music teachers | der Musiklehrer/Musiklehrer | person adult owned
doctor/doctors | der Arzt/Ärzte | person adult owned
dentist/dentists | der Zahnarzt/Zahnärzte | person adult owned
nurse/nurses | die Krankenschwester/Krankenschwestern | person adult
student/students | der Student*/Studenten | person adult owned
neighbour/neighbours | der Nachbar*/Nachbarn | person adult owned
colleague/colleagues | der Kollege*/Kollegen | person adult owned
policeman/policemen | der Polizist*/Polizisten | person adult
bus driver/bus drivers | der Busfahrer/Busfahrer | person adult
friend/friends | der Freund/Freunde | kin
brother/brothers | der Bruder/Brüder | kin
sister/sisters | die Schwester/Schwestern | kin
son/sons | der Sohn/Söhne | kin
daughter/daughters | die Tochter/Töchter | kin
mother/- | die Mutter/- | kin
father/- | der Vater/- | kin
grandmother/- | die Großmutter/- | kin
uncle/- | der Onkel/- | kin
dog/dogs | der Hund/Hunde | animal
cat/cats | die Katze/Katzen | animal
horse/horses | das Pferd/Pferde | animal
soup/- | die Suppe/- | food dish
potato soup/- | die Kartoffelsuppe/- | food dish
vegetable soup/- | die Gemüsesuppe/- | food dish
cake/cakes | der Kuchen/Kuchen | food cake
apple cake/apple cakes | der Apfelkuchen/Apfelkuchen | food cake
birthday cake/birthday cakes | der Geburtstagskuchen/Geburtstagskuchen | food cake
bread/- | das Brot/- | food cake mass
apple/apples | der Apfel/Äpfel | food
egg/eggs | das Ei/Eier | food
coffee/- | der Kaffee/- | drink mass
tea/- | der Tee/- | drink mass
milk/- | die Milch/- | drink mass
apple juice/- | der Apfelsaft/- | drink mass
orange juice/- | der Orangensaft/- | drink mass
book/books | das Buch/Bücher | text book
cookbook/cookbooks | das Kochbuch/Kochbücher | text book
children's book/children's books | das Kinderbuch/Kinderbücher | text book
newspaper/newspapers | die Zeitung/Zeitungen | text book
letter/letters | der Brief/Briefe | text letter
love letter/love letters | der Liebesbrief/Liebesbriefe | text letter
report/reports | der Bericht/Berichte | text letter
story/stories | die Geschichte/Geschichten | tale letter
key/keys | der Schlüssel/Schlüssel | thing
car key/car keys | der Autoschlüssel/Autoschlüssel | thing
house key/house keys | der Hausschlüssel/Hausschlüssel | thing
bag/bags | die Tasche/Taschen | thing
school bag/school bags | die Schultasche/Schultaschen | thing
umbrella/umbrellas | der Regenschirm/Regenschirme | thing
present/presents | das Geschenk/Geschenke | thing
birthday present/birthday presents | das Geburtstagsgeschenk/Geburtstagsgeschenke | thing
picture/pictures | das Bild/Bilder | thing picture
bottle/bottles | die Flasche/Flaschen | vessel bottle
glass/glasses | das Glas/Gläser | vessel
cup/cups | die Tasse/Tassen | vessel
coat/coats | der Mantel/Mäntel | clothes
winter coat/winter coats | der Wintermantel/Wintermäntel | clothes
dress/dresses | das Kleid/Kleider | clothes
shirt/shirts | das Hemd/Hemden | clothes
jacket/jackets | die Jacke/Jacken | clothes
car/cars | das Auto/Autos | vehicle
sports car/sports cars | der Sportwagen/Sportwagen | vehicle
bicycle/bicycles | das Fahrrad/Fahrräder | vehicle
train/trains | der Zug/Züge | transit
bus/buses | der Bus/Busse | transit
door/doors | die Tür/Türen | door
front door/- | die Haustür/- | door unique owned
window/windows | das Fenster/Fenster | door window
kitchen window/- | das Küchenfenster/- | door window unique owned
table/tables | der Tisch/Tische | surface
kitchen table/- | der Küchentisch/- | surface unique owned
desk/desks | der Schreibtisch/Schreibtische | surface
chair/chairs | der Stuhl/Stühle | surface
wall/- | die Wand/- | wall unique
garden/- | der Garten/- | place outdoors unique owned
park/- | der Park/- | place outdoors unique
kitchen/- | die Küche/- | place room unique owned
office/- | das Büro/- | place room unique owned
library/- | die Bibliothek/- | place unique
museum/- | das Museum/- | place unique
restaurant/- | das Restaurant/- | place unique
hospital/- | das Krankenhaus/- | place unique
school/- | die Schule/- | place unique owned
city/- | die Stadt/- | place town unique owned
village/- | das Dorf/- | place outdoors town unique owned
forest/- | der Wald/- | place outdoors unique
station/- | der Bahnhof/- | place outdoors unique
airport/- | der Flughafen/- | place unique
market/- | der Markt/- | place outdoors unique
lake/- | der See/- | place outdoors unique
"""

# Noun | where: English, German preposition | where to: English, German preposition and case.
_PLACES = """
garden | in / in | to / in acc
park | in / in | to / in acc
kitchen | in / in | to / in acc
office | in / in | to / in acc
library | in / in | to / in acc
museum | in / in | to / in acc
restaurant | in / in | to / in acc
hospital | in / in | to / in acc
city | in / in | to / in acc
village | in / in | to / in acc
forest | in / in | to / in acc
school | at / in | to / zu dat
station | at / an | to / zu dat
airport | at / an | to / zu dat
market | at / auf | to / zu dat
lake | at / an | to / an acc
table | on / auf | on / auf acc
kitchen table | on / auf | on / auf acc
desk | on / auf | on / auf acc
chair | on / auf | on / auf acc
wall | on / an | on / an acc
"""

# Where phrase | where-to phrase, for places without an article: English / German.
_FIXED_PLACES = """
at home / zu Hause | home / nach Hause
in Berlin / in Berlin | to Berlin / nach Berlin
in Hamburg / in Hamburg | to Hamburg / nach Hamburg
in Munich / in München | to Munich / nach München
in Vienna / in Wien | to Vienna / nach Wien
"""

# English | German, and the stem before an ending where it differs | classes.
# The class "colour" keeps an adjective before its noun: no "very red"; "excess" allows "too".
_ADJECTIVES = """
old | alt | adult animal text thing picture clothes vehicle door surface place excess
young | jung | adult animal
friendly | freundlich | person
tired | müde/müd | person kin animal
sick | krank | person kin animal
happy | glücklich | person kin
sad | traurig | person kin
hungry | hungrig | person kin animal
famous | berühmt | person
clever | klug | person animal
curious | neugierig | person animal
fresh | frisch | food drink
warm | warm | dish drink clothes excess
cold | kalt | dish drink excess
hot | heiß | dish drink excess
delicious | lecker | food
sweet | süß | cake excess
new | neu | text tale thing clothes vehicle door surface place transit
interesting | interessant | text tale
boring | langweilig | text tale
exciting | spannend | text tale
long | lang | text tale clothes excess
short | kurz | text tale clothes excess
beautiful | schön | thing clothes place
expensive | teuer/teur | thing clothes vehicle excess
cheap | billig | thing clothes vehicle
big | groß | animal thing vessel door surface place vehicle excess
small | klein | animal thing vessel door surface place vehicle excess
heavy | schwer | surface
fast | schnell | vehicle transit
slow | langsam | transit vehicle excess
empty | leer | vessel transit
quiet | ruhig | place
dark | dunkel/dunkl | place
red | rot | thing clothes vehicle transit colour
blue | blau | thing clothes vehicle transit colour
green | grün | thing clothes vessel door colour
black | schwarz | animal clothes vehicle colour
white | weiß | animal clothes door surface colour
"""

# English base/past/-ing | German prefix+infinitive / 3rd person / perfect | frame | subject |
# object classes | marks.
# Frames: none; acc, dat: one object; "dat acc": recipient and object; "for:auf acc": an object
# behind a preposition; "to:" where to, "at:" where, "on:" an accusative object and where to it is
# put, each with the class of places.
# Marks: P may take a place, W a companion, F one for whom; S is a state, N an event without
# duration, neither of them progressive; V has a particle that takes no pronoun ("picks up him").
_VERBS = """
sleep/slept/sleeping | schlafen/schläft/hat geschlafen | none | person animal | - | P
work/worked/working | arbeiten/arbeitet/hat gearbeitet | none | person | - | P W
dance/danced/dancing | tanzen/tanzt/hat getanzt | none | person | - | P W
sing/sang/singing | singen/singt/hat gesungen | none | person | - | P W
laugh/laughed/laughing | lachen/lacht/hat gelacht | none | person | - | P W
go shopping/went shopping/going shopping | ein+kaufen/kauft/hat eingekauft | none | person | - | W
watch television/watched television/watching television | fern+sehen/sieht/hat ferngesehen | none \
| person | - | P W
get up/got up/getting up | auf+stehen/steht/ist aufgestanden | none | person | - | -
fall asleep/fell asleep/falling asleep | ein+schlafen/schläft/ist eingeschlafen | none \
| person animal | - | P
arrive/arrived/arriving | an+kommen/kommt/ist angekommen | none | person transit | - | -
depart/departed/departing | ab+fahren/fährt/ist abgefahren | none | transit | - | -
go/went/going | gehen/geht/ist gegangen | to:place | person | - | W
run/ran/running | laufen/läuft/ist gelaufen | to:outdoors | person animal | - | -
travel/travelled/travelling | reisen/reist/ist gereist | to:town | person | - | W
come/came/coming | kommen/kommt/ist gekommen | to:place | person | - | W
return/returned/returning | zurück+kehren/kehrt/ist zurückgekehrt | to:place | person | - | W
live/lived/living | wohnen/wohnt/hat gewohnt | at:town | person | - | S W
stay/stayed/staying | bleiben/bleibt/ist geblieben | at:place | person animal | - | W
see/saw/seeing | sehen/sieht/hat gesehen | acc | person | person kin animal vehicle | P N
hear/heard/hearing | hören/hört/hat gehört | acc | person | person kin animal | P N
love/loved/loving | lieben/liebt/hat geliebt | acc | person | person kin animal | S
know/knew/knowing | kennen/kennt/hat gekannt | acc | person | person kin | S
visit/visited/visiting | besuchen/besucht/hat besucht | acc | person | person kin | P W
meet/met/meeting | treffen/trifft/hat getroffen | acc | person | person kin | P
call/called/calling | an+rufen/ruft/hat angerufen | acc | person | person kin | P
invite/invited/inviting | ein+laden/lädt/hat eingeladen | acc | person | person kin | -
pick up/picked up/picking up | ab+holen/holt/hat abgeholt | acc | person | person kin | P V
look at/looked at/looking at | an+sehen/sieht/hat angesehen | acc | person | person picture text | -
find/found/finding | finden/findet/hat gefunden | acc | person | thing text clothes | P N
look for/looked for/looking for | suchen/sucht/hat gesucht | acc | person | person thing animal | P
lose/lost/losing | verlieren/verliert/hat verloren | acc | person | thing | P N
need/needed/needing | brauchen/braucht/hat gebraucht | acc | person | thing clothes vehicle | S
buy/bought/buying | kaufen/kauft/hat gekauft | acc | person | book thing clothes food drink | P F
sell/sold/selling | verkaufen/verkauft/hat verkauft | acc | person | thing clothes vehicle | P
order/ordered/ordering | bestellen/bestellt/hat bestellt | acc | person | food drink | P F
eat/ate/eating | essen/isst/hat gegessen | acc | person | food | P W
drink/drank/drinking | trinken/trinkt/hat getrunken | acc | person | drink | P W
cook/cooked/cooking | kochen/kocht/hat gekocht | acc | person | dish | P F
bake/baked/baking | backen/backt/hat gebacken | acc | person | cake | F
read/read/reading | lesen/liest/hat gelesen | acc | person | text tale | P
write/wrote/writing | schreiben/schreibt/hat geschrieben | acc | person | letter | P F
clean/cleaned/cleaning | putzen/putzt/hat geputzt | acc | person | window room | -
wash/washed/washing | waschen/wäscht/hat gewaschen | acc | person | clothes vehicle vessel | -
repair/repaired/repairing | reparieren/repariert/hat repariert | acc | person | vehicle door | -
open/opened/opening | auf+machen/macht/hat aufgemacht | acc | person | door letter bottle | -
close/closed/closing | zu+machen/macht/hat zugemacht | acc | person | door | -
tidy up/tidied up/tidying up | auf+räumen/räumt/hat aufgeräumt | acc | person | room | V
try on/tried on/trying on | an+probieren/probiert/hat anprobiert | acc | person | clothes | V
throw away/threw away/throwing away | weg+werfen/wirft/hat weggeworfen | acc | person \
| text thing | V
wear/wore/wearing | tragen/trägt/hat getragen | acc | person | clothes | P
feed/fed/feeding | füttern/füttert/hat gefüttert | acc | person | animal | P
help/helped/helping | helfen/hilft/hat geholfen | dat | person | person kin | P
thank/thanked/thanking | danken/dankt/hat gedankt | dat | person | person kin | -
answer/answered/answering | antworten/antwortet/hat geantwortet | dat | person | person kin | -
follow/followed/following | folgen/folgt/ist gefolgt | dat | person animal | person kin | -
listen to/listened to/listening to | zu+hören/hört/hat zugehört | dat | person | person kin | P
trust/trusted/trusting | vertrauen/vertraut/hat vertraut | dat | person | person kin | S
give/gave/giving | geben/gibt/hat gegeben | dat acc | person | text thing food | -
show/showed/showing | zeigen/zeigt/hat gezeigt | dat acc | person | text thing clothes vehicle | -
send/sent/sending | schicken/schickt/hat geschickt | dat acc | person | text thing | -
bring/brought/bringing | bringen/bringt/hat gebracht | dat acc | person | food drink thing text | -
lend/lent/lending | leihen/leiht/hat geliehen | dat acc | person | book vehicle | -
tell/told/telling | erzählen/erzählt/hat erzählt | dat acc | person | tale | P
wait/waited/waiting | warten/wartet/hat gewartet | for:auf acc | person | person kin transit | P
think/thought/thinking | denken/denkt/hat gedacht | of:an acc | person | person kin | -
speak/spoke/speaking | sprechen/spricht/hat gesprochen | with:mit dat | person | person kin | P
dream/dreamt/dreaming | träumen/träumt/hat geträumt | of:von dat | person \
| person animal clothes vehicle | -
lie/lay/lying | liegen/liegt/hat gelegen | at:surface | text thing | - | -
stand/stood/standing | stehen/steht/hat gestanden | at:surface | vessel | - | -
lay/laid/laying | legen/legt/hat gelegt | on:surface | person | text thing | -
place/placed/placing | stellen/stellt/hat gestellt | on:surface | person | vessel | -
hang/hung/hanging | hängen/hängt/hat gehängt | on:wall | person | picture | -
be/-/- | sein/ist/ist gewesen | none | - | - | S
"""

# Verbs with a clause for an object: frame "that" / "whether" (dass, ob) or "zu" (an infinitive).
_CLAUSAL_VERBS = """
say/said/saying | sagen/sagt/hat gesagt | that
believe/believed/believing | glauben/glaubt/hat geglaubt | that
hope/hoped/hoping | hoffen/hofft/hat gehofft | that
know/knew/knowing | wissen/weiß/hat gewusst | that
tell/told/telling | erzählen/erzählt/hat erzählt | that dat
ask/asked/asking | fragen/fragt/hat gefragt | whether
try/tried/trying | versuchen/versucht/hat versucht | zu
forget/forgot/forgetting | vergessen/vergisst/hat vergessen | zu
begin/began/beginning | an+fangen/fängt/hat angefangen | zu
promise/promised/promising | versprechen/verspricht/hat versprochen | zu
"""

# English | German | the times they go with: habit, now, past, future. "mid": stands beside the
# English verb ("often reads").
_TIMES = """
every day | jeden Tag | habit
every morning | jeden Morgen | habit
every evening | jeden Abend | habit
on Sundays | sonntags | habit
in summer | im Sommer | habit
often | oft | habit past mid
always | immer | habit mid
sometimes | manchmal | habit past mid
now | jetzt | now
today | heute | now future
at the moment | im Moment | now
yesterday | gestern | past
yesterday evening | gestern Abend | past
this morning | heute Morgen | past
last week | letzte Woche | past
two days ago | vor zwei Tagen | past
on Monday | am Montag | past future
on Friday | am Freitag | past future
in the afternoon | am Nachmittag | past future
tomorrow | morgen | future
tomorrow morning | morgen früh | future
tonight | heute Abend | future
next week | nächste Woche | future
"""

# English for I, he, we | its plain form where it needs "do" | German for ich, er, wir | time
_MODALS = """
can/can/can | - | kann/kann/können | future
must/must/must | - | muss/muss/müssen | future
should/should/should | - | sollte/sollte/sollten | future
will/will/will | - | werde/wird/werden | future
want to/wants to/want to | want to | will/will/wollen | future
would like to/would like to/would like to | - | möchte/möchte/möchten | future
am allowed to/is allowed to/are allowed to | - | darf/darf/dürfen | future
could/could/could | - | konnte/konnte/konnten | past
had to/had to/had to | have to | musste/musste/mussten | past
wanted to/wanted to/wanted to | want to | wollte/wollte/wollten | past
"""

# English subject/object form | German nominative/accusative/dative | person
_PRONOUNS = """
I/me | ich/mich/mir | 0
he/him | er/ihn/ihm | 1
she/her | sie/sie/ihr | 1
we/us | wir/uns/uns | 2
they/them | sie/sie/ihnen | 2
"""

NAMES = ("Anna", "Maria", "Julia", "Laura", "Paul", "Peter", "Thomas", "Max")

# Determiner -> German stem, row of its endings ("" for none), row of the adjective's endings.
DETERMINERS = {
    "the": ("d", "definite", "definite"),
    "this": ("dies", "dieser", "definite"),
    "these": ("dies", "dieser", "definite"),
    "a": ("ein", "ein", "ein"),
    "my": ("mein", "ein", "ein"),
    "his": ("sein", "ein", "ein"),
    "her": ("ihr", "ein", "ein"),
    "our": ("unser", "ein", "ein"),
    "": ("", "", "none"),
    "two": ("zwei", "", "none"),
    "three": ("drei", "", "none"),
    "many": ("viel", "dieser", "none"),
}

# Endings in the order masculine, feminine, neuter, plural.
DETERMINER_ENDINGS = {
    "definite": {"nom": "er ie as ie", "acc": "en ie as ie", "dat": "em er em en"},
    "dieser": {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"},
    "ein": {"nom": "- e - e", "acc": "en e - e", "dat": "em er em en"},
}
ADJECTIVE_ENDINGS = {
    "definite": {"nom": "e e e en", "acc": "en e e en", "dat": "en en en en"},
    "ein": {"nom": "er e es en", "acc": "en e es en", "dat": "en en en en"},
    "none": {"nom": "er e es e", "acc": "en e es e", "dat": "em er em en"},
}
RELATIVE_PRONOUNS = {
    "nom": "der die das die",
    "acc": "den die das die",
    "dat": "dem der dem denen",
}
CONTRACTIONS = {
    "in dem": "im",
    "in das": "ins",
    "an dem": "am",
    "zu dem": "zum",
    "zu der": "zur",
    "von dem": "vom",
}
# ich, er, wir. The present of other verbs follows from infinitive and third person.
IRREGULAR_PRESENT = {
    "sein": ("bin", "ist", "sind"),
    "haben": ("habe", "hat", "haben"),
    "wissen": ("weiß", "weiß", "wissen"),
}


@dataclass(frozen=True)
class Noun:
    """A noun: `gender` 0, 1, 2 is der, die, das, `oblique` the singular past the nominative."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    oblique: str
    gender: int
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Adjective:
    """An adjective; `stem` is what the German endings are put to (teuer, teur-)."""

    english: str
    german: str
    stem: str
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Verb:
    """A verb with its frame; `infinitive` is without the separable `prefix`."""

    base: str
    past: str
    gerund: str
    prefix: str
    infinitive: str
    third: str
    auxiliary: str
    participle: str
    frame: str
    subjects: tuple[str, ...] = ("person",)
    objects: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Adverb:
    """A time phrase and the times ("habit", "now", "past", "future", "mid") it goes with."""

    english: str
    german: str
    times: tuple[str, ...]


@dataclass(frozen=True)
class Modal:
    """A modal, or the future's auxiliary, its forms for I/he/we; `plain` where it needs "do"."""

    english: tuple[str, ...]
    plain: str
    german: tuple[str, ...]
    time: str


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


def _forms(cell: str) -> list[str]:
    return ["" if form.strip() == "-" else form.strip() for form in cell.split("/")]


def _noun(english: str, german: str, classes: str) -> Noun:
    article, rest = german.split(" ", 1)
    singular, plural = _forms(rest)
    name = singular.rstrip("*")
    oblique = plural if singular.endswith("*") else name
    gender = ("der", "die", "das").index(article)
    one, many = _forms(english)
    return Noun(one, many, name, plural, oblique, gender, tuple(classes.split()))


def _verb(english: str, german: str, frame: str, *columns: str) -> Verb:
    infinitive, third, perfect = _forms(german)
    prefix, _, stem = infinitive.rpartition("+")
    auxiliary, participle = perfect.split()
    auxiliary = {"hat": "haben", "ist": "sein"}[auxiliary]
    classes = [tuple(word for word in column.split() if word != "-") for column in columns]
    base, past, gerund = _forms(english)
    german_forms = (prefix, stem, third, auxiliary, participle)
    return Verb(base, past, gerund, *german_forms, frame, *classes)


def _adjective(english: str, german: str, classes: str) -> Adjective:
    forms = _forms(german)
    return Adjective(english, forms[0], forms[-1], tuple(classes.split()))


NOUNS = {noun.english: noun for noun in (_noun(*row) for row in _rows(_NOUNS))}
ADJECTIVES = {adj.english: adj for adj in (_adjective(*row) for row in _rows(_ADJECTIVES))}
VERBS = {verb.base: verb for verb in (_verb(*row) for row in _rows(_VERBS))}
# Keyed by verb and frame, "know that" beside "know".
CLAUSAL_VERBS = {
    f"{verb.base} {verb.frame.split()[0]}": verb for verb in (_verb(*row) for row in _rows(_CLAUSAL_VERBS))
}
TIMES = {en: Adverb(en, de, tuple(times.split())) for en, de, times in _rows(_TIMES)}
MODALS = {
    en.split("/")[1]: Modal(tuple(_forms(en)), "" if plain == "-" else plain, tuple(_forms(de)), time)
    for en, plain, de, time in _rows(_MODALS)
}
PRONOUNS = {
    en.split("/")[0]: (tuple(_forms(en)), tuple(_forms(de)), int(person))
    for en, de, person in _rows(_PRONOUNS)
}
# Noun -> ((English, German preposition, case) for where, the same for where to).
PLACES = {}
for _name, _where, _to in _rows(_PLACES):
    _goal, _case = _forms(_to)[1].split()
    PLACES[_name] = ((*_forms(_where), "dat"), (_forms(_to)[0], _goal, _case))
# ((English, German) for where, the same for where to), in one list.
FIXED_PLACES = [(tuple(_forms(where)), tuple(_forms(to))) for where, to in _rows(_FIXED_PLACES)]
