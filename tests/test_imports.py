"""Imports: every arrow points down the list of docs/design.md, and there is no circle."""

import ast
import gc
import re
from graphlib import TopologicalSorter

import pytest

from tests.commands import ROOT

PACKAGES = ("fairseq_rope", "recipes")


def module_of(path):
    """Return the dotted name of the module in the file *path*."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {package: {module_of(path): path for path in (ROOT / package).rglob("*.py")} for package in PACKAGES}


def imported_by(modules, module, local):
    """Return those of *modules* that *module* imports; with *local*, also inside of functions."""
    path = modules[module]
    gc.disable()  # in Python 3.11, ast.parse fails if an object that is collected meanwhile raises an error
    try:
        tree = ast.parse(path.read_text())
    finally:
        gc.enable()
    inside = set()
    if not local:
        functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        inside = {child for function in functions for child in ast.walk(function)}
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    imported = set()
    for node in ast.walk(tree):
        if node in inside:
            continue
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                imported |= {name} & modules.keys() or {base} & modules.keys()
    return imported - {module, *PACKAGES}


def rows(package):
    """Return the row of each room in the table of docs/design.md, from 0 at the top."""
    section = (ROOT / "docs" / "design.md").read_text().partition(f"| `{package}/` |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in section.splitlines()[2:]]
    return {name: row for row, cell in enumerate(cells) for name in re.findall(r"`(\w+)(?:\.py|/)`", cell)}


def room_of(module):
    return (module.split(".") + ["__init__"])[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_is_in_the_table(package):
    settings = {path.parent.name for path in (ROOT / package).glob("*/*.yaml")}
    assert {room_of(module) for module in PATHS[package]} | settings == rows(package).keys()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_from_a_row_above_its_own(package):
    row, modules = rows(package), PATHS[package]
    up = set()
    for module in modules.keys() - {package}:
        others = imported_by(modules, module, local=True)
        up |= {f"{module} -> {other}" for other in others if row[room_of(other)] < row[room_of(module)]}
    assert not up


@pytest.mark.parametrize("package", PACKAGES)
def test_there_is_no_circle_of_imports(package):
    modules = PATHS[package]
    graph = {module: imported_by(modules, module, local=False) for module in modules.keys() - {package}}
    assert list(TopologicalSorter(graph).static_order())
