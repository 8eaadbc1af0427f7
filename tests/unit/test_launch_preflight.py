"""What is said of each host before a job starts: pure, with made-up reports."""

import pytest

from odsgd_kvstore.launch.preflight import judge

SOUND = {
    "host": "vm",
    "python": "3.11.2",
    "executable": "/venv/bin/python",
    "mxnet": "1.9.1",
    "mxnet_error": "",
    "dist_kvstore": True,
    "package": "0.1.0",
    "package_error": "",
    "python_error": "",
    "cwd_error": "",
    "program_error": "",
    "ports_error": "",
    "cores": 8,
    "time": 1000.0,
}
NO_MODULE = "ModuleNotFoundError: No module named "
LABELS = ("node1", "me@node22", "node3")


def judged(*changes, stock=False, sent=(1000.0, 1000.0)):
    """Judge as many hosts as there are changes to a sound report."""
    reports = [{**SOUND, **change} for change in changes]
    sent = [sent] * len(reports)
    return judge(reports, LABELS[: len(reports)], sent, stock)


def problem(change, **kwargs):
    """What is said of the second of two hosts; the first is sound."""
    lines, error = judged({}, change, **kwargs)
    assert lines[0] == "node1      ok  Python 3.11.2, MXNet 1.9.1, 8 cores"
    assert lines[1] == f"me@node22  FAILED  {error[len('me@node22: ') :]}"
    assert len(lines) == 2 and error.startswith("me@node22: ")
    return error[len("me@node22: ") :]


def test_sound_hosts_have_a_line_each():
    assert judged({}, {"python": "3.11.9", "cores": 1}, {"numpy": "1.22"}) == (
        [
            "node1      ok  Python 3.11.2, MXNet 1.9.1, 8 cores",
            "me@node22  ok  Python 3.11.9, MXNet 1.9.1, 1 core",
            "node3      ok  Python 3.11.2, MXNet 1.9.1, 8 cores",
        ],
        "",
    )


VENV = "make the same virtual environment there"
PROBLEMS = [
    (
        {"python": "2.7.18", "python_error": "python ended with exit code 1"},
        f"it has Python 2.7.18, and MXNet needs 3.8 to 3.12; {VENV}",
    ),
    ({"python": "3.13.0"}, "it has Python 3.13.0, and MXNet needs 3.8 to 3.12; "),
    (
        {"python": "", "python_error": "/p cannot be run: No such file or directory"},
        f"/p cannot be run: No such file or directory; {VENV}",
    ),
    (
        {"python": "3.10.4"},
        (
            f"it has Python 3.10.4, and node1 has 3.11.2; all hosts need the same version: "
            f"{VENV}"
        ),
    ),
    ({"mxnet": "1.8.0"}, "it has MXNet 1.8.0, and node1 has 1.9.1; "),
    ({"package": "0.0.9"}, "it has odsgd_kvstore 0.0.9, and node1 has 0.1.0; "),
    (
        {"mxnet": "", "mxnet_error": NO_MODULE + "'mxnet'"},
        f"MXNet is not installed for /venv/bin/python; {VENV}",
    ),
    (
        {
            "mxnet_error": "OSError: libgfortran.so.5: cannot open shared object file: "
            "No such file or directory"
        },
        (
            "MXNet needs the library libgfortran.so.5, which is not found; install it "
            "there, or put its folder into LD_LIBRARY_PATH, which is forwarded"
        ),
    ),
    (
        {
            "mxnet_error": "AttributeError: no bool",
            "package_error": "EnvironmentNotSupported: This is NumPy 2.1. Run: pip",
        },
        "This is NumPy 2.1. Run: pip",
    ),
    (
        {"mxnet_error": "OSError: broken\nfile"},
        f"MXNet cannot be imported by /venv/bin/python (OSError: broken file); {VENV}",
    ),
    (
        {"dist_kvstore": False},
        (
            "its MXNet 1.9.1 was built without DIST_KVSTORE, and can't train on several "
            "hosts; install a build that has it"
        ),
    ),
    (
        {"package": "", "package_error": NO_MODULE + "'odsgd_kvstore'"},
        f"odsgd_kvstore is not installed for /venv/bin/python; {VENV}",
    ),
    (
        {"package": "", "package_error": "SyntaxError: x"},
        f"odsgd_kvstore cannot be imported by /venv/bin/python (SyntaxError: x); {VENV}",
    ),
    (
        {"cwd_error": "the folder /w does not exist", "mxnet_error": "any"},
        (
            "the folder /w does not exist; start in a folder that every host has, or copy "
            "it there with --sync-dst-dir DIR"
        ),
    ),
    (
        {"program_error": "the program 'x' is not found in PATH, /bin"},
        "the program 'x' is not found in PATH, /bin; install it there, or",
    ),
    (
        {"ports_error": "of the ports 5-6 only 1 are free"},
        "of the ports 5-6 only 1 are free; give a wider --port-range",
    ),
    ({"error": "no route; check the name"}, "no route; check the name"),
]


@pytest.mark.parametrize("change, words", PROBLEMS)
def test_problem_is_named_with_what_to_do(change, words):
    assert problem(change).startswith(words)


def test_host_without_a_report_is_judged():
    lines, error = judge([{"error": "is down"}], ["n1"], [(1.0, 2.0)], False)
    assert (lines, error) == (["n1  FAILED  is down"], "n1: is down")


def test_stock_servers_need_no_package():
    gone = {"package": "", "package_error": NO_MODULE + "'odsgd_kvstore'"}
    for change in (gone, {"package": "0.0.9"}):
        lines, error = judged({}, change, stock=True)
        assert error == "" and "  ok  " in lines[1]


def test_version_of_most_hosts_counts():
    lines, error = judged({"mxnet": "1.8.0"}, {}, {})
    assert error.startswith("node1: it has MXNet 1.8.0, and me@node22 has 1.9.1; ")
    assert [" ok " in line for line in lines] == [False, True, True]
    # Of two the first; what has failed already is not compared with.
    assert judged({"mxnet": "1.8.0"}, {})[1].startswith("me@node22: it has MXNet 1.9.1")
    assert [" ok " in line for line in judged({"python": "2.7.1"}, {})[0]] == [0, 1]


def test_first_of_several_failures_is_the_error():
    lines, error = judged({}, {"cwd_error": "no"}, {"dist_kvstore": False})
    assert [" FAILED " in line for line in lines] == [False, True, True]
    assert error.startswith("me@node22: no; start in a folder")
    assert error.endswith(" (2 of 3 hosts failed; the lines above say why)")


def test_long_texts_are_cut():
    assert len(problem({"error": "x" * 5000})) == 600


def test_clocks_far_apart_are_a_warning():
    """Asked at 1000 and answered at 1004: the middle is 1002."""
    sent = (1000.0, 1004.0)
    times = {"time": 1002.0}, {"time": 1004.0}, {"time": 998.5}
    lines, error = judged(*times, sent=sent)
    assert error == ""
    assert lines[3:] == [
        (
            "warning: the clock of me@node22 is 6 s ahead of that of node3, so times in "
            "their logs are hard to compare; set the clocks (NTP)"
        )
    ]
    assert len(judged({"time": 1004.0}, {"time": 999.5}, sent=sent)[0]) == 2  # 4.5 s
    (_, warning), _ = judged({"time": 1009.0}, sent=sent)
    assert "clock of node1 is 7 s ahead of that of this machine" in warning


def test_time_that_a_report_takes_does_not_count():
    # It took 20 of the 20.2 s, at the same time of day.
    change = {"started": 1000.1, "time": 1020.1}
    assert len(judged(change, sent=(1000.0, 1020.2))[0]) == 1
