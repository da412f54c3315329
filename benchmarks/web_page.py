"""Lines a second through LibreTranslate's API, beside ``fairseq-rope translate`` with the same model.

    python -m benchmarks.web_page --work recipes/demo/work --programs lt

``--work`` is the work folder of a recipe that was exported (``--until export``), and ``--programs`` an environment with
LibreTranslate and spacy (docs/serving.md, "A web page"). The lines are those of the validation set. LibreTranslate runs
with its default settings, and with those that the docs recommend for a server.
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.alternating import build_parser, in_turns, report
from fairseq_rope.serving.ctranslate2_search import available_cores
from fairseq_rope.serving.translator import Translator
from fairseq_rope.tools import package

CORES = available_cores()
SERVER = {"ARGOS_BATCH_SIZE": "512", "ARGOS_INTER_THREADS": str(CORES), "ARGOS_INTRA_THREADS": "1"}
SENTENCE = "Click this button to open the dialog."


def install_package(served: Path, data: Path, folder: Path, programs: Path) -> dict[str, str]:
    """Make a package of the exported model *served*, in *folder*. Returns the environment variables of the programs.

    *programs* is the bin folder of their environment. They need no network, since spacy splits sentences.
    """
    flags = ["--model", served, "--data", data, "--output", folder / "packages", "--force"]
    package.main(list(map(str, flags)))
    (installed,) = (folder / "packages").glob("translate-*/")
    blank = f"import spacy; spacy.blank('en').to_disk({str(installed / 'spacy')!r})"
    subprocess.run([programs / "python", "-c", blank], check=True)
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{name: str(folder / name) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")},
        "ARGOS_PACKAGES_DIR": str(folder / "packages"),
        "ARGOS_PACKAGE_INDEX": f"file://{folder}/packages/",
        "ARGOS_CHUNK_TYPE": "SPACY",
    }


@contextlib.contextmanager
def serving(folder: Path, variables: dict[str, str], programs: Path) -> Iterator[str]:
    """Run LibreTranslate with the packages in *folder*, and yield its address."""
    address = f"http://127.0.0.1:{free_port()}"
    words = [programs / "libretranslate", "--load-only", "en,de", "--port", address.rpartition(":")[2]]
    with (
        open(folder / "log", "w") as log,
        subprocess.Popen(words, cwd=folder, env=variables, stdout=log, stderr=log) as program,
    ):
        try:
            if not answers(f"{address}/languages"):
                raise RuntimeError((folder / "log").read_text()[-3000:])
            yield address
        finally:
            program.terminate()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def answers(url: str) -> bool:
    """Wait up to two minutes until *url* answers."""
    for _ in range(240):
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(url).close()
            return True
        time.sleep(0.5)
    return False


def post(url: str, data: Any, kind: str = "application/json") -> Any:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": kind})) as answer:
        return json.load(answer)


def translated(address: str, text: Any) -> Any:
    """The translations of *text*, a line or a list of lines."""
    return post(f"{address}/translate", {"q": text, "source": "en", "target": "de"})["translatedText"]


def line_by_line(translate: Callable[[str], Any], lines: list[str], clients: int) -> None:
    """Translate *lines* one by one, by so many *clients* at once."""
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(translate, lines))


def main() -> None:
    parser = build_parser("web_page", __doc__, rounds=3)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="work folder of an exported recipe")
    parser.add_argument("--programs", type=Path, required=True, metavar="DIR", help="environment with LibreTranslate")
    parser.add_argument("--lines", type=int, default=100, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    programs, work = args.programs.resolve() / "bin", args.work.resolve()
    served = work / "exported"
    if not served.is_dir():
        parser.error(f"--work {args.work}: has no exported model; run its recipe with --until export")
    lines = next(work.glob("text-valid-*/text.en")).read_text(encoding="utf-8").splitlines()[: args.lines]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        variables = install_package(served, work / "data-bin", folder, programs)
        subjects: dict[str, Callable[[], object]] = {}
        for name, settings in (("default settings", {}), ("settings of a server", SERVER)):
            api = partial(translated, stack.enter_context(serving(folder, {**variables, **settings}, programs)))
            subjects[f"{name}: a request with one paragraph"] = partial(api, " ".join(lines))
            for clients in (1, 4):
                subjects[f"{name}: {clients} clients, a line a request"] = partial(line_by_line, api, lines, clients)
        translator = stack.enter_context(Translator(str(served)))
        subjects["fairseq-rope translate: all lines"] = partial(translator.translate, lines)
        subjects["fairseq-rope translate: line by line"] = partial(line_by_line, translator.translate, lines, 1)
        seconds = in_turns(subjects, args.rounds)
    rows = [{"": name, "lines/s": len(lines) / statistics.median(took)} for name, took in seconds.items()]
    report(f"web page, {len(lines)} lines, {CORES} cores", rows, args.json)


if __name__ == "__main__":
    main()
