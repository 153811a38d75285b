"""The table of cases: networks of a few hundred parameters, and settings."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
import torchvision.models as tv
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations as new
from torch.nn.utils import prune, spectral_norm, weight_norm
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, StepLR
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tests.promises.differential.bare import CLASSES, EQUAL, FEATURES, SGD, TOKENS, Case

H = 20
Run = Callable[[Any, Tensor], Tensor]
ADAM, ADAMW = partial(optim.Adam, lr=0.01), partial(optim.AdamW, lr=0.01)
MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)


class Net(nn.Module):
    """Two layers `a` and `o`, other parts by name, and a function of the network and the inputs.

    Tensors become buffers, non-persistent if `constant`. What is no part stays an attribute.
    """

    def __init__(self, run: Run, *, constant: bool = False, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in {"a": linear(FEATURES), "o": linear(H, CLASSES), **parts}.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part, persistent=not constant)
            elif part is not None:
                setattr(self, name, part)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Losses(Net):
    """A `Net` with losses of its own, by a function `loss`."""

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"class": F.cross_entropy(self(x), y), "other": self.loss(self, x, y)}


def linear(inputs: int = H, outputs: int = H) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def mlp(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(FEATURES), *between or [nn.ReLU()], linear(H, CLASSES))


def plain(m: Any, x: Tensor) -> Tensor:
    return m.o(m.a(x).relu())


def changed(net: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    change(net)
    return net


def each_parameter(change: Callable[[nn.Parameter], object]) -> nn.Module:
    return changed(mlp(), lambda net: [change(parameter) for parameter in net.parameters()])


# Optimisers and other settings, for an MLP.


def layerwise(kind: Any, *rates: float, **settings: Any) -> Callable[..., optim.Optimizer]:
    """Weights and biases with rates of their own, of which the optimiser's default is none."""

    def make(params: Iterable[nn.Parameter]) -> optim.Optimizer:
        params = list(params)
        parts = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
        rated = [{"params": part, "lr": lr} for part, lr in zip(parts, rates, strict=True)]
        return kind(rated, lr=0.07, **settings)

    return make


class Lars(optim.SGD):
    """A subclass of SGD that scales gradients by the norms of whole tensors."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.1 * p.norm() / (p.grad.norm() + 1e-6))
        return super().step(closure)


OPTIMIZERS = {
    "amsgrad": partial(ADAM, amsgrad=True, weight_decay=0.01),
    "groups": layerwise(optim.AdamW, 0.002, 0.05),
    "rmsprop": partial(optim.RMSprop, lr=0.003, centered=True, momentum=0.5),
    "adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.3),
    "adafactor": partial(optim.Adafactor, lr=0.02),
    "lars": partial(Lars, lr=0.05, momentum=0.9),
}
even = partial(Case, mlp, sizes=EQUAL)
fewer = partial(ExponentialLR, gamma=0.5)
MLP = {
    **{name: even(optimizer=optimizer) for name, optimizer in OPTIMIZERS.items()},
    "sgd": even(packed=True),
    "nesterov": even(optimizer=partial(MOMENTUM, nesterov=True), packed=True),
    "adamw": even(optimizer=partial(ADAMW, weight_decay=0.3, betas=(0.8, 0.95)), packed=True),
    "groups_scheduled": even(optimizer=layerwise(optim.SGD, 0.1, 0.005), schedule=fewer, rounds=3),
    "scheduled": even(schedule=partial(StepLR, step_size=1), rounds=3),
    "lbfgs": even(optimizer=partial(optim.LBFGS, lr=0.1), refused="optimizer"),
    "clip_norm": even(optimizer=partial(MOMENTUM, lr=0.5), clip=(0.3, "norm")),
    "clip_value": even(optimizer=ADAM, clip=(0.01, "value")),
    "unequal": Case(mlp, optimizer=ADAM),
    "skewed": Case(mlp, sizes=(25, 2, 4, 9, 1, 14, 3, 6), skewed=True, optimizer=MOMENTUM),
    "drop_last": Case(mlp, sizes=(8, 12, 6, 10, 5, 16), last="drop", epochs=3),
    "bf16": even(optimizer=partial(SGD, lr=0.1), precision="bf16-mixed"),
}


# Layers, weights that are shared or frozen, and random numbers.


def conv(norm: nn.Module) -> nn.Sequential:
    layers = nn.Conv2d(3, 8, 3, padding=1, bias=False), norm, nn.ReLU(inplace=True)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), linear(32, CLASSES))


def in_place(m: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    h = m.a(x)
    h += h.detach().mean()
    h[:, :3] = 0
    return m.o(h.relu_())


def by_layer(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    return lambda: changed(mlp(), lambda net: change(net[0]))


INSTANCE = partial(nn.InstanceNorm2d, affine=True, track_running_stats=True)
LAYERS = {
    "bn_equal": Case(lambda: conv(nn.BatchNorm2d(8)), "image", EQUAL, optimizer=MOMENTUM),
    "bn_unequal": Case(lambda: conv(nn.BatchNorm2d(8)), "image", last="join", optimizer=MOMENTUM),
    "bn_cumulative": Case(lambda: mlp(nn.BatchNorm1d(H, momentum=None)), last="join"),
    "bn_frozen": Case(lambda: mlp(nn.BatchNorm1d(H).requires_grad_(False)), last="join"),
    "group_norm": Case(lambda: conv(nn.GroupNorm(2, 8)), "image", EQUAL, optimizer=ADAM),
    "instance_norm": Case(lambda: conv(INSTANCE(8)), "image"),
    "layer_norm": Case(lambda: mlp(nn.LayerNorm(H), nn.GELU())),
    "prelu": Case(lambda: mlp(nn.PReLU(H)), sizes=EQUAL),
    "dropout": Case(lambda: mlp(nn.Dropout(0.3), nn.ReLU()), sizes=EQUAL, draws=True),
    "functional_dropout": Case(
        lambda: Net(lambda m, x: m.o(F.dropout(m.a(x), 0.2, m.training).relu())), draws=True
    ),
    "dropped_weights": Case(
        lambda: Net(lambda m, x: m.o(F.linear(x, F.dropout(m.a.weight, 0.2)).relu())), draws=True
    ),
    "noise": Case(lambda: Net(lambda m, x: m.o(m.a(x + torch.randn_like(x)).relu())), draws=True),
    "in_place": Case(lambda: Net(in_place)),
    "lists": Case(
        lambda: Net(
            lambda m, x: m.o(sum(layer(x).tanh() for layer in m.layers)) + m.p[0],
            layers=nn.ModuleList(linear(FEATURES) for _ in range(3)),
            p=nn.ParameterList([torch.ones(CLASSES)]),
        )
    ),
    "used_twice": Case(
        lambda: Net(lambda m, x: m.o(m.h(m.h(m.a(x)).relu())), h=linear()), optimizer=MOMENTUM
    ),
    "twice_in_order": Case(
        lambda: mlp(nn.Tanh(), layer := linear(), nn.Tanh(), layer), sizes=EQUAL
    ),
    "unused": Case(lambda: Net(plain, unused=linear(3, 3)), optimizer=MOMENTUM),
    "one_path": Case(
        lambda: Net(lambda m, x: m.o(m.a(x) if float(x.sum()) > 0 else m.b(x)), b=linear(FEATURES)),
        optimizer=MOMENTUM,
    ),
    "checkpointed": Case(lambda: Net(lambda m, x: m.o(checkpoint(m.a, x, use_reentrant=False)))),
    "scripted": Case(lambda: torch.jit.script(mlp())),
    "weight_norm": Case(by_layer(new.weight_norm), sizes=EQUAL),
    "weight_norm_old": Case(by_layer(weight_norm), sizes=EQUAL),
    "spectral_norm": Case(by_layer(new.spectral_norm)),
    "spectral_norm_old": Case(by_layer(spectral_norm)),
    "orthogonal": Case(by_layer(new.orthogonal)),
    "pruned": Case(by_layer(lambda layer: prune.l1_unstructured(layer, "weight", 0.5))),
    "frozen": Case(by_layer(lambda a: a.requires_grad_(False)), sizes=EQUAL, optimizer=ADAMW),
    "biases_only": Case(lambda: each_parameter(lambda p: p.requires_grad_(p.dim() == 1))),
}


# Sequences.


def attend(m: Any, x: Tensor) -> Tensor:
    """Attention to some of the tokens, or to none: torch gives 0 for those rows."""
    seen = ((x > 8) & (x[:, :1] > 4))[:, None].expand(-1, x.shape[1], -1)
    q, k, v = m.body(m.e(x)).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen) + m.e(x)


def on_tokens(run: Run, body: nn.Module | None = None, **parts: Any) -> Net:
    """An embedding of width 8, `e`, and a layer `o` on the mean of what `run` gives."""
    parts = {"e": nn.Embedding(TOKENS, 8), "a": None, "o": linear(8, CLASSES), **parts}
    return Net(lambda m, x: m.o(run(m, x.long()).mean(1)), body=body, **parts)


def encoder(dropout: float) -> Net:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    return on_tokens(
        lambda m, x: m.body(m.e(x), src_key_padding_mask=(x == 0) & m.later),
        nn.TransformerEncoder(layer, 2),
        later=torch.arange(12) > 0,
    )


def embedded(**settings: Any) -> Callable[[], Net]:
    return lambda: on_tokens(lambda m, x: m.e(x), e=nn.Embedding(TOKENS, 8, **settings))


def tied() -> Net:
    net = on_tokens(lambda m, x: m.body(m.e(x)).tanh() @ m.w, nn.Linear(8, TOKENS, bias=False))
    net.body.weight, net.w = net.e.weight, nn.Parameter(torch.randn(TOKENS, 8) / 4)
    return net


def recurrent(layer: nn.Module, width: int) -> Net:
    return Net(lambda m, x: m.o(m.a(x)[0][:, -1]), a=layer, o=linear(width, CLASSES))


lstm = partial(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True)
tokens = partial(Case, data="tokens")
SEQUENCES = {
    "lstm": Case(lambda: recurrent(lstm(6, 5), 10), "series", optimizer=ADAM),
    "gru": Case(lambda: recurrent(nn.GRU(6, 12, batch_first=True), 12), "series"),
    "encoder": tokens(partial(encoder, 0.0), optimizer=MOMENTUM),
    "encoder_dropout": tokens(partial(encoder, 0.1), optimizer=MOMENTUM, draws=True),
    "padding": tokens(embedded(padding_idx=0)),
    "by_frequency": tokens(embedded(scale_grad_by_freq=True)),
    "max_norm": tokens(embedded(max_norm=1.0)),
    "sparse": tokens(embedded(sparse=True), may_refuse=True),
    "tied": tokens(tied, optimizer=MOMENTUM),
    "masked_rows": tokens(lambda: on_tokens(attend, linear(8, 24))),
}


# State that changes in the forward pass, hooks, callbacks and penalties.


def mean_assigned(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if m.training:
        m.mean, m.n = 0.9 * m.mean + 0.1 * h.detach().mean(0), m.n + 1
    return m.o((h - m.mean).relu())


def warmed_up(m: Any, x: Tensor) -> Tensor:
    if m.training:
        m.warmth += 1
    return plain(m, x) * (1 - 0.8 ** (m.warmth + 1))


def centred(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if m.training:
        m.drift["centre"] = 0.9 * m.drift["centre"] + 0.1 * h.detach().mean(0)
    return m.o((h - m.drift["centre"]).relu())


def taught(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """The teacher `t` is a moving average."""
    with torch.no_grad():
        for old, own in zip(m.t.parameters(), m.a.parameters(), strict=True):
            old.lerp_(own, 0.1)
    return F.mse_loss(m.a(x), m.t(x))


def listed(scale: float) -> nn.Module:
    net = Losses(plain, loss=lambda m, x, y: scale * sum(w.square().sum() for w in m.decay))
    return changed(net, lambda m: setattr(m, "decay", [m.a.weight, m.o.weight]))


def halve(p: nn.Parameter) -> None:
    p.grad = 0.5 * p.grad


def moving(run: Run) -> Net:
    return Net(run, mean=torch.zeros(H), n=torch.tensor(0))


STATE = {
    "buffer_in_place": Case(
        lambda: moving(lambda m, x: m.o(m.a(x) - m.mean.lerp_(m.a(x).detach().mean(0), 0.1)))
    ),
    "buffer_assigned": Case(lambda: moving(mean_assigned)),
    "buffer_constant": Case(lambda: Net(warmed_up, constant=True, warmth=torch.zeros(()))),
    "attribute_count": Case(lambda: Net(warmed_up, warmth=0), counts="warmth"),
    "attribute_dict": Case(lambda: Net(centred, drift={"centre": 0.0}), counts="drift"),
    "moving_teacher": Case(
        lambda: Losses(plain, loss=taught, t=linear(FEATURES).requires_grad_(False), written=["t"])
    ),
    "hook_of_gradient": Case(lambda: each_parameter(lambda p: p.register_hook(lambda g: g / 2))),
    "hook_of_accumulation": Case(
        lambda: each_parameter(lambda p: p.register_post_accumulate_grad_hook(halve)),
        may_refuse=True,
    ),
    "hook_of_layer": Case(
        by_layer(lambda a: a.register_forward_hook(lambda _, __, h: h * 2)), sizes=EQUAL
    ),
    "hook_of_backward": Case(
        lambda: changed(
            mlp(), lambda m: m[2].register_full_backward_hook(lambda _, g, __: (g[0] / 2,))
        )
    ),
    "tied_transposed": Case(
        lambda: changed(
            Net(lambda m, x: m.o(m.a(m.b(m.a(x)))), b=linear(H, FEATURES)),
            lambda m: setattr(m.b.weight, "data", m.a.weight.data.t()),
        ),
        may_refuse=True,
    ),
    "annealed": Case(
        lambda: Net(lambda m, x: plain(m, x) / m.temperature, temperature=1.0),
        each_round=lambda net, t: setattr(net, "temperature", (1.0, 4.0, 0.25)[t]),
        rounds=3,
    ),
    "frozen_later": even(
        each_round=lambda net, t: net[0].requires_grad_(t != 1), rounds=3, may_refuse=True
    ),
    "layer_replaced": even(
        each_round=lambda net, t: setattr(net, "1", (nn.ReLU(), nn.Tanh(), nn.Sigmoid())[t]),
        rounds=3,
    ),
    "penalty_list": Case(partial(listed, 1e-2)),
    "penalty_list_small": Case(partial(listed, 1e-4)),
}


# Losses beside the cross-entropy.


def contrastive(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(m.a(x), dim=-1)
    alike = (y[:, None] == y).float() - torch.eye(len(x))
    scores = (z @ z.t() - 1e9 * torch.eye(len(x))).log_softmax(-1) * alike
    return -(scores.sum(1) / alike.sum(1).clamp(min=1)).mean()


def sloped(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(m(x).logsumexp(1).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def adversarial(m: Any, x: Tensor, y: Tensor) -> Tensor:
    shift = torch.zeros_like(x, requires_grad=True)
    (slope,) = torch.autograd.grad(F.cross_entropy(m(x + shift), y), shift)
    return F.cross_entropy(m(x + 0.1 * slope.sign()), y)


def auxiliary(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Of a second output, which the network has in training only."""
    second = m.o(m.a(x).tanh()) if m.training else None
    return F.cross_entropy(second, y)


def mixed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
    logits = m(share * x + (1 - share) * x[other])
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])


WEIGHTS = torch.linspace(0.2, 2, CLASSES)
LOSSES: dict[str, Callable[..., Tensor]] = {
    "weighted": lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS),
    "ignoring": lambda m, x, y: F.cross_entropy(m(x), y, ignore_index=0, reduction="sum"),
    "contrastive": contrastive,
    "slope": sloped,
    "adversarial": adversarial,
    "auxiliary": auxiliary,
    "mixed": mixed,
    "norm": lambda m, x, y: 0.01 * m.a.weight.norm(),
}


# LightningModules.


class Module(L.LightningModule):
    """A LightningModule; `change` gives what its `training_step` returns."""

    def __init__(self, change: Callable[..., Any] = lambda m, loss, index, size: loss) -> None:
        super().__init__()
        self.body, self.straight, self.scale = mlp(), linear(FEATURES, CLASSES), 0.0
        self.held, self.change = [self.straight.weight], change

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.body(x) + self.straight(x), y)
        self.log("own", loss)
        return self.change(self, loss, batch_idx, len(y))


class Configured(Module):
    @override
    def configure_optimizers(self) -> Any:
        return layerwise(optim.SGD, 0.01, 0.1, momentum=0.9)(self.parameters())


class OneCycle(Module):
    @override
    def configure_optimizers(self) -> Any:
        adam = optim.Adam(self.parameters(), lr=0.01)
        schedule = {"scheduler": OneCycleLR(adam, 0.05, total_steps=12), "interval": "step"}
        return {"optimizer": adam, "lr_scheduler": schedule}


MODULES = {
    "plain": Case(Module),
    "clipped": Case(Module, clip=(0.2, "norm"), optimizer=MOMENTUM),
    "configured": Case(Configured, optimizer=None),
    "one_cycle": Case(OneCycle, sizes=EQUAL, epochs=3, optimizer=None),
    "numbered": Case(  # later batches read a weight that the module also keeps in a list
        lambda: Module(lambda m, loss, i, n: {"loss": loss + i * m.held[0].square().sum()})
    ),
    "skipping": Case(lambda: Module(lambda m, loss, i, n: loss if n == 4 else None)),
}


# Networks of torchvision, on 3 x 32 x 32.

resnet = partial(tv.ResNet, tv.resnet.BasicBlock, [1, 1, 1, 1])
VISION: dict[str, Callable[..., nn.Module]] = {
    "resnet": resnet,
    "resnet_gn": partial(resnet, norm_layer=partial(nn.GroupNorm, 8)),
    "shufflenet": partial(tv.ShuffleNetV2, [2, 2, 2], [8, 16, 24, 32, 64]),
    "mobilenet": partial(tv.mobilenet_v3_small, dropout=0.0),
    "vit": partial(tv.VisionTransformer, 32, 8, 1, 2, 16, 32),
}
# The last layers have one pixel: statistics over smaller batches, or larger steps, make rounding
# grow a thousandfold in a step, in torch too.
picture = partial(
    Case, data="picture", sizes=(8, 16, 8), batch=8, epochs=1, optimizer=partial(SGD, lr=0.01)
)

CASES = {
    **{f"mlp_{name}": case for name, case in MLP.items()},
    **LAYERS,
    **SEQUENCES,
    **STATE,
    **{
        f"loss_{name}": Case(partial(Losses, plain, loss=loss), draws=loss is mixed)
        for name, loss in LOSSES.items()
    },
    **{f"module_{name}": case for name, case in MODULES.items()},
    **{name: picture(partial(build, num_classes=CLASSES)) for name, build in VISION.items()},
}
