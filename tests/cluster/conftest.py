"""Test beds for real clusters, and the table launcher x case at the end.

These tests run from scripts/test-cluster only: they need root's rights, programs such
as sshd, Open MPI, MPICH and Slurm, and minutes.
"""

import os
import signal
from pathlib import Path

import pytest
from bed_hosts import Hosts
from bed_slurm import Slurm
from bed_sshd import LoopbackSshd
from cluster_jobs import LAUNCH, LIMIT_S, Job, train
from watch import wait_until_none

FOLDER = Path(__file__).parent
ENABLED = os.environ.get("ODSGD_TEST_CLUSTER") == "1"
NOT_HERE = "runs real clusters on this machine; start it with scripts/test-cluster"
LAUNCHERS = {"test_ssh": "ssh", "test_slurm": "Slurm", "test_mpi": "MPI"}
NAMES = {"openmpi": "Open MPI", "mpich": "MPICH"}


def pytest_configure():
    """End in an orderly way, without networks left, when a time limit ends the run."""
    if ENABLED:
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Skip without the switch; name launcher and case for the table."""
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        if not ENABLED:
            item.add_marker(pytest.mark.skip(reason=NOT_HERE))
        names = [v for k, v in LAUNCHERS.items() if item.path.name.startswith(k)]
        case = item.originalname[len("test_") :].replace("_", " ")
        values = [str(value) for value in _params(item).values()]
        system = [NAMES[value] for value in values if value in NAMES]
        values = [value for value in values if value not in NAMES]
        case += f" ({', '.join(values)})" if values else ""
        item.user_properties.append(("case", ((system + names + ["other"])[0], case)))


def pytest_terminal_summary(terminalreporter):
    """Print the table."""
    rows = _rows(terminalreporter)
    if not (ENABLED and rows):
        return
    rows = [("launcher", "case", "result"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    terminalreporter.section("clusters")
    for launcher, case, result in rows:
        columns = f"{launcher:<{widths[0]}}  {case:<{widths[1]}}  {result}"
        terminalreporter.write_line(columns)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A run in which nothing passed has shown nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    worker = hasattr(session.config, "workerinput")
    if ENABLED and not worker and not reporter.stats.get("passed"):
        session.exitstatus = session.exitstatus or 1


def _params(item):
    """Values of the test's parameters by name."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def _rows(reporter):
    """Launcher, case and result of each test of this folder, in the order of the run."""
    rows = {}
    for outcome in ("passed", "skipped", "failed", "error"):
        for report in reporter.stats.get(outcome, []):
            case = dict(getattr(report, "user_properties", [])).get("case")
            if case is None:
                continue
            result = outcome
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reason = report.longrepr[2].partition("Skipped: ")[2]
                result = f"skipped: {reason or report.longrepr[2]}"
            if outcome == "error":
                result = f"failed: {report.when}"
            rows[tuple(case)] = result
    return sorted((*case, result) for case, result in rows.items())


@pytest.fixture(scope="session")
def hosts(tmp_path_factory):
    """Two hosts, which are namespaces of this machine."""
    with Hosts(tmp_path_factory.mktemp("hosts")) as bed:
        yield bed


@pytest.fixture(scope="session")
def loopback(tmp_path_factory):
    """An sshd on this machine's loopback."""
    with LoopbackSshd(tmp_path_factory.mktemp("sshd")) as bed:
        yield bed


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Slurm on one node."""
    with Slurm(tmp_path_factory.mktemp("slurm")) as bed:
        yield bed


@pytest.fixture
def slurm_of_two(hosts, tmp_path_factory):
    """Slurm on the two hosts."""
    with Slurm(tmp_path_factory.mktemp("slurm"), hosts) as bed:
        yield bed


@pytest.fixture(scope="session")
def expected(request):
    """The weights that the local launcher ends with."""
    job = Job([*LAUNCH, "-n", "2", "-s", "1", *train()])
    request.addfinalizer(job.close)
    result = job.finish()
    assert result.code == 0, result
    shas = {report["sha256"] for report in result.reports().values()}
    assert len(shas) == 1, result
    return shas.pop()


class Starter:
    """Starts programs, and ends them."""

    def __init__(self):
        self.jobs = []

    def __call__(self, *argv, **options):
        """Start a program; see `Job`."""
        self.jobs.append(Job(argv, **options))
        return self.jobs[-1]

    def close(self):
        """End those that still run."""
        while self.jobs:
            self.jobs.pop().close()


@pytest.fixture
def start():
    """Start programs; at the end of the test none of them runs."""
    starter = Starter()
    yield starter
    starter.close()


@pytest.fixture
def over_ssh(hosts, start, tmp_path):
    """Start jobs on the bed's hosts; at the end nothing of them runs there."""

    def start_job(lines, *args, **options):
        path = tmp_path / "hostfile"
        path.write_text("\n".join(lines) + "\n")
        ssh = ("-H", path, "--ssh-opts", hosts.ssh_opts)
        return start(*LAUNCH, *ssh, *args, **options)

    yield start_job
    start.close()
    wait_until_none(hosts.processes, "on the hosts", LIMIT_S)
