"""Training on many processes: the same pure step, with its state placed by torch.distributed.

It is imported by its users, with `import fmp.distributed`: `import fmp` alone does not load torch.distributed.tensor.
"""

from fmp.distributed.blocks import full_params as full_params, gathered_block as gathered_block
from fmp.distributed.checkpoints import Checkpoints as Checkpoints, PendingSave as PendingSave
from fmp.distributed.fsdp2 import fsdp2_params as fsdp2_params, fsdp2_value_and_grad as fsdp2_value_and_grad
from fmp.distributed.layout import Layout as Layout
from fmp.distributed.shards import (
    LocalShard as LocalShard,
    as_dtensors as as_dtensors,
    local_shards as local_shards,
    own_shards as own_shards,
)
