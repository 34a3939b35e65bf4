"""Files of compressed weights: one safetensors file a model, with a checksum for everything in it.

    save(tree, path)       compressed tensors as `fmp.df11.stored` packs them, others as they are, tied ones once
    load(path)             the same tree; or, with decompress=True, the weights
    open(path)             a mapping that reads one tensor at a time

`fmp.df11.manifest` says what the header holds. Plain tensors keep their names in the file, so that other programs can
read them; compressed ones are bytes to them.
"""

import contextlib
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fmp import _compat, tree
from fmp.df11 import manifest, model_files, stored, tensor_file, writing
from fmp.df11.compressed import CompressedTensor, check_outside, empty
from fmp.df11.frozen_weight import stored_form
from fmp.df11.manifest import Manifest, Record
from fmp.df11.tensor_file import TensorFile
from fmp.df11.writing import Weight
from fmp.errors import DF11Error
from fmp.files import is_lack_of_memory

Tree = Any


def save(weights: Tree, path: str | os.PathLike[str]) -> None:
    """Writes a tree of weights to one file, atomically.

    What `fmp.df11.compress` has compressed is stored compressed, other tensors are stored as they are. A tensor that is
    in the tree under several names is stored once. The same weights give the same bytes (with the same zlib, which gets
    some tensors). Beyond the tree itself, memory for two tensors is enough.

    Args:
        weights: A flat dict of names, such as `model.params`, or any nesting of dicts with strings as keys, lists and
            tuples. Its leaves are tensors, `CompressedTensor` nodes and None.
        path: The file to create or replace. Its folder must exist.

    Raises:
        TypeError: If the tree has other nodes or leaves, or a tensor of a dtype that safetensors files do not have.
        ValueError: If two leaves get the same name, or a name is not valid Unicode.
        RuntimeError: Inside `torch.func.vmap`, `grad` or another transform, where tensors may have no memory to read.
        OSError: If the file cannot be written.

    Example:
        >>> import tempfile
        >>> params = {"weight": torch.full((64, 64), 0.5).bfloat16(), "bias": torch.zeros(64)}
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     save(fmp.df11.compress(params), file.name)
        ...     fmp.tree.describe(load(file.name)), fmp.tree.describe(load(file.name, decompress=True))
        ("{'bias': f32[64], 'weight': df11[64,64]}", "{'bias': f32[64], 'weight': bf16[64,64]}")
    """
    if _compat.transform_active():
        raise RuntimeError("save cannot run inside vmap, grad or another transform; save what it returns")
    leaves: dict[str, Weight] = {}
    structure = _take_apart(weights, (), leaves)
    sources, tied, first = [], {}, {}
    for name, leaf in leaves.items():
        source = writing.source(name, leaf)
        target = first.setdefault(_identity(leaf), name)
        if target == name:
            sources.append(source)
        else:
            tied[name] = target
    is_flat = isinstance(structure, dict) and structure == {"dict": {name: name for name in leaves}}
    writing.write(sources, path, tied=tied, structure=None if is_flat else structure)


def load(path: str | os.PathLike[str], *, decompress: bool = False) -> Tree:
    """Reads the tree that `save` wrote.

    Args:
        path: The file; or the folder of a model that `python -m fmp df11 compress` made.
        decompress: Whether to restore the weights. By default compressed tensors come back as nodes.

    Returns:
        The tree, bit for bit, on the host: dicts, lists and tuples as they were saved, tied tensors as one tensor. From
        a file that was converted, and from a folder, whatever its files hold, a flat dict of names: `blocks/0/weight`.

    Raises:
        DF11Error: If a file is incomplete, damaged, or of another kind; the message names file and tensor. The stored
            bytes of every tensor are checked, and the bits of those that are restored.
        RuntimeError: Inside of a `torch.func` transform or `torch.compile`.
        OSError: If there is no such file, or it cannot be opened.

    Example:
        >>> import tempfile
        >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
        >>> save(fmp.df11.compress({"w": torch.full((64, 128), 0.5).bfloat16(), "b": torch.zeros(2)}), path)
        >>> load(path)
        {'b': tensor([0., 0.]), 'w': df11[64,128]}
    """
    if os.path.isdir(path):
        return _load_folder(path, decompress)
    with open(path) as file:
        leaves, structure = _leaves(file, decompress), file.manifest.structure
    return leaves if structure is None else _put_together(structure, leaves)


def open(path: str | os.PathLike[str]) -> "WeightFile":
    """Opens a file that `save` wrote, without reading any tensor.

    Args:
        path: The file.

    Returns:
        A mapping of names to tensors and `CompressedTensor` nodes, which reads and checks one when it is asked for, and
        is closed by `with` or `close`. In a nested tree, a name is the path of the leaf, `blocks/0/weight`.

    Raises:
        DF11Error: If the file is of another kind, or its header is damaged. Reading a tensor raises it too.
        OSError: If the file cannot be opened.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as temporary:
        ...     save({"bias": torch.ones(2), "scale": torch.ones(2)}, temporary.name)
        ...     with open(temporary.name) as file:
        ...         list(file), file["bias"]
        (['bias', 'scale'], tensor([1., 1.]))
    """
    return WeightFile(path)


class WeightFile(Mapping[str, Weight]):
    """A file of compressed weights that is open for reading.

    Args:
        path: The file.
        plain: Whether it may also be an ordinary safetensors file, which has no checksums.

    Attributes:
        path: The file.
        manifest: What its header says.
        is_compressed: False for an ordinary safetensors file.
    """

    def __init__(self, path: str | os.PathLike[str], *, plain: bool = False) -> None:
        self.path = path
        with self._named():
            self._file = TensorFile(path)
            try:
                self.is_compressed = manifest.is_compressed(self._file.header)
                if plain and not self.is_compressed:
                    records = {name: Record(0) for name in self._file.entries}
                    self.manifest = Manifest(records, metadata=self._file.metadata)
                else:
                    self.manifest = manifest.read(self._file.header, self._file.metadata, self._file.entries)
            except BaseException:
                self._file.close()
                raise

    @property
    def records(self) -> Mapping[str, Record]:
        """What is known of each tensor, without the names for tensors that are another one."""
        return self.manifest.tensors

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...], int]:
        """Returns the dtype and the shape of a tensor, and the bytes that it takes in the file."""
        name = self.manifest.tied.get(name, name)
        record, entry = self.records[name], self._file.entries[name]
        return (torch.bfloat16, record.shape, entry.nbytes) if record.form else (entry.dtype, entry.shape, entry.nbytes)

    def read(self, name: str, *, decompress: bool = False) -> Weight:
        """Reads one tensor.

        Args:
            name: Its name.
            decompress: Whether to restore a compressed one.

        Raises:
            DF11Error: If it is damaged.
            KeyError: If there is none of this name.
            RuntimeError: Inside of a `torch.func` transform or `torch.compile`.
        """
        check_outside("reading a file of weights")
        name = self.manifest.tied.get(name, name)
        record, entry = self.records[name], self._file.entries[name]
        with self._named(name):
            data = self._file.read(name)
            if self.is_compressed and zlib.crc32(data.data) != record.crc:
                raise DF11Error("damaged: its checksum does not match")
            if record.form is None:
                if entry.dtype == torch.bool and (data > 1).any():
                    raise DF11Error("damaged: it has bools that are neither 0 nor 1")
                raw = torch.from_numpy(data) if data.size else empty(torch.uint8)
                return raw.view(entry.dtype).reshape(entry.shape)
            node = stored.unpack(data, record.form, record.shape)
            if not decompress:
                return node
            tensor = node.decompress()
            if zlib.crc32(tensor_file.raw_bytes(tensor).data) != record.values_crc:
                raise DF11Error("damaged: it does not give the weights that were compressed")
            return tensor

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def __getitem__(self, name: str) -> Weight:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter([*self.records, *self.manifest.tied])

    def __contains__(self, name: object) -> bool:
        # That of Mapping would read the tensor.
        return name in self.records or name in self.manifest.tied

    def __len__(self) -> int:
        return len(self.records) + len(self.manifest.tied)

    def __repr__(self) -> str:
        return f"WeightFile({os.fspath(self.path)!r}, {len(self)} tensors)"

    def __enter__(self) -> "WeightFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _named(self, name: str | None = None) -> Iterator[None]:
        """Names the file, and the tensor, in what goes wrong with a file of any content."""
        try:
            yield
        except (ValueError, RuntimeError, TypeError, OverflowError) as error:
            place = os.fspath(self.path) if name is None else f"{os.fspath(self.path)}: {name}"
            if is_lack_of_memory(error):
                raise MemoryError(place) from error
            raise DF11Error(f"{place}: {error}") from error


def _leaves(file: WeightFile, decompress: bool) -> dict[str, Weight]:
    leaves = {name: file.read(name, decompress=decompress) for name in file.records}
    return leaves | {name: leaves[target] for name, target in file.manifest.tied.items()}


def _load_folder(path: str | os.PathLike[str], decompress: bool) -> dict[str, Weight]:
    leaves: dict[str, Weight] = {}
    for name in model_files.find(path).weights:
        with open(os.path.join(path, name)) as file:
            # Before anything is read, which takes the memory.
            if twice := leaves.keys() & set(file):
                raise DF11Error(f"{os.fspath(file.path)}: another file of the folder has {min(twice)} too")
            leaves |= _leaves(file, decompress)
    return leaves


def _take_apart(node: Tree, path: tuple[str, ...], leaves: dict[str, Weight]) -> Any:
    """Collects the leaves of a tree by name, and returns its structure."""
    name = tree.join(path) if path else "tensor"
    if isinstance(node, dict):
        for key in node:
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}; a file of weights has strings as keys")
        return {"dict": {key: _take_apart(node[key], (*path, key), leaves) for key in sorted(node)}}
    if type(node) in (list, tuple):
        parts = [_take_apart(part, (*path, str(index)), leaves) for index, part in enumerate(node)]
        return {type(node).__name__: parts}
    if node is None:
        return {"none": None}
    if not isinstance(node, torch.Tensor | CompressedTensor):
        raise TypeError(
            f"{name} is a {type(node).__name__}; a file of weights holds tensors in dicts, lists and tuples; "
            "fmp.checkpoint.save takes any state"
        )
    if name in leaves:
        raise ValueError(f"two leaves have the name {name!r}; rename one of the keys")
    leaves[name] = stored_form(node)
    return name


def _put_together(structure: Any, leaves: Mapping[str, Weight]) -> Tree:
    match structure:
        case {"dict": children}:
            return {key: _put_together(child, leaves) for key, child in children.items()}
        case {"list": parts}:
            return [_put_together(part, leaves) for part in parts]
        case {"tuple": parts}:
            return tuple(_put_together(part, leaves) for part in parts)
        case {"none": _}:
            return None
    return leaves[structure]


def _identity(weight: Weight) -> Any:
    """Returns what two weights share if they are one: the same numbers in the same memory."""
    if isinstance(weight, CompressedTensor):
        return (weight.shape, *map(_identity, tree.leaves(weight)))
    # Tensors without elements have no memory to share.
    if weight.is_meta or type(weight) not in (torch.Tensor, torch.nn.Parameter) or not weight.numel():
        return id(weight)
    memory = weight.dtype, weight.device, weight.data_ptr(), weight.shape, weight.stride()
    return *memory, weight.is_conj(), weight.is_neg()
