"""The table of cases: networks of a few hundred parameters, and settings.

`Net` is no layer that `auto` knows, so the cases that it makes train alone there; those of
`nn.Sequential` with equal sizes are packed. A number tries to pack all of them.
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
import torchvision.models as tv
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, parametrize, prune, rnn, spectral_norm, weight_norm
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from tests.differential.bare import CLASSES, EQUAL, FEATURES, SGD, TOKENS, UNEQUAL, Case

HIDDEN = 20
ADAM, ADAMW = partial(optim.Adam, lr=0.01), partial(optim.AdamW, lr=0.01)
MOMENTUM = partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-2)


class Net(nn.Module):
    """Parts by name, and a function of the network and the inputs.

    Tensors become buffers, non-persistent where `constant` names them. All else stays an attribute.
    """

    def __init__(
        self, run: Callable[[Any, Tensor], Tensor], constant: tuple[str, ...] = (), **parts: Any
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part, persistent=name not in constant)
            else:
                setattr(self, name, part)
        self.run = run

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Losses(Net):
    """A `Net` with losses of its own."""

    def __init__(self, run: Any, loss: Callable[[Any, Tensor, Tensor], Any], **parts: Any) -> None:
        super().__init__(run, **parts)
        self.loss = loss

    def losses(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return self.loss(self, x, y)


def mlp(*between: nn.Module) -> nn.Sequential:
    middle = between or (nn.ReLU(),)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), *middle, nn.Linear(HIDDEN, CLASSES))


def two(run: Callable[[Any, Tensor], Tensor], **parts: Any) -> Net:
    """Two linear layers, `a` and `o`."""
    return Net(run, a=nn.Linear(FEATURES, HIDDEN), o=nn.Linear(HIDDEN, CLASSES), **parts)


def own(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Callable[[], Losses]:
    """An MLP, `net`, with one loss."""
    return lambda: Losses(
        lambda m, x: m.net(x),
        lambda m, x, y: {"loss": loss(m, x, y)},
        net=mlp(),
        weights=torch.linspace(0.2, 2, CLASSES),
    )


def on_tokens(body: nn.Module, run: Callable[[Any, Tensor], Tensor], **parts: Any) -> Net:
    """An embedding of width 8, `e`, a body, and a layer `o` on the mean over positions."""
    embedding = parts.pop("e", None) or nn.Embedding(TOKENS, 8)
    run_on = lambda m, x: m.o(run(m, x.long()).mean(1))  # noqa: E731
    return Net(run_on, e=embedding, body=body, o=nn.Linear(8, CLASSES), **parts)


def changed(net: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    change(net)
    return net


def each_parameter(change: Callable[[nn.Parameter], object]) -> nn.Module:
    net = mlp()
    for parameter in net.parameters():
        change(parameter)
    return net


# Optimisers.


def layerwise(kind: Any, rates: tuple[float, float], **settings: Any) -> Callable[..., Any]:
    """Weights and biases in groups with their own rates; the first is not the default."""

    def make(params: Iterable[nn.Parameter]) -> optim.Optimizer:
        params = list(params)
        groups = ([p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1])
        rated = [{"params": group, "lr": lr} for group, lr in zip(groups, rates, strict=True)]
        return kind(rated, lr=0.07, **settings)

    return make


class Lion(optim.Optimizer):
    """Steps by the sign of a mean of gradients."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_((0.9 * mean + 0.1 * p.grad).sign(), alpha=group["lr"])
                mean.lerp_(p.grad, 0.01)


class Lars(optim.SGD):
    """A subclass of SGD that scales gradients by the norms of whole tensors."""

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad.mul_(0.1 * p.norm() / (p.grad.norm() + 1e-6))
        return super().step(closure)


def optimized(optimizer: Any, **settings: Any) -> Case:
    return Case(mlp, sizes=EQUAL, optimizer=optimizer, **settings)


OPTIMIZERS = {
    "mlp_sgd": optimized(SGD, packed=True),
    "mlp_nesterov": optimized(partial(MOMENTUM, nesterov=True), packed=True),
    "mlp_amsgrad": optimized(partial(ADAM, amsgrad=True, weight_decay=0.01)),
    "mlp_adamw": optimized(partial(ADAMW, weight_decay=0.3, betas=(0.8, 0.95)), packed=True),
    "mlp_groups": optimized(layerwise(optim.AdamW, (0.002, 0.05))),
    "mlp_groups_momentum": optimized(layerwise(optim.SGD, (0.1, 0.005), momentum=0.9)),
    "mlp_groups_scheduled": optimized(
        layerwise(optim.SGD, (0.1, 0.005)),
        schedule=partial(lr_scheduler.ExponentialLR, gamma=0.5),
        rounds=3,
    ),
    "mlp_scheduled": optimized(
        partial(SGD, lr=0.2), schedule=partial(lr_scheduler.StepLR, step_size=1), rounds=3
    ),
    "mlp_rmsprop": optimized(partial(optim.RMSprop, lr=0.003, centered=True, momentum=0.5)),
    "mlp_adagrad": optimized(
        partial(optim.Adagrad, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.3)
    ),
    "mlp_nadam": optimized(partial(optim.NAdam, lr=0.01, weight_decay=0.02)),
    "mlp_rprop": optimized(partial(optim.Rprop, lr=0.01)),
    "mlp_adafactor": optimized(partial(optim.Adafactor, lr=0.02)),
    "mlp_lbfgs": optimized(partial(optim.LBFGS, lr=0.1), refused="optimizer"),
    "mlp_lion": optimized(partial(Lion, lr=0.003)),
    "mlp_lars": optimized(partial(Lars, lr=0.05, momentum=0.9)),
    "mlp_clip_norm": optimized(partial(MOMENTUM, lr=0.5), clip=(0.3, "norm")),
    "mlp_clip_value": optimized(ADAM, clip=(0.01, "value")),
    "mlp_unequal": Case(mlp, sizes=UNEQUAL, optimizer=ADAM),
    "mlp_skewed": Case(mlp, sizes=(25, 2, 4, 9, 1, 14, 3, 6), skewed=True, optimizer=MOMENTUM),
    "mlp_drop_last": Case(mlp, sizes=(8, 12, 6, 10, 5, 16), last="drop", epochs=3),
    "mlp_bf16": optimized(partial(SGD, lr=0.1), precision="bf16-mixed"),
}


# Layers.


def conv(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, CLASSES),
    )  # fmt: skip


def expert(m: Any, x: Tensor) -> Tensor:
    """Each sample goes to its best expert only."""
    gate, choice = m.gate(x).softmax(-1).max(-1)
    out = x.new_zeros(len(x), CLASSES)
    for number, each in enumerate(m.experts):
        chosen = choice == number
        if chosen.any():
            out[chosen] = gate[chosen, None] * each(x[chosen])
    return out


def in_place(m: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    h = m.a(x)
    h += h.detach().mean()
    h[:, :3] = 0
    return m.o(h.relu_())


def sparsely(m: Any, x: Tensor) -> Tensor:
    weight = F.dropout(m.a.weight, 0.2, m.training)
    return m.o(F.dropout(F.linear(x, weight, m.a.bias).relu(), 0.1, m.training))


class Symmetric(nn.Module):
    @override
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


class Sign(torch.autograd.Function):
    """A sign with the gradient of the identity, and without a rule for vmap."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


LAYERS = {
    "bn_equal": Case(
        conv(lambda: nn.BatchNorm2d(8)), "image", EQUAL, optimizer=MOMENTUM, packed=True
    ),
    "bn_unequal": Case(conv(lambda: nn.BatchNorm2d(8)), "image", last="join", optimizer=MOMENTUM),
    "bn_cumulative": Case(lambda: mlp(nn.BatchNorm1d(HIDDEN, momentum=None)), last="join"),
    "bn_frozen": Case(
        lambda: mlp(nn.BatchNorm1d(HIDDEN).requires_grad_(False), nn.Tanh()), last="join"
    ),
    "group_norm": Case(conv(lambda: nn.GroupNorm(2, 8)), "image", EQUAL, optimizer=ADAM),
    "instance_norm": Case(
        conv(lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True)), "image"
    ),
    "layer_norm": Case(lambda: mlp(nn.LayerNorm(HIDDEN), nn.GELU())),
    "depthwise": Case(
        lambda: nn.Sequential(
            nn.Conv2d(3, 9, 3, groups=3),
            nn.Hardswish(),
            nn.Conv2d(9, 4, 3, stride=2, dilation=2),
            nn.PReLU(4),
            nn.MaxPool2d(1),
            nn.Flatten(),
            nn.Linear(4, CLASSES),
        ),
        "image",
    ),
    "dropout": Case(lambda: mlp(nn.Dropout(0.3), nn.ReLU()), sizes=EQUAL, draws=True),
    "alpha_dropout": Case(lambda: mlp(nn.SELU(), nn.AlphaDropout(0.2)), draws=True),
    "functional_dropout": Case(lambda: two(sparsely), draws=True),
    "noise": Case(
        lambda: two(lambda m, x: m.o(m.a(x + 0.1 * torch.randn_like(x)).relu())), draws=True
    ),
    "in_place": Case(lambda: two(in_place)),
    "lists": Case(
        lambda: Net(
            lambda m, x: m.o(sum(layer(x).tanh() for layer in m.layers)) + m.p[0] * m.d["b"],
            layers=nn.ModuleList(nn.Linear(FEATURES, HIDDEN) for _ in range(3)),
            o=nn.Linear(HIDDEN, CLASSES),
            p=nn.ParameterList([torch.ones(CLASSES)]),
            d=nn.ParameterDict({"b": torch.ones(CLASSES)}),
        )
    ),
    "used_twice": Case(
        lambda: two(lambda m, x: m.o(m.h(m.h(m.a(x).relu()).relu())), h=nn.Linear(HIDDEN, HIDDEN)),
        optimizer=MOMENTUM,
    ),
    "shared_layer": Case(
        lambda: (lambda layer: mlp(nn.Tanh(), layer, nn.Tanh(), layer))(nn.Linear(HIDDEN, HIDDEN)),
        sizes=EQUAL,
    ),
    "tied_transposed": Case(
        lambda: changed(
            two(lambda m, x: m.o(m.a(m.b(m.a(x).relu()))), b=nn.Linear(HIDDEN, FEATURES)),
            lambda m: setattr(m.b.weight, "data", m.a.weight.data.t()),
        ),
        may_refuse=True,
    ),
    "unused": Case(
        lambda: two(lambda m, x: m.o(m.a(x).relu()), u=nn.Linear(3, 3)), optimizer=MOMENTUM
    ),
    "one_path": Case(
        lambda: two(
            lambda m, x: m.o(m.a(x) if float(x.detach().mean()) > 0 else m.b(x).tanh()),
            b=nn.Linear(FEATURES, HIDDEN),
        ),
        optimizer=MOMENTUM,
    ),
    "experts": Case(
        lambda: Net(
            expert,
            gate=nn.Linear(FEATURES, 3),
            experts=nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3)),
        )
    ),
    "checkpointed": Case(
        lambda: two(lambda m, x: m.o(checkpoint(m.a, x, use_reentrant=False).relu()))
    ),
    "straight_through": Case(lambda: two(lambda m, x: m.o(Sign.apply(m.a(x))))),
    "scripted": Case(lambda: torch.jit.script(mlp())),
    "weight_norm": Case(lambda: changed(mlp(), lambda m: parametrizations.weight_norm(m[0]))),
    "weight_norm_old": Case(lambda: changed(mlp(), lambda m: weight_norm(m[0]))),
    "spectral_norm": Case(lambda: changed(mlp(), lambda m: parametrizations.spectral_norm(m[0]))),
    "spectral_norm_old": Case(lambda: changed(mlp(), lambda m: spectral_norm(m[0]))),
    "orthogonal": Case(lambda: changed(mlp(), lambda m: parametrizations.orthogonal(m[0]))),
    "symmetric": Case(
        lambda: changed(
            mlp(nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)),
            lambda m: parametrize.register_parametrization(m[2], "weight", Symmetric()),
        )
    ),
    "pruned": Case(lambda: changed(mlp(), lambda m: prune.l1_unstructured(m[0], "weight", 0.5))),
    "frozen": Case(
        lambda: changed(mlp(), lambda m: m[0].requires_grad_(False)), sizes=EQUAL, optimizer=ADAMW
    ),
    "biases_only": Case(lambda: each_parameter(lambda p: p.requires_grad_(p.dim() == 1))),
    "low_rank": Case(
        lambda: Net(
            lambda m, x: m.o((m.a(x) + x @ m.down @ m.up).relu()),
            a=nn.Linear(FEATURES, HIDDEN).requires_grad_(False),
            o=nn.Linear(HIDDEN, CLASSES),
            down=nn.Parameter(torch.randn(FEATURES, 2) / 4),
            up=nn.Parameter(torch.zeros(2, HIDDEN)),
        ),
        optimizer=ADAMW,
    ),
}


# Sequences.


def attend(m: Any, x: Tensor) -> Tensor:
    """Attention over some tokens, which some samples do not have: torch gives 0 for those rows."""
    seen = ((x > 8) & (x[:, :1] > 4))[:, None].expand(-1, x.shape[1], -1)
    q, k, v = m.body(m.e(x)).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen) + m.e(x)


def multihead(m: Any, x: Tensor) -> Tensor:
    h, hidden = m.e(x), (x <= 8) | (x[:, :1] <= 4)
    return h + m.body(h, h, h, key_padding_mask=hidden, need_weights=False)[0].nan_to_num()


def rotated(m: Any, x: Tensor) -> Tensor:
    """Causal attention with rotated positions, from buffers that no state dict has."""
    q, k, v = m.body(m.e(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    turn = lambda z: z * m.cos + z.roll(2, -1) * m.sin  # noqa: E731
    return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True).flatten(2)[..., :8]


def ragged(m: Any, x: Tensor) -> Tensor:
    lengths = (x[:, :, 0] > -1).sum(1).clamp(min=1)
    packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return m.o(m.r(packed)[1][-1])


def cells(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 12)
    for step in x.unbind(1):
        h = m.r(step, h)
    return m.o(h)


def padded_mean(m: Any, x: Tensor) -> Tensor:
    seen = (x != 0).float()[..., None]
    return (m.e(x) * seen / seen.mean(1, keepdim=True).clamp(min=0.1)) + m.body(seen)


def encoder(dropout: float) -> Net:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
    run = lambda m, x: m.body(m.e(x), src_key_padding_mask=(x == 0) & m.later)  # noqa: E731
    body = nn.TransformerEncoder(layer, 2)
    return on_tokens(body, run, later=torch.arange(12) > 0)


def recurrent(layer: nn.Module, width: int) -> Net:
    run = lambda m, x: m.o(m.r(x)[0][:, -1])  # noqa: E731
    return Net(run, r=layer, o=nn.Linear(width, CLASSES))


def embedded(**settings: Any) -> Net:
    return on_tokens(nn.Identity(), lambda m, x: m.e(x), e=nn.Embedding(TOKENS, 8, **settings))


def tied() -> Net:
    net = on_tokens(nn.Linear(8, TOKENS, bias=False), lambda m, x: m.body(m.e(x)).tanh() @ m.w)
    net.body.weight = net.e.weight
    net.w = nn.Parameter(torch.randn(TOKENS, 8) / 4)
    return net


ANGLES = torch.arange(12)[:, None] / torch.tensor([1.0, 10.0, 1.0, 10.0])
SEQUENCES = {
    "lstm": Case(
        lambda: recurrent(nn.LSTM(6, 5, 2, bidirectional=True, batch_first=True), 10),
        "series",
        optimizer=ADAM,
    ),
    "gru": Case(lambda: recurrent(nn.GRU(6, 12, batch_first=True), 12), "series"),
    "gru_cells": Case(lambda: Net(cells, r=nn.GRUCell(6, 12), o=nn.Linear(12, CLASSES)), "series"),
    "rnn_ragged": Case(
        lambda: Net(ragged, r=nn.RNN(6, 12, batch_first=True), o=nn.Linear(12, CLASSES)), "series"
    ),
    "conv1d": Case(
        lambda: nn.Sequential(
            nn.Conv1d(10, 8, 3), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(16, CLASSES)
        ),
        "series",
    ),
    "encoder": Case(partial(encoder, 0.0), "tokens", optimizer=partial(ADAMW, lr=0.003)),
    "encoder_dropout": Case(
        partial(encoder, 0.1), "tokens", optimizer=partial(ADAMW, lr=0.003), draws=True
    ),
    "padding": Case(
        lambda: on_tokens(nn.Linear(1, 8), padded_mean, e=nn.Embedding(TOKENS, 8, padding_idx=0)),
        "tokens",
        optimizer=ADAM,
    ),
    "by_frequency": Case(partial(embedded, scale_grad_by_freq=True), "tokens"),
    "max_norm": Case(partial(embedded, max_norm=1.0), "tokens"),
    "sparse": Case(partial(embedded, sparse=True), "tokens", may_refuse=True),
    "bag": Case(
        lambda: on_tokens(nn.EmbeddingBag(TOKENS, 8), lambda m, x: m.e(x) + m.body(x)[:, None]),
        "tokens",
    ),
    "tied": Case(tied, "tokens", optimizer=MOMENTUM),
    "masked_rows": Case(lambda: on_tokens(nn.Linear(8, 24), attend), "tokens"),
    "masked_heads": Case(
        lambda: on_tokens(nn.MultiheadAttention(8, 2, batch_first=True), multihead), "tokens"
    ),
    "rotated": Case(
        lambda: on_tokens(
            nn.Linear(8, 24), rotated, constant=("cos", "sin"), cos=ANGLES.cos(), sin=ANGLES.sin()
        ),
        "tokens",
    ),
}


# State that changes in the forward pass, hooks, and callbacks.


def mean_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if m.training:
        with torch.no_grad():
            m.mean.lerp_(h.mean(0), 0.1)
            m.n += 1
    return m.o((h - m.mean).relu())


def mean_assigned(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if m.training:
        m.mean, m.n = 0.9 * m.mean + 0.1 * h.detach().mean(0), m.n + 1
    return m.o((h - m.mean).relu())


def warmed_up(m: Any, x: Tensor) -> Tensor:
    if m.training:
        m.calls += 1
    return m.o(m.a(x).relu()) * (1 - 0.8 ** (m.calls + 1))


def centred(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if m.training:
        m.kept["centre"] = 0.9 * m.kept["centre"] + 0.1 * h.detach().mean(0)
    return m.o((h - m.kept["centre"]).relu())


def by_history(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    loss = F.cross_entropy(m(x), y)
    m.history.append(float(loss.detach()))
    return {"loss": loss / (0.1 + sum(m.history[-5:]) / len(m.history[-5:]))}


def quantised(m: Any, x: Tensor) -> Tensor:
    """The nearest of 6 codes, which follow their samples."""
    h = m.a(x)
    found = F.one_hot(torch.cdist(h, m.codes).argmin(-1), 6).float()
    if m.training:
        with torch.no_grad():
            m.n.mul_(0.9).add_(found.sum(0), alpha=0.1)
            m.codes.mul_(0.9).add_((found.t() @ h) / m.n[:, None], alpha=0.1)
    return m.o(h + (found @ m.codes - h).detach())


def queued(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Contrast with the samples of earlier batches."""
    z = F.normalize(m.a(x), dim=1)
    negative = z @ m.queue.clone().t()
    place = (torch.arange(len(x)) + int(m.place)) % 12
    m.queue[place] = z.detach()
    m.place += len(x)
    return {"class": F.cross_entropy(m(x), y), "contrast": 0.1 * negative.logsumexp(1).mean()}


def taught(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """A teacher that is the moving average of the network."""
    with torch.no_grad():
        for old, new in zip(m.teacher.parameters(), m.net.parameters(), strict=True):
            old.lerp_(new, 0.1)
    logits = m.net(x)
    return {"class": F.cross_entropy(logits, y), "as": F.mse_loss(logits, m.teacher(x))}


def taught_net() -> Losses:
    net = mlp()
    teacher = copy.deepcopy(net).requires_grad_(False)
    return Losses(lambda m, x: m.net(x), taught, net=net, teacher=teacher)


def noted() -> Losses:
    """A hook notes what the loss then reads."""
    net = Losses(lambda m, x: m.net(x), activity, net=mlp(), seen={})
    net.net[0].register_forward_hook(lambda _, __, h: net.seen.update(h=h))
    return net


def activity(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"class": F.cross_entropy(m(x), y), "activity": 0.01 * m.seen["h"].square().mean()}


def listed(scale: float) -> Callable[[], Losses]:
    """A penalty on weights that the network also keeps in a list."""

    def penalised(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"c": F.cross_entropy(m(x), y), "p": scale * sum(w.square().sum() for w in m.decay)}

    def build() -> Losses:
        net = mlp()
        decay = [p for p in net.parameters() if p.dim() > 1]
        return Losses(lambda m, x: m.net(x), penalised, net=net, decay=decay)

    return build


def halve(p: nn.Parameter) -> None:
    p.grad.mul_(0.5)


def moving(run: Any) -> Net:
    return two(run, mean=torch.zeros(HIDDEN), n=torch.tensor(0))


def tempered(net: Any, t: int) -> None:
    net.temperature = (1.0, 4.0, 0.25)[t]


def replace_activation(net: Any, t: int) -> None:
    net[1] = (nn.ReLU(), nn.Tanh(), nn.Sigmoid())[t]


def parts(net: Any, gradients: Any, _: Any) -> Any:
    return tuple(None if g is None else 0.5 * g for g in gradients)


STATE = {
    "buffer_in_place": Case(lambda: moving(mean_in_place)),
    "buffer_assigned": Case(lambda: moving(mean_assigned)),
    "buffer_constant": Case(
        lambda: Net(
            warmed_up,
            ("calls",),
            a=nn.Linear(FEATURES, HIDDEN),
            o=nn.Linear(HIDDEN, CLASSES),
            calls=torch.zeros(()),
        )
    ),
    "buffer_listed": Case(
        lambda: changed(moving(mean_in_place), lambda m: setattr(m, "all", [m.mean]))
    ),
    "codes": Case(lambda: two(quantised, codes=torch.randn(6, HIDDEN), n=torch.ones(6))),
    "queue": Case(
        lambda: Losses(
            lambda m, x: m.o(m.a(x)),
            queued,
            a=nn.Linear(FEATURES, 8),
            o=nn.Linear(8, CLASSES),
            queue=torch.zeros(12, 8),
            place=torch.tensor(0),
        )
    ),
    "attribute_count": Case(lambda: two(warmed_up, calls=0), counts="calls"),
    "attribute_dict": Case(lambda: two(centred, kept={"centre": 0.0}), counts="kept"),
    "attribute_list": Case(
        lambda: Losses(lambda m, x: m.net(x), by_history, net=mlp(), history=[]), counts="history"
    ),
    "moving_teacher": Case(taught_net),
    "noted": Case(noted),
    "gradient_hook": Case(lambda: each_parameter(lambda p: p.register_hook(lambda g: g * 0.5))),
    "accumulate_hook": Case(
        lambda: each_parameter(lambda p: p.register_post_accumulate_grad_hook(halve)),
        may_refuse=True,
    ),
    "backward_hook": Case(
        lambda: changed(mlp(), lambda m: m[1].register_full_backward_hook(parts)), sizes=EQUAL
    ),
    "forward_hook": Case(
        lambda: changed(mlp(), lambda m: m[0].register_forward_hook(lambda _, __, h: h * 2)),
        sizes=EQUAL,
    ),
    "annealed": Case(
        lambda: two(lambda m, x: m.o(m.a(x).relu()) / m.temperature, temperature=1.0),
        each_round=tempered,
        rounds=3,
    ),
    "frozen_later": Case(
        mlp,
        sizes=EQUAL,
        each_round=lambda net, t: net[0].requires_grad_(t != 1),
        rounds=3,
        optimizer=MOMENTUM,
        may_refuse=True,
    ),
    "layer_replaced": Case(mlp, sizes=EQUAL, each_round=replace_activation, rounds=3),
    "penalty_list": Case(listed(1e-2)),
    "penalty_list_small": Case(listed(1e-4)),
}


# Losses.


def focal(m: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(m(x), y, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def contrastive(m: Any, x: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(m.net[0](x), dim=-1)
    alike = (y[:, None] == y).float() - torch.eye(len(x))
    scores = (z @ z.t() - 1e9 * torch.eye(len(x))).log_softmax(-1) * alike
    return F.cross_entropy(m(x), y) - 0.3 * (scores.sum(1) / alike.sum(1).clamp(min=1)).mean()


def smooth(m: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    logits = m(x)
    (slope,) = torch.autograd.grad(logits.logsumexp(1).sum(), x, create_graph=True)
    return F.cross_entropy(logits, y) + 0.5 * (slope.norm(dim=1) - 1).square().mean()


def adversarial(m: Any, x: Tensor, y: Tensor) -> Tensor:
    shift = torch.zeros_like(x, requires_grad=True)
    (slope,) = torch.autograd.grad(F.cross_entropy(m(x + shift), y), shift)
    return F.cross_entropy(m(x + 0.1 * slope.sign()), y)


def mixed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    share, other = float(np.random.beta(0.4, 0.4)), torch.randperm(len(x))
    logits = m(share * x + (1 - share) * x[other])
    return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])


LOSSES = {
    "loss_smoothed": Case(own(lambda m, x, y: F.cross_entropy(m(x), y, label_smoothing=0.1))),
    "loss_weighted": Case(own(lambda m, x, y: F.cross_entropy(m(x), y, weight=m.weights))),
    "loss_ignores": Case(
        own(lambda m, x, y: F.cross_entropy(m(x), torch.where(x[:, 0] > 0.3, -100, y))), batch=8
    ),
    "loss_sum": Case(
        own(lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum")),
        optimizer=partial(SGD, lr=0.01),
    ),
    "loss_focal": Case(own(focal)),
    "loss_contrastive": Case(own(contrastive)),
    "loss_slope": Case(own(smooth)),
    "loss_adversarial": Case(own(adversarial)),
    "loss_mixed": Case(own(mixed), draws=True),
    "loss_spectral": Case(
        own(lambda m, x, y: F.cross_entropy(m(x), y) + m.net[0].weight.norm() * 0.01)
    ),
}


# LightningModules.


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.weight = mlp(), 0.0, nn.Linear(FEATURES, CLASSES)
        self.held = [self.weight.weight]

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.body(x) + self.weight(x), y)
        self.log("own", loss)
        return loss


class Configured(Module):
    @override
    def configure_optimizers(self) -> Any:
        return layerwise(optim.SGD, (0.01, 0.1), momentum=0.9)(self.parameters())


class OneCycle(Module):
    @override
    def configure_optimizers(self) -> Any:
        adam = optim.Adam(self.parameters(), lr=0.01)
        schedule = lr_scheduler.OneCycleLR(adam, 0.05, total_steps=12)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Numbered(Module):
    """The loss depends on the number of the batch, by a weight in a list."""

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss + (0.1 * self.held[0].square().sum() if batch_idx else 0.0)}


class Skipping(Module):
    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if len(batch[1]) == 4 else None


class Annealing(Module):
    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        self.scale += 0.1
        return super().training_step(batch, batch_idx) * min(1.0, self.scale)


class Distilled(Module):
    """A frozen teacher, which stays in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp(nn.BatchNorm1d(HIDDEN), nn.Dropout(0.5)).requires_grad_(False)

    @override
    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.teacher.eval()
        return self

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        wrong = F.mse_loss(self.body(batch[0]), self.teacher(batch[0]))
        return super().training_step(batch, batch_idx) + wrong


class Manual(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


MODULES = {
    "module": Case(Module),
    "module_clipped": Case(Module, clip=(0.2, "norm"), optimizer=MOMENTUM),
    "module_configured": Case(Configured, optimizer=None),
    "module_one_cycle": Case(OneCycle, sizes=EQUAL, epochs=3, optimizer=None),
    "module_numbered": Case(Numbered),
    "module_skipping": Case(Skipping),
    "module_annealing": Case(Annealing, counts="scale"),
    "module_distilled": Case(Distilled, last="join"),
    "module_manual": Case(Manual, refused="model"),
}


# torchvision's classifiers, on 3 x 32 x 32.


def picture(net: Callable[[], nn.Module]) -> Case:
    # The last layers have one pixel: with smaller batches or larger steps, statistics over them
    # make rounding grow a thousandfold in a step, in torch too.
    sizes = (8, 16, 8)
    return Case(net, "picture", sizes, batch=8, epochs=1, optimizer=partial(SGD, lr=0.01))


def residual(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: tv.ResNet(tv.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, **settings)


VISION = {
    "resnet": picture(residual()),
    "resnet_gn": picture(residual(norm_layer=partial(nn.GroupNorm, 8))),
    "squeezenet": picture(lambda: tv.squeezenet1_1(num_classes=CLASSES, dropout=0.0)),
    "shufflenet": picture(
        lambda: tv.ShuffleNetV2([2, 2, 2], [8, 16, 24, 32, 64], num_classes=CLASSES)
    ),
    "mobilenet": picture(lambda: tv.mobilenet_v3_small(num_classes=CLASSES, dropout=0.0)),
    "densenet": picture(lambda: tv.DenseNet(8, (2, 2), 8, num_classes=CLASSES)),
    "vit": picture(lambda: tv.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=CLASSES)),
}

CASES = OPTIMIZERS | LAYERS | SEQUENCES | STATE | LOSSES | MODULES | VISION
