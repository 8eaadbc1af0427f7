"""Sealed messages, and optimizers and schedules that come out equal."""

import base64
import collections
import json
import math
import pickle

import mxnet as mx
import numpy as np
import pytest
from mxnet import lr_scheduler, optimizer

from odsgd_kvstore import commands
from odsgd_kvstore.commands import Opener, Sealer, SealError
from odsgd_kvstore.errors import ConfigError

KEY, JOB, NONCE = b"secret", "job1", "ab" * 16
BODY = {"op": "change", "values": {"lr": 0.1, "name": "größer\U0001f40d"}}
OPTIMIZERS = sorted(optimizer.Optimizer.opt_registry)
SCHEDULES = [
    lr_scheduler.FactorScheduler(step=3, factor=0.3, base_lr=0.1),
    lr_scheduler.MultiFactorScheduler(step=[3, 7], factor=0.1, base_lr=1 / 3),
    lr_scheduler.PolyScheduler(max_update=9, base_lr=0.7, pwr=2, warmup_steps=2),
    lr_scheduler.CosineScheduler(max_update=9, base_lr=0.7, final_lr=1e-5),
]
Named = collections.namedtuple("Named", "name")


class Own(optimizer.SGD):
    """An optimizer that is not MXNet's."""


def sent(body=BODY, key=KEY, job=JOB, rank=0, nonces=(NONCE,), before=0):
    """An envelope, the `before + 1`-th of its sender."""
    sealer = Sealer(key, job, rank)
    for _ in range(before):
        sealer.seal(body, nonces)
    return sealer.seal(body, nonces)


def taken_apart(envelope):
    """What is inside an envelope."""
    inside = envelope[len(commands._HEAD) : -len(commands._TAIL)]
    return json.loads(base64.b64decode(inside))


def put_together(outer):
    """The envelope around something."""
    inside = base64.b64encode(json.dumps(outer).encode()).decode()
    return commands._HEAD + inside + commands._TAIL


def refused(envelope, part, opener=None):
    """The envelope is not opened, and the message says why."""
    with pytest.raises(SealError, match=part):
        (opener or Opener(KEY, JOB, NONCE)).open(envelope)


@pytest.mark.parametrize("key", [KEY, b""])
def test_message_comes_back_equal(key):
    assert Opener(key, JOB, NONCE).open(sent(key=key)) == BODY


def test_message_for_several_servers_is_opened_by_each():
    envelope = sent(nonces=["cd" * 16, NONCE])
    assert Opener(KEY, JOB, NONCE).open(envelope) == BODY
    assert Opener(KEY, JOB, "cd" * 16).open(envelope) == BODY


def test_hello_needs_no_nonce():
    hello = {"op": "hello", "status_keys": [0]}
    assert Opener(KEY, JOB, NONCE).open(sent(hello, nonces=[])) == hello


def test_envelope_is_text_that_c_can_carry():
    envelope = sent()
    assert envelope.isascii() and "\0" not in envelope


def test_envelope_is_the_pickle_of_a_call_of_apply():
    calls = []

    class Finder(pickle.Unpickler):
        def find_class(self, module, name):
            assert (module, name) == ("odsgd_kvstore.server", "apply")
            return calls.append

    import io

    Finder(io.BytesIO(sent().encode())).load()
    assert json.loads(base64.b64decode(calls[0])).keys() == {"text", "seal"}


def test_key_is_nowhere_in_the_envelope():
    outer = taken_apart(sent(key=b"do-not-show"))
    assert "do-not-show" not in json.dumps(outer) + sent(key=b"do-not-show")


@pytest.mark.parametrize("key", [b"other", b"", b"secret "])
def test_wrong_key_is_refused(key):
    refused(sent(key=key), "wrong seal.*ODSGD_KEY")


def test_altered_text_is_refused():
    outer = taken_apart(sent())
    assert "0.1" in outer["text"]
    outer["text"] = outer["text"].replace("0.1", "9.1")
    refused(put_together(outer), "wrong seal")


@pytest.mark.parametrize("name", ["rank", "number", "job", "nonces"])
def test_each_field_is_under_the_seal(name):
    outer = taken_apart(sent())
    message = json.loads(outer["text"])
    message[name] = {"rank": 1, "number": 7, "job": "x", "nonces": []}[name]
    outer["text"] = json.dumps(message)
    refused(put_together(outer), "wrong seal")


def test_replay_is_refused():
    opener = Opener(KEY, JOB, NONCE)
    first, second = sent(), sent(before=1)
    assert opener.open(first) == opener.open(second) == BODY
    refused(first, "command 1 of rank 0 arrived a second time", opener)
    refused(second, "command 2 of rank 0 arrived a second time", opener)


def test_number_is_counted_for_each_rank():
    opener = Opener(KEY, JOB, NONCE)
    assert opener.open(sent(rank=0, before=4)) == BODY
    assert opener.open(sent(rank=1)) == BODY
    refused(sent(rank=0, before=3), "command 4 of rank 0", opener)


def test_refused_message_does_not_use_up_a_number():
    opener = Opener(KEY, JOB, NONCE)
    refused(sent(key=b"other", before=8), "wrong seal", opener)
    refused(sent(job="job2", before=8), "another job", opener)
    assert opener.open(sent()) == BODY


def test_another_job_is_refused():
    refused(sent(job="job2"), "another job, 'job2'")


def test_earlier_start_is_refused():
    refused(sent(nonces=["cd" * 16]), "earlier start")
    refused(sent(nonces=[]), "earlier start")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        commands._HEAD,
        commands._TAIL,
        pickle.dumps(1, 0).decode(),
        pickle.dumps(mx.optimizer.SGD(), 0).decode(),
        "cos\nsystem\n(Vtrue\ntR.",
    ],
)
def test_foreign_command_is_refused_and_not_unpickled(text, monkeypatch):
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    refused(text, "without this package's seal")


def test_overlapping_head_and_tail_are_refused():
    text = commands._HEAD + commands._TAIL[1:]
    refused(text, "without this package's seal|malformed")


@pytest.mark.parametrize(
    "outer",
    [
        {},
        [],
        3,
        None,
        "x",
        {"text": "{}"},
        {"seal": ""},
        {"text": 3, "seal": ""},
        {"text": "[", "seal": ""},
        {"text": "[]", "seal": 3},
    ],
)
@pytest.mark.parametrize("key", [KEY, b""])
def test_malformed_inside_is_refused(outer, key):
    why = "malformed|wrong seal|no ODSGD_KEY"
    refused(put_together(outer), why, Opener(key, JOB, NONCE))


@pytest.mark.parametrize("inside", ["!", "ab", "\u00e9"])
def test_inside_that_is_not_base64_is_refused(inside):
    refused(commands._HEAD + inside + commands._TAIL, "malformed")


def test_deeply_nested_inside_is_refused():
    # It comes before the seal is checked, so anybody could send it.
    inside = base64.b64encode(b"[" * 200_000).decode()
    refused(commands._HEAD + inside + commands._TAIL, "malformed")


def attributes(thing):
    """What an optimizer or schedule is on a server."""
    skip = commands._WORKER_ONLY
    return {
        k: v for k, v in vars(thing).items() if k not in skip and k != "lr_scheduler"
    }


def through(thing, sealed=False):
    """An optimizer as a server gets it, after its way as text."""
    encoded = json.loads(json.dumps(commands.encode_optimizer(thing, rescale=0.125)))
    return commands.decode_optimizer(encoded, sealed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_of_mxnet_comes_out_equal(name):
    given = optimizer.create(name, learning_rate=1 / 3, wd=1e-7 / 3)
    wanted = dict(attributes(given), rescale_grad=0.125)
    there = through(given)
    assert type(there) is type(given)
    assert attributes(there) == wanted
    assert there.param_dict == there.idx2name == there.lr_mult == there.wd_mult == {}
    assert there._index_update_count == {} and there.num_update == 0
    assert there.lr_scheduler is None


@pytest.mark.parametrize(
    "value", [1 / 3, 0.1, 1e-300, 5e-324, -0.0, math.pi * 1e17, float(np.float32(0.1))]
)
def test_floats_are_exact(value):
    assert through(optimizer.SGD(wd=value)).wd.hex() == value.hex()


def test_numpy_scalars_become_the_same_python_values():
    there = through(optimizer.SGD(wd=np.float32(0.1), momentum=np.float64(1 / 3)))
    assert (there.wd, there.momentum) == (float(np.float32(0.1)), 1 / 3)
    assert type(there.wd) is float


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_each_schedule_comes_out_equal(schedule):
    there = through(
        optimizer.SGD(learning_rate=0.1, lr_scheduler=schedule)
    ).lr_scheduler
    assert type(there) is type(schedule)
    assert vars(there) == vars(schedule)
    assert [there(t) for t in range(1, 12)] == [schedule(t) for t in range(1, 12)]


def test_encoding_changes_nothing_of_the_user_s():
    given = optimizer.Adam(lr_scheduler=SCHEDULES[0], param_idx2name={0: "w"})
    given.rescale_grad = 0.5
    before = dict(vars(given))
    commands.encode_optimizer(given, rescale=0.125)
    assert vars(given) == before
    assert given.lr_scheduler is SCHEDULES[0]


def test_begin_num_update_is_where_counting_starts():
    assert through(optimizer.SGD(begin_num_update=40)).num_update == 40


def test_own_optimizer_is_pickled_and_obeyed_only_under_a_seal():
    given = Own(learning_rate=1 / 3, momentum=0.9)
    there = through(given, sealed=True)
    assert type(there) is Own
    assert attributes(there) == dict(attributes(given), rescale_grad=0.125)
    with pytest.raises(ConfigError, match="not MXNet's own.*ODSGD_KEY.*odsgd-launch"):
        through(given, sealed=False)


def test_pickle_is_not_opened_without_a_seal(monkeypatch):
    encoded = commands.encode_optimizer(Own())
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    with pytest.raises(ConfigError):
        commands.decode_optimizer(encoded, sealed=False)


@pytest.mark.parametrize("name", ["Updater", "np", "Test2", "__doc__", "get_updater"])
def test_class_by_name_must_be_an_optimizer(name):
    encoded = {"optimizer": {"class": name, "state": {}}, "lr_scheduler": None}
    with pytest.raises(ConfigError, match=f"{name!r} is not an optimizer"):
        commands.decode_optimizer(encoded, sealed=False)


def test_class_defined_in_the_script_is_refused_by_name():
    kind = type("Mine", (optimizer.SGD,), {"__module__": "__main__"})
    with pytest.raises(
        ConfigError, match="Mine is defined in the script.*__main__.*Move"
    ):
        commands.encode_optimizer(kind())


def test_schedule_defined_in_the_script_is_refused_by_name():
    kind = type("Mine", (lr_scheduler.LRScheduler,), {"__module__": "__main__"})
    with pytest.raises(ConfigError, match="Mine is defined in the script.*Move"):
        commands.encode_optimizer(optimizer.SGD(lr_scheduler=kind()))


def test_attribute_that_cannot_travel_is_refused_with_the_cause():
    given = Own()
    given.hook = lambda: 3
    with pytest.raises(ConfigError, match="Own cannot be sent.*lambda.*plain values"):
        commands.encode_optimizer(given)


@pytest.mark.parametrize(
    "value", [{1: 2}, (1, 2), [{1: 2}], Named("x"), np.zeros(2), {"a": (1,)}]
)
def test_what_json_would_change_is_pickled(value):
    given = optimizer.SGD()
    given.extra = value
    encoded = commands.encode_optimizer(given)["optimizer"]
    assert "pickle" in encoded
    there = through(given, sealed=True).extra
    assert type(there) is type(value)
    assert (
        np.array_equal(there, value)
        if isinstance(value, np.ndarray)
        else (there == value)
    )


def test_sealed_command_is_refused_where_it_cannot_be_checked():
    envelope = Sealer(KEY, JOB, 0).seal({"op": "hello"}, [])
    refused(envelope, "no ODSGD_KEY to check it with", Opener(b"", JOB, NONCE))
