"""What the pages about the launchers say: their commands run, their options exist."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from odsgd_kvstore.launch import cli
from odsgd_kvstore.launch.hosts import parse_hosts

ROOT = Path(__file__).resolve().parents[2]
DOCS = Path(cli.__file__).resolve().parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))
BY_HAND = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER")
BY_HAND += ("DMLC_NUM_SERVER", "ODSGD_KEY_FILE")
STARTED_BY = {"mpirun": "mpi", "mpiexec": "mpi", "srun": "slurm"}
ENDS = {"|", ">", "<", "&", ";", "&&", "||", ")"}
ASKED_FOR_HELP = {"-h", "--help"}
# What the tables of what goes wrong quote, and others say; all else we say.
OF_OTHERS = {
    "local": {"odsgd-launch: command not found", "import mxnet"},
    "mpi": {"There are not enough slots available"},
    "slurm": {"step creation temporarily disabled", "Requested nodes are busy"},
    "kubernetes": {
        "CreateContainerConfigError", "InvalidImageName", "ErrImagePull", "Pending",
        "field is immutable", "Bus error", "kubectl wait", "libcuda.so.1",
    },
}  # fmt: skip
VARIABLE = re.compile(
    r"(?<!\w)'[^']*'(?!\w)|\{[^{}]*\}|DMLC_[A-Z_]*(\.\.\.)?|\.\.\.|\bnode\d\b"
    r"|(?<=it has )MXNet|\b(mpirun|srun)(?= started)|ranks \d+(, \d+)*|\b\d+(\.\d+)*\b"
)


def options(hidden):
    """The names of the launcher's options, with or without the hidden ones."""
    found = [one for one in cli.launch.params if isinstance(one, click.Option)]
    names = [one.opts for one in found if hidden or not one.hidden]
    return ASKED_FOR_HELP.union(*names)


def blocks(page, language):
    """The texts of a page's fenced blocks in a language."""
    found = re.findall(
        rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(), re.MULTILINE | re.DOTALL
    )
    return [
        re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found
    ]


def launches(page):
    """The commands that start a job: [words before odsgd-launch, words after it]."""
    for text in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = split(line)
            names = [word.rpartition("/")[2] for word in words]
            if "odsgd-launch" in names:
                at = names.index("odsgd-launch")
            elif "odsgd_kvstore.launch" in names:
                at = names.index("odsgd_kvstore.launch")
            else:
                continue
            after = words[at + 1 :]
            ends = [i for i, word in enumerate(after) if word in ENDS]
            yield words[:at], after[: ends[0] if ends else None]


def split(line):
    """The words of a line as a shell has them; comments and operators apart."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    return list(reader)


def inline_code(page):
    """What stands between single backquotes."""
    text = re.sub(
        r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    return re.findall(r"`([^`]+)`", text)


def quoted(page):
    """The messages in the table of what goes wrong."""
    table = page.read_text().partition("## What goes wrong")[2]
    cells = re.findall(r"^\| (.*?) \| .* \|$", table, re.MULTILINE)
    return {message for cell in cells for message in re.findall(r"`([^`]+)`", cell)}


def messages():
    """Every text of the package's sources, with <> in place of each variable."""
    for path in DOCS.parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield general("".join(map(piece, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield general(node.value)


def piece(node):
    """A part of an f-string; what adds the plural's s is written as it."""
    if isinstance(node, ast.Constant):
        return node.value
    inner = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return "s" if "s" in inner else "{}"


def general(text):
    """A text without what differs from one time to the next."""
    text = re.sub(r"\b1 rank\b", "2 ranks", text)
    return " ".join(VARIABLE.sub("<>", text).split())


COMMANDS = [
    pytest.param(before, after, page, id=f"{page.parent.name}/{page.name}-{number}")
    for page in [*PAGES, ROOT / "README.md"]
    for number, (before, after) in enumerate(launches(page))
]


def parse(arguments):
    """What the launcher's own parser makes of arguments."""
    return cli.launch.make_context("odsgd-launch", list(arguments)).params


def launcher_of(params):
    """Which launcher a command line is for."""
    return params["launcher"] or ("ssh" if params["hostfile"] else "local")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the host file of the page about ssh."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_PROFILE", "me")
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_")):
            monkeypatch.delenv(name)
    (text,) = blocks(DOCS / "ssh.md", "hosts")
    (tmp_path / "hosts").write_text(text)
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", str(mpirun.parent), prepend=os.pathsep)
    return tmp_path


def pretend(monkeypatch, launcher, size):
    """Be rank 0 of so many, as mpirun or srun would have it; 0: neither was called."""
    monkeypatch.setenv("SLURM_JOB_ID" if launcher == "slurm" else "NOTHING", "1")
    mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": str(size)}
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}
    slurm["SLURM_STEP_NUM_TASKS"] = str(size)
    for name, value in (mpi if launcher == "mpi" else slurm).items():
        if size:
            monkeypatch.setenv(name, value)


def run(*arguments):
    """The output of the launcher, which has to end well."""
    result = CliRunner().invoke(cli.launch, arguments, obj=arguments)
    assert result.exit_code == 0, result.output
    return result.output


def test_there_is_a_page_for_each_launcher():
    names = {page.stem for page in PAGES}
    assert names == {"README", "foreign", *cli.LAUNCHERS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_page_has_commands_and_says_what_goes_wrong(page):
    assert blocks(page, "sh")
    if page.name != "README.md":
        assert "## What goes wrong" in page.read_text()
        assert page.name == "foreign.md" or list(launches(page))


@pytest.mark.parametrize(("before", "after", "page"), COMMANDS)
def test_command_parses(before, after, page):
    params = parse(after)
    assert params["command"]
    assert not params["command"][0].startswith("-")
    launcher = launcher_of(params)
    if page.stem in cli.LAUNCHERS:
        assert launcher == page.stem
    for starter, its_launcher in STARTED_BY.items():
        if starter in before:
            servers = params["num_servers"]
            count = 1 + params["num_workers"] + servers
            assert launcher == its_launcher
            assert asked_for(before, page) == count


def asked_for(starter, page):
    """The number of processes that mpirun or srun starts; it may be in the script."""
    if "-n" in starter:
        return int(starter[starter.index("-n") + 1])
    return int(re.search(r"--ntasks=(\d+)", page.read_text()).group(1))


@pytest.mark.parametrize(("before", "after", "page"), COMMANDS)
def test_dry_run_prints_all_roles(before, after, page, folder, monkeypatch):
    params = parse(after)
    launcher = launcher_of(params)
    workers, servers = params["num_workers"], params["num_servers"]
    if launcher in STARTED_BY.values():
        is_called = bool(STARTED_BY.keys() & set(before))
        pretend(monkeypatch, launcher, 1 + servers + workers if is_called else 0)
        output = run("--dry-run", *after)
        if not is_called:
            words = shlex.split(output)
            assert words[0].rpartition("/")[2] in STARTED_BY
            assert str(1 + servers + workers) in re.split("[ =]", output)
            if "-H" in after:  # mpirun has it, and the ranks need it no more.
                assert words[words.index("--hostfile") + 1] == params["hostfile"]
                after = [w for w in after if w not in ("-H", params["hostfile"])]
            assert words[-len(after) :] == after
            return
    output = run("--dry-run", *after)
    if launcher == "kubernetes":
        _, _, server_job, worker_job = yaml.safe_load_all(output)
        assert server_job["spec"]["completions"] == servers
        assert worker_job["spec"]["completions"] == workers
        pod = worker_job["spec"]["template"]["spec"]
        assert pod["containers"][0]["command"] == list(params["command"])
        return
    for kind, count in (("worker", workers), ("server", servers)):
        found = set(re.findall(rf"\b{kind} (\d+)\b", output))
        assert found == {str(rank) for rank in range(count)}
    assert "scheduler" in output
    if launcher in ("local", "ssh"):
        assert shlex.join(params["command"][1:]) in output
    if launcher == "ssh":
        for host in parse_hosts((folder / "hosts").read_text(), "hosts").hosts:
            assert f"{host.label}: " in output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_in_the_text_exist(page):
    named = {word for code in inline_code(page) for word in code.split(" ", 1)[:1]}
    named = {word for word in named if word.startswith("-")} - {"--"}
    assert named <= options(hidden=True)


def test_every_option_is_explained():
    named = {code.split(" ")[0] for page in PAGES for code in inline_code(page)}
    assert named >= options(hidden=False)


def test_table_of_options_says_for_which_launchers_they_are():
    """The last column of the table, beside what the launcher refuses."""
    rows = re.findall(
        r"^\| (`-.*`) \| .* \|(.*)\|$", (DOCS / "README.md").read_text(), re.MULTILINE
    )
    said = {
        name: set(re.findall(r"[a-z]+", re.sub(r"\(.*?\)", "", launchers)))
        for options, launchers in rows
        for name in re.findall("`(.*?)`", options)
    }
    for parameter, launchers in cli.ONLY_FOR.items():
        flag = f"--{parameter.replace('_', '-')}"
        if said[flag] == {"all", "but", "kubernetes"}:
            said[flag] = set(cli.LAUNCHERS) - {"kubernetes"}
        assert said[flag] == set(launchers), flag


def test_quoted_messages_are_those_of_the_sources():
    texts = set(messages())
    for page in PAGES:
        others = OF_OTHERS.get(page.stem, set())
        assert others <= quoted(page), page.name
        for message in quoted(page) - others:
            said = general(message.rstrip(" ."))
            assert any(said in text for text in texts), f"{page.name}: {message}"


def test_links_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert (DOCS / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_shell_reads_the_blocks(page):
    for text in blocks(page, "sh"):
        subprocess.run(
            ["sh", "-n"], input=text, text=True, check=True, timeout=60
        )  # Reads, and runs nothing.


def test_page_about_kubernetes_has_the_commands_of_the_manifest():
    text = run(
        "--launcher", "kubernetes", "-n4", "-s2", "--name=digits", "--dry-run", "a"
    )
    commands = re.findall(r"^# +(kubectl .*)$", text, re.MULTILINE)
    assert len(commands) == 5
    page = "\n".join(blocks(DOCS / "kubernetes.md", "sh"))
    assert [command for command in commands if command not in page] == []


def test_commands_for_starting_by_hand_start_each_role(tmp_path):
    """Run with a stand-in for Python that notes what it was called for."""
    stand_in = tmp_path / "bin" / "python"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exec {shlex.quote(sys.executable)} "$@"\n'
        f'echo "$DMLC_ROLE $* {" ".join(f"${name}" for name in BY_HAND)}" >> calls\n'
    )
    stand_in.chmod(0o755)
    _, start, key = blocks(DOCS / "foreign.md", "sh")
    subprocess.run(
        ["sh", "-ec", f"{key}\n{start}\nwait"],
        cwd=tmp_path,
        env={"PATH": f"{stand_in.parent}:{os.environ['PATH']}"},
        check=True,
        timeout=60,
    )
    assert re.fullmatch("[0-9a-f]{64}\n", (tmp_path / "job.key").read_text())
    assert (tmp_path / "job.key").stat().st_mode & 0o777 == 0o600
    rest = f"-m odsgd_kvstore train.py 127.0.0.1 9091 2 1 {tmp_path / 'job.key'}"
    assert sorted((tmp_path / "calls").read_text().splitlines()) == [
        f"{role} {rest}" for role in ("scheduler", "server", "worker", "worker")
    ]


def test_manifest_of_an_operator_gives_every_role_the_same_command():
    (text,) = blocks(DOCS / "foreign.md", "yaml")
    roles = yaml.safe_load(text)["spec"]["mxReplicaSpecs"]
    assert {kind: role["replicas"] for kind, role in roles.items()} == {
        "Scheduler": 1,
        "Server": 2,
        "Worker": 4,
    }
    for role in roles.values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "mxnet"
        assert container["command"] == ["python", "-m", "odsgd_kvstore", "train.py"]
