"""CUDA kernels: the sources in `cuda/`, compiled by NVRTC and launched through CuPy on tensors of torch.

Nothing here has to be called by users: what can run on a kernel does, where tensors are on a GPU, no transform of
`torch.func` is active and nothing is traced. `backends()` says what runs, and why.
"""

from fmp.kernels.backends import Backend as Backend, backends as backends
