"""The networks of benchmark_convergence.py, by name, with weights drawn from a seed."""

from __future__ import annotations

import digits
import mxnet as mx
from mxnet import gluon
from mxnet.gluon import nn

HE = {"rnd_type": "gaussian", "factor_type": "in", "magnitude": 2}  # for ReLU


def build(
    name: str, dataset_shape: tuple[int, int, int], num_classes: int, seed: int
) -> gluon.HybridBlock:
    """A new network on the CPU, initialised and hybridized.

    Parameters
    ----------
    name : str
        'lenet5', 'bn_cnn', 'mlp', 'conv' (of digits.py), or a classification network
        of GluonCV, such as 'cifar_resnet20_v1'.
    dataset_shape : tuple of int
        Channels, height and width of an image.
    num_classes : int
    seed : int
        Equal seeds give equal weights.

    Raises
    ------
    ValueError
        The name is unknown, or the network does not fit the images.
    ImportError
        The name is GluonCV's, and GluonCV is not installed.
    """
    if name == "conv":
        if (dataset_shape, num_classes) != ((1, 8, 8), 10):
            raise ValueError(
                f"network 'conv' takes the 1 x 8 x 8 digits; images of {dataset_shape} "
                "were given. Use 'mlp', 'lenet5' or 'bn_cnn'."
            )
        return digits.build_net("conv", seed)
    net = OWN[name](num_classes) if name in OWN else _from_gluoncv(name, num_classes)
    mx.random.seed(seed)
    net.initialize(mx.init.Xavier(**HE))
    try:  # Weights are drawn when their shapes are known: before any training.
        net(mx.nd.zeros((1, *dataset_shape))).wait_to_read()
    except (mx.MXNetError, ValueError) as error:
        raise ValueError(
            f"network {name!r} does not fit images of {dataset_shape}: {error}"
        ) from error
    compile_block(net)
    return net


def compile_block(block: gluon.HybridBlock) -> None:
    """Compile what a block computes at its next calls."""
    block.hybridize(static_alloc=True, static_shape=True)


def num_parameters(net: gluon.Block) -> int:
    """How many numbers are trained; running statistics are not."""
    params = net.collect_params().values()
    return sum(param.data().size for param in params if param.grad_req != "null")


def _lenet5(num_classes: int) -> gluon.HybridBlock:
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(6, 5, activation="relu"),
        nn.MaxPool2D(),
        nn.Conv2D(16, 5, activation="relu"),
        nn.MaxPool2D(),
        nn.Dense(120, activation="relu"),
        nn.Dense(84, activation="relu"),
        nn.Dense(num_classes),
    )
    return net


def _bn_cnn(num_classes: int) -> gluon.HybridBlock:
    net = nn.HybridSequential()
    for channels in (8, 16, 32):
        # No bias: the normalisation would take it away again.
        net.add(
            nn.Conv2D(channels, 3, padding=1, use_bias=False),
            nn.BatchNorm(),
            nn.Activation("relu"),
            nn.MaxPool2D(),
        )
    net.add(nn.Dense(num_classes))
    return net


def _mlp(num_classes: int) -> gluon.HybridBlock:
    net = nn.HybridSequential()
    net.add(nn.Dense(128, activation="relu"), nn.Dense(num_classes))
    return net


OWN = {"lenet5": _lenet5, "bn_cnn": _bn_cnn, "mlp": _mlp}


def _from_gluoncv(name: str, num_classes: int) -> gluon.HybridBlock:
    """A network of GluonCV, which is imported only when it is asked for."""
    allowed = (
        f"{', '.join(map(repr, [*OWN, 'conv']))}, and GluonCV's classification "
        "networks, such as 'cifar_resnet20_v1' and 'resnet50_v1b'"
    )
    try:
        from gluoncv.model_zoo import get_model
    except ImportError as error:
        raise ImportError(
            f"network {name!r}: allowed are {allowed}. GluonCV could not be imported "
            f"({error}); install it with: pip install '.[gluoncv]'"
        ) from error
    try:
        return get_model(name, classes=num_classes, pretrained=False)
    except ValueError:
        raise ValueError(f"network is {name!r}; allowed are {allowed}.") from None
