"""The files of a model: one safetensors file, or a folder as Hugging Face lays it out."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

from fmp.df11.tensor_file import TensorFile
from fmp.errors import DF11Error

_INDEX = ".safetensors.index.json"
# The same weights once more, in formats that are not read here.
_OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"})


@dataclasses.dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        root: The folder, or the file itself.
        weights: The safetensors files, relative to the folder; `Path()` for a single file.
        others: What belongs to the model besides: configuration, tokenizer, indices.
        left_out: Files with weights in other formats.
    """

    root: Path
    weights: list[Path]
    others: list[Path]
    left_out: list[Path]

    @property
    def is_folder(self) -> bool:
        """Whether the model is a folder."""
        return self.weights != [Path()]


def find(path: str | os.PathLike[str]) -> ModelFiles:
    """Finds the files of a model, and checks that an index names files and tensors that are there.

    Args:
        path: A file, or a folder, whose subfolders belong to the model too, except those with a leading dot.

    Raises:
        FileNotFoundError: If there is no such file, or no safetensors file in the folder.
        DF11Error: If an index does not fit the files.
        OSError: If a file cannot be read.
    """
    root = Path(path)
    if not root.is_dir():
        if not root.exists():
            raise FileNotFoundError(f"there is no file {os.fspath(path)!r}")
        return ModelFiles(root, [Path()], [], [])
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        found += [Path(folder, name).relative_to(root) for name in sorted(names)]
    weights = [file for file in found if file.suffix == ".safetensors"]
    if not weights:
        raise FileNotFoundError(f"there are no safetensors files in {os.fspath(path)!r}")
    left_out = [file for file in found if file.suffix in _OTHER_WEIGHTS]
    others = [file for file in found if file not in {*weights, *left_out}]
    for file in others:
        if file.name.endswith(_INDEX):
            _check_index(root / file)
    return ModelFiles(root, weights, others, left_out)


def copy_others(model: ModelFiles, target: Path) -> None:
    """Copies what belongs to a model besides its weights."""
    for file in model.others:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(model.root / file, target / file)


def _check_index(path: Path) -> None:
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        shards: dict[str, set[str]] = {}
        for name, shard in places.items():
            shards.setdefault(shard, set()).add(name)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise DF11Error(f"{path}: this index cannot be read: {error!r}") from None
    for shard, names in shards.items():
        if not (path.parent / shard).is_file():
            raise DF11Error(f"{path}: the file {shard!r} is missing")
        try:
            file = TensorFile(path.parent / shard)
        except DF11Error as error:
            raise DF11Error(f"{path.parent / shard}: {error}") from None
        file.close()
        if missing := sorted(names - file.entries.keys()):
            raise DF11Error(f"{path.parent / shard}: the tensor {missing[0]} is missing, and the index names it")
