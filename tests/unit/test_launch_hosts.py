"""Host files: what is taken, and what is refused with the line and an example."""

import builtins
import os

import pytest

from odsgd_kvstore.errors import LaunchError
from odsgd_kvstore.launch import hosts
from odsgd_kvstore.launch.hosts import Host, HostFile, parse_hosts, read_hosts

EXAMPLE = r"'me@node2:2222 slots=4'"


def parse(text):
    return parse_hosts(text, "hosts.txt")


@pytest.mark.parametrize(
    "line, host",
    [
        ("node1", Host("node1")),
        ("me@node1", Host("node1", "me")),
        ("node1:2222", Host("node1", "", 2222)),
        ("me@node1:2222 slots=3", Host("node1", "me", 2222, 3)),
        ("10.0.0.7:22", Host("10.0.0.7", "", 22)),
        ("[fd00::7]:2222", Host("fd00::7", "", 2222)),
        ("[fd00::7]", Host("fd00::7")),
        ("me@[fd00::7]:2222", Host("fd00::7", "me", 2222)),
        ("fd00::7", Host("fd00::7")),
        ("::1", Host("::1")),
        ("fe80::1%eth0 slots=2", Host("fe80::1%eth0", "", None, 2)),
        ("my_alias-1.example.org", Host("my_alias-1.example.org")),
        ("j.doe@example.org@node1", Host("node1", "j.doe@example.org")),
        ("node1 slots=2 max_slots=4", Host("node1", slots=2)),
        ("node1 slots=2 max-slots=2", Host("node1", slots=2)),
        ("node1 slots = 2", Host("node1", slots=2)),
        ("\t node1 \t slots=2 \t # the big one", Host("node1", slots=2)),
        ("node1#comment", Host("node1")),
    ],
)
def test_line_gives_a_host(line, host):
    assert parse(line) == HostFile((host,), "slots" in line)


@pytest.mark.parametrize(
    "host, label",
    [
        (Host("node1"), "node1"),
        (Host("node1", "me", 2222, 4), "me@node1:2222"),
        (Host("fd00::7"), "fd00::7"),
        (Host("fd00::7", "me", 22), "me@[fd00::7]:22"),
    ],
)
def test_label_is_what_a_line_would_have(host, label):
    assert host.label == label
    assert parse(label).hosts[0] == Host(host.name, host.user, host.port)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_comments_and_blank_lines_are_left_out(end):
    lines = ["\ufeff# our hosts", "", "b # second", "  ", "a slots=2", "#c", ""]
    assert parse(end.join(lines)) == HostFile((Host("b"), Host("a", slots=2)), True)


def test_equal_lines_add_up_in_the_order_of_their_first():
    # b has 1 + 1, a 2 + 1; another user or port is another host.
    found = parse("b\na slots=2\nb\nme@b\nb:2222\na\n")
    hosts = [(host.label, host.slots) for host in found.hosts]
    assert hosts == [("b", 2), ("a", 3), ("me@b", 1), ("b:2222", 1)]
    assert found.is_limited
    assert not parse("b\nb").is_limited


BAD = [
    ("-oProxyCommand=x", "'-oProxyCommand=x' as the host.* no '-' first"),
    ("me@-x", "'-x' as the host"),
    ("-me@node1", "'-me' as the user"),
    ("@node1", "'' as the user"),
    ("me@", "'' as the host"),
    ("a;reboot", "'a;reboot' as the host"),
    ("$(x)@a", r"'\$\(x\)' as the user"),
    ("node[1-4]", "as the host"),
    ("n\u00f6de", "as the host"),
    ("ssh://node1", "'//node1' after ':'"),
    ("node1:", "'' after ':'"),
    ("node1:ssh", "'ssh' after ':'"),
    ("node1:0", "'0' after ':'.*22 to 65535"),
    ("node1:65536", "'65536' after ':'"),
    ("node1:4", "not a number of processes: for 4 write 'node1 slots=4'"),
    ("node1:-22", "'-22' after ':'"),
    ("node1:\u0662\u0662\u0662", "after ':'"),
    ("[fd00::7", "is not an IPv6 address"),
    ("[node1]:22", "is not an IPv6 address"),
    ("[fd00::7]x", "is not an IPv6 address"),
    ("fd00::7::1", "is not an IPv6 address"),
    ("10.0.0", "is not an IPv4 address"),
    ("10.0.0.256", "is not an IPv4 address"),
    ("10.0.0.0/24", "as the host"),
    ("node1 4", "'4' after a host means nothing"),
    ("node1 node2", "'node2' after a host means nothing"),
    ("node1 cpu=4", "'cpu=4' after a host means nothing"),
    ("node1 slots=2 slots=2", "'slots=2' after a host means nothing"),
    ("node1 slots=0", "'slots=0' has '0' as a number; allowed: 1 to 10000"),
    ("node1 slots=-1", "'-1' as a number"),
    ("node1 slots=two", "'two' as a number"),
    ("node1 slots=", "'' as a number"),
    ("node1 slots=10001", "'10001' as a number"),
    ("node1 max_slots=4", "'max_slots=4' has no slots=N that fits"),
    ("node1 slots=4 max_slots=2", "has no slots=N that fits"),
    ("x" * 300, r"xxx\.\.\.'"),
]


@pytest.mark.parametrize("line, words", BAD)
def test_wrong_line_is_refused_with_its_number_and_an_example(line, words):
    with pytest.raises(LaunchError, match=f"hosts.txt, line 3: .*{words}") as caught:
        parse(f"# hosts\nnode1\n{line}\nnode2\n")
    assert "allowed: " in str(caught.value) and EXAMPLE in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# node1\n", "\ufeff"])
def test_no_host_is_refused(text):
    with pytest.raises(LaunchError, match=f"hosts.txt has no host; .*{EXAMPLE}"):
        parse(text)


def test_file_is_read(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfnode1\r\nnode2 slots=2\r\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("hosts", str(tmp_path / "hosts"), "~/hosts"):
        assert read_hosts(path).hosts == (Host("node1"), Host("node2", slots=2))


def test_file_that_cannot_be_read_is_named_with_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    full = os.path.join(os.getcwd(), "nosuch")
    with pytest.raises(LaunchError) as caught:
        read_hosts("nosuch")
    assert str(caught.value) == (
        f"-H/--hostfile: {full} cannot be read (No such file or directory); give a "
        f"text file with one host a line: {hosts.FORM}"
    )
    with pytest.raises(LaunchError, match=r"cannot be read \(Is a directory\)"):
        read_hosts(str(tmp_path))
    with pytest.raises(LaunchError, match="'' cannot be read"):
        read_hosts("")


def test_file_without_rights_is_refused(monkeypatch):
    def refuse(path, mode):  # Root may read everything.
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(builtins, "open", refuse)
    with pytest.raises(LaunchError, match=r"/x cannot be read \(Permission denied\)"):
        read_hosts("/x")


@pytest.mark.parametrize(
    "data", [b"\x7fELF\0\1", "node1\n".encode("utf-16"), b"n\xe4", b"a\n" * (1 << 20)]
)
def test_file_that_is_no_text_is_refused(tmp_path, data):
    (tmp_path / "hosts").write_bytes(data)
    with pytest.raises(LaunchError, match="hosts is not a text file in UTF-8"):
        read_hosts(str(tmp_path / "hosts"))


def test_wrong_line_of_a_file_is_named_with_its_path(tmp_path):
    (tmp_path / "hosts").write_text("node1:x\n")
    with pytest.raises(LaunchError, match=f"{tmp_path}/hosts, line 1: "):
        read_hosts(str(tmp_path / "hosts"))
