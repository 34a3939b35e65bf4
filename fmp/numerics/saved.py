"""Files that `torch.save` has written: their tensors by name, read without running what else they hold."""

import os
import pickle

import torch

from fmp.numerics.named import leaves_of

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def is_saved_by_torch(path: str | os.PathLike[str]) -> bool:
    """Says whether a file begins as those of `torch.save` do, of the form of today or of the one before.

    Example:
        >>> is_saved_by_torch("no such file")
        False
    """
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        head = file.read(8)
    # A safetensors file begins with the length of its header, the last four of whose eight bytes are zero.
    return head.startswith((_ZIP, _PICKLE)) and any(head[4:])


def saved_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Reads the tensors of a file that `torch.save` has written: of a state dict, or of any tree of them.

    Its numbers stay in the file until they are looked at, if it has the form of today. Sparse and quantized tensors are
    left out.

    Args:
        path: The file.

    Returns:
        The tensors by their paths, such as `model/layers.0.weight`.

    Raises:
        ValueError: If the file holds objects that only its own code can make, such as a module, or is damaged.

    Example:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "model.pt")
        ...     torch.save({"model": torch.nn.Linear(3, 2).state_dict(), "step": 7}, path)
        ...     list(saved_tensors(path))
        ['model/weight', 'model/bias']
    """
    with open(path, "rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    name = os.fspath(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name!r} holds more than tensors, such as a whole module, and to read that would run code from it; save "
            "the tensors alone: torch.save(module.state_dict(), path), or safetensors.torch.save_file of them"
        ) from error
    except (RuntimeError, EOFError, KeyError) as error:
        raise ValueError(
            f"{name!r} is no file of torch.save, or a damaged one: {str(error).splitlines()[0]}"
        ) from error
    return {
        path: leaf.detach()
        for path, leaf in leaves_of(content)
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_quantized
    }
