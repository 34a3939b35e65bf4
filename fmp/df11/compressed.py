"""A compressed tensor as a node of a tree: tensors as children, so that everything which carries trees carries it."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fmp import _compat, tree
from fmp.df11.ahead import ahead_of_time
from fmp.df11_codec import codec
from fmp.df11_codec.layout import Encoded
from fmp.kernels import df11 as kernels, eligible

# The parts of compressed numbers as numpy has them.
_DTYPES = (np.uint8, np.uint64, np.uint16, np.int64, np.uint8)


@tree.dataclass
class CompressedTensor:
    """A bf16 tensor in about 10.6 bits a number, from which it comes back bit for bit.

    The children are integers: no cast changes them, and nothing can be differentiated by them. `torch.func` transforms
    and `torch.compile` take the node as an argument; `decompress` works inside of both, and is one operator to the
    compiler. `fmp.checkpoint`, pickle and deepcopy carry it. (A checkpoint is loaded into a tree whose tensors have
    the sizes of the saved ones. That is so for the same weights, compressed again, but not for other weights.)

    A tensor that compression would make larger is kept as it is, in `raw`, and the other parts are empty.

    Attributes:
        code_lengths: u8[256], the length of each exponent's code, as in `fmp.df11_codec.layout`.
        stream: i64[words], the codes.
        chunk_bits: i16[chunks], the number of bits in each chunk.
        group_starts: i64[groups], the position in bits at which each group starts.
        sign_mantissa: u8[numel], sign and mantissa of each number.
        raw: i16[numel], the bits of all numbers, or empty.
        shape: The shape of the tensor.
        dtype: Its dtype, bfloat16.

    Example:
        >>> weight = torch.full((64, 128), 0.5, dtype=torch.bfloat16)
        >>> node = CompressedTensor.compress(weight)
        >>> node, torch.equal(node.decompress(), weight), node.nbytes / weight.nbytes < 0.6
        (df11[64,128], True, True)
    """

    code_lengths: torch.Tensor
    stream: torch.Tensor
    chunk_bits: torch.Tensor
    group_starts: torch.Tensor
    sign_mantissa: torch.Tensor
    raw: torch.Tensor
    shape: torch.Size = tree.static()
    dtype: torch.dtype = tree.static(default=torch.bfloat16)

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> "CompressedTensor":
        """Compresses one tensor, on the host and by as many threads as `torch.get_num_threads()` says.

        Args:
            tensor: bf16[...], of any shape, strides and device. What is on another device is copied to the host, and
                the parts are put on that device.

        Returns:
            The node. It shares no memory with the tensor.

        Raises:
            TypeError: If the tensor is not bf16, or not a plain tensor with memory of its own.
            RuntimeError: Inside of a `torch.func` transform or `torch.compile`, where tensors have no fixed values.
        """
        check_outside("compress")
        check_compressible(tensor)
        values = _array(tensor.detach().resolve_neg().reshape(-1).view(torch.int16), np.uint16)
        encoded = codec.encode(values, threads=torch.get_num_threads())
        raw = torch.from_numpy(values.view(np.int16).copy()) if encoded is None else empty(torch.int16)
        return cls.from_encoded(encoded, raw, tensor.shape).to(tensor.device)

    @classmethod
    def from_encoded(cls, encoded: Encoded | None, raw: torch.Tensor, shape: Sequence[int]) -> "CompressedTensor":
        """Makes a node of what `codec.encode` returns, without a copy, or of the numbers as they are.

        Args:
            encoded: The compressed numbers; None if the numbers are in `raw`.
            raw: i16[numel], the bits of the numbers; i16[0] if they are in `encoded`.
            shape: The shape of the tensor.
        """
        if encoded is None:
            dtypes = (torch.uint8, torch.int64, torch.int16, torch.int64, torch.uint8)
            lengths, stream, chunk_bits, starts, rest = [empty(dtype) for dtype in dtypes]
        else:
            lengths = torch.from_numpy(encoded.code_lengths)
            stream = torch.from_numpy(encoded.stream.view(np.int64))
            chunk_bits = torch.from_numpy(encoded.chunk_bits.view(np.int16))
            starts = torch.from_numpy(encoded.group_starts)
            rest = torch.from_numpy(encoded.sign_mantissa)
        return cls(lengths, stream, chunk_bits, starts, rest, raw, torch.Size(shape))

    def decompress(self) -> torch.Tensor:
        """Restores the tensor.

        Returns:
            bf16 of the tensor's shape, contiguous, on the node's device, in memory of its own. The work is done on a
            GPU whose kernels run, see `fmp.kernels.backends`, and otherwise on the host, with copies.

        Raises:
            ValueError: If the parts do not fit together, or are mapped over by `torch.func.vmap`. What is decoded while
                a CUDA graph is captured is not checked.
            RuntimeError: If a CUDA graph is captured, and the host would have to decode.
        """
        if self.is_raw:
            if self.raw.dtype != torch.int16 or self.raw.numel() != self.numel():
                raise ValueError(f"{self.raw.numel()} numbers as {self.raw.dtype} do not make {self}")
            return self.raw.clone().view(self.dtype).reshape(self.shape)
        return _decode(*_coded(self), self.shape)

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> "CompressedTensor":
        """Moves the node to a device. It has no other dtype: for that, decompress it first.

        Args:
            device: The device, as for `torch.Tensor.to`.
            non_blocking: Whether the host goes on while the parts are copied, where torch can do that.

        Returns:
            A node on the device; its parts are those of this one where they are there already.

        Raises:
            TypeError: If `device` is a dtype.
            RuntimeError: If torch knows no such device.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"{self} cannot be cast to {device}; cast what decompress() returns")
        return tree.map(lambda part: part.to(device, non_blocking=non_blocking), self)

    @property
    def is_raw(self) -> bool:
        """Whether the tensor is kept as it is."""
        return self.code_lengths.numel() == 0

    @property
    def device(self) -> torch.device:
        """The device of the parts."""
        return self.sign_mantissa.device

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts together."""
        return sum([part.nbytes for part in (*_coded(self), self.raw)])

    @property
    def bits_per_weight(self) -> float:
        """The bits that a number takes, all included; 16.0 for an empty tensor."""
        return 8 * self.nbytes / self.numel() if self.numel() else 16.0

    def numel(self) -> int:
        """Returns the number of elements of the tensor."""
        return self.shape.numel()

    def __repr__(self) -> str:
        return self.__describe__()

    def __describe__(self) -> str:
        return f"df11[{','.join(str(size) for size in self.shape)}]"


def decompress_all(nodes: Sequence[CompressedTensor]) -> list[torch.Tensor]:
    """Restores tensors as `CompressedTensor.decompress` does; on a GPU, those of one device in one launch."""
    devices: dict[torch.device, list[int]] = {}
    for index, node in enumerate(nodes):
        if not node.is_raw and node.sign_mantissa.numel() == node.numel():
            devices.setdefault(node.device, []).append(index)
    found: dict[int, torch.Tensor] = {}
    for device, indices in devices.items():
        parts = [_coded(nodes[index]) for index in indices]
        together = list(chain.from_iterable(parts))
        if eligible.are_plain(together) and eligible.are_alike([together]) and eligible.runs("df11", device):
            restored = zip(indices, kernels.restore(parts), strict=True)
            found |= {index: tensor.reshape(nodes[index].shape) for index, tensor in restored}
    return [found[index] if index in found else node.decompress() for index, node in enumerate(nodes)]


def _coded(node: CompressedTensor) -> kernels.Parts:
    return kernels.Parts(node.code_lengths, node.stream, node.chunk_bits, node.group_starts, node.sign_mantissa)


def empty(dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor without elements on the host, whatever the default device is."""
    return torch.empty(0, dtype=dtype, device="cpu")


def check_outside(what: str) -> None:
    """Raises inside of a `torch.func` transform, and while torch.compile traces.

    Args:
        what: The function that cannot run there.

    Raises:
        RuntimeError: Inside of either.
    """
    if torch.compiler.is_compiling():
        _not_traced(torch.empty(0))
    elif _compat.transform_active():
        raise RuntimeError(f"{what} cannot run inside vmap, grad or another transform; do it outside")


def check_compressible(tensor: Any, what: str = "the tensor") -> None:
    """Raises unless a value is a tensor that can be compressed.

    Args:
        tensor: The value.
        what: What to call it in the message.

    Raises:
        TypeError: If it is not a plain bf16 tensor.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.bfloat16:
        raise TypeError(
            f"{what} is {tree.describe(tensor)}; only bf16 tensors are compressed: cast it first, for example with "
            "fmp.cast, or leave it out"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        kind = f"{type(tensor).__name__} of layout {tensor.layout} on {tensor.device}"
        raise TypeError(f"{what} is a {kind}; only plain tensors with values are compressed")


@torch.library.custom_op("fmp::df11_not_traced", mutates_args=())
def _not_traced(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


@_not_traced.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    # After any other error, torch.compile would go on with what is called here, piece by piece.
    raise RuntimeError("weights cannot be compressed, or read from a file, inside of torch.compile; do it outside")


# torch.library.custom_op would load the whole compiler when it is first called. Integers have no gradients to lose.
_parts = "Tensor code_lengths, Tensor stream, Tensor chunk_bits, Tensor group_starts, Tensor sign_mantissa"
torch.library.define("fmp::df11_decode", f"({_parts}, SymInt[] shape) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


@torch.library.impl("fmp::df11_decode", "CompositeExplicitAutograd")
def _on_any_device(
    code_lengths: torch.Tensor,
    stream: torch.Tensor,
    chunk_bits: torch.Tensor,
    group_starts: torch.Tensor,
    sign_mantissa: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    if sign_mantissa.numel() != torch.Size(shape).numel():
        raise ValueError(f"{sign_mantissa.numel()} compressed numbers do not have the shape {list(shape)}")
    parts = (code_lengths, stream, chunk_bits, group_starts, sign_mantissa)
    threads, device = torch.get_num_threads(), sign_mantissa.device

    if eligible.runs("df11", device):
        return kernels.restore([kernels.Parts(*[part.contiguous() for part in parts])])[0].reshape(shape)
    if sign_mantissa.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the host would have to decode, which a CUDA graph cannot capture; decode once before, so that the kernel "
            "is compiled and tried, and see fmp.kernels.backends() if that does not help"
        )

    def decode(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        encoded = Encoded(*[_array(part, dtype) for part, dtype in zip(parts, _DTYPES, strict=True)])
        bits = codec.decode(encoded, threads=threads)
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(shape).to(device)

    return ahead_of_time(decode, parts, torch.Size(shape))


@torch.library.register_fake("fmp::df11_decode")
def _(
    code_lengths: torch.Tensor,
    stream: torch.Tensor,
    chunk_bits: torch.Tensor,
    group_starts: torch.Tensor,
    sign_mantissa: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    return sign_mantissa.new_empty(shape, dtype=torch.bfloat16)


def _refuse(info: Any, in_dims: Any, *args: Any) -> Any:
    raise ValueError(
        "a compressed tensor cannot be mapped over by vmap; use in_dims=None for it, or decompress it first"
    )


torch.library.register_vmap("fmp::df11_decode", _refuse)
_decode: Any = torch.ops.fmp.df11_decode.default


def _array(tensor: torch.Tensor, dtype: type) -> npt.NDArray[Any]:
    # A tensor that was read from a file may lie anywhere, also where a number of 64 bits should not.
    return np.require(tensor.detach().cpu().contiguous().numpy(), requirements=["C", "A"]).view(dtype)
