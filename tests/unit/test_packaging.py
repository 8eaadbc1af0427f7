"""What the package says about itself, and how the set-up script decides."""

import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools
from packaging.markers import default_environment
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ("scripts/setup-venv", "scripts/demo", "scripts/test")
PYTHONS = ("3.8", "3.9", "3.10", "3.11", "3.12")
# What the set-up script needs from the system, apart from a Python.
TOOLS = ("cat", "cksum", "date", "dirname", "flock", "mkdir", "mv", "rm", "sh")


@pytest.fixture
def metadata(monkeypatch):
    """The arguments that setup.py gives to setuptools."""
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(ROOT.parent)  # setup.py must not rely on the current folder
    runpy.run_path(str(ROOT / "setup.py"))
    return given


@pytest.fixture
def checkout(tmp_path):
    """A folder with the scripts, and a PATH with the tools and no Python."""
    root = tmp_path / "check out"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    shutil.copy(ROOT / "setup.py", root)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in TOOLS:
        path = shutil.which(tool)
        if path is not None:
            (bin_folder / tool).symlink_to(path)
    return root, bin_folder


def add_python(folder, name, answer):
    """Make a stand-in for an interpreter: it gives `answer` to the script's probe."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)
    return path


def set_up(checkout, **env):
    """Run the set-up script with nothing but its tools."""
    root, bin_folder = checkout
    return subprocess.run(
        [str(root / "scripts" / "setup-venv")],
        env={"PATH": str(bin_folder), "HOME": str(root), **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=60,
    )


def applying(requirements, python):
    """Return {name: Requirement} of those that hold on this Python."""
    full = {"python_version": python, "python_full_version": f"{python}.1"}
    found = {}
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or marker.evaluate({**default_environment(), **full}):
            assert requirement.name not in found
            found[requirement.name] = requirement
    return found


def constraints():
    """Return the lines of the constraints file that are not comments."""
    lines = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_version_is_that_of_version_file(metadata):
    names = runpy.run_path(str(ROOT / "odsgd_kvstore" / "_version.py"))
    assert metadata["version"] == names["__version__"]


def test_packages_are_those_in_the_tree(metadata):
    found = setuptools.find_packages(str(ROOT), include=["odsgd_kvstore*"])
    assert sorted(metadata["packages"]) == sorted(found)


def test_mxnet_is_an_extra_only(metadata):
    names = [Requirement(text).name for text in metadata["install_requires"]]
    assert "mxnet" not in names
    assert metadata["extras_require"]["cpu"] == ["mxnet==1.9.1"]


def test_command_is_there(metadata):
    (script,) = metadata["entry_points"]["console_scripts"]
    name, module, function = re.match(r"(\S+) = (\S+):(\S+)$", script).groups()
    assert (name, function) == ("odsgd-launch", "main")
    assert (ROOT / (module.replace(".", "/") + ".py")).is_file()


@pytest.mark.parametrize("python", PYTHONS)
def test_constraints_pin_all_requirements(metadata, python):
    extras = metadata["extras_require"]
    wanted = metadata["install_requires"] + extras["cpu"] + extras["demo"]
    pins = applying(constraints(), python)
    for text in wanted + extras["test"]:
        for name, requirement in applying([text], python).items():
            (pin,) = pins[name].specifier
            assert pin.operator == "=="
            assert requirement.specifier.contains(pin.version)


@pytest.mark.parametrize("version", ["2.7", "3.7", "3.8", "3.12", "3.13"])
def test_python_requires(metadata, version):
    allowed = Requirement(f"x{metadata['python_requires']}").specifier
    assert allowed.contains(version) == (version in PYTHONS)


def test_changelog_has_an_unreleased_block():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[Unreleased\]$", text, re.MULTILINE)


@pytest.mark.parametrize("name", [*SCRIPTS, ".ci/run"])
def test_script_is_executable_and_valid(name):
    path = ROOT / name
    assert path.stat().st_mode & stat.S_IXUSR
    shell = "bash" if "bash" in path.read_text().splitlines()[0] else "sh"
    subprocess.run([shell, "-n", str(path)], check=True, timeout=30)


def test_benchmark_script_knows_nothing_of_us():
    text = (ROOT / "benchmarks" / "digits.py").read_text()
    assert "import odsgd_kvstore" not in text
    assert "-m odsgd_kvstore" not in text


def test_setup_says_what_it_found_when_no_python_fits(checkout):
    add_python(checkout[1], "python3", "echo 'no Python 3.7.16, which is too old'")
    add_python(checkout[1], "python3.11", "echo not found >&2; exit 127")
    result = set_up(checkout)
    assert result.returncode != 0
    assert "Python 3.7.16, which is too old" in result.stdout
    assert "python3.11: it does not run" in result.stdout
    assert "3.8 to 3.12" in result.stdout
    assert not (checkout[0] / ".venv").exists()


def test_setup_says_so_when_there_is_no_python(checkout):
    result = set_up(checkout)
    assert result.returncode != 0
    assert "Found: none" in result.stdout


@pytest.mark.parametrize(
    "answer, said",
    [
        ("echo 'no Python 3.13.0, which is too new'", "which is too new"),
        ("exit 1", "it does not run"),
        ("", "it does not run"),
    ],
)
def test_setup_refuses_the_python_that_was_asked_for(checkout, answer, said):
    add_python(checkout[1], "python3.11", "echo ok 3.11.7 /nowhere")
    python = add_python(checkout[0], "mine", answer)
    result = set_up(checkout, PYTHON=str(python))
    assert result.returncode != 0
    assert f"PYTHON={python}" in result.stdout
    assert said in result.stdout


def test_setup_shows_what_failed_and_starts_anew(checkout):
    bin_folder = checkout[1]
    failing = add_python(bin_folder, "failing", "echo no space left; exit 1")
    add_python(bin_folder, "python3.9", f"echo 'ok 3.9.18 {failing}'")
    for _ in range(2):  # the second time there is a half-made .venv
        result = set_up(checkout)
        assert result.returncode != 0
        assert "no space left" in result.stdout
        assert "not made by this script" not in result.stdout


def test_setup_keeps_a_foreign_venv(checkout):
    root, bin_folder = checkout
    failing = add_python(bin_folder, "failing", "exit 1")
    add_python(bin_folder, "python3.9", f"echo 'ok 3.9.18 {failing}'")
    (root / ".venv").mkdir()
    (root / ".venv" / "mine").write_text("kept")
    result = set_up(checkout)
    assert "not made by this script" in result.stdout
    (kept,) = root.glob(".venv.old-*/mine")
    assert kept.read_text() == "kept"


def test_setup_does_nothing_when_all_is_ready(checkout):
    """A stand-in for .venv/bin/python that would fail at anything but the probe."""
    root, _ = checkout
    (root / ".venv" / "bin").mkdir(parents=True)
    python = root / ".venv" / "bin" / "python"
    add_python(python.parent, "python", f"echo 'ok 3.9.18 {python}'")
    names = ("setup.py", "scripts/constraints.txt", "scripts/setup-venv")
    text = b"".join((root / name).read_bytes() for name in names)
    sums = subprocess.run(
        ["cksum"], input=text, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    stamp = root / ".venv" / "odsgd-setup"
    stamp.write_text(f"Python 3.9.18 in {os.path.realpath(root)}/.venv\n{sums}")
    result = set_up(checkout)
    assert (result.returncode, result.stdout) == (0, "")


def test_pytest_does_not_pass_over_the_tests_with_processes():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert "tests/dist/test_staleness.py::" in done.stdout, done.stdout[-2000:]
