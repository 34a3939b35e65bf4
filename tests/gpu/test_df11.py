"""DF11 on a device: weights come back bit for bit, and what computes with them computes the same."""

import pytest
import torch
from torch import nn

import fmp
from fmp.df11 import CompressedTensor
from fmp.df11_codec import codec
from fmp.df11_codec.published.groups import encode_group
from fmp.kernels import df11, df11_published
from tests.bits import same_bits
from tests.df11.published_oracle import gaussian
from tests.kernels.test_df11 import BLOCK, node_with, of, weights


@pytest.mark.parametrize("kind", ["normal", "two exponents", "wide"])
def test_many_tensors_in_one_launch(device, kind):
    tensors = [weights(numbers, kind) for numbers in (3, 700, BLOCK + 1, 64, 5000)]
    nodes = [CompressedTensor.compress(tensor).to(device) for tensor in tensors]
    pairs = [(node, tensor) for node, tensor in zip(nodes, tensors, strict=True) if not node.is_raw]
    outs, damaged = df11.decode([of(node) for node, _ in pairs])
    assert not damaged.any()
    assert {out.device for out in outs} == {damaged.device} == {pairs[0][0].device}
    assert same_bits([out.cpu() for out in outs], [tensor for _, tensor in pairs])


def test_a_tree_is_decoded_in_one_launch(device, sources):
    params = {"a": weights(BLOCK + 1).to(device), "b": [weights(700).to(device)], "c": torch.ones(2, device=device)}
    compressed = fmp.df11.compress(params, min_numel=1)
    fmp.df11.decompress(compressed)  # tries the kernel
    sources.clear()
    assert same_bits(fmp.df11.decompress(compressed), params)
    assert sources == ["df11"]


def test_damage_is_reported(device):
    node = CompressedTensor.compress(weights(5000)).to(device)
    bad = node_with(node, chunk_bits=node.chunk_bits + 1, sign_mantissa=node.sign_mantissa.clone())
    assert df11.decode([of(node), of(bad)])[1].bool().tolist() == [False, True]
    with pytest.raises(ValueError, match="corrupt"):
        df11.restore([of(node), of(bad)])


def test_the_published_format(device):
    bits = gaussian(100_000)
    group = encode_group(bits)
    parts = [torch.from_numpy(getattr(group, name)).to(device) for name in df11_published.Parts._fields]
    out, damaged = df11_published.decode(df11_published.Parts(*parts))
    assert not damaged.item()
    assert same_bits(out.cpu().view(torch.int16), torch.from_numpy(bits.view("int16")))
    parts[-1] = parts[-1].flip(0)
    assert df11_published.decode(df11_published.Parts(*parts))[1].item()


def blocks(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 96, bias=False)).bfloat16().to(device)
    return layers.requires_grad_(False)


def test_a_wrapped_module_computes_the_same(device):
    module = blocks(device)
    small = fmp.df11.wrap(module, ["*.weight"])
    results = []
    for layers in (module, small):
        x = torch.linspace(-1, 1, 4 * 96, device=device).view(4, 96).bfloat16().requires_grad_()
        out = layers(x)
        out.float().square().sum().backward()
        results.append((out.detach(), x.grad))
    assert same_bits(*results)
    assert {param.device for param in small.parameters()} == {param.device for param in module.parameters()}


def test_a_frozen_block_has_the_same_gradients(device):
    params = {"kernel": weights(96 * 128).view(96, 128).to(device), "bias": weights(128).to(device)}

    def block(params, x):
        return torch.tanh(x @ params["kernel"] + params["bias"]).float().square().sum()

    x = torch.linspace(-1, 1, 4 * 96, device=device).view(4, 96).bfloat16()
    plain = torch.func.grad_and_value(block, argnums=1)(params, x)
    assert same_bits(plain, torch.func.grad_and_value(fmp.df11.frozen(block), argnums=1)(fmp.df11.compress(params), x))


def test_decode_is_not_left_to_the_host(gpu, monkeypatch):
    assert fmp.kernels.backends()["df11 on cuda"].name == "cuda"
    tensor = weights(5000)
    node = CompressedTensor.compress(tensor).to(gpu)
    monkeypatch.setattr(codec, "decode", lambda *args, **kwargs: pytest.fail("the host decodes"))
    restored = node.decompress()
    assert restored.is_cuda
    assert same_bits(restored.cpu(), tensor)
