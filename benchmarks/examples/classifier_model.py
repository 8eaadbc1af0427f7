"""Networks by name: of GluonCV, or of MXNet's own zoo where GluonCV is not installed."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
from typing import Any, Callable, Sequence

import mxnet as mx
from classifier_flags import Refused
from mxnet import gluon

PRETRAINED_CLASSES = 1000
_NORM_GROUPS = 32
# Networks of other tasks end with their data set, or say what they do.
_OTHER_TASKS = re.compile(
    r"(voc|coco|custom|ade|citys|kitti\w*|kinetics\d+|ucf101|hmdb51|sthsthv2|mhpv1"
    r"|otb15|int8|640x192)$|pose|_fpn"
)
_EXTRA = "GluonCV is not installed; it has many more: pip install '.[gluoncv]'."


def build(
    args: argparse.Namespace, contexts: Sequence[mx.Context], is_new: bool = True
) -> gluon.HybridBlock:
    """A network with its first weights, the same on every rank.

    Parameters
    ----------
    args : argparse.Namespace
        model and the flags of the network, num_classes, input_size and seed.
    contexts : sequence of mx.Context
        The worker's devices.
    is_new : bool
        Whether pretrained weights are of use: not where a checkpoint follows.

    Raises
    ------
    Refused
        The name is unknown, the network does not take a flag or such images, or there
        are no pretrained weights.
    """
    make, name = finder(args.model)
    keywords = {**network_keywords(args), "ctx": list(contexts)}
    mx.random.seed(args.seed)
    has_weights = args.use_pretrained and is_new
    if has_weights:
        net = _download(args, make, name, keywords)
    else:
        net = _make(args, make, name, keywords)
    net.cast(args.dtype)
    _infer_shapes(net, args)
    if not has_weights:
        net.initialize(mx.init.MSRAPrelu(), ctx=list(contexts))
    if args.mode != "imperative":
        net.hybridize(static_alloc=True, static_shape=True)
    if args.last_gamma and not _has_zero_gamma(net):
        raise Refused(f"--model {args.model} takes --last-gamma and does not heed it.")
    return net


def _make(
    args: argparse.Namespace,
    make: Callable[..., gluon.HybridBlock],
    name: str,
    keywords: dict[str, Any],
) -> gluon.HybridBlock:
    """Call the network's constructor; a flag that it does not know is refused."""
    try:
        return make(name, **keywords)
    except TypeError as error:
        given = [flag for key, flag in _FLAGS.items() if key in keywords]
        if not given:
            raise
        raise Refused(
            f"--model {args.model} does not take {' and '.join(given)} ({error})."
        ) from None


def _download(
    args: argparse.Namespace,
    make: Callable[..., gluon.HybridBlock],
    name: str,
    keywords: dict[str, Any],
) -> gluon.HybridBlock:
    """The network with the zoo's weights."""
    print(
        f"--use-pretrained: the weights of {name} are downloaded into ~/.mxnet/models, "
        "unless they are there.",
        flush=True,
    )
    try:
        return _make(args, make, name, {**keywords, "pretrained": True})
    except (ValueError, RuntimeError, OSError) as error:
        raise Refused(f"--use-pretrained: no weights of {name}: {error}") from None


_FLAGS = {
    "use_se": "--use_se",
    "batch_norm": "--batch-norm",
    "last_gamma": "--last-gamma",
    "norm_layer": "--use-gn",
}


def network_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags mean to the network's constructor.

    Raises
    ------
    Refused
        A flag does not fit the network or the data.
    """
    if args.use_se and not args.model.lower().startswith("resnext"):
        raise Refused(f"--use_se is for resnext networks; --model is {args.model}.")
    if args.batch_norm and not args.model.lower().startswith("vgg"):
        raise Refused(f"--batch-norm is for vgg networks; --model is {args.model}.")
    if args.use_pretrained and args.num_classes != PRETRAINED_CLASSES:
        raise Refused(
            f"--use-pretrained has {PRETRAINED_CLASSES} classes; --num-classes is "
            f"{args.num_classes}. Leave one of them out."
        )
    keywords: dict[str, Any] = {"classes": args.num_classes}
    for name in ("use_se", "batch_norm", "last_gamma"):
        if getattr(args, name):
            keywords[name] = True
    if args.use_gn:
        keywords["norm_layer"] = group_norm
    return keywords


def group_norm(in_channels: int = 0, **keywords: Any) -> gluon.nn.GroupNorm:
    """MXNet's GroupNorm in GluonCV's place for one: GluonCV's own fails on 1.9.1."""
    return gluon.nn.GroupNorm(_NORM_GROUPS, **keywords)


def finder(name: str) -> tuple[Callable[..., gluon.HybridBlock], str]:
    """The function that makes the network, and the name that it knows it by.

    Raises
    ------
    Refused
        No zoo that is installed has it; the message has names like it.
    """
    make, names = _zoo()
    if name.lower() in names:
        return make, name.lower()
    close = difflib.get_close_matches(name.lower(), names, n=5, cutoff=0.5)
    text = f"--model {name} is not a classification network"
    if has_gluoncv():
        text += f" of GluonCV ({len(names)} are)."
    else:
        text += f" of MXNet's own zoo. {_EXTRA}"
    if close:
        text += f" Close: {', '.join(close)}."
    raise Refused(text)


def has_gluoncv() -> bool:
    """Whether GluonCV is installed."""
    return importlib.util.find_spec("gluoncv") is not None


def _zoo() -> tuple[Callable[..., gluon.HybridBlock], list[str]]:
    """GluonCV's function and names, else those of MXNet."""
    if has_gluoncv():
        from gluoncv import model_zoo

        names = [n for n in model_zoo.get_model_list() if not _OTHER_TASKS.search(n)]
        return model_zoo.get_model, names
    vision = gluon.model_zoo.vision
    try:
        vision.get_model("")
    except ValueError as error:  # the names are nowhere else
        return vision.get_model, str(error).split()[7:]
    raise AssertionError("MXNet's zoo has a network without a name")


def _has_zero_gamma(net: gluon.HybridBlock) -> bool:
    gammas = net.collect_params(".*gamma").values()
    return any((gamma.data().asnumpy() == 0).all() for gamma in gammas)


def _infer_shapes(net: gluon.HybridBlock, args: argparse.Namespace) -> None:
    """Give every parameter its shape, so that none is drawn later than the others.

    Without a forward pass: one in inference mode leaves weights in the layout of
    oneDNN, which MXNet's dist_sync of 1.9.1 cannot send (it ends the servers).
    """
    shape = (1, 3, args.input_size, args.input_size)
    output = net(mx.sym.var("data"))
    found = None
    if isinstance(output, mx.sym.Symbol):
        try:
            _, (found, *_), _ = output.infer_shape(data=shape)
            net.infer_shape(mx.nd.zeros(shape))
        except (mx.MXNetError, ValueError) as error:
            why = [line for line in str(error).splitlines() if line.strip()][-1]
            raise Refused(
                f"--model {args.model} does not work with images of {args.input_size} "
                f"pixels (--input-size){' and --use-gn' if args.use_gn else ''}: {why}"
            ) from None
    if found != (1, args.num_classes):
        raise Refused(
            f"--model {args.model} gives {found or type(output).__name__} for one "
            f"image, not a score for each of {args.num_classes} classes."
        )
