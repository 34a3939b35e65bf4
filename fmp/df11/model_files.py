"""The files of a model: one safetensors file, or a folder as Hugging Face lays it out."""

import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from fmp.df11.tensor_file import TensorFile
from fmp.errors import DF11Error

_INDEX = ".safetensors.index.json"
# The same weights once more, in formats that are not read here.
_OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"})
_OTHER_FORMAT = "weights in this format are not read"


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        root: The folder, or the file itself.
        weights: The safetensors files, relative to the folder; `Path()` for a single file.
        others: What belongs to the model besides: configuration, tokenizer, indices.
        left_out: What is not read, and why.
    """

    root: Path
    weights: list[Path]
    others: list[Path]
    left_out: dict[Path, str]

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder."""
        return self.weights != [Path()]


def find(path: str | os.PathLike[str]) -> ModelFiles:
    """Finds the files of a model, and checks that an index names files and tensors that are there.

    Args:
        path: A file, or a folder, whose subfolders belong to the model too, behind symbolic links as well. Subfolders
            with a leading dot are left out, and so are links to a folder that they are in.

    Raises:
        FileNotFoundError: If there is no such file, or no safetensors file in the folder.
        DF11Error: If an index cannot be read, or does not fit the files.
        OSError: If a file or a subfolder cannot be read.
    """
    root = Path(path)
    if not os.fspath(path) or not root.exists():
        raise FileNotFoundError(f"there is no file {os.fspath(path)!r}")
    if not root.is_dir():
        return ModelFiles(root, [Path()], [], {})
    left_out: dict[Path, str] = {}
    found = [file.relative_to(root) for file in _walk(root, left_out)]
    weights = [file for file in found if file.suffix == ".safetensors"]
    if not weights:
        raise FileNotFoundError(f"there are no safetensors files in {os.fspath(path)!r}")
    left_out = {folder.relative_to(root): why for folder, why in left_out.items()}
    left_out |= dict.fromkeys([file for file in found if file.suffix in _OTHER_WEIGHTS], _OTHER_FORMAT)
    others = [file for file in found if file not in left_out and file.suffix != ".safetensors"]
    for file in others:
        if file.name.endswith(_INDEX):
            _check_index(root, file, weights)
    return ModelFiles(root, weights, others, left_out)


def _walk(root: Path, left_out: dict[Path, str]) -> Iterator[Path]:
    """Yields the files of a folder and its subfolders, and notes which subfolders are left out."""

    def fail(error: OSError) -> None:
        raise error

    for folder, subfolders, names in os.walk(root, onerror=fail, followlinks=True):
        for name in sorted(subfolders):
            subfolder = Path(folder, name)
            real = Path(os.path.realpath(subfolder))
            if name.startswith("."):
                left_out[subfolder] = "its name begins with a dot"
            elif real in (here := Path(os.path.realpath(folder)), *here.parents):
                left_out[subfolder] = "it is a link to a folder that it is in"
        subfolders[:] = sorted(name for name in subfolders if Path(folder, name) not in left_out)
        yield from (Path(folder, name) for name in sorted(names))


def _check_index(root: Path, index: Path, weights: list[Path]) -> None:
    path = root / index
    for name, names in _shards(path).items():
        shard = Path(name)
        if shard.is_absolute() or ".." in shard.parts:
            raise DF11Error(f"{path}: it names the file {name!r}, which is outside of its folder")
        # A name that someone else wrote is compared with the files that were found, and never opened.
        if index.parent / shard not in weights:
            raise DF11Error(f"{path}: the file {name!r} is missing among the safetensors files of the model")
        try:
            file = TensorFile(path.parent / shard)
        except DF11Error as error:
            raise DF11Error(f"{path.parent / shard}: {error}") from None
        file.close()
        if missing := sorted(names - file.entries.keys()):
            raise DF11Error(f"{path.parent / shard}: the tensor {missing[0]} is missing, and the index names it")


def _shards(path: Path) -> dict[str, set[str]]:
    """Reads which tensors an index says are in which file."""
    try:
        contents = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise DF11Error(f"{path}: this index cannot be read: {error}") from None
    places = contents.get("weight_map") if isinstance(contents, dict) else None
    if not isinstance(places, dict) or not all(isinstance(shard, str) for shard in places.values()):
        raise DF11Error(f"{path}: this index cannot be read: it has no weight_map from tensors to files")
    shards: dict[str, set[str]] = {}
    for name, shard in places.items():
        shards.setdefault(shard, set()).add(name)
    return shards
