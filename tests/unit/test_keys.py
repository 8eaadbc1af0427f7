"""User keys and the choice of a server by the choice of a key."""

import ctypes

import pytest

from odsgd_kvstore.errors import ConfigError, JobError
from odsgd_kvstore.keys import NativeKeys, UserKeys, as_list, server_of

LARGEST = 215329  # 215330 * 9973 does not fit into ps-lite's int.


def ps_lite_server(key, num_servers):
    """`EncodeDefaultKey` in MXNet 1.9.1: int server = (key * 9973) % num_servers."""
    product = ctypes.c_int32(key * 9973).value
    return int(
        ctypes.c_int32(int(product - num_servers * int(product / num_servers))).value
    )


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5, 7, 16])
def test_server_of_equals_the_formula_of_ps_lite(num_servers):
    for key in [*range(500), 9973, 99999, LARGEST - 1, LARGEST]:
        assert server_of(key, num_servers) == ps_lite_server(key, num_servers)


def test_formula_of_ps_lite_overflows_one_above_the_largest_key():
    assert LARGEST * 9973 <= 2**31 - 1 < (LARGEST + 1) * 9973
    assert ps_lite_server(LARGEST + 1, 5) != server_of(LARGEST + 1, 5)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5, 9973])
def test_on_server_deals_new_keys_of_the_server_asked_for(num_servers):
    keys = NativeKeys(num_servers, 1000)
    wanted = [server % num_servers for server in (4, 0, 0, 2, 1, 3, 3)]
    if num_servers == 9973:  # Every key is on server 0, whatever the search.
        wanted = [0] * 7
    dealt = [keys.on_server(server) for server in wanted]
    assert [server_of(key, num_servers) for key in dealt] == wanted
    assert len(set(dealt)) == len(dealt)
    assert dealt == sorted(dealt)


def test_two_ranks_deal_the_same_keys():
    sizes = [10, 3, 5000, 7, 7, 2000, 1]
    first, second = NativeKeys(3, 1000), NativeKeys(3, 1000)
    assert [first.place(s) for s in sizes] == [second.place(s) for s in sizes]


def test_placement_is_even():
    keys = NativeKeys(3, 1000)
    load = [0, 0, 0]
    for size in [300, 10, 10, 280, 300, 20, 5, 600, 300, 270]:
        load[server_of(keys.place(size), 3)] += size
    # Each array goes to the server that holds least so far, the first of equals:
    # 300 + 5 + 600, 10 + 280 + 20 + 300, 10 + 300 + 270.
    assert load == [905, 610, 580]


def test_equal_arrays_go_round_the_servers():
    keys = NativeKeys(4, 1000)
    assert sorted(server_of(keys.place(8), 4) for _ in range(12)) == sorted(
        [0, 1, 2, 3] * 3
    )


def test_an_array_that_is_cut_does_not_count_as_one_server_s_load():
    keys = NativeKeys(2, 1000)
    keys.place(10**6)
    assert {server_of(keys.place(5), 2), server_of(keys.place(5), 2)} == {0, 1}


def test_keys_end_at_the_largest_with_a_remedy():
    keys = NativeKeys(1, 1000)
    keys._next = LARGEST - 1  # As if all before were dealt.
    assert keys.on_server(0) == LARGEST - 1
    with pytest.raises(JobError, match=rf"all {LARGEST} keys.*Start a new job"):
        keys.on_server(0)


def test_user_keys_take_int_and_str_mixed_in_order():
    keys = UserKeys()
    keys.add(3, "three")
    keys.add("fc_weight", "named")
    keys.add(0, "zero")
    assert list(keys) == ["three", "named", "zero"]
    assert (keys["fc_weight"], keys[0], len(keys)) == ("named", "zero", 3)


def test_duplicate_key_is_refused_and_leaves_the_first():
    keys = UserKeys()
    keys.add("w", 1)
    with pytest.raises(
        ConfigError, match="'w' was initialised before.*Use another key"
    ):
        keys.add("w", 2)
    assert keys["w"] == 1


@pytest.mark.parametrize("key", [True, 1.5, None, (1,), b"w"])
def test_key_of_another_type_is_refused(key):
    with pytest.raises(ConfigError) as caught:
        UserKeys().check_new(key)
    assert repr(key) in str(caught.value)
    assert f"is a {type(key).__name__}; use int or str" in str(caught.value)


@pytest.mark.parametrize("key", ["zz", 7, [1], None])
def test_unknown_key_is_refused_with_the_known_ones(key):
    keys = UserKeys()
    for known in range(10):
        keys.add(f"k{known}", known)
    with pytest.raises(ConfigError) as caught:
        keys[key]
    text = str(caught.value)
    assert f"Key {key!r} is not known" in text
    assert "'k0', 'k1'" in text and "'k7'..." in text and "'k8'" not in text
    assert "Call broadcast (or init) for it first, on every rank" in text


def test_unknown_key_of_an_empty_store_says_none():
    with pytest.raises(ConfigError, match="known are: none"):
        UserKeys()["w"]


def test_as_list():
    assert as_list(3) == [3]
    assert as_list([3, 4]) == [3, 4]
    assert as_list((3,)) == [3]
