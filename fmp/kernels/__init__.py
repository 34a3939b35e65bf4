"""CUDA kernels: the sources in `cuda/`, compiled by NVRTC and launched through CuPy on tensors of torch.

Nothing here has to be called by users: what can run on a kernel does, where tensors are on a GPU, no transform of
`torch.func` is active and nothing is traced. `backends()` says what runs, and why. In the names of functions here,

    has_kernels   a device: kernels can be compiled and launched there; `launch.missing` says why not
    agrees        a kernel on a device: a trial there gave the bits of what it replaces
    runs          a kernel on a device: the device has kernels, and the kernel agrees
    usable        a kernel for tensors: it runs on their device, and they are plain memory that it can read
"""

from fmp.kernels.backends import Backend as Backend, backends as backends
