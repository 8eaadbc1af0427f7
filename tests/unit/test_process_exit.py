"""How a worker that failed ends: at once, with its status, its output written."""

import subprocess
import sys

import pytest

from odsgd_kvstore import process_exit

# A thread that is never joined stands for MXNet's store, whose destructor waits.
START = f"""
import atexit, os, sys, threading
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("process_exit", {process_exit.__file__!r})
process_exit = module_from_spec(spec)
spec.loader.exec_module(process_exit)
hooks = process_exit.install()
assert process_exit.install() is hooks
threading.Thread(target=threading.Event().wait).start()
"""


def run(code, *options):
    """Run code after `START`; (exit code, output, errors)."""
    done = subprocess.run(
        [sys.executable, *options, "-c", START + code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def test_exception_is_printed_and_ends_the_process_at_once():
    code, out, errors = run("print('before', end='')\nraise ValueError('what it was')")
    assert (code, out) == (1, "before")
    assert errors.startswith("Traceback") and "ValueError: what it was" in errors


def test_interrupt_has_the_status_of_a_shell():
    code, _, errors = run("raise KeyboardInterrupt")
    assert code == 130 and "KeyboardInterrupt" in errors


def test_hook_of_the_user_is_called_and_the_process_ends():
    hook = "sys.excepthook = lambda *_: print('mine')\n"
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + hook + START + "1 / 0"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (1, "mine\n")


STATUS = [
    ("sys.exit(3)", 3),
    ("exit(4)", 4),
    ("quit(5)", 5),
    ("sys.exit('why')", 1),
    ("sys.exit()", 0),
    ("sys.exit(0)", 0),
    ("sys.exit(None)", 0),
    ("sys.exit([])", 1),
    ("sys.exit(256 + 7)", 7),
    ("sys.exit(-1)", 255),
    ("sys.exit(True)", 1),
]


@pytest.mark.parametrize("call, code", STATUS)
def test_status_of_exit_is_known_at_the_end(call, code):
    text = "atexit.register(lambda: (print(hooks.code), process_exit.end_now(99)))\n"
    assert run(text + call)[:2] == (99, f"{code}\n")


def test_exit_that_was_caught_is_not_the_status_of_the_end():
    text = "atexit.register(lambda: (print(hooks.code), process_exit.end_now(99)))\n"
    text += "try:\n    sys.exit(3)\nexcept SystemExit as end:\n    print(end.code)"
    assert run(text)[:2] == (99, "3\n0\n")


def test_exit_raises_what_was_given():
    text = "try:\n    sys.exit('why')\nexcept SystemExit as end:\n"
    text += "    print(end.code)\nprocess_exit.end_now(0)"
    assert run(text)[:2] == (0, "why\n")


def test_interactive_python_is_left_alone():
    # There sys.exit and an exception end a line, not the process.
    text = START.split("hooks =")[0]
    text += "before = sys.exit, sys.excepthook\nsys.ps1 = '> '\n"
    text += "process_exit.install()\nprint((sys.exit, sys.excepthook) == before)"
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_end_now_writes_what_was_printed_and_skips_destructors():
    text = "import io\nclass Late:\n    def __del__(self): print('late')\n"
    text += "kept = Late()\nprint('x' * 100000)\nprocess_exit.end_now(9)"
    code, out, errors = run(text)
    assert (code, out, errors) == (9, "x" * 100000 + "\n", "")


@pytest.mark.parametrize("stream", ["None", "open(os.devnull)", "object()"])
def test_end_now_needs_no_usable_output(stream):
    code, _, errors = run(f"sys.stdout = {stream}\nprocess_exit.end_now(9)")
    assert (code, errors) == (9, "")


def test_end_now_needs_no_open_output():
    assert run("sys.stdout.close()\nprocess_exit.end_now(9)")[0] == 9
