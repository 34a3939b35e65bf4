"""Which tests a plain run leaves out, so that it ends within minutes; `python -m pytest -m slow` runs these.

Each takes seconds, most of them by compiling, and others beside it notice what it would: a row of a matrix whose other
rows run, a long form of a story that a short one tells. Tests that are marked where they stand are slow as well.
"""

import re
from collections.abc import Iterable

import pytest

COLLECTED = pytest.StashKey[list[str]]()
"""Where a run keeps the names of all tests that it has collected, those included that it leaves out."""

_PATTERNS = [
    # Optimizers compile alike: those that stay have every kind of state, and every kind of hyper-parameter.
    r"optim/test_laws.py::test_compiled_is_eager_and_compiles_once\["
    r"(?!(sgd momentum|adam tensors|adamw mask|inject schedule|partition|lamb|adafactor|accumulate chain|ema|"
    r"torch adamw)\])",
    r"test_gradients.py::test_nesting_compiled\[aot_eager-(vmap over both|vmap of vmap|grad of grad of grad|torch's|"
    r"captured|jvp of vmap|grad of jvp|jacfwd|vmap of jacrev|grad of hessian|grad of tree)",
    r"policy/test_autocast_transforms.py::test_compiled_functions_see_the_same_and_compile_once\[(cnn|composites)-",
    r"policy/test_autocast_transforms.py::test_compiled_functions_see_the_same_and_compile_once\[.*-eager\]",
    r"rematerialization/test_compile.py::test_a_train_step\[(.*-O[01]|compiled step-O2)\]",
    r"test_traced.py::test_trees_made_while_tracing\[(only an empty dict|none in a dict|numbers in a dict|ordered)\]",
    r"df11/test_wrap.py::test_a_train_step_of_adapters\[True\]",
    r"test_step_transforms.py::test_compiled_steps_do_not_share_the_limit_of_recompilations",
    r"test_step_transforms.py::test_a_step_inside_a_function_that_is_compiled",
    r"test_step_o1.py::test_compiled_it_is_the_same_and_compiles_once\[half1\]",
    r"test_step_o1.py::test_nor_does_it_reach_into_a_compiled_step\[policy1\]",
    r"policy/test_autocast_transforms.py::test_compiled_functions_see_the_same_and_compile_once\["
    r"(mlp-(inside|around)|transformer-(inside|outside)|promotions-inside)-aot_eager",
    r"policy/test_autocast_transforms.py::test_attention_with_a_padding_mask_compiles\[dtype0\]",
    r"policy/test_every_op.py::test_compiled_equals_eager\[(apex-(__truediv__|l1_loss|normalize)|torch-(conv_tbc|nll_loss2d|"
    r"triplet_margin_loss))",
    r"master/test_step_forms.py::test_a_compiled_step_has_the_same_bits_and_compiles_once\[(f32|kahan)\]",
    r"optim/test_fused.py::test_a_transform_a_compiler_and_autograd_get_update\[(sgd|sgd nesterov|adam|adamw)\]",
    r"optim/test_fused_forms.py::test_under_vmap_and_compile_it_is_update\[(f32-dtype1|kahan-dtype3|stochastic-dtype5)\]",
    r"optim/test_own_code.py::test_more_of_a_kind_than_the_limit_compile_in_one_process\[(accumulate|masked)\]",
    r"rematerialization/test_compile.py::test_one_graph_with_the_gradients_of_the_function\[.*-eager\]",
    r"rematerialization/test_compile.py::test_a_compiled_block_under_a_transform\[compile\(remat\)-(jvp|grad\(grad\))\]",
    r"test_dropout.py::test_compiled_draws_are_the_eager_ones\[(torch\.|aten\.(?!bernoulli)|.*_in_place|randn?_|rand\]|"
    r"dropout[123]d|feature_dropout|gumbel_softmax_hard|bernoulli_)",
    r"test_gradients.py::test_nesting_compiled\[eager-",
    r"test_module.py::test_compiled_it_is_the_same\[(counter|tied|shared_layer)\]",
    r"test_module.py::test_norms_kept_in_full_precision_compile\[(block|encoder)\]",
    r"test_step_o1.py::test_a_module_with_statistics_and_dropout\[half[01]-True\]",
    r"test_step_transforms.py::test_a_mapped_step_can_be_compiled",
    r"df11/test_frozen_memory.py::test_compiled_weights_of_one_block_live_at_a_time\[saveable0",
    r"rematerialization/test_compile.py::test_inductor\[nested\]",
    r"rematerialization/test_matrix.py::test_same_results_with_and_without_remat\["
    r"(?!(nested|policy outside|dropout|BatchNorm|aux outputs|saveable\.only_names)-).*-compile",
    r"df11/test_frozen.py::test_in_a_train_step\[O2-True\]",
    r"test_step_fused.py::test_compiled\[(o0|remainder)\]",
    r"test_step_transforms.py::test_(the_derivative_through_a_compiled_step_is_right|a_compiled_step_with_a_float16_loss)",
    r"policy/test_autocast_programs.py::test_compiled_programs_give_the_dtypes_that_the_rules_say",
    r"numerics/test_format_loss.py::test_they_are_aux_of_a_step\[True\]",
    # Long tables of which every row is one of two or more ways to say the same.
    r"df11/test_frozen_matrix.py::test_same_results_as_with_plain_weights\[(partial|saveable\.(all|dots|offload_names))-",
    r"rematerialization/test_sequential.py::test_same_results_with_and_without_remat\[(2|4)-",
    r"rematerialization/test_saveable.py::test_what_is_kept_does_not_depend_on_what_is_differentiated\[(changed|folded)-",
    r"rematerialization/test_matrix.py::test_same_results_with_and_without_remat\[saveable\.(any_except_names|"
    r"dots_with_no_batch_dims|offload_names)-",
    r"testing/test_optimizer.py::test_fmps_optimizers_pass\[(sgd decay|lion schedule|rmsprop decay|torch (?!adamw\]))",
    r"testing/test_loss_scale.py::test_good_scalers_pass\[(good|static|dynamic 2)\]",
    r"optim/test_adam.py::test_second_moment_does_not_stall\[dtype[02]-plain\]",
    r"kernels/test_forms_launch.py::test_a_wrong_kernel_is_refused\[(remainder-fault[12]|stochastic-fault[45])",
    r"gpu/test_steps.py::test_the_kernels_change_no_bit\[sgd-(?!f16)",
    r"apex/test_torch_amp.py::test_the_scales_in_float16_are_those_of_grad_scaler\[.*-sgd\]",
    r"apex/test_rnn.py::test_whole_sequences_padded_and_packed\[(one layer|both directions)-",
    r"test_memory_measure.py::test_the_peak_is_that_of_a_real_step\[mlp-",
    r"kernels/test_forms_launch.py::test_steps\[.*-(sgd|sgd tensors|adam tensors|adamw no decay)\]",
    r"apex/test_torch_amp.py::test_a_hundred_losses_in_bfloat16_agree_within_its_rounding\[.*sgd",
    # Trainings: others compare bits or losses of the same scripts in fewer steps.
    r"test_examples.py::test_the_meta_gradient_equals_a_loop_and_adapting_helps",
    r"test_image_classifier.py::test_every_level_comes_near_the_accuracy_of_float32",
    r"test_train_lm.py::test_all_precisions_reach_the_same_validation_loss",
    r"test_legacy_apex_script.py::test_in_o0_it_equals_a_plain_loop",
    r"test_lora_on_df11.py::test_all_variants_end_in_the_same_bits_and_compressed_weights_take_less",
    r"test_deep_net_memory.py::test_all_arrangements_end_in_the_same_bits_and_save_memory",
    r"test_image_classifier.py::test_a_run_that_is_killed_and_resumed_ends_bit_identical\[arguments[12]\]",
    r"test_train_lm.py::test_a_run_that_is_killed_and_resumed_ends_bit_identical\[arguments(0-True|1-False)\]",
    r"df11/test_frozen_matrix.py::test_so_have_tensors_that_decode_themselves\[(closure|inside of remat|policy in)",
    # Several processes each: layouts and checkpoints in two of them stay.
    r"distributed/test_dtensors.py::test_(a_number_that_is_not_finite_is_found_on_any_rank\[3\]|compiled_they)",
    r"distributed/test_numerics_ranks.py::test_the_history_is_that_of_one_process\[1-True\]",
    r"distributed/test_(blocks|blocks_compiled|layout_compiled|fsdp2|train_distributed|checkpoints_killed|"
    r"checkpoints_ranks)\.py",
    r"distributed/test_checkpoints_refused\.py::test_groups_of_ranks_do_not_save_a_mixture",
]
_SLOW = re.compile("|".join(f"(?:{pattern})" for pattern in _PATTERNS))


def is_slow(name: str) -> bool:
    """Says whether a test, by its name as pytest prints it, is among these."""
    return _SLOW.search(name) is not None


def unused(names: Iterable[str]) -> list[str]:
    """Lists the patterns that none of these tests matches, which were renamed or are gone."""
    among = "\n".join(names)
    return [pattern for pattern in _PATTERNS if not re.search(pattern, among)]
