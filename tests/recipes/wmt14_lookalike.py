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
DIRT = (
    lambda en, de: ("", de),
    lambda en, de: (" \u00a0 ", de),
    lambda en, de: (en.replace(" ", "\r", 1), de + "\r"),
    lambda en, de: (en.replace(" ", " \u0085", 1), de.replace(" ", "\u2028", 1)),
    lambda en, de: (en.replace(" ", "\u200b ", 1), de),
    lambda en, de: (" ".join((en.split() * 300)[:300]), " ".join((de.split() * 300)[:300])),
    lambda en, de: (" ".join((en.split() * 36)[:36]), " ".join((de.split() * 3)[:3])),
)

_STEMS = tuple("ba cor del fi gran hum jo kel lin mo nar pe rut sil ton wa".split())
_ENDINGS = (("s", "en"), ("ing", "ung"), ("er", "ür"), ("ly", "lich"), ("", "ß"))


class Lookalike(NamedTuple):
    """The pairs (English, German) that write_lookalike() wrote into *folder*, in the order of the corpora."""

    folder: Path
    train: list[tuple[str, str]]
    valid: list[tuple[str, str]]
    test: list[tuple[str, str]]

    def templates(self, corpora):
        """ARCHIVE:MEMBER for each of TRAINING, VALID or TEST."""
        return [f"{self.folder / archive}:{member}" for archive, member in corpora.items()]


def write_lookalike(folder, pairs):
    """Write five tarballs and manifest.tsv into *folder*. The three training corpora have *pairs* pairs each."""
    folder.mkdir(parents=True, exist_ok=True)
    corpora, clean = {}, clean_pairs(3 * pairs + 40)
    for number, (archive, member) in enumerate(TRAINING.items()):
        corpus = clean[pairs * number :][:pairs]
        for at, dirt in enumerate(DIRT):
            corpus[5 * at] = dirt(*corpus[5 * at])
        corpora[archive, member] = corpus
    train, valid, test = sum(corpora.values(), []), clean[-40:-20], clean[-20:]
    corpora |= {each: valid for each in VALID.items()} | {each: test for each in TEST.items()}
    manifest = ["file\tbytes\tchecksum\turl"]
    for (archive, member), corpus in corpora.items():
        members = {}
        for column, (lang, side) in enumerate(SIDES.items()):
            text = sgm(corpus, column, lang) if ".sgm" in member else "".join(pair[column] + "\n" for pair in corpus)
            members[member.format(lang=lang, side=side)] = text.encode()
        content = tarball(members)
        (folder / archive).write_bytes(content)
        checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        manifest.append(f"{archive}\t{len(content)}\t{checksum}\thttp://127.0.0.1:9/{archive}")
    (folder / "manifest.tsv").write_text("\n".join(manifest) + "\n")
    return Lookalike(folder, train, valid, test)


def tarball(members):
    """The bytes of a .tgz of *members*: contents by name, or None by TarInfo (a link, a device)."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped, tarfile.open(fileobj=zipped, mode="w") as archive:
        for member, content in members.items():
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(content or b"")
            archive.addfile(info, io.BytesIO(content or b""))
    return buffer.getvalue()


def clean_pairs(count):
    """Sentences in two invented languages. The same *count* gives the same pairs."""
    draw, words = random.Random(1), {}  # English: German, the most frequent first
    while len(words) < 400:
        stem = "".join(draw.choice(_STEMS) for _ in range(draw.randint(1, 3)))
        english, german = draw.choice(_ENDINGS)
        words[stem + english] = stem.translate(str.maketrans("ou", "öü")) + german
    known, pairs = list(words.items()), []
    for _ in range(count):
        drawn = [known[int(len(known) ** draw.random()) - 1] for _ in range(draw.randint(4, 22))]
        joint, end, comma = draw.choice([" ", " ", " ", " & ", "-"]), draw.choice(".?!"), draw.randrange(3)
        columns = [list(column) for column in zip(*drawn, strict=True)]
        for column, (opening, closing) in zip(columns, ('""', "„“"), strict=True):
            column[0] = column[0].capitalize()
            column[comma] = f"{opening}{column[comma]}{closing},"
        pairs.append(tuple(" ".join(column).replace(" ", joint, 1) + end for column in columns))
    return pairs


def sgm(corpus, column, lang):
    """The SGM file of one side of *corpus* in documents of seven pairs, as newstest2014."""
    name = "refset" if lang == "de" else "srcset"
    lines = [f'<{name} setid="newstest2014" srclang="any" trglang="{lang}">']
    for start in range(0, len(corpus), 7):
        lines += [f'<doc docid="{start}" genre="news" origlang="en">', "<p>"]
        for number, pair in enumerate(corpus[start : start + 7], 1):
            lines.append(f'<seg id="{number}">{html.escape(pair[column], quote=False)}</seg>')
        lines += ["</p>", "</doc>"]
    return "\n".join([*lines, f"</{name}>", ""])
