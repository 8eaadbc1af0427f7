"""The launcher's plans, texts and option parsing: nothing is started here."""

import sys
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import Failure, cli, commands, local, show, start, variables
from odsgd_kvstore.launch.commands import STOCK_SERVER, Job, plan_local
from odsgd_kvstore.launch.output import LineSplitter

ROOT = str(Path(commands.__file__).absolute().parents[2])
KEY = "do-not-show"


def plan(base=None, cores=12, num_workers=2, num_servers=1, ports=None, **settings):
    """Plan a job with known ports, key and job id."""
    settings.setdefault("command", ("python", "train.py"))
    job = Job(num_workers, num_servers, **settings)
    ports = ports or list(range(500, 500 + job.num_roles))
    return plan_local(job, base or {}, ports, KEY, "job1", cores)


def common(role, **more):
    """What each role of `plan()` has."""
    text = (
        "DMLC_PS_ROOT_URI=127.0.0.1 DMLC_PS_ROOT_PORT=500 DMLC_NODE_HOST=127.0.0.1 "
        "DMLC_NUM_WORKER=2 DMLC_NUM_SERVER=1 DMLC_LOCAL=1 ODSGD_JOB=job1 "
        f"ODSGD_KEY={KEY} OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 DMLC_ROLE={role}"
    )
    return {**dict(pair.split("=") for pair in text.split()), **more}


def local_place(rank):
    """What a worker of `plan()` is told of its host."""
    return {"ODSGD_LOCAL_RANK": str(rank), "ODSGD_LOCAL_SIZE": "2"}


def test_plan_gives_exact_environments():
    home = {"HOME": "/h"}
    roles = plan(home)
    serving = {**home, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ROOT}
    assert [role.env for role in roles] == [
        common("scheduler", **serving),
        common("server", PORT="501", DMLC_SERVER_ID="0", **serving),
        common("worker", PORT="502", DMLC_WORKER_ID="0", **local_place(0), **home),
        common("worker", PORT="503", DMLC_WORKER_ID="1", **local_place(1), **home),
    ]


def test_plan_gives_exact_commands():
    serve = (sys.executable, "-m", "odsgd_kvstore.server")
    train = ("python", "train.py")
    assert [role.argv for role in plan()] == [serve, serve, train, train]
    stock = plan(stock_servers=True)
    assert [r.argv for r in stock[:2]] == [(sys.executable, "-c", STOCK_SERVER)] * 2
    assert "PYTHONPATH" not in stock[1].env


def test_plan_gives_ranks_by_ascending_port():
    roles = plan(num_workers=3, num_servers=2, ports=[9, 700, 600, 30, 10, 20])
    assert roles[0].env["DMLC_PS_ROOT_PORT"] == "9"
    names = ["scheduler", "server 0", "server 1", "worker 0", "worker 1", "worker 2"]
    assert [role.name for role in roles] == names
    ports = [role.env.get("PORT") for role in roles]
    assert ports == [None, "10", "20", "30", "600", "700"]


@pytest.mark.parametrize("ports", [[1, 2, 3], [1, 2, 3, 3], [1, 2, 3, 4, 5]])
def test_plan_refuses_ports_that_do_not_fit(ports):
    with pytest.raises(LaunchError, match="needs 4 different"):
        plan(ports=ports)


def test_plan_drops_what_an_outer_job_left_and_keeps_the_original():
    names = "DMLC_INTERFACE DMLC_RANK DMLC_WORKER_ID DMLC_SERVER_ID DMLC_ROLE PORT"
    base = dict.fromkeys(names.split(), "stale")
    roles = plan(base)
    assert "stale" not in chain(*(role.env.values() for role in roles))
    assert base == dict.fromkeys(names.split(), "stale")


def test_plan_lets_the_narrower_option_win():
    base, env = dict.fromkeys("ABCD", "base"), dict.fromkeys("BCD", "env")
    roles = plan(base, env=env, env_server={"C": "server"}, env_worker={"D": "worker"})
    seen = [" ".join(role.env[name] for name in "ABCD") for role in roles]
    assert seen == ["base env server env"] * 2 + ["base env env worker"] * 2


def test_plan_keeps_its_own_variables_whatever_the_user_gives():
    own = {"DMLC_ROLE": "x", "DMLC_PS_ROOT_PORT": "1", "PORT": "1", "ODSGD_JOB": "x"}
    worker = plan(env=own, env_worker=own)[2]
    assert [worker.env[name] for name in own] == ["worker", "500", "502", "job1"]


@pytest.mark.parametrize("cores, threads", [(1, "1"), (2, "1"), (7, "2"), (96, "32")])
def test_plan_shares_the_cores_out(cores, threads):
    assert {role.env["OMP_NUM_THREADS"] for role in plan(cores=cores)} == {threads}


def test_plan_keeps_threads_and_devices_that_the_user_set():
    base = {"OMP_NUM_THREADS": "7", "CUDA_VISIBLE_DEVICES": "0,1"}
    base.update(PYTHONUNBUFFERED="", MXNET_CPU_WORKER_NTHREADS="3")
    roles = plan(base, env_server={"OMP_NUM_THREADS": "2"})
    assert [r.env["OMP_NUM_THREADS"] for r in roles] == ["2", "2", "7", "7"]
    assert [r.env["CUDA_VISIBLE_DEVICES"] for r in roles] == ["", "", "0,1", "0,1"]
    assert {r.env["PYTHONUNBUFFERED"] for r in roles} == {""}
    assert {r.env["MXNET_CPU_WORKER_NTHREADS"] for r in roles} == {"3"}
    given = plan(base, env_server={"CUDA_VISIBLE_DEVICES": "1"})
    assert given[1].env["CUDA_VISIBLE_DEVICES"] == "1"


def test_plan_puts_the_package_before_the_python_path_of_servers():
    roles = plan({"PYTHONPATH": "/a"})
    assert [r.env["PYTHONPATH"] for r in roles] == [f"{ROOT}:/a"] * 2 + ["/a"] * 2


def test_plan_does_not_put_site_packages_first(monkeypatch):
    path = "/venv/lib/site-packages/odsgd_kvstore/launch/commands.py"
    monkeypatch.setattr(commands, "__file__", path)
    assert "PYTHONPATH" not in plan()[0].env
    assert plan({"PYTHONPATH": "/a"})[0].env["PYTHONPATH"] == "/a"


@pytest.mark.parametrize("own", [{"ODSGD_KEY": "mine"}, {"ODSGD_KEY_FILE": "/k"}])
def test_plan_lets_the_users_key_win(own):
    for role in plan(own):
        keys = {k: v for k, v in role.env.items() if k.startswith("ODSGD_KEY")}
        assert keys == own


@pytest.mark.parametrize("count", [0, -1, 1.5, "2", True, None])
def test_job_refuses_a_bad_count(count):
    with pytest.raises(LaunchError, match="--num-workers is .* at least 1"):
        Job(count, 1, ("true",))
    with pytest.raises(LaunchError, match="--num-servers is .* at least 1"):
        Job(1, count, ("true",))


@pytest.mark.parametrize("command", [(), ("",), "python train.py"])
def test_job_refuses_a_bad_command(command):
    with pytest.raises(LaunchError, match="command"):
        Job(1, 1, command)


def test_choose_ports_avoids_names_in_use():
    asked = []

    def exists(path):
        asked.append(path)
        return len(asked) < 4

    ports = local.choose_ports(3, exists)
    assert ports == list(range(ports[0], ports[0] + 3))
    assert 100_000_000 <= ports[0] and ports[-1] < 2_000_000_000
    assert asked[-3:] == [f"/tmp/{port}" for port in ports]
    assert not set(asked[-3:]) & set(asked[:3])


def test_choose_ports_gives_up_when_all_are_in_use():
    with pytest.raises(LaunchError, match="/tmp"):
        local.choose_ports(3, lambda path: True)


def test_parse_env_takes_values_and_current_ones():
    env = variables.parse_env(["A=1", "B", "C=x=y:z", "D="], {"B": "now"})
    assert env == {"A": "1", "B": "now", "C": "x=y:z", "D": ""}


def test_parse_pairs_takes_mxnets_form_and_ours():
    env = variables.parse_pairs("--env-server", ["A:1", "B=2", "C:http://h:1=2", "D="])
    assert env == {"A": "1", "B": "2", "C": "http://h:1=2", "D": ""}


@pytest.mark.parametrize("text", ["", "=1", "1A=2", "A B=2", "A-B"])
def test_parse_env_refuses_a_bad_name(text):
    with pytest.raises(LaunchError, match="--env .*NAME=VALUE"):
        variables.parse_env([text], {})


@pytest.mark.parametrize("text", ["", "A", ":1", "1A:2"])
def test_parse_pairs_refuses_a_bad_form(text):
    with pytest.raises(LaunchError, match="--env-worker .*NAME:VALUE"):
        variables.parse_pairs("--env-worker", [text])


def test_parse_env_names_a_variable_that_is_not_set():
    with pytest.raises(LaunchError, match="--env NOPE: NOPE is not set"):
        variables.parse_env(["NOPE"], {})


def test_a_key_on_the_command_line_is_refused_without_repeating_it():
    for parse in (
        lambda: variables.parse_env([f"ODSGD_KEY={KEY}"], {}),
        lambda: variables.parse_pairs("--env-server", [f"ODSGD_KEY:{KEY}"]),
    ):
        with pytest.raises(LaunchError, match="ODSGD_KEY_FILE") as caught:
            parse()
        assert KEY not in str(caught.value)
    assert variables.parse_env(["ODSGD_KEY"], {"ODSGD_KEY": KEY}) == {"ODSGD_KEY": KEY}


def test_describe_shows_role_rank_pid_and_command_only():
    roles = plan(stock_servers=True, command=("python", "a b.py"))
    text = commands.describe(roles, {"scheduler": 11, "worker 1": 4711})
    assert text.splitlines() == [
        "role       rank  pid   command",
        f"scheduler  0     11    {sys.executable} -c '{STOCK_SERVER}'",
        f"server     0     -     {sys.executable} -c '{STOCK_SERVER}'",
        "worker     0     -     python 'a b.py'",
        "worker     1     4711  python 'a b.py'",
    ]


def test_no_text_about_a_role_shows_the_key():
    roles = plan({"SECRET": "inherited"})
    text = commands.describe(roles) + show.explain(roles, {"SECRET": "inherited"})
    assert KEY not in text + repr(roles) and "SECRET" not in text
    assert "ODSGD_KEY=(hidden)" in text


@pytest.fixture
def run(monkeypatch):
    """Run the command line without MXNet, and without starting anything."""
    monkeypatch.setitem(sys.modules, "mxnet", None)
    monkeypatch.setattr(
        start, "run_roles", lambda *args, **kwargs: pytest.fail("started")
    )
    monkeypatch.setattr(local.secrets, "token_hex", lambda size: KEY)
    monkeypatch.setenv("INHERITED_SECRET", "inherited-value")
    for name in ("ODSGD_KEY", "ODSGD_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    return lambda *args: CliRunner().invoke(cli.launch, args)


def test_help_needs_no_mxnet(run):
    result = run("--help")
    assert result.exit_code == 0
    ready = ("--dry-run", "--stock-servers", "--emulate-bandwidth RATE")
    for option in (*cli.NOT_SUPPORTED_YET.values(), *ready):
        assert option.split("/")[-1] in result.output


def test_dry_run_needs_no_mxnet_and_hides_the_key(run):
    result = run("-n", "2", "--dry-run", "--env", "A=1 2", "train", "--lr", "-n", "3")
    lines = result.output.splitlines()
    assert result.exit_code == 0
    heads = [line.split(":")[0] for line in lines if not line.startswith(" ")]
    assert heads == ["scheduler", "server 0", "server 1", "worker 0", "worker 1"]
    assert "worker 1: train --lr -n 3" in lines
    assert lines.count("  ODSGD_KEY=(hidden)") == lines.count("  A='1 2'") == 5
    assert KEY not in result.output.replace(f"ODSGD_JOB={KEY}", "")
    assert "inherited-value" not in result.output


def test_dry_run_shows_the_emulated_network(run):
    result = run("-n", "2", "-s", "1", "--dry-run", "--emulate-bandwidth=1Gbit", "a")
    lines = result.output.splitlines()
    shown = [line.split(": ")[1] for line in lines if line.startswith("  network: ")]
    limits = "1000 Mbit/s in each direction"
    assert shown == [f"198.18.0.{254 - i}, {limits}" for i in range(4)]
    assert "DMLC_LOCAL" not in result.output


def test_double_dash_ends_the_options(run):
    result = run("-n", "1", "--dry-run", "--", "train", "--", "-x")
    assert "worker 0: train -- -x" in result.output.splitlines()


def test_start_without_mxnet_says_what_to_install(run):
    result = run("-n", "1", "true")
    assert result.exit_code == 1
    assert "pip install odsgd-kvstore[cpu]" in result.output


def test_an_option_to_come_is_refused_by_name(run):
    result = run("-n", "1", "--max-restarts", "1", "true")
    assert result.exit_code == 2
    assert "--max-restarts is not supported yet" in result.output


FOREIGN = (
    ("--launcher local -H hosts", "--hostfile is for --launcher ssh or mpi"),
    ("--sync-dst-dir /d", "--sync-dst-dir is for --launcher ssh"),
    ("--ssh-opts -v", "--ssh-opts is for --launcher ssh"),
    ("--interface e0", "--interface is for --launcher ssh or mpi or slurm"),
    ("--port-range 2000-3000", "--port-range is for --launcher ssh or mpi or slurm"),
    ("--image a", "--image is for --launcher kubernetes"),
    ("--name a", "--name is for --launcher kubernetes"),
    ("--launcher kubernetes --log-dir d", "--log-dir is for --launcher local or ssh"),
    ("-H h --emulate-bandwidth 1gbit", "--emulate-bandwidth is for --launcher local"),
)


@pytest.mark.parametrize("text, words", FOREIGN)
def test_an_option_of_another_launcher_is_refused_by_name(run, text, words):
    result = run("-n", "1", *text.split(), "true")
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize(
    "args, words",
    [
        (["-n", "1", "--p3", "true"], "--p3 is not supported: the p3 store has no"),
        (["-n", "1", "--launcher", "sge", "true"], "sge is not supported; use"),
        (["-n", "1", "--launcher", "yarn", "true"], "yarn is not supported; use"),
        (["true"], "--num-workers"),
        (["-n", "0", "true"], "-n/--num-workers is 0"),
        (["-n", "1", "-s", "0", "true"], "-s/--num-servers is 0"),
        (["-n", "two", "true"], "'two' is not a valid integer"),
        (["-n", "1"], "COMMAND"),
        (["-n", "1", "--timeout", "0", "true"], "--timeout is 0"),
        (["-n", "1", "--timeout", "nan", "true"], "--timeout is nan"),
        (["-n", "1", "--env", "NOPE_NOPE", "true"], "NOPE_NOPE is not set"),
        (["-n", "1", "--launcher", "ssh", "true"], "needs a host file; give -H"),
        (["-n", "1", "-H", "h", "--port-range", "9", "true"], "--port-range is '9'"),
        (["-n", "1", "-H", "h", "--ssh-opts", "-o 'x", "true"], "close the quotes"),
        (["-n", "1", "--emulate-bandwidth", "9", "true"], "bandwidth is '9'; give"),
        (["-n", "80", "--emulate-bandwidth", "1gbit", "true"], "for 155 roles"),
    ],
)
def test_a_bad_setting_is_named(run, args, words):
    result = run(*args)
    assert result.exit_code == 2
    assert words in result.output


def feed(*parts, step_s=0.0):
    """Everything that a splitter says of `parts`, `step_s` apart."""
    splitter = LineSplitter()
    lines = [splitter.feed(part, i * step_s) for i, part in enumerate(parts)]
    return [*chain(*lines), *splitter.close()]


@pytest.mark.parametrize(
    "parts, lines",
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"a", b"b\n\nc"], ["ab", "", "c"]),
        ([b"a\r\nb\r", b"\n"], ["a", "b"]),
        ([b"\xff\n"], ["\ufffd"]),
        ([b"\xe2\x82", b"\xac\n"], ["\u20ac"]),
        ([b"1%\r2%\r3%\n"], ["3%"]),
        ([b"\r1%", b"\r2%", b"\r3%"], ["1%", "3%"]),  # The second came too soon.
    ],
)
def test_splitter_gives_whole_lines(parts, lines):
    assert feed(*parts) == lines


def test_splitter_shows_a_progress_bar_once_a_second():
    parts = [b"\r%d%%" % i for i in range(5)]
    assert feed(*parts, step_s=0.5) == ["0%", "2%", "4%"]


def test_splitter_keeps_lines_of_megabytes_whole():
    assert feed(*[b"x" * 65536] * 64, b"\n") == ["x" * 65536 * 64]


@pytest.mark.parametrize(
    "code, exit_code, reason",
    [
        (3, 3, "failed with exit code 3"),
        (-9, 137, "was ended by signal 9 (SIGKILL)"),
        (-40, 168, "was ended by signal 40 (real-time)"),
        (0, 1, "ended (exit code 0) before the workers were done"),
    ],
)
def test_failure_says_how_a_role_ended(code, exit_code, reason):
    failure = Failure.of_exit("worker 1", 4711, code, ["a", "b"])
    assert failure.exit_code == exit_code
    assert str(failure) == (
        f"worker 1 (pid 4711) {reason}; its last lines were:\n    a\n    b"
    )
    silent = Failure.of_exit("worker 1", 4711, code, [])
    assert str(silent) == f"worker 1 (pid 4711) {reason}; it wrote nothing"
