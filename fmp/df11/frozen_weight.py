"""A frozen weight as a tensor: its shape and dtype are there to see, its numbers only while an operator reads them."""

import dataclasses
from typing import Any

import torch

from fmp import _compat, tree
from fmp.df11.compressed import CompressedTensor

_aten: Any = torch.ops.aten
_PARTS = [field.name for field in dataclasses.fields(CompressedTensor) if field.name not in ("shape", "dtype")]
_NO_MEMORY = "a compressed weight has no memory that others can read; give them fmp.df11.decompress(weight)"
# What these return has the same values in the same places.
_SAME = frozenset((_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default))
# So has that of these, but for views: of one that has gaps, a copy has none.
_COPIES = frozenset((_aten.clone.default, _aten._to_copy.default))
_FORMATS = frozenset((None, torch.preserve_format, torch.contiguous_format))
# A view by one of these is not the same view in the next call of a compiled function.
_VARIABLE = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
# These show a tensor with another sign, by a flag that only a plain one can have.
_FLAGS = frozenset((_aten._neg_view.default, _aten._conj.default))


@dataclasses.dataclass
class Holder:
    """What all views of one weight share, so that new values reach every one of them.

    Attributes:
        node: The compressed values.
        storage: What torch takes for their memory: nothing.
    """

    node: CompressedTensor
    storage: torch.UntypedStorage = dataclasses.field(default_factory=lambda: torch.UntypedStorage(0))


@dataclasses.dataclass(frozen=True)
class View:
    """One operator that shows the same memory in another way.

    Attributes:
        op: The operator, such as `aten.transpose.int`.
        args: Its arguments after the tensor.
        kwargs: Its keyword arguments.
        index: Which of several results is meant; None if there is one.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    index: int | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Shows a tensor in this way."""
        found = self.op(tensor, *self.args, **self.kwargs)
        return found if self.index is None else found[self.index]


class FrozenWeight(torch.Tensor):
    """A bf16 tensor that is stored compressed, and decoded by each operator that reads it, for as long as that runs.

    forward:   y = linear(x, weight)       decode, multiply, free
    backward:  dx = dy @ weight            decode, multiply, free

    Autograd keeps the compressed weight for the backward pass, not the decoded one. Values, and gradients of everything
    else, are those of the bf16 weight, under every `torch.func` transform and `torch.compile` (where the compiler
    decides how long a decoded weight lives).

    Views (`weight.T`, `weight.chunk(3)`) are compressed, too, and decoded where they are used; so are clones, copies,
    and what `.to(device)` returns. All else that is computed from it is a plain tensor: `.float()` is, and
    `fmp.df11.decompress(weight)` gives a bf16 one. Pickle and `torch.save` write the decoded weight, as a plain tensor;
    `fmp.df11.save` writes the compressed one.

    It cannot be changed in place, except by `copy_` as a whole, as `load_state_dict` does; what is copied into it is
    compressed. `module.float()` makes it a plain parameter. Code that takes its memory from C++, such as TorchScript
    when it writes a file, finds none: give it decompressed weights.

    Args:
        node: The compressed values.

    Example:
        >>> weight = FrozenWeight(fmp.df11.compress(torch.full((64, 128), 0.5).bfloat16()))
        >>> weight, weight.shape, weight.dtype
        (FrozenWeight(df11[64,128]), torch.Size([64, 128]), torch.bfloat16)
        >>> x = torch.ones(2, 128, dtype=torch.bfloat16, requires_grad=True)
        >>> torch.nn.functional.linear(x, weight).sum().backward()
        >>> x.grad[0, 0]
        tensor(32., dtype=torch.bfloat16)
    """

    # Operators are met in __torch_dispatch__ only, below autograd and the torch.func transforms.
    __torch_function__ = _compat.plain_torch_function

    holder: Holder
    views: tuple[View, ...]
    form: torch.Tensor

    @staticmethod
    def __new__(cls, node: CompressedTensor) -> "FrozenWeight":
        """Makes the tensor; see the class."""
        if not isinstance(node, CompressedTensor):
            raise TypeError(f"FrozenWeight holds a CompressedTensor, got {node!r}; use fmp.df11.compress first")
        with _compat.without_dispatch_modes():
            return _made(Holder(node), (), torch.empty(node.shape, dtype=node.dtype, device="meta"))

    @property
    def node(self) -> CompressedTensor:
        """The compressed values, of which this may be a view."""
        return self.holder.node

    def decompress(self) -> torch.Tensor:
        """Decodes the weight into memory of its own."""
        tensor = self.node.decompress()
        for view in self.views:
            tensor = view(tensor)
        return tensor

    @classmethod
    @_compat.never_traced
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, FrozenWeight):
            if func.is_view and func._can_decompose():  # inference mode hands down what autograd takes apart elsewhere
                return func.decompose(*args, **kwargs)
            if func in _SAME:
                return _made(first.holder, first.views, first.form, is_inference=first.is_inference())
            if func is _aten.copy_.default:
                return _overwritten(first, *args[1:])
            if func in _COPIES and not first.views and _keeps_form(first, **kwargs):
                return _moved(first, **kwargs)
            if func in _FLAGS:
                with torch.inference_mode(first.is_inference()):
                    return func(first.decompress())
            if func.is_view and not any(isinstance(leaf, _VARIABLE) for leaf in tree.leaves((args[1:], kwargs))):
                return _viewed(first, func, args[1:], kwargs)
        _check_unwritten(func, args, kwargs)
        kwargs = {name: _decoded(value) for name, value in kwargs.items()}
        return func(*[_decoded(arg) for arg in args], **kwargs)

    def data_ptr(self) -> int:
        """Raises a `TypeError`, for code that reads memory by itself, as safetensors does."""
        raise TypeError(_NO_MEMORY)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns a storage without memory, one for all views of a weight; torch compares storages."""
        return self.holder.storage

    def share_memory_(self) -> Any:
        """Raises a `TypeError`, as `data_ptr` does."""
        raise TypeError(_NO_MEMORY)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(_NO_MEMORY)

    def apply_(self, *args: Any) -> Any:
        """Raises a `TypeError`, as `data_ptr` does."""
        raise TypeError(_NO_MEMORY)

    def tolist(self) -> Any:
        """Returns the numbers as lists."""
        return self.decompress().tolist()

    def __format__(self, spec: str) -> str:
        return format(self.decompress(), spec) if self.ndim == 0 else super().__format__(spec)

    @property
    def data(self) -> torch.Tensor:
        """A view of the weight that autograd does not follow."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if _form_of(value) == _form_of(self):
            with torch.no_grad():
                self.copy_(value)
        else:  # such as float32, by module.float()
            torch.utils.swap_tensors(self, _like(self, value.detach()))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return _PARTS, (self.node.shape, self.views, self.dtype, self.storage_offset())

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Any], context: Any, size: Any, stride: Any) -> "FrozenWeight":
        shape, views, dtype, offset = context
        node = CompressedTensor(**parts, shape=shape)
        with _compat.without_dispatch_modes():
            form = torch.empty(shape.numel(), dtype=dtype, device="meta").as_strided(size, stride, offset)
        return _made(Holder(node), views, form)

    def __getattr__(self, name: str) -> torch.Tensor:
        # torch.compile takes the parts as attributes.
        if name in _PARTS:
            return getattr(self.node, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"FrozenWeight({self.__describe__()})"

    def __describe__(self) -> str:
        return f"df11[{','.join(str(size) for size in self.shape)}]"

    @_compat.never_traced
    def __copy__(self) -> "FrozenWeight":
        return _like(self, self.detach())

    @_compat.never_traced
    def __deepcopy__(self, memo: dict[int, Any]) -> "FrozenWeight":
        # Nobody changes compressed values in place, so the copy may share them.
        copied = _like(self, _made(Holder(self.node), self.views, self.form))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _like(self, self.decompress()).__reduce_ex__(protocol)


def stored_form(leaf: Any) -> Any:
    """Returns the compressed tensor in a `FrozenWeight`, a plain tensor for a view of one, and all else as it is."""
    if not isinstance(leaf, FrozenWeight):
        return leaf
    return leaf.decompress() if leaf.views else leaf.node


def _made(
    holder: Holder, views: tuple[View, ...], form: torch.Tensor, *, is_inference: bool | None = None
) -> FrozenWeight:
    # In inference mode, too, a view of a tensor that autograd knows is one that it knows.
    is_inference = torch.is_inference_mode_enabled() if is_inference is None else is_inference
    with torch.inference_mode(is_inference):
        weight = torch.Tensor._make_wrapper_subclass(
            FrozenWeight,
            form.shape,
            strides=form.stride(),
            storage_offset=form.storage_offset(),
            dtype=form.dtype,
            device=holder.node.device,
        )
    weight.holder, weight.views, weight.form = holder, views, form
    return weight


def _like(weight: FrozenWeight, tensor: Any) -> Any:
    if isinstance(weight, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, weight.requires_grad)
    return tensor.requires_grad_(weight.requires_grad)


def _form_of(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _viewed(weight: FrozenWeight, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with _compat.without_dispatch_modes():
        forms = op(weight.form, *args, **kwargs)
    if isinstance(forms, torch.Tensor):
        view = (*weight.views, View(op, args, kwargs))
        return _made(weight.holder, view, forms, is_inference=weight.is_inference())
    views = [(*weight.views, View(op, args, kwargs, index)) for index in range(len(forms))]
    return type(forms)(
        _made(weight.holder, view, form, is_inference=weight.is_inference())
        for view, form in zip(views, forms, strict=True)
    )


def _keeps_form(
    weight: FrozenWeight, dtype: Any = None, layout: Any = None, memory_format: Any = None, **kwargs: Any
) -> bool:
    return dtype in (None, weight.dtype) and layout in (None, torch.strided) and memory_format in _FORMATS


def _moved(weight: FrozenWeight, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> FrozenWeight:
    node = weight.node if device is None else weight.node.to(device, non_blocking=non_blocking)
    return _made(Holder(node), (), weight.form)


def _overwritten(weight: FrozenWeight, source: torch.Tensor, non_blocking: bool = False) -> FrozenWeight:
    if weight.views:
        raise _unwritable(_aten.copy_.default)
    if any(type(part) is not torch.Tensor for part in tree.leaves(weight.node)) or weight.is_meta:
        where = "on the meta device" if weight.is_meta else "inside of torch.compile"
        raise TypeError(
            f"{where}, a compressed weight cannot get new values; load them with assign=True, or by "
            "fmp.df11.wrap(module, weights=...)"
        )
    if isinstance(source, FrozenWeight) and not source.views and source.shape == weight.shape:
        weight.holder.node = source.node.to(weight.device, non_blocking=non_blocking)
        return weight
    values = _decoded(source).to(weight.device, weight.dtype).expand(weight.shape)
    weight.holder.node = CompressedTensor.compress(values)
    return weight


def _check_unwritten(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if op.namespace == "c10d":  # these write into tensors that their schemas do not mark
        raise _unwritable(op)
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = kwargs.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
        if any(isinstance(item, FrozenWeight) for item in (given if isinstance(given, list | tuple) else (given,))):
            raise _unwritable(op)


def _unwritable(op: Any) -> TypeError:
    return TypeError(
        f"{op} cannot write into a compressed weight; change a copy, fmp.df11.decompress(weight), or copy new values "
        "into all of it with weight.copy_(values)"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, FrozenWeight):
        return value.decompress()
    return type(value)(map(_decoded, value)) if type(value) in (list, tuple) else value
