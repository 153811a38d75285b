"""VDCNN: its own alphabet, its blocks and poolings."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightfed.datasets.text import ALPHABET, encode
from lightfed.networks.vdcnn import VDCNN, ConvBlock


def small(layers: int = 9, **settings: float) -> VDCNN:
    return VDCNN(layers, 4, **({"width": 0.07, "hidden": 8} | settings))  # type: ignore[arg-type]


def letters(*shape: int) -> Tensor:
    return torch.randint(0, 71, shape, generator=torch.Generator().manual_seed(0))


def test_the_alphabet_has_no_newline_and_one_hyphen() -> None:
    codes = torch.from_numpy(encode(list(ALPHABET), 1))
    model = small()
    seen: list[Tensor] = []
    model.embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(codes)
    own = dict(zip(ALPHABET, seen[0].flatten().tolist(), strict=True))
    assert own.pop("\n") == 0
    assert sorted(own.values()) == list(range(1, 69)) == list(own.values())
    assert not model.embedding(torch.tensor(0)).any()
    assert model.embedding.weight.shape == (69, 16)


def test_letters_may_come_in_any_type_and_number() -> None:
    model = small().eval()
    for length in (1, 7, 130):
        x = letters(2, length)
        assert model(x).shape == (2, 4)
        for dtype in (torch.uint8, torch.float32):
            assert torch.equal(model(x.to(dtype)), model(x))


def test_a_stage_halves_the_positions() -> None:
    model = small(17)
    x = model.stem(model.embedding(letters(1, 1024) % 69).transpose(1, 2))
    positions = [x.shape[-1]]
    for stage in model.stages:
        x = stage(x)
        positions.append(x.shape[-1])
    assert positions == [1024, 512, 256, 128, 64]
    assert x.shape[1] == 36  # 35.84, rounded up
    assert model.classifier[0](x).shape == (1, 36, 8)


def test_a_block_adds_its_input_and_then_rectifies() -> None:
    x = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(0))
    block = ConvBlock(3, 3, widens=False).eval()
    out = F.relu(block.body(x) + x)
    assert torch.equal(block(x), out)
    nn.init.zeros_(block.body[4].weight)  # type: ignore[arg-type]
    assert torch.equal(block(x), F.relu(x))
    wide = ConvBlock(3, 5, widens=True).eval()
    nn.init.zeros_(wide.body[4].weight)  # type: ignore[arg-type]
    assert wide.shortcut is not None
    assert torch.equal(wide(x), F.relu(wide.shortcut(x)))
    convolution = wide.shortcut[0]
    assert isinstance(convolution, nn.Conv1d)
    assert (convolution.kernel_size, convolution.bias) == ((1,), None)


def test_convolutions_start_as_he_et_al_say() -> None:
    torch.manual_seed(0)
    for module in VDCNN(9, width=0.5, hidden=8).modules():
        if isinstance(module, nn.Conv1d) and module.weight.numel() > 10_000:
            fan_in = module.weight[0].numel()
            assert (module.weight.std() * (fan_in / 2) ** 0.5 - 1).abs() < 0.05
