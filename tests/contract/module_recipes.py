"""How to make every module of ``torch.nn`` and its inputs, with a few elements each.

A recipe is deterministic: the same weights and inputs each time. :func:`x` makes inputs with gradients, :func:`c` makes
inputs without.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence


def c(*shape: int) -> Tensor:
    """Return numbers that do not require gradients."""
    return torch.randn(*shape)


def x(*shape: int) -> Tensor:
    """Return numbers that require gradients."""
    return torch.randn(*shape).requires_grad_()


def p(*shape: int) -> Tensor:
    """Return probabilities that require gradients."""
    return torch.sigmoid(torch.randn(*shape)).requires_grad_()


def k(high: int, *shape: int) -> Tensor:
    """Return classes or tokens."""
    return torch.randint(high, shape)


def signs(*shape: int) -> Tensor:
    """Return values of plus or minus one."""
    return 1.0 - 2 * torch.randint(2, shape)


@dataclass(frozen=True)
class Recipe:
    """A module with inputs.

    Attributes:
        module: Makes the module; called under a fixed seed.
        inputs: Makes the inputs; called under a fixed seed.
        random: Whether training draws random numbers, which differ between formats.
        state: Whether the module has floating buffers, whose storage plans without autocasting choose themselves.
    """

    module: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    random: bool = False
    state: bool = False

    def build(self) -> nn.Module:
        """Return the module in training mode; lazy modules have run once."""
        torch.manual_seed(3)
        module = self.module()
        if any(isinstance(m, nn.modules.lazy.LazyModuleMixin) for m in module.modules()):
            with torch.no_grad():
                module(*self.feed())
        return module

    def feed(self) -> tuple[Any, ...]:
        """Return the inputs, each as its own leaf."""
        torch.manual_seed(4)
        return self.inputs()


class Containers(nn.Module):
    """Contains the containers that have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(3, 4), nn.Tanh()])
        self.dict = nn.ModuleDict({"out": nn.Linear(4, 2)})
        self.weights = nn.ParameterList([torch.randn(2, 2)])
        self.named = nn.ParameterDict({"bias": torch.randn(2)})

    def forward(self, value: Tensor) -> Tensor:
        for module in self.list:
            value = module(value)
        value = self.dict["out"](value)
        return torch.matmul(value, self.weights[0]) + self.named["bias"]


class Unpooling(nn.Module):
    """A pooling layer and the layer that undoes it."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(nn, f"MaxPool{dims}d")(2, return_indices=True)
        self.unpool = getattr(nn, f"MaxUnpool{dims}d")(2)

    def forward(self, value: Tensor) -> Tensor:
        return self.unpool(*self.pool(value))


class Packed(nn.Module):
    """A recurrent layer over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(3, 4, batch_first=True)

    def forward(self, value: Tensor) -> Tensor:
        packed = pack_padded_sequence(value, torch.tensor([3, 2]), batch_first=True)
        return self.inner(packed)[0].data


def _reset(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def _nd(name: str) -> int:
    return int(name[-2]) if name[-1] == "d" and name[-2].isdigit() else 0


_SIDES = {1: (6,), 2: (5, 4), 3: (4, 3, 4)}


def _plain(name: str, *args: Any, shape: tuple[int, ...] = (2, 4), **how: Any) -> Recipe:
    return Recipe(lambda: getattr(nn, name)(*args), lambda: (x(*shape),), **how)


def _recipes() -> dict[str, Recipe]:
    out: dict[str, Recipe] = {}
    for name in [
        "CELU",
        "ELU",
        "GELU",
        "Hardshrink",
        "Hardsigmoid",
        "Hardswish",
        "Hardtanh",
        "Identity",
        "LeakyReLU",
        "LogSigmoid",
        "Mish",
        "PReLU",
        "ReLU",
        "ReLU6",
        "SELU",
        "SiLU",
        "Sigmoid",
        "Softplus",
        "Softshrink",
        "Softsign",
        "Tanh",
        "Tanhshrink",
        "GLU",
        "Flatten",
    ]:
        out[name] = _plain(name)
    for name in ["LogSoftmax", "Softmax", "Softmin"]:
        out[name] = _plain(name, -1)
    out["Softmax2d"] = _plain("Softmax2d", shape=(2, 3, 2, 2))
    out["Threshold"] = _plain("Threshold", 0.1, 2.0)
    out["RReLU"] = _plain("RReLU", random=True)
    for name in ["Dropout", "AlphaDropout", "FeatureAlphaDropout", "Dropout1d", "Dropout2d", "Dropout3d"]:
        out[name] = _plain(name, shape=(4, 3, *_SIDES.get(_nd(name), ())), random=True)
    for dims, side in _SIDES.items():
        shape = (2, 4, *side)
        for kind in ("Conv", "ConvTranspose"):
            for lazy in ("", "Lazy"):
                args = (4, 2, 3) if not lazy else (2, 3)
                out[f"{lazy}{kind}{dims}d"] = _plain(f"{lazy}{kind}{dims}d", *args, shape=shape)
        for lazy in ("", "Lazy"):
            out[f"{lazy}BatchNorm{dims}d"] = Recipe(
                lambda dims=dims, lazy=lazy: getattr(nn, f"{lazy}BatchNorm{dims}d")(*([] if lazy else [4])),
                lambda shape=shape: (x(*shape),), state=True,
            )  # fmt: skip
            out[f"{lazy}InstanceNorm{dims}d"] = Recipe(
                lambda dims=dims, lazy=lazy: getattr(nn, f"{lazy}InstanceNorm{dims}d")(
                    *([] if lazy else [4]), affine=True, track_running_stats=True
                ),
                lambda shape=shape: (x(*shape),), state=True,
            )  # fmt: skip
        for kind in ("AvgPool", "MaxPool"):
            out[f"{kind}{dims}d"] = _plain(f"{kind}{dims}d", 2, shape=shape)
        for kind in ("AdaptiveAvgPool", "AdaptiveMaxPool"):
            out[f"{kind}{dims}d"] = _plain(f"{kind}{dims}d", 2, shape=shape)
        out[f"LPPool{dims}d"] = Recipe(
            lambda dims=dims: getattr(nn, f"LPPool{dims}d")(2, 2),
            lambda shape=shape: (torch.rand(*shape).add(0.5).requires_grad_(),),
        )
        out[f"MaxUnpool{dims}d"] = Recipe(
            lambda dims=dims: Unpooling(dims), lambda dims=dims: (x(2, 3, *[4] * dims),)
        )
        if dims > 1:
            out[f"FractionalMaxPool{dims}d"] = Recipe(
                lambda dims=dims: getattr(nn, f"FractionalMaxPool{dims}d")(2, output_size=2),
                lambda dims=dims: (x(2, 4, *[5] * dims),), random=True,
            )  # fmt: skip
        for kind in ("CircularPad", "ReflectionPad", "ReplicationPad", "ZeroPad"):
            out[f"{kind}{dims}d"] = _plain(f"{kind}{dims}d", 1, shape=shape)
        out[f"ConstantPad{dims}d"] = _plain(f"ConstantPad{dims}d", 1, 0.3, shape=shape)
    image = (2, 4, 4, 4)
    out["ChannelShuffle"] = _plain("ChannelShuffle", 2, shape=image)
    out["PixelShuffle"] = _plain("PixelShuffle", 2, shape=image)
    out["PixelUnshuffle"] = _plain("PixelUnshuffle", 2, shape=image)
    out["UpsamplingNearest2d"] = _plain("UpsamplingNearest2d", None, 2, shape=image)
    out["UpsamplingBilinear2d"] = _plain("UpsamplingBilinear2d", None, 2, shape=image)
    out["Upsample"] = Recipe(lambda: nn.Upsample(scale_factor=2, mode="bicubic"), lambda: (x(*image),))
    out["Unflatten"] = _plain("Unflatten", 1, (2, 2))
    out["Unfold"] = _plain("Unfold", 2, shape=image)
    out["Fold"] = _plain("Fold", (3, 3), 2, shape=(2, 8, 4))
    out["CrossMapLRN2d"] = _plain("CrossMapLRN2d", 3, shape=image)
    out["LocalResponseNorm"] = _plain("LocalResponseNorm", 2, shape=image)
    out["GroupNorm"] = _plain("GroupNorm", 2, 4, shape=image)
    out["LayerNorm"] = _plain("LayerNorm", 4)
    out["RMSNorm"] = _plain("RMSNorm", 4)
    out["SyncBatchNorm"] = Recipe(lambda: nn.SyncBatchNorm(4).eval(), lambda: (x(*image),), state=True)
    # --- matrices, attention, recurrence
    out["Linear"] = _plain("Linear", 4, 3)
    out["LazyLinear"] = _plain("LazyLinear", 3)
    out["Bilinear"] = Recipe(lambda: nn.Bilinear(3, 4, 2), lambda: (x(2, 3), x(2, 4)))
    out["Embedding"] = Recipe(lambda: nn.Embedding(7, 4), lambda: (k(7, 2, 3),))
    out["EmbeddingBag"] = Recipe(lambda: nn.EmbeddingBag(7, 4), lambda: (k(7, 2, 3),))
    for name in ("RNN", "LSTM", "GRU"):
        out[name] = Recipe(
            lambda name=name: getattr(nn, name)(3, 4, 2, batch_first=True), lambda: (x(2, 3, 3),)
        )
        out[f"{name}Cell"] = Recipe(lambda name=name: getattr(nn, f"{name}Cell")(3, 4), lambda: (x(2, 3),))
    out["GRU: packed"] = Recipe(Packed, lambda: (x(2, 3, 3),))
    out["LSTM: bidirectional, projected"] = Recipe(
        lambda: nn.LSTM(3, 4, bidirectional=True, proj_size=2), lambda: (x(3, 2, 3),)
    )
    out["MultiheadAttention"] = Recipe(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda: (x(2, 3, 4), x(2, 3, 4), x(2, 3, 4))
    )
    out["MultiheadAttention: other widths"] = Recipe(
        lambda: nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
        lambda: (x(3, 2, 4), x(3, 2, 3), x(3, 2, 5)),
    )
    layer = {"d_model": 4, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0, "batch_first": True}
    out["TransformerEncoderLayer"] = Recipe(
        lambda: nn.TransformerEncoderLayer(**layer), lambda: (x(2, 3, 4),)
    )
    out["TransformerEncoder"] = Recipe(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 1), lambda: (x(2, 3, 4),)
    )
    out["TransformerDecoderLayer"] = Recipe(
        lambda: nn.TransformerDecoderLayer(**layer), lambda: (x(2, 3, 4), x(2, 2, 4))
    )
    out["TransformerDecoder"] = Recipe(
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 1),
        lambda: (x(2, 3, 4), x(2, 2, 4)),
    )
    out["Transformer"] = Recipe(
        lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **layer),
        lambda: (x(2, 3, 4), x(2, 2, 4)),
    )
    out["TransformerEncoderLayer: masked"] = Recipe(
        lambda: nn.TransformerEncoderLayer(**layer, norm_first=True),
        lambda: (x(2, 3, 4), nn.Transformer.generate_square_subsequent_mask(3)),
    )
    out["Sequential"] = Recipe(
        lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Linear(3, 2)), lambda: (x(2, 4),)
    )
    out["ModuleList, ModuleDict, ParameterList, ParameterDict"] = Recipe(Containers, lambda: (x(2, 3),))
    # --- losses and distances
    for name in ["L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss", "SoftMarginLoss"]:
        out[name] = Recipe(lambda name=name: getattr(nn, name)(), lambda: (x(2, 4), signs(2, 4)))
    out["HingeEmbeddingLoss"] = Recipe(nn.HingeEmbeddingLoss, lambda: (x(2, 4), signs(2, 4)))
    out["KLDivLoss"] = Recipe(
        lambda: nn.KLDivLoss(reduction="batchmean"), lambda: (x(2, 4), torch.softmax(c(2, 4), -1))
    )
    out["BCELoss"] = Recipe(nn.BCELoss, lambda: (p(2, 4), torch.rand(2, 4)))
    out["BCEWithLogitsLoss"] = Recipe(nn.BCEWithLogitsLoss, lambda: (x(2, 4), torch.rand(2, 4)))
    out["MultiLabelSoftMarginLoss"] = Recipe(
        nn.MultiLabelSoftMarginLoss, lambda: (x(2, 4), torch.rand(2, 4).round())
    )
    out["MultiLabelMarginLoss"] = Recipe(
        nn.MultiLabelMarginLoss, lambda: (x(2, 4), torch.tensor([[3, 0, -1, 1]] * 2))
    )
    out["MultiMarginLoss"] = Recipe(nn.MultiMarginLoss, lambda: (x(2, 4), k(4, 2)))
    out["CrossEntropyLoss"] = Recipe(nn.CrossEntropyLoss, lambda: (x(2, 4), k(4, 2)))
    out["CrossEntropyLoss: weighted"] = Recipe(
        lambda: nn.CrossEntropyLoss(torch.rand(4), label_smoothing=0.1),
        lambda: (x(2, 4), k(4, 2)),
        state=True,
    )
    out["NLLLoss"] = Recipe(nn.NLLLoss, lambda: (x(2, 4), k(4, 2)))
    out["NLLLoss2d"] = Recipe(nn.NLLLoss2d, lambda: (x(2, 4, 3, 2), k(4, 2, 3, 2)))
    out["GaussianNLLLoss"] = Recipe(nn.GaussianNLLLoss, lambda: (x(2, 4), c(2, 4), p(2, 4)))
    out["CTCLoss"] = Recipe(
        nn.CTCLoss,
        lambda: (torch.log_softmax(c(5, 2, 4), -1).requires_grad_(), 1 + k(3, 2, 2), (5, 5), (2, 2)),
    )
    out["CosineEmbeddingLoss"] = Recipe(nn.CosineEmbeddingLoss, lambda: (x(2, 4), x(2, 4), signs(2)))
    out["MarginRankingLoss"] = Recipe(nn.MarginRankingLoss, lambda: (x(4), x(4), signs(4)))
    for name in ("TripletMarginLoss", "TripletMarginWithDistanceLoss"):
        out[name] = Recipe(lambda name=name: getattr(nn, name)(), lambda: (x(2, 4), x(2, 4), x(2, 4)))
    for name in ("CosineSimilarity", "PairwiseDistance"):
        out[name] = Recipe(lambda name=name: getattr(nn, name)(), lambda: (x(2, 4), x(2, 4)))
    out["AdaptiveLogSoftmaxWithLoss"] = Recipe(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(4, 8, [3, 5], div_value=2.0),
        lambda: (x(4, 4), torch.tensor([0, 3, 6, 1])),
    )
    if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.13
        out["LinearCrossEntropyLoss"] = Recipe(
            lambda: nn.LinearCrossEntropyLoss(4, 5), lambda: (x(3, 4), k(5, 3))
        )
    # --- parametrizations
    out["parametrizations.weight_norm"] = Recipe(
        lambda: parametrizations.weight_norm(nn.Linear(4, 3)), lambda: (x(2, 4),)
    )
    out["parametrizations.spectral_norm"] = Recipe(
        lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), lambda: (x(2, 4),), state=True
    )
    out["parametrizations.orthogonal"] = Recipe(
        lambda: parametrizations.orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"),
        lambda: (x(2, 4),),
        state=True,
    )
    out["utils.spectral_norm"] = Recipe(
        lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), lambda: (x(2, 4),), state=True
    )
    return out


RECIPES = _recipes()

EXCEPTIONS = {
    "Module": "the base class, without a forward",
    "Container": "a deprecated base class, without a forward",
    "RNNBase": "the base class of RNN, LSTM and GRU, without a forward",
    "RNNCellBase": "the base class of the cells, without a forward",
    "DataParallel": "wraps modules for several GPUs; prepare refuses it in words (test_session)",
    "LinearCrossEntropyOptions": "no module",
}
"""Names of ``torch.nn`` that need no recipe."""


def every_name() -> set[str]:
    """Return the names of all modules in the installed ``torch.nn``."""
    found = {
        name for name, value in vars(nn).items() if inspect.isclass(value) and issubclass(value, nn.Module)
    }
    return found | set(nn.modules.__all__)


def covered() -> set[str]:
    """Return the names that have recipes."""
    names: set[str] = set()
    for name in RECIPES:
        names.update(name.partition(":")[0].split(", "))
    return names
