"""What fmp takes from the private parts of torch and optree, in one place; tests/test_compat.py notices changes.

Elsewhere are only private attributes of objects of torch, such as `Tensor._version`, `UntypedStorage._cdata` and
`OpOverload._schema`; operators, by their names; and in `fmp.distributed.storage` what torch's checkpoints are made of.
tests/test_torch_names.py lists them all.
"""

from torch._ops import (
    HigherOrderOperator as HigherOrderOperator,
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
)
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor, FakeTensorMode as FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm

from fmp._compat.backward import ENGINE as ENGINE, next_number as next_number, running_node as running_node
from fmp._compat.compiler import (
    allow_side_effects_in_checkpoint as allow_side_effects_in_checkpoint,
    as_compiling as as_compiling,
    can_tell_tensors_apart as can_tell_tensors_apart,
    compiled_on_its_own as compiled_on_its_own,
    compiler_name as compiler_name,
    constant_while_tracing as constant_while_tracing,
    described_by as described_by,
    is_compiled as is_compiled,
    making_a_graph as making_a_graph,
    never_traced as never_traced,
    original as original,
    tag_maker as tag_maker,
)
from fmp._compat.graph import (
    check_inference_mode as check_inference_mode,
    counting_changes as counting_changes,
    gradients_are_batched as gradients_are_batched,
    is_zero_tensor as is_zero_tensor,
    recorded_at as recorded_at,
    refuses_saved_tensor_hooks as refuses_saved_tensor_hooks,
    saved_data as saved_data,
    saved_tensors_are_hooked as saved_tensors_are_hooked,
    saved_tensors_hooks_allowed as saved_tensors_hooks_allowed,
    without_batched_gradients as without_batched_gradients,
)
from fmp._compat.levels import (
    JVP as JVP,
    VMAP as VMAP,
    Mapping as Mapping,
    belongs_to_ended_level as belongs_to_ended_level,
    below_transforms as below_transforms,
    count_true as count_true,
    differentiated as differentiated,
    differentiated_outside as differentiated_outside,
    ended_twice as ended_twice,
    for_one_member as for_one_member,
    forward_mode_active as forward_mode_active,
    has_ended as has_ended,
    level_of as level_of,
    levels_of as levels_of,
    levels_up_to as levels_up_to,
    mapped_as_it_falls as mapped_as_it_falls,
    mapped_sizes as mapped_sizes,
    mappings as mappings,
    repeated as repeated,
    reverse_mode_active as reverse_mode_active,
    tracing_a_transform as tracing_a_transform,
    transform_active as transform_active,
    transform_level as transform_level,
    transforms as transforms,
    unwrap_if_dead as unwrap_if_dead,
    unwrap_in_place as unwrap_in_place,
    unwrapped_to as unwrapped_to,
    without_transforms as without_transforms,
    wrapped_above as wrapped_above,
    wrapped_by_transform as wrapped_by_transform,
)
from fmp._compat.memory import (
    base_of as base_of,
    count_holders as count_holders,
    count_tensors as count_tensors,
    without_memory as without_memory,
)
from fmp._compat.modes import (
    DisableTorchFunction as DisableTorchFunction,
    TorchDispatchMode as TorchDispatchMode,
    autocast_depth as autocast_depth,
    autocast_devices as autocast_devices,
    dispatch_modes as dispatch_modes,
    function_modes as function_modes,
    plain_torch_function as plain_torch_function,
    pop_function_mode as pop_function_mode,
    push_function_mode as push_function_mode,
    remove_function_mode as remove_function_mode,
    replaced_function_modes as replaced_function_modes,
    without_dispatch_modes as without_dispatch_modes,
    wraps_tensors as wraps_tensors,
)
from fmp._compat.numbered import Numbered as Numbered
from fmp._compat.operators import (
    FUNCTIONS as FUNCTIONS,
    NN_FUNCTIONS as NN_FUNCTIONS,
    SPARSE_FUNCTIONS as SPARSE_FUNCTIONS,
    fused_adam_ as fused_adam_,
    fused_adamw_ as fused_adamw_,
    fused_sgd_ as fused_sgd_,
    packet_name as packet_name,
    registered_op as registered_op,
    reinterpreted as reinterpreted,
)
from fmp._compat.parametrized import (
    parametrization_cache as parametrization_cache,
    parametrizations_are_cached as parametrizations_are_cached,
)
from fmp._compat.pytree import register_pytree as register_pytree
from fmp._compat.recurrent import (
    FLAT_WEIGHTS as FLAT_WEIGHTS,
    first_weight as first_weight,
    forget_weights as forget_weights,
    leave_in_place as leave_in_place,
)
