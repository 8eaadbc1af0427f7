"""The manifest of a job for Kubernetes: its schema, and what each role gets."""

import json
import re
import shutil
import subprocess

import kubernetes_validate
import pytest
import yaml

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import kubernetes
from odsgd_kvstore.launch.commands import Job
from odsgd_kvstore.launch.kubernetes import KINDS, manifest

# The oldest with Indexed Jobs for everybody that the schemas are there for, and newer.
VERSIONS = ("1.25", "1.28", "1.31", "1.34", "1.37")
NASTY = (
    "plain",
    "",
    "yes",
    "null",
    "~",
    "4",
    "1e-3",  # PyYAML takes it for a text, and what Kubernetes reads with for a number
    "0o17",
    "2026-11-30",
    "# no comment",
    "a: b",
    "- a",
    "{{x}}",
    "'single' \"double\" \\ back",
    "two\nlines\tand a tab\r",
    "\x1b[1m\x7f\x85\u2028\ufeff",
    "Größe \U0001f600",
    "*anchor &alias !tag %percent @at `tick`",
    "x" * 500 + " " + "y" * 500,
)
DOLLARS = ("$(HOME)", "$HOME", "$$", "a$", "$$(HOME)", "$(", "$(DMLC_ROLE)$$$")


def settings(num_workers=4, num_servers=2, **others):
    """A job of the user's."""
    others.setdefault("command", ("python", "train.py"))
    return Job(num_workers, num_servers, **others)


def documents(*args, **options):
    """The manifest's objects, read by a YAML reader."""
    return list(yaml.safe_load_all(manifest(*args, **options)))


def jobs(*args, **options):
    """The manifest's Jobs, by kind of role."""
    found = documents(*args, **options)[1:]
    return {
        job["metadata"]["labels"][f"{kubernetes.LABEL}/component"]: job for job in found
    }


def containers(*args, **options):
    """The only container of each kind of role."""
    return {
        kind: job["spec"]["template"]["spec"]["containers"][0]
        for kind, job in jobs(*args, **options).items()
    }


def environment(container):
    """What a container gets; a reference as the mapping that it is."""
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    return {
        entry["name"]: entry.get("valueFrom") or expand(entry["value"])
        for entry in container["env"]
    }


def expand(text):
    """What Kubernetes makes of $(NAME) and $$ in a text, with HOME set."""
    replace = {"$$": "$", "$(HOME)": "/root", "$(DMLC_ROLE)": "worker"}
    return re.sub(r"\$\$|\$\((HOME|DMLC_ROLE)\)", lambda m: replace[m.group()], text)


@pytest.mark.parametrize("version", VERSIONS)
def test_manifest_validates_against_the_published_schema(version):
    job = settings(
        env={"A": "1", "B": "$(HOME)"},
        env_server={"OMP_NUM_THREADS": "2"},
        env_worker={"C": "two\nlines"},
    )
    for each in (settings(1, 1), job, settings(stock_servers=True)):
        found = documents(each, image="example.com/train:2", name="a-1", timeout=60)
        assert [one["kind"] for one in found] == ["Service", "Job", "Job", "Job"]
        for one in found:
            kubernetes_validate.validate(one, version, strict=True)


def test_schema_refuses_a_number_where_a_text_belongs():
    """The check of the schema does see what goes wrong most often."""
    broken = jobs(settings())["worker"]
    entry = broken["spec"]["template"]["spec"]["containers"][0]["env"][0]
    entry["value"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.31", strict=True)


def test_roles_are_told_their_places():
    found = containers(settings(), name="night")
    everyone = {
        "PYTHONUNBUFFERED": "1",
        "ODSGD_KEY": {"secretKeyRef": {"name": "night-key", "key": "key"}},
        "DMLC_PS_ROOT_URI": "night-scheduler",
        "DMLC_PS_ROOT_PORT": "9091",
        "DMLC_NUM_WORKER": "4",
        "DMLC_NUM_SERVER": "2",
        "DMLC_USE_KUBERNETES": "1",
    }
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    pod = {"PORT": "9091", "DMLC_NODE_HOST": address}
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    local = {"ODSGD_LOCAL_RANK": "0", "ODSGD_LOCAL_SIZE": "1"}
    assert {kind: environment(one) for kind, one in found.items()} == {
        "scheduler": {**everyone, **no_gpu, "DMLC_ROLE": "scheduler"},
        "server": {**everyone, **no_gpu, **pod, "DMLC_ROLE": "server"},
        "worker": {**everyone, **pod, **local, "DMLC_ROLE": "worker"},
    }


@pytest.mark.parametrize(
    ("program", "python"),
    [("/opt/bin/python3.11",) * 2, ("python",) * 2, ("./pythonista.sh", "python")],
)
def test_servers_run_in_the_python_of_the_command(program, python):
    found = containers(settings(command=(program, "train.py")))
    assert found["worker"]["command"] == [program, "train.py"]
    serve = [python, "-m", "odsgd_kvstore.server"]
    assert found["server"]["command"] == found["scheduler"]["command"] == serve


def test_stock_servers_run_the_servers_of_mxnet():
    found = containers(settings(stock_servers=True))
    for kind in ("scheduler", "server"):
        python, option, code = found[kind]["command"]
        assert (python, option) == ("python", "-c")
        assert "mxnet" in code and "odsgd" not in code
    assert found["worker"]["command"] == ["python", "train.py"]


def test_counts_and_ends_of_the_jobs():
    found = jobs(settings(), name="night", timeout=90.5)
    indexed = {"completionMode": "Indexed", "backoffLimit": 0}
    indexed["activeDeadlineSeconds"] = 91
    specs = {kind: dict(job["spec"]) for kind, job in found.items()}
    pods = {kind: spec.pop("template")["spec"] for kind, spec in specs.items()}
    assert specs == {
        "scheduler": {"backoffLimit": 0, "activeDeadlineSeconds": 91},
        "server": {**indexed, "parallelism": 2, "completions": 2},
        "worker": {**indexed, "parallelism": 4, "completions": 4},
    }
    assert {pod["restartPolicy"] for pod in pods.values()} == {"Never"}
    assert {pod["enableServiceLinks"] for pod in pods.values()} == {False}
    memory = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]  # For DataLoader.
    assert [pods[kind].get("volumes") for kind in KINDS] == [None, None, memory]
    mounts = pods["worker"]["containers"][0]["volumeMounts"]
    assert mounts == [{"name": "memory", "mountPath": "/dev/shm"}]
    names = [job["metadata"]["name"] for job in found.values()]
    assert names == [f"night-{kind}" for kind in KINDS]
    unlimited = jobs(settings(), timeout=None)["worker"]["spec"]
    assert "activeDeadlineSeconds" not in unlimited


def test_service_is_headless_and_finds_its_own_scheduler_only():
    """Two jobs with different names don't meet."""
    day, night = (documents(settings(), name=name) for name in ("day", "night"))
    for service, *its_jobs in (day, night):
        spec = service["spec"]
        assert spec["clusterIP"] == "None"
        assert spec["publishNotReadyAddresses"] is True
        assert spec["ports"] == [{"name": "tcp-ps-lite", "port": 9091}]
        found = [selects(spec["selector"], job) for job in its_jobs]
        assert found == [True, False, False]
    assert not any(selects(day[0]["spec"]["selector"], job) for job in night[1:])
    names = {one["metadata"]["name"] for one in day + night}
    assert names == {f"{name}-{kind}" for name in ("day", "night") for kind in KINDS}


def selects(selector, job):
    """Whether a Service with this selector finds the pods of a Job."""
    return selector.items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_variables_of_the_user_reach_their_roles():
    job = settings(
        env={"A": "all", "B": "all", "CUDA_VISIBLE_DEVICES": "all"},
        env_server={"B": "server"},
        env_worker={"B": "worker", "PYTHONUNBUFFERED": ""},
    )
    found = {kind: environment(one) for kind, one in containers(job).items()}
    assert [found[kind]["A"] for kind in KINDS] == ["all", "all", "all"]
    assert [found[kind]["B"] for kind in KINDS] == ["server", "server", "worker"]
    assert found["server"]["CUDA_VISIBLE_DEVICES"] == ""
    assert found["worker"]["CUDA_VISIBLE_DEVICES"] == "all"
    assert found["worker"]["PYTHONUNBUFFERED"] == ""


def test_variables_of_the_user_do_not_move_a_role():
    stolen = {"DMLC_ROLE": "server", "PORT": "1", "DMLC_NODE_HOST": "10.0.0.1"}
    found = containers(settings(env_worker=stolen))["worker"]
    assert environment(found) == environment(containers(settings())["worker"])


@pytest.mark.parametrize("text", NASTY + DOLLARS)
def test_texts_arrive_unchanged(text):
    job = settings(command=("python", text), env={"VALUE": text})
    worker = containers(job)["worker"]
    assert [expand(one) for one in worker["command"]] == ["python", text]
    assert environment(worker)["VALUE"] == text


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_texts_arrive_unchanged_through_kubectl():
    """As the reader of YAML has it that Kubernetes uses; needs no cluster."""
    variables = {f"V{i}": text for i, text in enumerate(NASTY + DOLLARS)}
    job = settings(command=("python", *variables.values()), env=variables)
    read = subprocess.run(
        ["kubectl", "label", "--local", "-f", "-", "a=b", "-o", "json"],
        input=manifest(job).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=60,
    ).stdout.decode()
    worker = json.loads("{" + read.rpartition("\n{")[2])  # Objects, one by one.
    (container,) = worker["spec"]["template"]["spec"]["containers"]
    assert [expand(one) for one in container["command"][1:]] == [*variables.values()]
    found = {one["name"]: expand(one.get("value", "")) for one in container["env"]}
    assert {name: found[name] for name in variables} == variables


def test_texts_of_the_user_have_quotes():
    """Readers of YAML differ in what they take for a number."""
    job = settings(env={"A": "1e-3"}, command=("python", "1e2"))
    text = manifest(job, name="e1", image="1e3")
    plain = {
        event.value
        for event in yaml.parse(text)
        if isinstance(event, yaml.ScalarEvent) and event.style is None
    }
    assert {"Job", "None", "true", "9091"} < plain
    assert not [word for word in plain if re.search("1e|e1", word)]


def test_nothing_comes_from_the_environment(monkeypatch):
    first = manifest(settings())
    monkeypatch.setenv("ODSGD_KEY", "5ec12e7")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert manifest(settings()) == first


@pytest.mark.parametrize("field_name", ["env", "env_server", "env_worker"])
def test_key_is_refused_and_not_repeated(field_name):
    with pytest.raises(LaunchError, match="Secret") as caught:
        manifest(settings(**{field_name: {"ODSGD_KEY": "5ec12e7"}}))
    assert "5ec12e7" not in str(caught.value)


def test_key_file_of_the_user_replaces_the_secret():
    job = settings(env={"ODSGD_KEY_FILE": "/etc/job/key"})
    for container in containers(job).values():
        env = environment(container)
        assert env["ODSGD_KEY_FILE"] == "/etc/job/key" and "ODSGD_KEY" not in env


@pytest.mark.parametrize(
    "name", ["", "a b", "night\n", *["Night", "1a", "-a", "a-", "a.b", "a_b", "nächt"]]
)
def test_name_that_kubernetes_refuses_is_refused(name):
    with pytest.raises(LaunchError, match="--name is .*lower-case letters"):
        manifest(settings(), name=name)


def test_more_pods_than_a_job_of_kubernetes_has_are_refused():
    with pytest.raises(LaunchError, match="-s 100001; .* at most 100,000 pods"):
        manifest(settings(1, 100_001))


@pytest.mark.parametrize("counts", [(1, 1), (1000, 1), (1, 100_000)])
def test_longest_name_fits_and_one_more_is_refused(counts):
    job = settings(*counts)
    with pytest.raises(LaunchError) as caught:
        manifest(job, name="a" * 63)
    allowed = int(re.search(r"room for (\d+) characters", str(caught.value)).group(1))
    with pytest.raises(LaunchError):
        manifest(job, name="a" * (allowed + 1))
    found = jobs(job, name="a" * allowed)
    pods = []
    for job in found.values():
        last = job["spec"].get("completions", 1) - 1
        index = f"-{last}" if "completions" in job["spec"] else ""
        pods.append(job["metadata"]["name"] + index + "-xxxxx")
    assert max(len(pod) for pod in pods) == 63


@pytest.mark.parametrize("image", ["", " ", "a b", "-a", "$IMAGE", "a\nb"])
def test_image_that_cannot_be_one_is_refused(image):
    with pytest.raises(LaunchError, match="--image is"):
        manifest(settings(), image=image)


@pytest.mark.parametrize(
    "image",
    ["train", "localhost:5000/me/train:v1.2-gpu", f"example.com/t@sha256:{'0' * 64}"],
)
def test_image_is_that_of_every_role(image):
    found = containers(settings(), image=image)
    assert {container["image"] for container in found.values()} == {image}
    assert "no --" not in manifest(settings(), image=image, timeout=1)


def test_text_that_is_not_unicode_is_refused():
    text = b"\xff".decode(errors="surrogateescape")
    with pytest.raises(LaunchError, match="the command is not UTF-8"):
        manifest(settings(command=("python", text)))
    with pytest.raises(LaunchError, match="the value of A is not UTF-8"):
        manifest(settings(env={"A": text}))


def test_comment_says_what_to_do():
    text = manifest(settings(command=("python", "a\nb: c")), name="night")
    comment = text[: text.index("---\n")].splitlines()
    assert all(line.startswith("#") for line in comment)
    words = "\n".join(comment)
    assert "kubectl create secret generic night-key --from-file=key=/dev/stdin" in words
    assert "kubectl delete job,service -l app.kubernetes.io/instance=night" in words
    assert f"{kubernetes.PLACEHOLDER_IMAGE} does not exist" in words
    assert "nvidia.com/gpu: 1" in words and "--max-log-requests=7" in words
    assert "no --timeout" in words


def test_line_of_the_comment_adds_a_gpu_to_the_workers():
    """As the comment says: beneath 'image:' of the workers' container."""
    text = manifest(settings())
    line = re.search(r"^# ( +resources: .*)$", text, re.MULTILINE).group(1)
    at = text.index("image:", text.index("- name: worker"))
    end = text.index("\n", at) + 1
    worker = list(yaml.safe_load_all(text[:end] + line + "\n" + text[end:]))[-1]
    kubernetes_validate.validate(worker, "1.31", strict=True)
    container = worker["spec"]["template"]["spec"]["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}}
