"""Whole trainings over ssh end with the weights of the local launcher."""

import os
import re
import sys
import uuid
from pathlib import Path

import pytest
from bed_hosts import BANNER
from bed_tools import need
from cluster_jobs import DIGITS, LAUNCH, MARK, environment, roles, train

TWO = ("-n", "2", "-s", "1")


def addresses(reports):
    """Of the scheduler, as every rank knows it, and of each rank."""
    envs = [report["env"] for _, report in sorted(reports.items())]
    assert len({env["DMLC_PS_ROOT_URI"] for env in envs}) == 1
    return [envs[0]["DMLC_PS_ROOT_URI"], *(env["DMLC_NODE_HOST"] for env in envs)]


def test_two_hosts_by_alias_with_two_servers(over_ssh, hosts, expected):
    result = over_ssh(["alpha", "beta"], "-n", "2", "-s", "2", *train()).finish()
    reports = result.check(expected)
    alpha, beta = hosts["alpha"], hosts["beta"]
    # '198.19.n.9' is larger than '198.19.n.10' as text, so alpha comes first.
    assert [reports[rank]["host"] for rank in (0, 1)] == ["alpha", "beta"]
    assert addresses(reports) == [alpha.address, alpha.address, beta.address]
    # /etc/hosts of each host gives its own name 127.0.1.1, as Debian does.
    assert "127.0." not in re.sub(r"REPORT.*", "", result.output)
    assert [reports[rank]["env"]["ODSGD_LOCAL_RANK"] for rank in (0, 1)] == ["0", "0"]
    for host in (alpha, beta):
        assert re.search(rf"^{host.name} +ok +Python ", result.output, re.MULTILINE)
        assert f"{host.name}: advertising {host.address} (from " in result.output
    rows = re.findall(
        r"^(scheduler|server|worker) +(\d) +(?:\S+ +)?(alpha|beta)",
        result.output, re.MULTILINE,
    )  # fmt: skip
    assert sorted(rows) == [
        ("scheduler", "0", "alpha"), ("server", "0", "alpha"), ("server", "1", "beta"),
        ("worker", "0", "alpha"), ("worker", "1", "beta"),
    ]  # fmt: skip
    assert result.errors == ""


def test_one_host_with_all_roles(over_ssh, expected):
    lines = ["# our only machine\r", "\r", "alpha slots=2  # two workers\r"]
    reports = over_ssh(lines, "-n", "2", "-s", "2", *train()).finish().check(expected)
    assert {report["host"] for report in reports.values()} == {"alpha"}
    assert [reports[rank]["env"]["ODSGD_LOCAL_RANK"] for rank in (0, 1)] == ["0", "1"]


@pytest.mark.parametrize("shells", ["bash and dash", "tcsh and banner"])
def test_login_shells(over_ssh, expected, shells):
    first, second = shells.split(" and ")
    need(first, second.replace("banner", "bash"))
    lines = [f"odsgdtest-{first}@alpha", f"odsgdtest-{second}@beta"]
    result = over_ssh(lines, *TWO, *train()).finish()
    result.check(expected)
    assert BANNER not in result.output


def test_ports_and_ipv6(over_ssh, hosts, expected):
    alpha, beta = hosts["alpha"], hosts["beta"]
    lines = [f"root@{alpha.address}:2222", f"[{beta.six}]:2222"]
    reports = over_ssh(lines, *TWO, *train()).finish().check(expected)
    # ps-lite speaks IPv4 only.
    assert addresses(reports) == [alpha.address, alpha.address, beta.address]


def test_environment_arguments_and_folder_arrive(over_ssh, hosts, expected, tmp_path):
    folder = tmp_path / 'it\'s a "folder"; $HOME `x` ü'
    folder.mkdir()
    words = ["two words", "it's", '"quoted"', "$HOME", "a;b|c&d", "*", "", "\\", "ü\n2"]
    key, mark = "k" * 40, uuid.uuid4().hex
    env = environment(
        MXNET_CPU_WORKER_NTHREADS="2", ODSGD_KEY=key, MINE2="kept", LD_LIBRARY_PATH="/x y",
        PS_VERBOSE="0", MINE_NOT="stays here", **{MARK: mark},
    )  # fmt: skip
    env["PYTHONPATH"] += os.pathsep + str(tmp_path / "my modules")
    options = ["--env", "MINE=it's $HOME", "--env", "MINE2", "--env-worker", "MINE3:w"]
    options += ["--env-server", "MINE3:s"]
    job = over_ssh(
        ["alpha", "beta"], *TWO, *options, *train("--steps", "12", "--", *words),
        env=env, cwd=folder,
    )  # fmt: skip
    job.wait_for("TRAINING")
    servers = roles("server", mark).values()
    assert not job.shows(key)
    reports = job.finish().check(expected)
    for report in reports.values():
        env = report["env"]
        assert report["argv"] == ["--steps", "12", "--", *words]
        assert report["cwd"] == str(folder)
        assert report["executable"] == sys.executable
        assert str(tmp_path / "my modules") in report["path"]
        assert env["MXNET_CPU_WORKER_NTHREADS"] == "2"
        assert env["LD_LIBRARY_PATH"].endswith("/x y")  # Modules may add to it.
        assert env[MARK] == mark
        assert (env["MINE"], env["MINE2"], env["MINE3"]) == ("it's $HOME", "kept", "w")
        assert "MINE_NOT" not in env
        assert report["has_key"]
    assert {env["MINE3"] for env in servers} == {"s"}
    assert {env["CUDA_VISIBLE_DEVICES"] for env in servers} == {""}


def test_a_folder_is_copied_to_the_hosts(over_ssh, hosts, expected, tmp_path):
    need("rsync")
    source = tmp_path / "my script"
    source.mkdir()
    (source / "train it.py").write_bytes(Path(DIGITS).read_bytes())
    target = hosts.local / "a copy's place"
    job = over_ssh(
        ["alpha", "beta"], *TWO, "--sync-dst-dir", target, "--", sys.executable,
        "train it.py", cwd=source,
    )  # fmt: skip
    reports = job.finish().check(expected)
    assert {report["cwd"] for report in reports.values()} == {str(target)}
    for name in ("alpha", "beta"):  # File systems of their own.
        assert hosts[name].inside("ls", str(target)) == "train it.py\n"


def test_log_files_have_the_lines_and_quiet_shows_none(over_ssh, expected, tmp_path):
    logs = tmp_path / "logs of it"
    job = over_ssh(["alpha", "beta"], *TWO, "--quiet", "--log-dir", logs, *train())
    result = job.finish()
    assert (result.code, result.output, result.errors) == (0, "", "")
    texts = {path.name: path.read_text() for path in logs.rglob("*") if path.is_file()}
    assert len(texts) == 4
    found = [re.findall(r"REPORT .*", text) for text in texts.values()]
    result.output = "\n".join(line for lines in found for line in lines)
    result.check(expected)
    assert [len(lines) for lines in found].count(1) == 2


def test_a_dry_run_connects_to_nobody(over_ssh, hosts):
    options = (*TWO, "--env", "MINE=1", "--dry-run")
    lines = ["absent", "odsgdtest-dash@alpha:2222"]
    result = over_ssh(lines, *options, *train(), env=environment(ODSGD_KEY="k" * 40))
    result = result.finish()
    assert (result.code, result.errors) == (0, "")
    assert "k" * 40 not in result.output
    for text in (
        "absent: scheduler, server 0, worker 0",
        "-p 2222",
        "-l odsgdtest-dash",
    ):
        assert text in result.output


def test_loopback_without_namespaces(loopback, start, expected, tmp_path):
    path = tmp_path / "hostfile"
    path.write_text(f"127.0.0.1:{loopback.port}\n")
    ssh = ("-H", path, "--ssh-opts", loopback.ssh_opts)
    reports = start(*LAUNCH, *ssh, *TWO, *train()).finish().check(expected)
    assert addresses(reports) == ["127.0.0.1"] * 3
    assert loopback.processes() == {}
