"""Slurm: where rank 0 is, and how it proves itself by munge or by the user's key."""

import base64
import contextlib
import hmac
import os
import socket

import pytest
from meetings import agent, close, controller

from odsgd_kvstore.errors import ConfigError, LaunchError
from odsgd_kvstore.launch import slurm
from odsgd_kvstore.launch.ranks import Rank

MUNGE = """#!/bin/sh
PATH={path}
test -e {folder}/broken && echo 'munge: Error: no socket' >&2 && exit 6
echo "$@" >> {folder}/arguments
echo "MUNGE:$(base64 -w 0)"
"""
UNMUNGE = """#!/bin/sh
PATH={path}
echo "$@" >> {folder}/arguments
echo "UID:             somebody ($(cat {folder}/uid))"
echo
sed s/MUNGE:// | base64 -d
"""


@pytest.fixture
def munge(tmp_path, monkeypatch):
    """Programs in place of munge's; the file 'uid' says who made each credential."""
    for name, text in (("munge", MUNGE), ("unmunge", UNMUNGE)):
        path = tmp_path / name
        path.write_text(text.format(path=os.defpath, folder=tmp_path))
        path.chmod(0o755)
    (tmp_path / "uid").write_text(str(os.geteuid()))
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def node_list(rank, ports, **more):
    """Slurm's way, with all ranks on one node."""
    environ = {
        "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "node0", **more,
    }  # fmt: skip
    return slurm.ByNodeList(Rank(rank, 2, "node0", "Slurm"), environ, ports)


@pytest.fixture
def ports():
    """A range of eight ports, of which the first is taken."""
    for first in range(20000, 32000, 50):
        with contextlib.ExitStack() as stack:
            taken = socket.socket()
            stack.enter_context(taken)
            with contextlib.suppress(OSError):
                taken.bind(("0.0.0.0", first))
                taken.listen()
                yield first, first + 7
                return


@pytest.mark.parametrize("more", [{}, {"ODSGD_KEY": "secret"}])
def test_slurm_ranks_meet_by_munge_or_by_key(munge, ports, more):
    if more:
        (munge / "broken").touch()
    zero = controller(node_list(0, ports, **more), size=2)
    one = agent(node_list(1, ports, **more), 1, size=2)
    assert [guest.rank for guest in close(zero.result())] == [1]
    one.result().close()
    if not more:
        said = (munge / "arguments").read_text()
        assert set(said.split()) == {f"--restrict-uid={os.geteuid()}", "--keys=UID"}


def test_slurm_credential_of_another_user_or_step_is_refused(munge, ports):
    zero, one = node_list(0, ports), node_list(1, ports)
    token, credential = zero.seal()
    assert one.open_credential(credential) == token
    (munge / "uid").write_text("1" + str(os.geteuid()))
    with pytest.raises(LaunchError, match="made by another user"):
        one.open_credential(credential)
    (munge / "uid").write_text(str(os.geteuid()))
    with pytest.raises(LaunchError, match=r"for step '12\.0'"):
        node_list(1, ports, SLURM_JOB_ID="13").open_credential(credential)
    with pytest.raises(LaunchError, match="ODSGD_KEY, set it for all ranks"):
        one.open_credential(b"")
    payload = base64.b64encode(b"nonsense")
    with pytest.raises(ValueError):
        one.open_credential(b"MUNGE:" + payload)


def test_slurm_without_key_and_munge_says_both_remedies(munge, ports):
    (munge / "broken").touch()
    with pytest.raises(
        LaunchError, match="ODSGD_KEY is not set, and munge.*no socket.*Set ODSGD_KEY"
    ):
        node_list(0, ports)
    with pytest.raises(ConfigError, match="ODSGD_KEY_FILE cannot be read"):
        node_list(0, ports, ODSGD_KEY_FILE="/no/file")


def test_slurm_token_follows_from_key_and_step(ports):
    token, credential = node_list(0, ports, ODSGD_KEY="k").seal()
    assert credential == b""
    assert token == hmac.digest(b"k", b"odsgd_kvstore step 12.0", "sha256")


def test_slurm_refuses_a_rank_0_that_is_not_on_the_first_node(ports):
    way = node_list(0, ports, ODSGD_KEY="k", SLURM_STEP_NODELIST="a[2-3],node0")
    with pytest.raises(LaunchError, match="rank 0 runs on node0.*first node, a2; give"):
        way.listen(0.0)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[01-04,7],x", "node01"),
        ("a,b[1-2]", "a"),
        ("rack[2,5]n[07-9],z", "rack2n07"),
        ("n[3]", "n3"),
    ],
)
def test_first_node_of_a_list(nodes, first):
    assert slurm.first_node(nodes) == first


def test_first_node_of_no_list():
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST is empty"):
        slurm.first_node("")


def test_candidate_ports_follow_from_the_step_and_stay_in_the_range():
    ports = slurm.candidate_ports("12.0", 20000, 32767)
    assert ports == slurm.candidate_ports("12.0", 20000, 32767)
    assert ports != slurm.candidate_ports("12.1", 20000, 32767)
    assert len(set(ports)) == 16
    assert all(20000 <= port <= 32767 for port in ports)
    assert sorted(slurm.candidate_ports("12.0", 5, 7)) == [5, 6, 7]
