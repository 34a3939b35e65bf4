"""Which tests a plain run leaves out, so that it ends within minutes; `python -m pytest -m slow` runs these.

Each takes seconds, most of them by compiling, and others beside it notice what it would: a row of a matrix whose other
rows run, a long form of a story that a short one tells. Tests that are marked where they stand are slow as well.
"""

import re

_PATTERNS = [
    # Optimizers compile alike: those that stay have every kind of state, and every kind of hyper-parameter.
    r"optim/test_laws.py::test_compiled_is_eager_and_compiles_once\["
    r"(?!(sgd momentum|adam tensors|adamw mask|inject schedule|partition|lamb|lion|larc|rmsprop centered|adafactor|"
    r"accumulate chain|ema|torch adamw|torch radam)\])",
    r"test_gradients.py::test_nesting_compiled\[aot_eager-(vmap over both|vmap of vmap|grad of grad of grad|torch's|"
    r"captured|jvp of vmap|grad of jvp|jacfwd|vmap of jacrev|grad of hessian|grad of tree)",
    r"policy/test_autocast_transforms.py::test_compiled_functions_see_the_same_and_compile_once\[(cnn|composites)-",
    r"policy/test_autocast_transforms.py::test_compiled_functions_see_the_same_and_compile_once\[.*-eager\]",
    r"rematerialization/test_compile.py::test_a_train_step\[.*-O[01]\]",
    r"test_traced.py::test_trees_made_while_tracing\[(only an empty dict|none in a dict|numbers in a dict|ordered)\]",
    r"df11/test_wrap.py::test_a_train_step_of_adapters\[True\]",
    r"test_step_transforms.py::test_compiled_steps_do_not_share_the_limit_of_recompilations",
    r"test_step_transforms.py::test_a_step_inside_a_function_that_is_compiled",
    r"test_step_o1.py::test_compiled_it_is_the_same_and_compiles_once\[half1\]",
    r"test_step_o1.py::test_nor_does_it_reach_into_a_compiled_step\[policy1\]",
    # Trainings: others compare bits or losses of the same scripts in fewer steps.
    r"test_examples.py::test_the_meta_gradient_equals_a_loop_and_adapting_helps",
    r"test_image_classifier.py::test_every_level_comes_near_the_accuracy_of_float32",
    r"test_train_lm.py::test_all_precisions_reach_the_same_validation_loss",
    r"test_legacy_apex_script.py::test_in_o0_it_equals_a_plain_loop",
    r"test_lora_on_df11.py::test_all_variants_end_in_the_same_bits_and_compressed_weights_take_less",
    r"test_deep_net_memory.py::test_all_arrangements_end_in_the_same_bits_and_save_memory",
    r"test_image_classifier.py::test_a_run_that_is_killed_and_resumed_ends_bit_identical\[arguments[12]\]",
    r"test_train_lm.py::test_a_run_that_is_killed_and_resumed_ends_bit_identical\[arguments1-False\]",
    r"df11/test_frozen_matrix.py::test_so_have_tensors_that_decode_themselves\[(closure|inside of remat|policy in)",
    # Several processes each: layouts and checkpoints in two of them stay.
    r"distributed/test_(blocks|blocks_compiled|layout_compiled|fsdp2|train_distributed|checkpoints_killed|"
    r"checkpoints_ranks)\.py",
]
_SLOW = re.compile("|".join(f"(?:{pattern})" for pattern in _PATTERNS))


def is_slow(name: str) -> bool:
    """Says whether a test, by its name as pytest prints it, is among these."""
    return _SLOW.search(name) is not None
