"""What versions of torch differ in."""

import pytest
import torch
from torch.torch_version import TorchVersion

BEFORE_2_13 = TorchVersion(torch.__version__) < "2.13"

differentiates_in_inference_mode = pytest.mark.skipif(
    BEFORE_2_13, reason="torch before 2.13 gives zero gradients in inference mode, so fmp refuses"
)
