"""Python, NumPy, MXNet and the role of a process, each wrong in turn."""

import glob
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from odsgd_kvstore import environment
from odsgd_kvstore.errors import EnvironmentNotSupported

ROOT = Path(environment.__file__).absolute().parents[1]
LIMIT_S = 120
OTHER_PYTHONS = sorted(
    path
    for version in ("3.6", "3.7", "3.13", "3.14")
    for path in glob.glob(
        os.path.expanduser(f"~/.pyenv/versions/{version}.*/bin/python")
    )
)


def run(*args, python=sys.executable, path=(), **env):
    """A Python with this package on its path; (exit code, output, errors)."""
    env.setdefault("PATH", os.environ.get("PATH", os.defpath))
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *map(str, path)])
    done = subprocess.run(
        [python, *args],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout, done.stderr


def failed(parts, *args, **kwargs):
    """The process fails with each of `parts` in the last lines of its errors."""
    code, _, errors = run(*args, **kwargs)
    missing = [part for part in parts if part not in errors]
    assert code != 0 and not missing, f"exit {code}, {missing} not in: {errors}"


@pytest.fixture
def only_click(tmp_path):
    """A folder for PYTHONPATH with click alone; with -S nothing else is installed."""
    spec = importlib.util.find_spec("click")
    (tmp_path / "click").symlink_to(os.path.dirname(spec.origin))
    return tmp_path


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 7, 9), (3, 13, 0), (4, 0, 0)])
def test_python_outside_the_range_is_refused(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(EnvironmentNotSupported) as caught:
        environment.check_python()
    text = str(caught.value)
    assert f"This is Python {version[0]}.{version[1]};" in text
    assert "3.8 to 3.12" in text and "Make a virtual environment" in text


@pytest.mark.parametrize("version", [(3, 8, 0), (3, 10, 3), (3, 12, 9)])
def test_python_inside_the_range_is_allowed(monkeypatch, version):
    monkeypatch.setattr(sys, "version_info", version)
    assert environment.check_python() is None


@pytest.mark.skipif(not OTHER_PYTHONS, reason="no Python out of the range in ~/.pyenv")
@pytest.mark.parametrize("python", OTHER_PYTHONS)
@pytest.mark.parametrize(
    "args",
    [
        ("-c", "import odsgd_kvstore"),
        ("-m", "odsgd_kvstore.launch", "--help"),
        (str(ROOT / "scripts" / "launch.py"), "--help"),
    ],
)
def test_real_python_outside_the_range_gets_the_message(python, args):
    failed(
        ["EnvironmentNotSupported: This is Python 3.", "3.8 to 3.12"],
        *args,
        python=python,
    )


def test_missing_mxnet_names_the_extras(only_click):
    parts = [
        "EnvironmentNotSupported: MXNet is not installed",
        "odsgd-kvstore[cpu]",
        "mxnet-cu112",
        "gluoncv, demo, test",
    ]
    failed(parts, "-S", "-c", "import odsgd_kvstore", path=[only_click])


@pytest.mark.parametrize(
    "start",
    [("-m", "odsgd_kvstore.launch"), (str(ROOT / "scripts" / "launch.py"),)],
    ids=["module", "script"],
)
def test_launcher_works_without_mxnet(only_click, start):
    code, out, errors = run("-S", *start, "--help", path=[only_click])
    assert (code, errors) == (0, "") and "Usage: odsgd-launch" in out
    job = ("-n", "2", "-s", "1", "--dry-run", "python", "train.py")
    code, out, errors = run("-S", *start, *job, path=[only_click])
    assert (code, errors) == (0, "") and "worker 1: python train.py" in out


@pytest.mark.parametrize(
    "start",
    [("-m", "odsgd_kvstore.launch"), (str(ROOT / "scripts" / "launch.py"),)],
    ids=["module", "script"],
)
def test_launcher_without_mxnet_starts_nothing_and_says_why(only_click, start):
    parts = ["MXNet is not installed in", "odsgd-kvstore[cpu]"]
    failed(parts, "-S", *start, "-n", "1", "python", "-c", "", path=[only_click])


def test_numpy_2_is_refused_before_mxnet_is_imported(tmp_path):
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("__version__ = '2.0.0'\n")
    parts = [
        "EnvironmentNotSupported: This is NumPy 2.0.0",
        "'numpy<1.24'",
        "'numpy>=1.26,<2'",
    ]
    failed(parts, "-c", "import odsgd_kvstore", path=[tmp_path])


def test_broken_numpy_is_named_with_its_cause(tmp_path):
    (tmp_path / "numpy.py").write_text("raise ImportError('no BLAS here')\n")
    parts = ["NumPy cannot be imported (no BLAS here)", "pip install 'numpy<1.24'"]
    failed(parts, "-c", "import odsgd_kvstore", path=[tmp_path])


@pytest.mark.parametrize("has_alias", [True, False])
def test_alias_that_mxnet_needs_is_made_where_it_is_missing(monkeypatch, has_alias):
    fake = types.ModuleType("numpy")
    fake.__version__ = "1.26.4"
    if has_alias:
        fake.bool = "there"
    monkeypatch.setitem(sys.modules, "numpy", fake)
    monkeypatch.delitem(sys.modules, "mxnet", raising=False)
    environment.prepare()
    assert fake.bool == ("there" if has_alias else bool)


@pytest.mark.parametrize(
    "role, has_mxnet, takes",
    [
        ("server", False, True),
        ("scheduler", False, True),
        ("worker", False, False),
        (None, False, False),
        ("server", True, False),
    ],
)
def test_role_is_taken_only_before_mxnet(monkeypatch, role, has_mxnet, takes):
    if role:
        os.environ["DMLC_ROLE"] = role
    if not has_mxnet:
        monkeypatch.delitem(sys.modules, "mxnet", raising=False)
    assert environment.takes_server_role() is takes


@pytest.mark.parametrize(
    "role, mxnet, serves",
    [
        ("server", types.SimpleNamespace(), True),  # half imported
        ("server", types.SimpleNamespace(kv=1), False),
        ("server", None, False),
        ("worker", types.SimpleNamespace(), False),
    ],
)
def test_stock_server_is_known_by_its_half_imported_mxnet(
    monkeypatch, role, mxnet, serves
):
    os.environ["DMLC_ROLE"] = role
    monkeypatch.setitem(sys.modules, "mxnet", mxnet)
    if mxnet is None:
        monkeypatch.delitem(sys.modules, "mxnet")
    assert environment.is_inside_stock_server() is serves


def test_role_is_there_again_after_mxnet_was_imported():
    os.environ["DMLC_ROLE"] = "server"
    environment.import_mxnet_without_role()
    assert os.environ["DMLC_ROLE"] == "server"


def test_unknown_role_is_refused_before_mxnet_takes_it():
    role = "foo"
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "9",
        "DMLC_LOCAL": "1",
        "DMLC_NUM_WORKER": "1",
        "DMLC_NUM_SERVER": "1",
    }
    code = (
        "import signal; signal.alarm(20)\n"  # Without the check MXNet waits for ever.
        "import odsgd_kvstore"
    )
    failed(
        [f"DMLC_ROLE is {role!r}", "worker, server, scheduler", "odsgd-launch"],
        "-c",
        code,
        DMLC_ROLE=role,
        **job,
    )


@pytest.mark.parametrize("role", ["server", "worker"])
def test_missing_variables_end_a_role_with_their_names(role):
    code = "import odsgd_kvstore, mxnet; mxnet.kv.create('dist_odsgd')"
    parts = [
        "ConfigError",
        "DMLC_PS_ROOT_URI",
        "DMLC_NUM_SERVER not set",
        "odsgd-launch",
    ]
    failed(parts, "-c", code, DMLC_ROLE=role)


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_malformed_variable_ends_a_role_with_its_name(role):
    job = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": "9",
        "DMLC_LOCAL": "1",
        "DMLC_NUM_WORKER": "two",
        "DMLC_NUM_SERVER": "1",
    }
    code = "import odsgd_kvstore, mxnet; mxnet.kv.create('dist_odsgd')"
    failed(
        ["ConfigError: DMLC_NUM_WORKER is 'two'", "whole number"],
        "-c",
        code,
        DMLC_ROLE=role,
        **job,
    )


def test_script_of_the_user_s_named_like_the_launcher_is_not_the_launcher(tmp_path):
    script = tmp_path / "launch.py"
    script.write_text("import odsgd_kvstore\nprint(odsgd_kvstore.Trainer.__name__)\n")
    assert run(str(script))[:2] == (0, "Trainer\n")


def test_launcher_is_recognised_behind_options_of_python(only_click):
    script = str(ROOT / "scripts" / "launch.py")
    options = ["-S", "-u", "-W", "error", "-X", "utf8"]
    assert run(*options, script, "--version", path=[only_click])[0] == 0
