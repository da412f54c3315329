"""install.sh refuses with one sentence before it creates files; make installs only once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import LIMIT, ROOT

pytestmark = pytest.mark.slow
BASH = shutil.which("bash") or "/bin/bash"

# A fake Python that only answers install.sh's questions.
FAKE_PYTHON = """
case "$*" in
    *version_info*) echo {version} ;;
    *ensurepip*) exit {venv_status} ;;
    *) exit 99 ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder with the files that an installation needs, and nothing installed."""
    folder = tmp_path.resolve() / "a checkout"
    folder.mkdir()
    for name in ("install.sh", "Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture
def fake_python(tmp_path):
    """fake_python(**properties): write a fake Python with these properties, and return its path."""

    def write(version="3.11.9", venv_status=0):
        path = tmp_path / "fake-python"
        path.write_text(f"#!{BASH}\n{FAKE_PYTHON.format(version=version, venv_status=venv_status)}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def tools(tmp_path):
    """A folder for PATH with the tools that install.sh calls. None of them is a compiler."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in ("sed", "awk", "df", "du"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def refusal(checkout, tools, **settings):
    """Run install.sh, which must fail, and return the one line that it writes to stderr."""
    before = sorted(path.name for path in checkout.iterdir())
    done = subprocess.run(
        [BASH, "install.sh"], cwd=checkout, env={"PATH": str(tools), **settings}, timeout=LIMIT,
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("install.sh: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(path.name for path in checkout.iterdir()) == before
    return done.stderr


def test_an_interpreter_that_does_not_run_is_named(checkout, tools):
    assert "python3.99" in refusal(checkout, tools, PYTHON="python3.99")
    message = refusal(checkout, tools)
    assert "python3" in message and "PYTHON=" in message


NO_ROOM = {"FAIRSEQ_ROPE_MIN_DISK_KB": "900000000000000"}


@pytest.mark.parametrize(
    "python, settings, values",
    [
        *(({"version": version}, {}, [version, "3.11"]) for version in ("2.7.18", "3.10.14", "3.14.0")),
        ({"venv_status": 1}, {}, ["venv", "ensurepip"]),
        ({"version": "3.13.0"}, NO_ROOM, ["900000000000 MB"]),
    ],
)
def test_missing_requirements_are_named(checkout, tools, fake_python, python, settings, values):
    """An old Python, its modules, room on the disk."""
    refused = refusal(checkout, tools, PYTHON=fake_python(**python), **settings)
    assert all(value in refused for value in values)


def install(checkout, tools, fake_python, pip_status=0, version="3.11.9", **settings):
    """Run all of install.sh, with a Python and a pip that only record their calls."""
    python = Path(fake_python(version=version))
    calls = checkout.parent / "calls"
    calls.touch()
    pip = f"""#!{BASH}
printf '%s\\n' "$*" >>'{calls}'
case "$*" in *"install"*" torch"*) exit {pip_status} ;; *constraints*|*version*) echo torch==0 ;; esac
"""
    python.write_text(python.read_text().replace("    *) exit 99 ;;", f"""    *_base_executable*) echo "$0" ;;
    "-m venv .venv") env >>'{calls}'; mkdir -p .venv/bin; cat >.venv/bin/python <<'END'
{pip}END
        chmod +x .venv/bin/python; echo "$*" >>'{calls}' ;;
    *) exit 99 ;;"""))  # fmt: skip
    for tool in ("env", "mv", "rm", "mkdir", "cat", "chmod", "touch"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(shutil.which(tool))
    environment = {"PATH": str(tools), "PYTHON": str(python), "FAIRSEQ_ROPE_MIN_DISK_KB": "1", **settings}
    calls.write_text("")
    done = subprocess.run(
        [BASH, "install.sh"], cwd=checkout, env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    return done, calls.read_text().splitlines()


def test_a_complete_installation_is_reused_and_a_failed_one_starts_over(checkout, tools, fake_python):
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


def test_a_failed_update_goes_on_in_place_with_the_same_settings(checkout, tools, fake_python):
    """pip has no network, for example; the environment that worked before must not be lost."""
    install(checkout, tools, fake_python, TORCH="torch==2.13.0+cpu")
    pip = checkout / ".venv" / "bin" / "python"
    for before, status, more in ((0, 1, {"TORCH": "torch==9.9"}), (1, 0, {})):
        pip.write_text(pip.read_text().replace(f"exit {before}", f"exit {status}"))
        done, calls = install(checkout, tools, fake_python, **more)
        assert done.returncode == status and "-m venv .venv" not in calls
        wanted = more.get("TORCH", "torch==2.13.0+cpu")  # not that of the update that failed
        assert any(f" {wanted} " in call for call in calls)
    assert "torch torch==2.13.0+cpu" in (checkout / ".venv" / ".installed").read_text().splitlines()


def test_an_installation_that_does_not_work_or_of_another_python_starts_over(checkout, tools, fake_python):
    install(checkout, tools, fake_python)
    program = checkout / ".venv" / "bin" / "python"
    program.write_text(program.read_text().replace('case "$*" in', 'case "$*" in *fairseq_rope.plugin*) exit 1 ;;'))
    done, _ = install(checkout, tools, fake_python)
    assert done.returncode == 1 and done.stderr.startswith("install.sh: the installed packages do not work: ")
    assert "-m venv .venv" in install(checkout, tools, fake_python)[1]
    assert "-m venv .venv" in install(checkout, tools, fake_python, version="3.12.1")[1]


def test_an_environment_that_install_did_not_make_is_refused_and_kept(checkout, tools, fake_python):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    done, calls = install(checkout, tools, fake_python)
    assert done.returncode == 1 and calls == [] and (checkout / ".venv" / "bin").exists()
    assert done.stderr.startswith(f"install.sh: {checkout}/.venv ")


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def planned(checkout, *settings):
    """The commands that `make test` would run."""
    names = [name for name in os.environ if name not in ("PYTHON", "TORCH") and not name.startswith("MAKE")]
    command, environment = ["make", "-n", "test", *settings], {name: os.environ[name] for name in names}
    return subprocess.check_output(command, cwd=checkout, env=environment, text=True, timeout=LIMIT)


@pytest.fixture
def installed(checkout):
    """The checkout with the stamp of an installation."""
    (checkout / ".venv").mkdir()
    stamp = checkout / ".venv" / ".installed"
    stamp.write_text(f"folder {checkout}\npython python3\ntorch \n")
    return checkout


@needs_make
def test_make_runs_the_tests_without_installing_again(installed):
    plan = planned(installed, "PYTHON=python3").replace(str(installed), "")
    assert "pytest" in plan and "install" not in plan and "pip" not in plan


@needs_make
@pytest.mark.parametrize(
    "changed", ["install.sh", "pyproject.toml", "PYTHON=python3.99", "TORCH=torch==2.13.0+cpu", "folder"]
)
def test_make_installs_again_when_pins_settings_or_the_folder_change(installed, changed):
    settings = [changed] if "=" in changed else []
    if changed == "folder":
        installed = installed.rename(installed.with_name("moved"))
    elif not settings:
        later = (installed / ".venv" / ".installed").stat().st_mtime + 10
        os.utime(installed / changed, (later, later))
    assert "install.sh" in planned(installed, *settings)


@needs_make
def test_only_distclean_removes_the_installation_and_trained_models(checkout):
    caches = [".ruff_cache/x", "build/lib/x", "recipes/demo/__pycache__/x.pyc"]
    preserved = [".venv/lib/__pycache__/x.pyc", "recipes/demo/work/average-rope-seed1/averaged.pt"]
    data = "recipes/demo/data/train.en"
    for name in (*caches, *preserved, data):
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).touch()
    subprocess.run(["make", "clean"], cwd=checkout, check=True, capture_output=True, timeout=LIMIT)
    assert not any((checkout / name).parent.exists() for name in caches)
    assert all((checkout / name).exists() for name in (*preserved, data))
    subprocess.run(["make", "distclean"], cwd=checkout, check=True, capture_output=True, timeout=LIMIT)
    assert not (checkout / ".venv").exists() and not (checkout / "recipes/demo/work").exists()
    assert (checkout / data).exists() and (checkout / "Makefile").exists()
