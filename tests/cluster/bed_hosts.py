"""Test bed: hosts with an sshd each, which are namespaces of this machine.

Each host has its own network, host name, process numbers and mounts, so that `ssh`,
the launcher and ps-lite see what they would see of machines. Nothing of a bed has a
lasting name: the kernel ends a host with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from bed_sshd import START_S, key_pair, sshd_config
from bed_tools import (
    device,
    end,
    free_networks,
    need,
    or_skip,
    remove_old,
    run,
    which,
)
from watch import command, pids, wait_until

from odsgd_kvstore.launch.shims import shim_argv

TOOLS = ("ip", "unshare", "nsenter", "mount", "umount", "sshd", "ssh", "ssh-keygen")
# First process of a host: waits for its network, runs sshd, collects orphans.
INIT = """
import os, socket, subprocess, sys
socket.sethostname(sys.argv[1])
print("up", flush=True)
if sys.stdin.readline() == "go\\n":
    subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    while True:
        os.wait()
"""
# 9 and 10: as text, ps-lite's order, the first is the larger one.
NUMBERS = {"alpha": 9, "beta": 10}
ABSENT = 77  # No host has this number.
HERE = 254  # This machine.
PORTS = (22, 2222)
SHELLS = ("bash", "dash", "tcsh", "banner")
BANNER = "*** Welcome. All activity is logged. ***"


@dataclass
class Host:
    """A host of the bed.

    Parameters
    ----------
    name : str
        Host name, and alias in the bed's ssh configuration.
    address, second, fast, six : str
        IPv4 on eth0; another one there; IPv4 on the second network, ib0; IPv6.
    popen : subprocess.Popen
        Of `unshare`; the host ends with it.
    pid : int
        First process of the host, as seen from outside.
    link : str
        This machine's end of the host's cable.
    """

    name: str
    address: str
    second: str
    fast: str
    six: str
    popen: subprocess.Popen
    pid: int
    link: str

    @property
    def entry(self) -> list[str]:
        """What goes before a command that runs on the host."""
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-m", "-p", "--"]

    def inside(self, *argv: str, text: str = "", check: bool = True) -> str:
        """Run a short command on the host; return its output."""
        return run(*self.entry, *argv, text=text, check=check)

    def processes(self) -> dict[int, str]:
        """Pid, as seen from outside, and command; without the first and the sshd."""
        space, found = os.readlink(f"/proc/{self.pid}/ns/pid"), {}
        for pid in pids():
            with contextlib.suppress(OSError):  # Ended meanwhile.
                if os.readlink(f"/proc/{pid}/ns/pid") == space and pid != self.pid:
                    found[pid] = command(pid)
        return {
            p: text for p, text in found.items() if text and "sshd: " not in text[:40]
        }

    @contextlib.contextmanager
    def covered(self, path: str | Path, source: str | Path | None = None):
        """Let `path` be the file or folder `source` on this host; None: empty."""
        if source is None:
            self.inside("mount", "-t", "tmpfs", "odsgdtest", str(path))
        else:
            self.inside("mount", "--bind", str(source), str(path))
        try:
            yield
        finally:
            self.inside("umount", "-l", str(path))

    @contextlib.contextmanager
    def firewall(self, *rules: str):
        """Drop what comes in and matches one of the rules of nft."""
        chain = "type filter hook input priority 0;"
        body = "".join(f"{rule} drop\n" for rule in rules)
        table = f"table inet odsgdtest {{\nchain in {{\n{chain}\n{body}}}\n}}\n"
        need("nft")
        with or_skip("a firewall", Path("no log")):
            self.inside("nft", "-f", "-", text=table)
        try:
            yield
        finally:
            self.inside("nft", "delete", "table", "inet", "odsgdtest")

    @contextlib.contextmanager
    def vanished(self):
        """Pull the host's cable."""
        run("ip", "link", "set", self.link, "down")
        try:
            yield
        finally:
            run("ip", "link", "set", self.link, "up")


class Hosts:
    """Context manager: the hosts, their networks and the way to reach them.

    Parameters
    ----------
    folder : pathlib.Path
        Empty, for keys and configurations.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[str, Host] = {}
        self.config = folder / "ssh_config"
        self.local = folder / "local"  # On every host a file system of its own.
        self._stack = contextlib.ExitStack()
        self._net = free_networks()

    def __getitem__(self, name: str) -> Host:
        return self.hosts[name]

    def __enter__(self) -> Hosts:  # noqa: PYI034 (Self is of Python 3.11)
        need(*TOOLS)
        if os.geteuid() != 0:
            pytest.skip(
                "hosts are namespaces of this machine, and only root makes them"
            )
        remove_old()
        with contextlib.ExitStack() as stack:
            self._files()
            with or_skip("a network", self.folder / "no log"):
                for number in (0, 1):
                    self._bridge(stack, number)
            for name in NUMBERS:
                self.hosts[name] = self._host(stack, name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ip(self, number: int, network: int = 0) -> str:
        """The address of a number on one of the two networks."""
        return f"198.19.{self._net + network}.{number}"

    def processes(self) -> dict[str, str]:
        """What runs on the hosts, by host and pid."""
        found = {}
        for host in self.hosts.values():
            for pid, text in host.processes().items():
                found[f"{host.name} {pid}"] = text
        return found

    @property
    def bridge(self) -> str:
        """This machine's interface on the first network."""
        return device("b", 0)

    @property
    def ssh_opts(self) -> str:
        """For ``odsgd-launch --ssh-opts``."""
        return f"-F {self.config}"

    def _files(self) -> None:
        """Keys, client configuration, users and homes."""
        folder = self.folder
        folder.chmod(0o755)
        self.local.mkdir()
        for name in ("user_key", "other_key", "host_key", "other_host_key"):
            key_pair(folder / name)
        shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
        public = " ".join((folder / "host_key.pub").read_text().split()[:2])
        other = " ".join((folder / "other_host_key.pub").read_text().split()[:2])
        (folder / "known_hosts").write_text(f"* {public}\n")
        (folder / "changed_hosts").write_text(f"* {other}\n")
        self._users()
        self.config.write_text(self._client_config())
        argv = [which("sshd"), "-D", "-e", "-f", str(folder / "sshd_config")]
        self._sshd = argv
        (folder / "sshd_config").write_text(sshd_config(folder, PORTS))

    def _users(self) -> None:
        """Names for the user of the hosts, one for each login shell."""
        passwd = Path("/etc/passwd").read_text()
        shadow = "root:*:20000:0:99999:7:::\n"
        for name in SHELLS:
            home = self.folder / f"home-{name}"
            home.mkdir()
            shell = shutil.which("bash" if name == "banner" else name) or "/bin/sh"
            passwd += f"odsgdtest-{name}:x:0:0::{home}:{shell}\n"
            shadow += f"odsgdtest-{name}:*:20000:0:99999:7:::\n"
        text = f"echo '{BANNER}'\necho '{BANNER}' >&2\n"
        (self.folder / "home-banner/.bashrc").write_text(text)
        (self.folder / "passwd").write_text(passwd)
        (self.folder / "shadow").write_text(shadow)

    def _client_config(self) -> str:
        """Aliases: each host, and some that can't work."""
        folder, beta = self.folder, self.ip(NUMBERS["beta"])
        blocks = [f"Host {name}\n  HostName {self.ip(number)}" for name, number in
                  NUMBERS.items()]  # fmt: skip
        changed = f"  UserKnownHostsFile {folder}/changed_hosts"
        blocks += [
            f"Host changed-key\n  HostName {beta}\n{changed}",
            f"Host no-key\n  HostName {beta}\n  IdentityFile {folder}/other_key",
            f"Host unknown-key\n  HostName {beta}\n  UserKnownHostsFile /dev/null",
            f"Host absent\n  HostName {self.ip(ABSENT)}",
            f"Host * !no-key\n  IdentityFile {folder}/user_key",
            "Host *\n  IdentitiesOnly yes\n  GlobalKnownHostsFile /dev/null",
            f"  UserKnownHostsFile {folder}/known_hosts",
        ]
        return "\n".join(blocks) + "\n"

    def _bridge(self, stack: contextlib.ExitStack, number: int) -> None:
        """One of the two networks; this machine takes part in both."""
        name = device("b", number)
        run("ip", "link", "add", name, "type", "bridge")
        stack.callback(run, "ip", "link", "del", name)
        run("ip", "address", "add", self.ip(HERE, number) + "/24", "dev", name)
        if number == 0:
            six = f"fd00:198:19:{self._net}::254/64"
            run("ip", "-6", "address", "add", six, "dev", name, "nodad")
        run("ip", "link", "set", name, "up")

    def _host(self, stack: contextlib.ExitStack, name: str) -> Host:
        """Start a host and give it its networks."""
        flags = ["--net", "--uts", "--ipc", "--mount", "--pid", "--fork"]
        init = (sys.executable, "-I", "-S", "-c", INIT, name, *self._sshd)
        flags += ["--kill-child", "--mount-proc"]
        argv = shim_argv(os.getpid(), ["unshare", *flags, *init])
        log = stack.enter_context((self.folder / f"{name}.log").open("wb"))
        popen = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        stack.callback(end, popen)
        if popen.stdout.readline() != b"up\n":
            pytest.skip(
                "no namespaces on this machine: "
                + (self.folder / f"{name}.log").read_text().strip()
            )
        children = Path(f"/proc/{popen.pid}/task/{popen.pid}/children").read_text()
        number, index = NUMBERS[name], list(NUMBERS).index(name)
        host = Host(
            name, self.ip(number), self.ip(number + 100), self.ip(number, 1),
            f"fd00:198:19:{self._net}::{number}", popen, int(children.split()[0]),
            device("v", 2 * index),
        )  # fmt: skip
        for network, inner in enumerate(("eth0", "ib0")):
            self._cable(host, network, inner, device("v", 2 * index + network))
        self._mounts(host)
        popen.stdin.write(b"go\n")
        popen.stdin.flush()
        with or_skip("sshd", self.folder / f"{name}.log"):
            wait_until(lambda: self._answers(host), f"the sshd of {name}", START_S)
        return host

    def _cable(self, host: Host, network: int, inner: str, outer: str) -> None:
        """A link between a host and a network."""
        peer = ("peer", "name", inner, "netns", str(host.pid))
        run("ip", "link", "add", "name", outer, "type", "veth", *peer)
        run("ip", "link", "set", outer, "master", device("b", network), "up")
        lines = ["link set lo up", f"link set {inner} up"]
        own = [host.address, host.second] if network == 0 else [host.fast]
        lines += [f"address add {ip}/24 dev {inner}" for ip in own]
        if network == 0:
            lines.append(f"address add {host.six}/64 dev {inner} nodad")
        host.inside("ip", "-batch", "-", text="\n".join(lines) + "\n")

    def _mounts(self, host: Host) -> None:
        """Files that belong to the host alone."""
        hosts = self.folder / f"{host.name}.hosts"
        # As Debian's installer writes it.
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n::1 localhost\n")
        host.inside("mount", "--bind", str(hosts), "/etc/hosts")
        for name in ("passwd", "shadow"):
            host.inside("mount", "--bind", str(self.folder / name), f"/etc/{name}")
        host.inside("mount", "-t", "tmpfs", "odsgdtest", "/run")
        host.inside("mkdir", "/run/sshd")
        host.inside("mount", "-t", "tmpfs", "odsgdtest", str(self.local))

    def _answers(self, host: Host) -> bool:
        argv = ("ssh", "-F", str(self.config), "-o", "BatchMode=yes")
        return run(*argv, host.name, "echo on", check=False) == "on\n"
