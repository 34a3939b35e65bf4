"""Every piece of work that has a kernel, once and small, for a tool that watches the device.

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tests.gpu.small
"""

import sys

import torch

import fmp
from fmp.df11 import CompressedTensor
from fmp.df11_codec.published.groups import encode_group
from fmp.kernels import df11, df11_published, launch, multi_tensor
from tests.df11.published_oracle import gaussian
from tests.gpu.steps import make_batch, make_params, make_step


def run(device: torch.device) -> None:
    """Launches the kernels on tensors of odd sizes; some begin where sixteen bytes at once are not possible."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors = [torch.ones(size + 1, dtype=dtype, device=device)[size % 2 :] for size in (1, 137, 70_001)]
        quotients, _, _ = multi_tensor.unscale(tensors, torch.tensor(3.0, device=device))
        multi_tensor.measure(tensors)
        multi_tensor.axpby(2.0, tensors, 1.0, quotients)
    for optimizer in (fmp.optim.adamw(0.01), fmp.optim.sgd(0.01, momentum=0.9)):
        for half in (torch.float16, torch.bfloat16):
            step = make_step(optimizer, policy=fmp.opt_level("O2", half_dtype=half))
            state = step.init(make_params(device))
            for seed in range(3):
                state, _ = step(state, make_batch(seed, device, overflow=seed == 1))
    bits = gaussian(50_000)
    node = CompressedTensor.compress(torch.from_numpy(bits.view("int16")).view(torch.bfloat16)).to(device)
    parts = df11.Parts(node.code_lengths, node.stream, node.chunk_bits, node.group_starts, node.sign_mantissa)
    assert not df11.decode([parts, parts])[1].any()
    group = encode_group(bits)
    arrays = [torch.from_numpy(getattr(group, name)).to(device) for name in df11_published.Parts._fields]
    assert not df11_published.decode(df11_published.Parts(*arrays))[1].item()


def main() -> None:
    if reason := launch.missing("cuda"):
        sys.exit(reason)
    run(torch.device("cuda", 0))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
