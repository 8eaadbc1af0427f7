"""How a worker that failed ends: at once, with its status, its output written."""

import subprocess
import sys

import pytest

from odsgd_kvstore import process_exit

# At a regular end MXNet's store waits for the other workers: here it prints "waited",
# unless the process ends before, as `native.py` makes it.
START = f"""
import atexit, os, sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("process_exit", {process_exit.__file__!r})
process_exit = module_from_spec(spec)
spec.loader.exec_module(process_exit)
hooks = process_exit.install()
assert process_exit.install() is hooks
def at_end():
    if hooks.code:
        process_exit.end_now(hooks.code)
    print("waited")
atexit.register(at_end)
"""


# Prints the status that is known when Python ends.
AT_THE_END = START.rsplit("threading.Thread", 1)[0] + (
    "atexit.register(lambda: (print(hooks.code), process_exit.end_now(99)))\n"
)


def run(code, *options, start=START):
    """Run code after `start`; (exit code, output, errors)."""
    done = subprocess.run(
        [sys.executable, *options, "-c", start + code],
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


@pytest.mark.parametrize(
    "call, code, end",
    [
        ("sys.exit(3)", 3, ""),
        ("exit(4)", 4, ""),
        ("quit(5)", 5, ""),
        ("sys.exit('why')", 1, ""),
        ("sys.exit([])", 1, ""),
        ("sys.exit(256 + 7)", 7, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit()", 0, "waited\n"),
        ("sys.exit(0)", 0, "waited\n"),
        ("pass", 0, "waited\n"),
    ],
)
def test_failed_exit_ends_at_once_with_its_status(call, code, end):
    assert run(call)[:2] == (code, end)


def test_exit_that_is_caught_is_no_end():
    text = "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass"
    assert run(text) == (0, "waited\n", "")


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
