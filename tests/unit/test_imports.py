"""Modules import only modules above them, in one fixed order (`ast`, no import)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).absolute().parents[2] / "odsgd_kvstore"
NAME = PACKAGE.name
# From the top; nobody may import what comes below.
ORDER = (
    "errors",
    "_version",
    "environment",
    "config",
    "resolve",
    "schedule",
    "process_exit",
    "layout",
    "optimizer_copy",
    "optimizer_state",
    "compression",
    "views",
    "local_rule",
    "mirrors",
    "replica",
    "delay_compensation",
    "local_update",
    "global_update",
    "keys",
    "commands",
    "status",
    "stock_server",
    "server",
    "watchdog",
    "transport",
    "native",
    "connection",
    "replicated",
    "blocks",
    "placement",
    "hyper",
    "checks",
    "wire",
    "give_assigned",
    "orders",
    "pipeline",
    "kvstore",
    "notice_assigned",
    "evaluation",
    "trainer",
    "registration",
    "testing",
)
NO_MXNET = (
    "errors",
    "_version",
    "environment",
    "config",
    "resolve",
    "schedule",
    "process_exit",
    "layout",
    "keys",
    "watchdog",
    "testing",
)
ENDS = ("__init__", "__main__")  # Nobody imports these; they import what they need.


def module_name(path):
    """'launch.cli' for launch/cli.py; 'launch' for launch/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
OWN = [name for name in MODULES if not name.startswith("launch")]
LAUNCH = [name for name in MODULES if name.startswith("launch")]


def absolute(node, path):
    """The absolute names that an import statement may import, dotted."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = (NAME, *path.relative_to(PACKAGE).parent.parts)
    start = ".".join(base[: len(base) - node.level + 1]) if node.level else ""
    module = ".".join(filter(None, (start, node.module)))
    return [f"{module}.{alias.name}" for alias in node.names]


def imports(name):
    """(module, whether at the top of the file) of the package's own imports."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for target in absolute(node, MODULES[name]):
                yield target, node in tree.body


def own_imports(name):
    """The package's modules that a module imports, anywhere in its text."""
    found = set()
    for target, _ in imports(name):
        if target.split(".")[0] != NAME:
            continue
        inside = target[len(NAME) + 1 :]
        while inside and inside not in MODULES:
            inside = inside.rpartition(".")[0]
        found.add(inside or "__init__")
    return found


def test_order_names_every_module():
    assert sorted(ORDER) == sorted(set(OWN) - set(ENDS))


@pytest.mark.parametrize("name", ORDER)
def test_module_imports_only_modules_above_it(name):
    allowed = set(ORDER[: ORDER.index(name)])
    if name == "testing":
        allowed |= set(LAUNCH) | {"testing"}  # As a script it imports itself.
    assert (
        own_imports(name) <= allowed | {"__init__"}
        if name == "testing"
        else (own_imports(name) <= allowed)
    )


@pytest.mark.parametrize("name", LAUNCH)
def test_launcher_imports_only_itself_and_what_needs_no_mxnet(name):
    assert own_imports(name) <= {"errors", "_version", "config", *LAUNCH}


def test_main_imports_only_the_end_of_a_process():
    assert own_imports("__main__") == {"process_exit"}


def test_rules_see_what_is_imported():
    assert own_imports("status") == {"commands"}
    assert own_imports("native") >= {"process_exit", "status", "config", "transport"}
    assert own_imports("launch.cli") >= {"errors", "launch.start", "launch.commands"}


@pytest.mark.parametrize("name", [*NO_MXNET, *LAUNCH])
def test_module_without_arrays_does_not_import_mxnet_at_its_top(name):
    tops = {target.split(".")[0] for target, is_top in imports(name) if is_top}
    assert not tops & {"mxnet", "numpy"}


def test_there_is_no_cycle_in_the_launcher():
    order, todo = [], {n: own_imports(n) & set(LAUNCH) - {n} for n in LAUNCH}
    while todo:
        free = [n for n, needs in todo.items() if not needs - set(order)]
        assert free, f"a cycle among {sorted(todo)}"
        order += free
        todo = {n: needs for n, needs in todo.items() if n not in free}


def test_launcher_leaves_mxnet_and_numpy_out():
    code = "import sys, runpy; sys.argv = ['odsgd-launch', '--version']\n"
    code += "try: runpy.run_module('odsgd_kvstore.launch', run_name='__main__')\n"
    code += "finally: print(sorted({'mxnet', 'numpy'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code.replace("; sys.argv", "\nsys.argv")],
        cwd=str(PACKAGE.parent),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.stdout.splitlines()[-1:], done.stderr) == (["[]"], "")
