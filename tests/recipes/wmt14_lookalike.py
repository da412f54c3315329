"""Make small tarballs like WMT14's five, with sentences in two invented languages, and their manifest."""

import gzip
import hashlib
import html
import io
import random
import tarfile
from pathlib import Path
from typing import NamedTuple

TRAINING = {
    "training-parallel-europarl-v7.tgz": "training/europarl-v7.de-en.{lang}",
    "training-parallel-commoncrawl.tgz": "commoncrawl.de-en.{lang}",
    "training-parallel-nc-v9.tgz": "training/news-commentary-v9.de-en.{lang}",
}
VALID = {"dev.tgz": "dev/newstest2013.{lang}"}
TEST = {"test-full.tgz": "test-full/newstest2014-deen-{side}.{lang}.sgm"}
SIDES = {"en": "src", "de": "ref"}

# Functions that turn a clean pair (English, German) into a dirty one. Every training corpus has each kind once.
DIRT = {
    "empty source": lambda en, de: ("", de),
    "empty target": lambda en, de: (en, ""),
    "blank source": lambda en, de: (" \u00a0 ", de),
    "CR": lambda en, de: (en.replace(" ", "\r", 1), de + "\r"),
    "NEL": lambda en, de: (en.replace(" ", " \u0085", 1), de),
    "U+2028": lambda en, de: (en, de.replace(" ", "\u2028", 1)),
    "zero-width space": lambda en, de: (en.replace(" ", "\u200b ", 1), de),
    "300 words": lambda en, de: (" ".join((en.split() * 300)[:300]), " ".join((de.split() * 300)[:300])),
    "12:1": lambda en, de: (" ".join((en.split() * 36)[:36]), " ".join((de.split() * 3)[:3])),
}

_STEMS = tuple("ba cor del fi gran hum jo kel lin mo nar pe rut sil ton wa".split())
_ENDINGS = (("s", "en"), ("ing", "ung"), ("er", "ür"), ("ly", "lich"), ("", "ß"))


class Lookalike(NamedTuple):
    """The pairs (English, German) that write_lookalike() wrote into *folder*, in the order of the corpora."""

    folder: Path
    train: list[tuple[str, str]]
    valid: list[tuple[str, str]]
    test: list[tuple[str, str]]
    dirty: dict[str, list[int]]  # positions in train by kind of DIRT

    def templates(self, corpora):
        """ARCHIVE:MEMBER for each of TRAINING, VALID or TEST."""
        return [f"{self.folder / archive}:{member}" for archive, member in corpora.items()]


def write_lookalike(folder, pairs, seed=1):
    """Write five tarballs and manifest.tsv into *folder*. The same seed gives the same bytes.

    The three training corpora together have *pairs* pairs, at least 90. The other two corpora have 20 clean pairs each.
    """
    rng = random.Random(seed)
    words = _words(rng)
    folder.mkdir(parents=True, exist_ok=True)
    train, dirty, manifest = [], {kind: [] for kind in DIRT}, ["file\tbytes\tchecksum\turl"]
    archives = {}
    for number, (archive, member) in enumerate(TRAINING.items()):
        share = pairs * (number + 1) // len(TRAINING) - pairs * number // len(TRAINING)
        corpus = [_pair(rng, words) for _ in range(share)]
        for kind, at in zip(DIRT, sorted(rng.sample(range(share), len(DIRT))), strict=True):
            corpus[at] = DIRT[kind](*corpus[at])
            dirty[kind].append(len(train) + at)
        train += corpus
        archives[archive] = {member: corpus}
    valid, test = ([_pair(rng, words) for _ in range(20)] for _ in range(2))
    archives |= {name: {member: valid} for name, member in VALID.items()}
    archives |= {name: {member: test} for name, member in TEST.items()}
    for archive, members in archives.items():
        content = tarball(
            {
                member.format(lang=lang, side=side): sgm(_in_documents(corpus), column, lang) if ".sgm" in member
                else "".join(pair[column] + "\n" for pair in corpus).encode()
                for member, corpus in members.items()
                for column, (lang, side) in enumerate(SIDES.items())
            }
        )  # fmt: skip
        (folder / archive).write_bytes(content)
        checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        manifest.append(f"{archive}\t{len(content)}\t{checksum}\thttp://127.0.0.1:9/{archive}")
    (folder / "manifest.tsv").write_text("\n".join(manifest) + "\n")
    return Lookalike(folder, train, valid, test, dirty)


def tarball(members):
    """The bytes of a .tgz of *members*: contents by name, or None by TarInfo (a link, a device)."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for member, content in members.items():
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(content or b"")
            archive.addfile(info, io.BytesIO(content or b""))
    return buffer.getvalue()


def _words(rng):
    """Pairs of a word and its translation, the most frequent first."""
    words = {}  # English: German
    while len(words) < 400:
        stem = "".join(rng.choice(_STEMS) for _ in range(rng.randint(1, 3)))
        english, german = rng.choice(_ENDINGS)
        words[stem + english] = stem.translate(str.maketrans("ou", "öü")) + german
    return list(words.items())


def _pair(rng, words):
    drawn = [words[int(len(words) ** rng.random()) - 1] for _ in range(rng.randint(4, 22))]
    columns = [list(column) for column in zip(*drawn, strict=True)]
    quoted = rng.randrange(len(drawn)) if rng.random() < 0.2 else None
    end = rng.choice([".", ".", "?", "!"])
    comma = rng.randrange(len(drawn) - 1)
    sentences = []
    joint = rng.choice([" ", " ", " ", " ", " ", " ", " & ", "-"])
    for column, (opening, closing) in zip(columns, ['""', "„“"], strict=True):
        column[0] = column[0].capitalize()
        if quoted is not None:
            column[quoted] = opening + column[quoted] + closing
        column[comma] += ","
        sentences.append(" ".join(column).replace(" ", joint, 1) + end)
    return tuple(sentences)


def _in_documents(corpus):
    return [corpus[start : start + 7] for start in range(0, len(corpus), 7)]


def sgm(documents, column, lang):
    """The SGM file of one side of *documents*, which are lists of pairs, as in newstest2014."""
    name = "refset" if lang == "de" else "srcset"
    lines = [f'<{name} setid="newstest2014" srclang="any" trglang="{lang}">']
    for name_of_document, document in enumerate(documents):
        lines += [f'<doc docid="{name_of_document}" genre="news" origlang="en">', "<p>"]
        for number, pair in enumerate(document, 1):
            lines.append(f'<seg id="{number}">{html.escape(pair[column], quote=False)}</seg>')
        lines += ["</p>", "</doc>"]
    return "\n".join([*lines, f"</{name}>", ""]).encode()
