"""A job as text for Kubernetes: plain Jobs and a headless Service, no operator.

Nothing is started here: the text goes to ``kubectl apply -f -``. How people use it is
in docs/kubernetes.md.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping
from typing import Any

import yaml

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch.commands import STOCK_SERVER, Job
from odsgd_kvstore.launch.variables import KEY_VARIABLES

DEFAULT_NAME = "odsgd"
PLACEHOLDER_IMAGE = "example.com/image-with-your-script:1"
# Each pod has its own address, so that one port is enough for all roles. A taken PORT
# would be replaced by ps-lite without a word; in a pod of its own none is taken.
PORT = 9091
MOST_PODS = 100_000
KINDS = ("scheduler", "server", "worker")
LABEL = "app.kubernetes.io"
_POD_SUFFIX = len("-xxxxx")  # Kubernetes adds it to the name of each pod.
_LONGEST_NAME = 63
# A Service's name must begin with a letter (RFC 1035), which RFC 1123 does not ask for.
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_IMAGE = re.compile(r"[A-Za-z0-9][\w.:/@-]*\Z", re.ASCII)
_PYTHON = re.compile(r"python[0-9.]*\Z")


_INTRODUCTION = """\
Job {name}: a scheduler, {num_servers} server(s) and {num_workers} worker(s).

Before the first start, make the secret that seals the commands to the servers. Until
then the pods wait.
  python -c "import secrets; print(secrets.token_hex(32), end='')" |
    kubectl create secret generic {name}-key --from-file=key=/dev/stdin
Start: pipe this text to
  kubectl apply -f -
Output, from the start:
  kubectl logs -f -l {instance} --prefix --tail=-1 --max-log-requests={num_pods}
Wait for the end of the training:
  kubectl wait --for=condition=complete --timeout=-1s job/{name}-worker
Remove, also before the next start:
  kubectl delete job,service -l {instance}

Resources: none are asked for, so that the pods start on any cluster. For GPUs, add this
line beneath "image:" of the workers' container; servers and scheduler need none.
        resources: {{limits: {{nvidia.com/gpu: 1}}}}
The cluster must have room for all {num_pods} pods at a time: they wait for each other.
"""
_NO_IMAGE = f"""\

Image: no --image was given, and {PLACEHOLDER_IMAGE} does not exist.
Give the name of one that holds Python, MXNet 1.9.1, odsgd_kvstore and what the workers
run.
"""
_NO_TIMEOUT = """\

Time: no --timeout was given. If a worker fails, servers and scheduler wait for it until
the job is removed.
"""


class _Quoted(str):
    """A text of the user's; what YAML 1.1 and 1.2 read as a number stays a text."""


class _Dumper(yaml.SafeDumper):
    """Without anchors, which people would have to read."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


_Dumper.add_representer(
    _Quoted,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", str(text), style='"'
    ),
)


def manifest(
    job: Job,
    *,
    image: str | None = None,
    name: str = DEFAULT_NAME,
    timeout: float | None = None,
) -> str:
    """Return a YAML stream with all that Kubernetes needs to run a job.

    Parameters
    ----------
    job : Job
        The user's settings; of these `bandwidth` is not looked at.
    image : str, optional
        Of every role: holds MXNet, this package and what the command names. When
        left out, a placeholder that the comment on top explains.
    name : str
        Begins the name of every object. Jobs with different names don't meet.
    timeout : float, optional
        Seconds after which Kubernetes ends the job's pods.

    Returns
    -------
    text : str
        The same for the same arguments: nothing of this machine is in it.

    Raises
    ------
    LaunchError
        Kubernetes would refuse the name or the image, a text is not Unicode, or the
        job's key would be written down.

    Notes
    -----
    The scheduler is known by the name of its Service, and listens on all addresses of
    its pod (`DMLC_USE_KUBERNETES`). Servers and workers listen on their pod's address
    and make that known. `ODSGD_JOB` stays unset, so that nobody expects a rank: ps-lite
    numbers the workers by their addresses.
    """
    _check_name(name, job)
    if max(job.num_workers, job.num_servers) > MOST_PODS:
        raise LaunchError(
            f"-n is {job.num_workers} and -s {job.num_servers}; Kubernetes runs at most "
            f"{MOST_PODS:,} pods of one Job"
        )
    _check_image(image)
    _check_key(job)
    limit = {}
    if timeout is not None:
        limit["activeDeadlineSeconds"] = math.ceil(timeout)
    documents = [_service(name)]
    documents += [_job(kind, job, image, name, limit) for kind in KINDS]
    body = yaml.dump_all(
        documents,
        Dumper=_Dumper,
        sort_keys=False,
        explicit_start=True,
        allow_unicode=True,
        width=math.inf,
    )
    return _introduction(job, image, name, timeout) + body


def _check_name(name: str, job: Job) -> None:
    """Refuse a name that does not fit into the names made from it."""
    longest = max(
        len("-scheduler"),
        len(f"-server-{job.num_servers - 1}"),
        len(f"-worker-{job.num_workers - 1}"),
    )
    allowed = _LONGEST_NAME - longest - _POD_SUFFIX
    if len(name) > allowed or not _DNS_LABEL.match(name):
        raise LaunchError(
            f"--name is {name!r}; Kubernetes allows lower-case letters, digits and "
            "'-', with a letter in front and no '-' at the end, and this job's pods "
            f"leave room for {allowed} characters"
        )


def _check_image(image: str | None) -> None:
    """Refuse what cannot be the name of an image."""
    if image is not None and not _IMAGE.match(image):
        raise LaunchError(
            f"--image is {image!r}; give the name of a container image, such as "
            f"{PLACEHOLDER_IMAGE}"
        )


def _check_key(job: Job) -> None:
    """Refuse to write the job's key where everybody can read it."""
    if any("ODSGD_KEY" in env for env in (job.env, job.env_server, job.env_worker)):
        raise LaunchError(
            "--env has ODSGD_KEY, and everybody who may read the manifest would read "
            "it; leave it out: the pods take it from a Secret, which the comment on "
            "top of the manifest says how to make"
        )


def _labels(name: str, kind: str) -> dict[str, str]:
    """The labels that Kubernetes recommends, and by which objects are found."""
    return {
        f"{LABEL}/name": "odsgd-kvstore",
        f"{LABEL}/instance": _Quoted(name),
        f"{LABEL}/component": kind,
    }


def _service(name: str) -> dict[str, Any]:
    """A name for the scheduler's pod."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": _Quoted(f"{name}-scheduler"),
            "labels": _labels(name, "scheduler"),
        },
        "spec": {
            # With an address of its own it would be one that no pod can bind.
            "clusterIP": "None",
            # The scheduler connects to itself by this name while it starts.
            "publishNotReadyAddresses": True,
            "selector": _labels(name, "scheduler"),
            "ports": [{"name": "tcp-ps-lite", "port": PORT}],
        },
    }


def _job(
    kind: str, job: Job, image: str | None, name: str, limit: Mapping[str, int]
) -> dict[str, Any]:
    """The Job of one kind of role; a pod that fails is not started again."""
    counts = {"server": job.num_servers, "worker": job.num_workers}
    spec: dict[str, Any] = {"backoffLimit": 0, **limit}
    if kind in counts:
        spec["completionMode"] = "Indexed"
        spec["parallelism"] = spec["completions"] = counts[kind]
    spec["template"] = {
        "metadata": {"labels": _labels(name, kind)},
        "spec": _pod(kind, job, image, name),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": _Quoted(f"{name}-{kind}"),
            "labels": _labels(name, kind),
        },
        "spec": spec,
    }


def _pod(kind: str, job: Job, image: str | None, name: str) -> dict[str, Any]:
    """What runs in each pod of a kind."""
    container: dict[str, Any] = {
        "name": kind,
        "image": _Quoted(image or PLACEHOLDER_IMAGE),
        "command": [_literal(text, "the command") for text in _argv(kind, job)],
        "env": _env(kind, job, name),
        "ports": [{"name": "ps-lite", "containerPort": PORT}],
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        # A Service called dmlc-ps-root would set DMLC_PS_ROOT_PORT in every pod.
        "enableServiceLinks": False,
        "containers": [container],
    }
    if kind == "worker":
        # Containers have 64 MB there, and Gluon's DataLoader passes batches through it.
        container["volumeMounts"] = [{"name": "memory", "mountPath": "/dev/shm"}]
        pod["volumes"] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    return pod


def _argv(kind: str, job: Job) -> tuple[str, ...]:
    """Program and arguments of a kind of role."""
    if kind == "worker":
        return tuple(job.command)
    program = job.command[0]
    is_python = _PYTHON.match(posixpath.basename(program))
    python = program if is_python else "python"
    if job.stock_servers:
        return (python, "-c", STOCK_SERVER)
    return (python, "-m", "odsgd_kvstore.server")


def _env(kind: str, job: Job, name: str) -> list[dict[str, Any]]:
    """The variables of a kind of role; what makes it this role comes last and wins."""
    users = {"PYTHONUNBUFFERED": "1", **job.env}
    if kind == "worker":
        users.update(job.env_worker)
    else:  # A server that takes a GPU starves a worker.
        users.update({"CUDA_VISIBLE_DEVICES": "", **job.env_server})
    entries: dict[str, dict[str, Any]] = {
        variable: {"value": _literal(value, f"the value of {variable}")}
        for variable, value in users.items()
    }
    if not any(users.get(variable) for variable in KEY_VARIABLES):
        key = {"name": _Quoted(f"{name}-key"), "key": "key"}
        entries["ODSGD_KEY"] = {"valueFrom": {"secretKeyRef": key}}
    entries.update(_place(kind, job, name))
    return [{"name": variable, **entry} for variable, entry in entries.items()]


def _place(kind: str, job: Job, name: str) -> Mapping[str, dict[str, Any]]:
    """The variables that make a pod this role of the job."""
    values = {
        "DMLC_ROLE": kind,
        "DMLC_PS_ROOT_URI": f"{name}-scheduler",
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": str(job.num_workers),
        "DMLC_NUM_SERVER": str(job.num_servers),
        "DMLC_USE_KUBERNETES": "1",
    }
    if kind != "scheduler":
        values["PORT"] = str(PORT)
    if kind == "worker":
        values.update(ODSGD_LOCAL_RANK="0", ODSGD_LOCAL_SIZE="1")
    entries: dict[str, dict[str, Any]] = {
        variable: {"value": _Quoted(value)} for variable, value in values.items()
    }
    if kind != "scheduler":
        address = {"fieldRef": {"fieldPath": "status.podIP"}}
        entries["DMLC_NODE_HOST"] = {"valueFrom": address}
    return entries


def _literal(text: str, what: str) -> str:
    """`text` so that the pod gets it unchanged: Kubernetes would replace $(NAME)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise LaunchError(
            f"{what} is not UTF-8, and Kubernetes takes nothing else; change it"
        ) from error
    return _Quoted(text.replace("$", "$$"))


def _introduction(job: Job, image: str | None, name: str, timeout: float | None) -> str:
    """The comment on top: what to do before the job, with it, and after it."""
    text = _INTRODUCTION.format(
        name=name,
        instance=f"{LABEL}/instance={name}",
        num_workers=job.num_workers,
        num_servers=job.num_servers,
        num_pods=job.num_workers + job.num_servers + 1,
    )
    if image is None:
        text += _NO_IMAGE
    if timeout is None:
        text += _NO_TIMEOUT
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
