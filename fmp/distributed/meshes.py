"""Whether a device mesh can be used: its process groups are there, and torch's two ways of numbering its ranks are one.

A process group, and so every collective, goes by the ranks in ascending order; a DTensor goes by their places in the
mesh. On a mesh whose ranks descend somewhere, one says that a process has other rows than the other.
"""

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def check_ascending(mesh: DeviceMesh) -> None:
    """Refuses a mesh on which collectives and DTensors would disagree about who has which rows.

    Raises:
        ValueError: If the ranks do not ascend along every dimension.
    """
    if not all(_ascends(mesh, dim) for dim in range(mesh.ndim)):
        raise ValueError(f"the mesh has the ranks {mesh.mesh.tolist()}; {_ADVICE}")


def check_groups(mesh: DeviceMesh) -> None:
    """Refuses a mesh that this process is in, and whose process groups are not those that it was made on.

    Raises:
        RuntimeError: If they have been destroyed, or others have their names now.
    """
    try:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    except RuntimeError:
        groups = []  # torch knows none of such a name any more
    found = [(group.size(), group.rank()) for group in groups]
    if found != [(mesh.size(dim), rank) for dim, rank in enumerate(mesh.get_coordinate() or ())]:
        raise RuntimeError(
            "the process groups of the mesh have been destroyed since it was made; after init_process_group, make the "
            "mesh, the layout and the step anew, and place the state again, for example from a checkpoint"
        )


def check_stored(tensor: DTensor) -> None:
    """Refuses a DTensor whose parts cannot be written to files, or read from them.

    Raises:
        ValueError: If it is a sum that has not been taken, or is shared out along a dimension of its mesh in which the
            ranks do not ascend.
    """
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(f"its placements are {tensor.placements}, a sum not yet taken; redistribute it first")
    mesh = tensor.device_mesh
    for dim, placement in enumerate(tensor.placements):
        if not (placement.is_replicate() or _ascends(mesh, dim)):
            raise ValueError(f"its mesh has the ranks {mesh.mesh.tolist()}; {_ADVICE}")


_ADVICE = (
    "along every dimension they must ascend, since process groups number them so; make it with init_device_mesh, or "
    "sort them"
)


def _ascends(mesh: DeviceMesh, dim: int) -> bool:
    return bool((mesh.mesh.diff(dim=dim) > 0).all())
