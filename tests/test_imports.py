"""Imports: every arrow points down the list of docs/design.md, there is no circle, and no test module is imported."""

import ast
import re
from graphlib import TopologicalSorter

from tests.commands import PLUGIN, ROOT

PACKAGE = "fairseq_rope"


def module_of(path):
    """Return the dotted name of the module in the file *path*."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in PLUGIN.rglob("*.py")}


def imported_by(module, local):
    """Return the modules of the package that *module* imports; with *local*, also inside of functions."""
    path = MODULES[module]
    tree = ast.parse(path.read_text())
    inside = set()
    if not local:
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        inside = {child for function in functions for child in ast.walk(function)}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(tree):
        if node in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found |= {name} & MODULES.keys() or {base} & MODULES.keys()
    return found - {module}


def rows():
    """Return the row of each room in the table of docs/design.md, from 0 at the top."""
    section = (ROOT / "docs" / "design.md").read_text().partition("| `fairseq_rope/` |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in section.splitlines()[2:]]
    return {name: row for row, cell in enumerate(cells) for name in re.findall(r"`(\w+)(?:\.py|/)`", cell)}


def room_of(module):
    return (module.split(".") + ["__init__"])[1]


def test_every_room_is_in_the_table():
    assert {room_of(module) for module in MODULES} == rows().keys()


def test_no_module_imports_from_a_row_above_its_own():
    row, up = rows(), set()
    for module in MODULES.keys() - {PACKAGE}:
        others = imported_by(module, local=True) - {PACKAGE}
        up |= {f"{module} -> {other}" for other in others if row[room_of(other)] < row[room_of(module)]}
    assert not up


def test_there_is_no_circle_of_imports():
    graph = {module: imported_by(module, local=False) - {PACKAGE} for module in MODULES.keys() - {PACKAGE}}
    assert list(TopologicalSorter(graph).static_order())


def imported_tests(path, tests):
    """Return the names of the test modules *tests* in the imports of the file *path*, also inside of functions."""
    words = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            words |= {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
    return tests & {part for word in words for part in word.split(".")}


def test_no_test_module_is_imported(no_garbage):
    """What several test modules use is in a module named after its subject, for example tests/searches.py."""
    paths = sorted((ROOT / "tests").rglob("*.py"))
    tests = {path.stem for path in paths if path.name.startswith("test_")}
    imports = {str(path.relative_to(ROOT)): imported_tests(path, tests) for path in paths}
    assert {path: names for path, names in imports.items() if names} == {}
