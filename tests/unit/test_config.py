"""Settings and the DMLC_* description of a job: what is allowed, and the messages."""

import os

import pytest

from odsgd_kvstore.config import Cluster, Config, job_key
from odsgd_kvstore.errors import ConfigError

JOB = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
}


def refused(parts, call, *args, kind=ConfigError, **kwargs):
    """The call raises `kind` with each of `parts` in its message."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    missing = [part for part in parts if part not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_defaults():
    config = Config.from_environment({})
    assert config == Config("auto", {}, 200, 1, None)


def test_config_is_immutable():
    with pytest.raises(AttributeError):
        Config().delay = 0


@pytest.mark.parametrize("value", [-1, 1.5, 2.0, True, False, "200", "", None, [3]])
def test_warmup_steps_must_be_a_whole_number(value):
    parts = [f"warmup_steps is {value!r}", "allowed is a whole number", "0 or more"]
    refused(parts, Config, warmup_steps=value)


@pytest.mark.parametrize("value", [2, -1, 0.0, 1.0, True, False, "1", None])
def test_delay_must_be_zero_or_one(value):
    parts = [f"delay is {value!r}", "allowed are 0", "1 (One-step Delay SGD)"]
    refused(parts, Config, delay=value)


@pytest.mark.parametrize("rule", [None, "", 3, ["sgd"], b"sgd"])
def test_rule_must_be_a_name(rule):
    parts = [f"local_optimizer is {rule!r}", "'auto'", "'mirror'", "'none'", "'sgd'"]
    refused(parts, Config, local_optimizer=rule)


@pytest.mark.parametrize("rule", ["auto", "mirror", "replica", "none", "Mirror"])
def test_rule_without_parameters_refuses_any(rule):
    given = {"learning_rate": 0.1}
    parts = [repr(rule), repr(given), "takes none", "Leave them out", "'sgd'"]
    refused(parts, Config, local_optimizer=rule, local_optimizer_params=given)


@pytest.mark.parametrize("given", [0.1, "lr", [("learning_rate", 0.1)], None])
def test_parameters_must_be_a_mapping(given):
    parts = [f"local_optimizer_params is {given!r}", "allowed is a dict"]
    refused(parts, Config, local_optimizer="sgd", local_optimizer_params=given)


@pytest.mark.parametrize(
    "given, threshold, full_every",
    [
        ({"type": "fp16"}, 0.5, 0),
        ({"type": "2bit"}, 0.5, 0),
        ({"type": "2bit", "threshold": 2}, 2.0, 0),
        ({"type": "2bit", "threshold": 0.01, "full_every": 1}, 0.01, 1),
        ({"type": "2bit", "full_every": 10}, 0.5, 10),
    ],
)
def test_compression_that_is_allowed(given, threshold, full_every):
    config = Config(compression_params=given)
    assert config.compression == given["type"]
    assert (config.threshold, config.full_every) == (threshold, full_every)


@pytest.mark.parametrize(
    "given, parts",
    [
        ({"type": "1bit"}, ["{'type': '1bit'}", "'fp16'", "'2bit'"]),
        ({"threshold": 0.5}, ["{'threshold': 0.5}", "'fp16'", "'2bit'"]),
        ("2bit", ["compression_params is '2bit'", "{'type': 'fp16'}"]),
        ([("type", "2bit")], ["compression_params is [", "{'type': 'fp16'}"]),
        ({"type": "fp16", "threshold": 1}, ["has threshold;", "{'type': 'fp16'}"]),
        ({"type": "2bit", "treshold": 1}, ["has treshold;", "'threshold': 0.5"]),
        ({"type": "2bit", "threshold": 0}, ["threshold 0;", "above 0"]),
        ({"type": "2bit", "threshold": -1.5}, ["threshold -1.5;", "above 0"]),
        ({"type": "2bit", "threshold": float("nan")}, ["threshold nan", "above 0"]),
        ({"type": "2bit", "threshold": float("inf")}, ["threshold inf", "above 0"]),
        ({"type": "2bit", "threshold": "0.5"}, ["threshold '0.5'", "above 0"]),
        ({"type": "2bit", "threshold": True}, ["threshold True", "above 0"]),
        ({"type": "2bit", "full_every": 0}, ["full_every 0;", "leave it out"]),
        ({"type": ["2bit"]}, ["compression_params is {'type': ['2bit']}"]),
        (0, ["compression_params is 0"]),
        ([], ["compression_params is []"]),
        ({"type": "2bit", "threshold": 1e-46}, ["threshold 1e-46;", "float32"]),
        ({"type": "2bit", "threshold": 10**400}, ["threshold 1000", "float32"]),
        ({"type": "2bit", "full_every": 2.0}, ["full_every 2.0;", "whole number"]),
        ({"type": "2bit", "full_every": True}, ["full_every True;", "whole number"]),
        ({"type": "2bit", "full_every": None}, ["full_every None;", "whole number"]),
    ],
)
def test_wrong_compression_is_refused_by_name(given, parts):
    refused(["compression_params", *parts], Config, compression_params=given)


@pytest.mark.parametrize("rule", ["mirror", "Mirror"])
def test_mirror_with_half_precision_is_refused(rule):
    parts = ["'mirror'", "'fp16'", "W(t) - W(t-1)", "'auto' or 'replica'"]
    fp16 = {"type": "fp16"}
    refused(parts, Config, local_optimizer=rule, compression_params=fp16)
    Config(local_optimizer=rule, compression_params={"type": "2bit"})


@pytest.mark.parametrize("empty", [None, {}])
def test_no_compression_is_allowed(empty):
    config = Config(compression_params=empty)
    assert not config.compression_params
    assert config.compression == ""


def test_each_variable_sets_its_setting():
    environ = {
        "ODSGD_WARMUP_STEPS": "7",
        "ODSGD_LOCAL_OPTIMIZER": "sgd",
        "ODSGD_LOCAL_LR": "0.25",
        "ODSGD_DELAY": "0",
    }
    wanted = Config("sgd", {"learning_rate": 0.25}, 7, 0, None)
    assert Config.from_environment(environ) == wanted


def test_os_environ_is_read_when_left_out():
    os.environ["ODSGD_WARMUP_STEPS"] = "11"
    assert Config.from_environment().warmup_steps == 11


def test_argument_wins_over_variable():
    environ = {"ODSGD_WARMUP_STEPS": "7", "ODSGD_DELAY": "0"}
    config = Config.from_environment(environ, warmup_steps=0, delay=None)
    assert (config.warmup_steps, config.delay) == (0, 0)


def test_rule_given_as_argument_leaves_out_the_variable_s_learning_rate():
    environ = {"ODSGD_LOCAL_OPTIMIZER": "sgd", "ODSGD_LOCAL_LR": "0.25"}
    config = Config.from_environment(environ, local_optimizer="mirror")
    assert config == Config("mirror")


def test_learning_rate_variable_holds_for_an_optimizer_given_as_argument():
    environ = {"ODSGD_LOCAL_LR": "0.25"}
    config = Config.from_environment(environ, local_optimizer="sgd")
    assert config == Config("sgd", {"learning_rate": 0.25})


def test_empty_variable_is_not_set():
    environ = {"ODSGD_WARMUP_STEPS": "", "ODSGD_DELAY": "", "ODSGD_LOCAL_LR": ""}
    assert Config.from_environment(environ) == Config()


@pytest.mark.parametrize(
    "variable, value, allowed",
    [
        ("ODSGD_WARMUP_STEPS", "-1", "0 or more"),
        ("ODSGD_WARMUP_STEPS", "2.5", "whole number"),
        ("ODSGD_WARMUP_STEPS", "True", "whole number"),
        ("ODSGD_WARMUP_STEPS", "many", "whole number"),
        ("ODSGD_DELAY", "2", "allowed are 0"),
        ("ODSGD_DELAY", "-1", "allowed are 0"),
        ("ODSGD_DELAY", "on", "whole number"),
        ("ODSGD_LOCAL_LR", "fast", "number"),
        ("ODSGD_LOCAL_LR", "nan", "number"),
        ("ODSGD_LOCAL_LR", "inf", "number"),
    ],
)
def test_bad_variable_is_named_with_its_value(variable, value, allowed):
    environ = {"ODSGD_LOCAL_OPTIMIZER": "sgd", variable: value}
    refused([variable, value, allowed], Config.from_environment, environ)


def test_learning_rate_variable_without_a_rule_names_both_variables():
    environ = {"ODSGD_LOCAL_LR": "0.1"}
    parts = ["ODSGD_LOCAL_LR", "0.1", "ODSGD_LOCAL_OPTIMIZER"]
    refused(parts, Config.from_environment, environ)


def test_no_job_is_stand_alone():
    assert Cluster.from_environment({"HOME": "/", "ODSGD_JOB": "j"}) is None


def test_job_is_read():
    environ = {**JOB, "ODSGD_JOB": "j", "DMLC_WORKER_ID": "1"}
    environ["MXNET_KVSTORE_BIGARRAY_BOUND"] = "500"
    assert Cluster.from_environment(environ) == Cluster("worker", 2, 1, "j", 1, 500)


def test_foreign_launcher_s_worker_number_is_not_a_rank():
    cluster = Cluster.from_environment({**JOB, "DMLC_WORKER_ID": "1"})
    assert cluster == Cluster("worker", 2, 1, "", None, 1000 * 1000)


@pytest.mark.parametrize("missing", sorted(JOB))
def test_missing_variable_is_named(missing):
    environ = {name: value for name, value in JOB.items() if name != missing}
    parts = [f"{missing} not set", "odsgd-launch -n", "stand-alone", *environ]
    refused(parts, Cluster.from_environment, environ)


def test_all_missing_variables_are_named():
    parts = ["DMLC_ROLE, DMLC_PS_ROOT_URI", "DMLC_NUM_SERVER not set", "odsgd-launch"]
    refused(parts, Cluster.from_environment, {"DMLC_NUM_WORKER": "2"})


@pytest.mark.parametrize("role", ["foo", "WORKER", "master", "worker "])
def test_unknown_role_is_refused(role):
    parts = [f"DMLC_ROLE is {role!r}", "worker, server, scheduler", "odsgd-launch"]
    refused(parts, Cluster.from_environment, {**JOB, "DMLC_ROLE": role})


@pytest.mark.parametrize(
    "variable",
    [
        "DMLC_NUM_WORKER",
        "DMLC_NUM_SERVER",
        "DMLC_PS_ROOT_PORT",
        "MXNET_KVSTORE_BIGARRAY_BOUND",
    ],
)
@pytest.mark.parametrize("value", ["0", "-3", "two", "1.5"])
def test_malformed_number_is_named(variable, value):
    parts = [f"{variable} is {value!r}", "whole number"]
    refused(parts, Cluster.from_environment, {**JOB, variable: value})


def test_malformed_worker_number_is_named():
    environ = {**JOB, "ODSGD_JOB": "j", "DMLC_WORKER_ID": "first"}
    parts = ["DMLC_WORKER_ID is 'first'", "whole number"]
    refused(parts, Cluster.from_environment, environ)


@pytest.mark.parametrize("text, value", [("", False), ("0", False), ("1", True)])
def test_own_servers_are_required_by_a_switch(text, value):
    cluster = Cluster.from_environment({**JOB, "ODSGD_REQUIRE_OWN_SERVER": text})
    assert cluster.require_own_server is value


def test_switch_that_is_neither_on_nor_off_is_refused():
    environ = {**JOB, "ODSGD_REQUIRE_OWN_SERVER": "yes"}
    parts = ["ODSGD_REQUIRE_OWN_SERVER is 'yes'", "0 and 1"]
    refused(parts, Cluster.from_environment, environ)


def test_bound_that_would_cut_a_status_is_refused():
    environ = {**JOB, "MXNET_KVSTORE_BIGARRAY_BOUND": "31"}
    refused(["BIGARRAY_BOUND is 31", "at least 32"], Cluster.from_environment, environ)
    environ["MXNET_KVSTORE_BIGARRAY_BOUND"] = "32"
    assert Cluster.from_environment(environ).bigarray_bound == 32


@pytest.fixture
def key_file(tmp_path):
    """A function that writes a key file with a mode."""

    def write(text, mode=0o600):
        path = tmp_path / "key"
        path.write_text(text)
        path.chmod(mode)
        return {"ODSGD_KEY_FILE": str(path)}

    return write


def test_no_key_is_empty():
    assert job_key({}) == b""


def test_key_comes_from_the_variable_first(key_file):
    assert job_key({"ODSGD_KEY": "secret", **key_file("other")}) == b"secret"


def test_key_comes_from_a_file(key_file):
    assert job_key(key_file(" s3cret \n")) == b"s3cret"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601, 0o620])
def test_key_file_that_others_may_touch_is_refused(key_file, mode):
    environ = key_file("do-not-show", mode)
    path = environ["ODSGD_KEY_FILE"]
    refused([path, "mode 0600", f"chmod 600 {path}"], job_key, environ)
    with pytest.raises(ConfigError) as caught:
        job_key(environ)
    assert "do-not-show" not in str(caught.value)


def test_missing_key_file_is_named(tmp_path):
    path = str(tmp_path / "nowhere")
    refused(["ODSGD_KEY_FILE", path], job_key, {"ODSGD_KEY_FILE": path})


def test_folder_as_key_file_is_named(tmp_path):
    refused(["ODSGD_KEY_FILE"], job_key, {"ODSGD_KEY_FILE": str(tmp_path)})


def test_empty_key_file_is_refused(key_file):
    environ = key_file(" \n")
    parts = [environ["ODSGD_KEY_FILE"], "is empty", "random secret"]
    refused(parts, job_key, environ)
