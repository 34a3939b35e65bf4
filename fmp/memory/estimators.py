"""What other libraries estimate for a model, by their own counting, for comparison with `fmp.memory.plan`.

They count differently: DeepSpeed divides by 2^30 and prints GB, has 4 + 16 and not 4 + 12 bytes a number at ZeRO 2, and
18 at ZeRO 3; accelerate starts from the float32 size and counts no masters in 16 bits. Nothing here is divided: the
results are bytes.
"""

from typing import NamedTuple

from fmp.memory.checks import amount, whole

_LIMIT = 2**63


class Estimate(NamedTuple):
    """What one device and one host need.

    Attributes:
        device: Bytes on each device.
        host: Bytes in the memory of each host.
    """

    device: int
    host: int


def deepspeed_zero2(
    numbers: float, *, devices: int, nodes: int = 1, offload_optimizer: bool = False, buffer_factor: float = 1.5
) -> Estimate:
    """Estimates as DeepSpeed's `estimate_zero2_model_states_mem_needs`.

    With P numbers on N devices in all, and n devices a node:

        on the devices       device = 4 P + 16 P / N      host = 4 P n · buffer_factor
        optimizer on hosts   device = 2 P                 host = P max(4 N, 16) · buffer_factor

    Args:
        numbers: The number of parameters.
        devices: Devices of each node.
        nodes: Nodes.
        offload_optimizer: Whether moments and masters live in the memory of the hosts.
        buffer_factor: What DeepSpeed calls `additional_buffer_factor`.

    Raises:
        ValueError: If a number is not one, or out of range.

    Example:
        >>> t5_3b = deepspeed_zero2(2851e6, devices=8)
        >>> round(t5_3b.device / 2**30, 2), round(t5_3b.host / 2**30, 2)
        (15.93, 127.45)
    """
    numbers = amount("numbers", numbers, below=_LIMIT)
    buffer_factor = amount("buffer_factor", buffer_factor, below=_LIMIT)
    devices, nodes = whole("devices", devices, 1, _LIMIT), whole("nodes", nodes, 1, _LIMIT)
    total = devices * nodes
    if offload_optimizer:
        return Estimate(int(2 * numbers), int(numbers * max(4 * total, 16) * buffer_factor))
    return Estimate(int(4 * numbers + int(16 * numbers / total)), int(numbers * 4 * devices * buffer_factor))


def deepspeed_zero3(
    numbers: float,
    largest_layer: float,
    *,
    devices: int,
    nodes: int = 1,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    sharded_init: bool = True,
    buffer_factor: float = 1.5,
) -> Estimate:
    """Estimates as DeepSpeed's `estimate_zero3_model_states_mem_needs`.

    With P numbers, of which L in the largest layer, on N devices in all, n a node, and M nodes:

        on the devices        device = 4 L + 18 P / N     host = 4 L n · buffer_factor
        optimizer on hosts    device = 4 L + 2 P / N      host = 16 P / M · buffer_factor
        parameters there too  device = 4 L                host = 18 P / M · buffer_factor

    A model that each process makes in full, before it is sharded, needs 4 P n · buffer_factor on the host, if that is
    more.

    Args:
        numbers: The number of parameters.
        largest_layer: How many of them the largest layer has.
        devices: Devices of each node.
        nodes: Nodes.
        offload_optimizer: Whether moments and masters live in the memory of the hosts.
        offload_params: Whether the parameters do so too.
        sharded_init: What DeepSpeed calls `zero_init`: whether the model is sharded as it is made.
        buffer_factor: What DeepSpeed calls `additional_buffer_factor`.

    Raises:
        ValueError: If parameters are offloaded and the optimizer is not, or a number is not one, or out of range.

    Example:
        >>> t5_3b = deepspeed_zero3(2851e6, 32e6, devices=8)
        >>> round(t5_3b.device / 2**30, 2), round(t5_3b.host / 2**30, 2)
        (6.09, 1.43)
    """
    if offload_params and not offload_optimizer:
        raise ValueError("offload_params=True needs offload_optimizer=True, as in DeepSpeed")
    numbers = amount("numbers", numbers, below=_LIMIT)
    largest_layer = amount("largest_layer", largest_layer, below=_LIMIT)
    if largest_layer > numbers:
        raise ValueError(f"largest_layer must be a part of the {numbers:,} parameters, got {largest_layer:,}")
    buffer_factor = amount("buffer_factor", buffer_factor, below=_LIMIT)
    devices, nodes = whole("devices", devices, 1, _LIMIT), whole("nodes", nodes, 1, _LIMIT)
    unsharded = numbers * 4 * devices
    if not offload_optimizer:
        on_device, host = (
            int(18 * numbers / (devices * nodes)),
            largest_layer * 4 * devices if sharded_init else unsharded,
        )
    else:
        on_device = 0 if offload_params else int(2 * numbers / (devices * nodes))
        shard = numbers * (18 if offload_params else 16) / nodes
        host = shard if sharded_init else max(unsharded, shard)
    return Estimate(int(4 * largest_layer) + on_device, int(host * buffer_factor))


class Training(NamedTuple):
    """What accelerate prints for training with Adam, in bytes.

    Attributes:
        model: Of the weights.
        gradients: While the gradients are computed.
        optimizer: Of the optimizer's state.
        step: While the optimizer steps.
    """

    model: int
    gradients: int
    optimizer: int
    step: int

    @property
    def peak(self) -> int:
        """The largest of the four."""
        return max(self)


def accelerate_training(numbers: float, dtype: str = "float32") -> Training | None:
    """Estimates as accelerate's `estimate_training_usage`, for Adam and a batch of one.

    With T for the bytes in float32:

        float32             model T, gradients T,     optimizer 2 T, step 4 T
        float16, bfloat16   model T, gradients 1.5 T, optimizer 2 T, step 2 T

    Args:
        numbers: The number of parameters.
        dtype: What accelerate calls it: `"float32"`, `"float16"`, `"bfloat16"`, `"int8"` or `"int4"`.

    Returns:
        The estimate; None for the integer formats, which accelerate does not train.

    Raises:
        ValueError: If `dtype` is another one, or `numbers` no number of parameters.

    Example:
        >>> gemma_2b = accelerate_training(2506172416, "bfloat16")
        >>> [round(size / 1e9, 2) for size in gemma_2b]
        [10.02, 15.04, 20.05, 20.05]
    """
    numbers = amount("numbers", numbers, below=_LIMIT)
    size = int(4 * numbers)
    if dtype == "float32":
        return Training(size, size, 2 * size, 4 * size)
    if dtype in ("float16", "bfloat16"):
        return Training(size, size + size // 2, 2 * size, 2 * size)
    if dtype in ("int8", "int4"):
        return None
    raise ValueError(f"dtype must be float32, float16, bfloat16, int8 or int4, got {dtype!r}")


def accelerate_inference(numbers: float, itemsize: float = 2) -> int:
    """Estimates what inference needs, as accelerate's documentation advises: the weights and a fifth more.

    Args:
        numbers: The number of parameters.
        itemsize: The bytes of a weight; 0.5 for int4.

    Raises:
        ValueError: If one of them is not a number, or out of range.

    Example:
        >>> accelerate_inference(7e9) / 1e9
        16.8
    """
    numbers = amount("numbers", numbers, below=_LIMIT)
    itemsize = amount("itemsize", itemsize, below=_LIMIT)
    return int(numbers * itemsize * 6 / 5)
