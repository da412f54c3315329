"""install.sh refuses in one sentence, before it makes anything; make installs only once."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASH = shutil.which("bash") or "/bin/bash"

# A Python that answers install.sh's questions as a test needs it, and can do nothing else.
FAKE_PYTHON = """#!{bash}
case "$*" in
    *version_info*) echo {version} ;;
    *ensurepip*) exit {venv_status} ;;
    *sysconfig*) echo {headers} ;;
    *) exit 99 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with what an installation starts from, and nothing installed."""
    folder = tmp_path.resolve() / "a checkout"
    folder.mkdir()
    for name in ("install.sh", "Makefile", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def fake_python(tmp_path):
    """Write a fake Python that lacks only what the keywords say; return its path."""

    def write(version="3.11.9", venv_status=0, with_headers=True):
        headers = tmp_path / "include"
        headers.mkdir(exist_ok=True)
        if with_headers:
            (headers / "Python.h").touch()
        path = tmp_path / "fake-python"
        path.write_text(FAKE_PYTHON.format(bash=BASH, version=version, venv_status=venv_status, headers=headers))
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def tools(tmp_path):
    """A folder for PATH with the few tools that install.sh calls, and no compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sed", "awk", "df", "du"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def refusal(checkout, tools, **settings):
    """Run install.sh, which has to refuse; return the one line that it writes to stderr."""
    before = sorted(path.name for path in checkout.iterdir())
    done = subprocess.run(
        [BASH, "install.sh"],
        cwd=checkout,
        env={"PATH": str(tools), **settings},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("install.sh: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(path.name for path in checkout.iterdir()) == before
    return done.stderr


def add_compiler(tools, name="c++"):
    compiler = tools / name
    compiler.write_text(f"#!{BASH}\n")
    compiler.chmod(0o755)


def test_an_interpreter_that_does_not_run_is_named(checkout, tools, tmp_path):
    assert "python3.99" in refusal(checkout, tools, PYTHON="python3.99")
    said = refusal(checkout, tools)
    assert "python3" in said and "PYTHON=" in said
    broken = tmp_path / "shim"
    broken.write_text(f"#!{BASH}\necho 'shim: not installed' >&2\nexit 127\n")
    broken.chmod(0o755)
    assert str(broken) in refusal(checkout, tools, PYTHON=str(broken))


@pytest.mark.parametrize("version", ["3.10.14", "3.8.0", "2.7.18"])
def test_an_old_python_is_refused_with_both_versions_and_the_way_out(checkout, tools, fake_python, version):
    said = refusal(checkout, tools, PYTHON=fake_python(version=version))
    assert version in said and "3.11" in said and "--user-dir" in said


@pytest.mark.parametrize(
    "lacking, said",
    [({"venv_status": 1}, "lacks the modules venv and ensurepip"), ({"with_headers": False}, "Python.h")],
)
def test_a_python_without_all_that_is_needed_is_refused(checkout, tools, fake_python, lacking, said):
    assert said in refusal(checkout, tools, PYTHON=fake_python(**lacking))


def test_a_missing_compiler_is_refused_and_one_that_was_asked_for_is_named(checkout, tools, fake_python):
    python = fake_python()
    assert "C++ compiler" in refusal(checkout, tools, PYTHON=python)
    add_compiler(tools)
    assert "icpx" in refusal(checkout, tools, PYTHON=python, CXX="icpx -O2")


@pytest.mark.parametrize("version", ["3.11.9", "3.13.0", "3.20.1"])
@pytest.mark.parametrize("settings", [{}, {"CXX": "c++ -O2"}])
def test_a_full_disk_is_refused_with_what_is_free_and_what_is_needed(checkout, tools, fake_python, settings, version):
    add_compiler(tools)
    needed = {"FAIRSEQ_ROPE_MIN_DISK_KB": "900000000000000"}
    said = refusal(checkout, tools, PYTHON=fake_python(version=version), **needed, **settings)
    assert "free" in said and "900000000000 MB" in said


def test_python_is_checked_as_it_really_is(checkout, tools):
    """The questions that the fakes answer, put to the Python that runs the tests."""
    said = refusal(checkout, tools, PYTHON=sys.executable, CXX="no-such-compiler")
    version = ".".join(str(number) for number in sys.version_info[:3])
    assert "no-such-compiler" in said or version in said


def install(checkout, tools, fake_python, pip_status=0, version="3.11.9", compiler="c++"):
    """Run all of install.sh, with a Python and a pip that only write down how they were called."""
    python = Path(fake_python(version=version))
    calls = checkout.parent / "calls"
    calls.touch()
    pip = f"""#!{BASH}
printf '%s\\n' "$*" >>'{calls}'
case "$*" in *" torch"*) exit {pip_status} ;; *constraints*|*version*) echo torch==0 ;; esac
"""
    python.write_text(python.read_text().replace("    *) exit 99 ;;", f"""    *_base_executable*) echo "$0" ;;
    "-m venv .venv") echo "CXX=$CXX" >>'{calls}'; mkdir -p .venv/bin; cat >.venv/bin/python <<'END'
{pip}END
        chmod +x .venv/bin/python; echo "$*" >>'{calls}' ;;
    *) exit 99 ;;"""))  # fmt: skip
    for tool in ("rm", "mkdir", "cat", "chmod", "touch"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool))
    add_compiler(tools, compiler)
    environment = {"PATH": str(tools), "PYTHON": str(python), "FAIRSEQ_ROPE_MIN_DISK_KB": "1"}
    environment |= {"CXX": os.environ["CXX"]} if "CXX" in os.environ else {}
    calls.write_text("")
    done = subprocess.run([BASH, "install.sh"], cwd=checkout, env=environment, capture_output=True, text=True)
    return done, calls.read_text().splitlines()


def test_a_whole_installation_is_gone_on_with_and_one_that_failed_is_started_over(checkout, tools, fake_python):
    done, calls = install(checkout, tools, fake_python, pip_status=1)
    assert done.returncode == 1 and "-m venv .venv" in calls
    stamp = checkout / ".venv" / ".installed"
    assert not stamp.exists()
    done, calls = install(checkout, tools, fake_python)
    assert done.returncode == 0, done.stderr
    assert "-m venv .venv" in calls and any("fairseq-fixed==" in call for call in calls)
    assert stamp.read_text().splitlines()[0] == f"folder {checkout}"
    done, calls = install(checkout, tools, fake_python)
    assert done.returncode == 0 and "-m venv .venv" not in calls
    assert any("fairseq-fixed==" in call for call in calls) and stamp.exists()


def test_another_version_of_the_interpreter_starts_over(checkout, tools, fake_python):
    install(checkout, tools, fake_python)
    _, calls = install(checkout, tools, fake_python, version="3.12.1")
    assert "-m venv .venv" in calls


def test_an_environment_that_somebody_else_made_is_refused_and_stays(checkout, tools, fake_python):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    done, calls = install(checkout, tools, fake_python)
    assert done.returncode == 1 and calls == [] and (checkout / ".venv" / "bin").exists()
    assert done.stderr == (
        f"install.sh: {checkout}/.venv is there and was not made by install.sh: move it away, or remove it\n"
    )


def test_the_compiler_that_is_found_is_used_unless_another_is_named(checkout, tools, fake_python, monkeypatch):
    assert "CXX=clang++" in install(checkout, tools, fake_python, compiler="clang++")[1]
    monkeypatch.setenv("CXX", str(tools / "clang++"))
    shutil.rmtree(checkout / ".venv")
    assert f"CXX={tools}/clang++" in install(checkout, tools, fake_python, compiler="clang++")[1]


def planned(checkout, *settings):
    """What `make test` would run."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHON", "TORCH") and not name.startswith("MAKE")
    }
    return subprocess.run(
        ["make", "-n", "test", *settings],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout


@pytest.fixture
def installed(checkout):
    """The checkout with the stamp of an installation."""
    (checkout / ".venv").mkdir()
    stamp = checkout / ".venv" / ".installed"
    stamp.write_text(f"folder {checkout}\npython python3\ntorch \n")
    return stamp


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@needs_make
def test_make_installs_where_nothing_is_installed(checkout):
    plan = planned(checkout)
    assert plan.index("bash install.sh") < plan.index("pytest")


@needs_make
def test_make_does_not_take_a_half_made_venv_for_an_installation(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    assert "install.sh" in planned(checkout)


@needs_make
@pytest.mark.parametrize("settings", [[], ["PYTHON=python3"]])
def test_make_goes_straight_to_the_tests_once_installed(checkout, installed, settings):
    plan = planned(checkout, *settings)
    assert "pytest" in plan and "install" not in plan.replace(str(checkout), "")
    assert "pip" not in plan.replace(str(checkout), "")


@needs_make
@pytest.mark.parametrize("changed", ["install.sh", "setup.py"])
def test_make_installs_again_when_the_pins_change(checkout, installed, changed):
    later = installed.stat().st_mtime + 10
    os.utime(checkout / changed, (later, later))
    assert "install.sh" in planned(checkout)


@needs_make
@pytest.mark.parametrize("setting", ["PYTHON=python3.99", "TORCH=torch==2.13.0+cpu"])
def test_make_installs_again_when_another_setting_is_asked_for(checkout, installed, setting):
    assert "install.sh" in planned(checkout, setting)


@needs_make
def test_make_installs_again_in_a_folder_that_was_moved(checkout, installed):
    moved = checkout.rename(checkout.with_name("moved"))
    assert "install.sh" in planned(moved)


@needs_make
def test_clean_keeps_the_installation_and_trained_models_and_distclean_does_not(checkout):
    caches = [".ruff_cache/x", "build/lib/x", "recipes/demo/__pycache__/x.pyc"]
    kept = [".venv/lib/__pycache__/x.pyc", "recipes/demo/work/transformer_rope.seed1/averaged.pt"]
    data = "recipes/demo/data/train.en"
    for name in (*caches, *kept, data):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).touch()
    subprocess.run(["make", "clean"], cwd=checkout, check=True, capture_output=True)
    assert not any((checkout / name).parent.exists() for name in caches)
    assert all((checkout / name).exists() for name in (*kept, data))
    subprocess.run(["make", "distclean"], cwd=checkout, check=True, capture_output=True)
    assert not (checkout / ".venv").exists() and not (checkout / "recipes/demo/work").exists()
    assert (checkout / data).exists() and (checkout / "Makefile").exists()
