"""What Apex amp does, what to write with fmp, and the test that shows it.

The sections: opt levels, `initialize`, `scale_loss`, gradients across backward passes, the loss scaler, optimizers, the
state dict, function casting, the cast cache, recurrent networks.
`docs/migrating_from_apex.md` shows these tables; `python -m tests.apex.parity` prints them.
"""

from typing import NamedTuple


class Row(NamedTuple):
    """One behavior: Apex's call, fmp's expression, what else there is to know, and a test of it."""

    apex: str
    fmp: str
    note: str
    test: str


LEVELS = "tests/apex/test_opt_levels.py"
INPUTS = "tests/apex/test_inputs.py"
LOSSES = "tests/apex/test_several_losses.py"
ACCUMULATION = "tests/apex/test_accumulation.py"
SCALER = "tests/apex/test_loss_scaler.py"
MASTERS = "tests/apex/test_masters.py"
SCHEDULES = "tests/compat/test_amp_schedules.py"
CHECKPOINT = "tests/apex/test_checkpoint.py"
FUNCTIONS = "tests/apex/test_functions.py"
RNN = "tests/apex/test_rnn.py"
TABLES = "tests/policy/test_apex_tables.py"
OPS = "tests/policy/test_autocast_ops.py"
CACHE = "tests/policy/test_cast_cache.py"
POLICIES = "tests/policy/test_autocast_policies.py"
OPT_LEVEL = "tests/policy/test_opt_level.py"
O1 = "tests/policy/test_opt_level_o1.py"

SECTIONS: dict[str, list[Row]] = {
    "Opt levels and properties": [
        Row(
            '`opt_level="O0"`',
            '`fmp.opt_level("O0")`',
            "float32, the same bits as without amp",
            f"{LEVELS}::test_o0_is_training_in_float32_bit_for_bit",
        ),
        Row(
            '`opt_level="O1"`',
            '`fmp.opt_level("O1")`',
            'float16, or `half_dtype="bf16"`',
            f"{LEVELS}::test_o1_and_o2_stay_close_to_float32",
        ),
        Row(
            '`opt_level="O2"`',
            '`fmp.opt_level("O2", keep_full=module)`',
            "every kind of norm stays in float32; without `keep_full` norms are found by name",
            f"{LEVELS}::test_what_each_level_stores",
        ),
        Row(
            "`O2` keeps BatchNorm only",
            '`fmp.opt_level("O2", keep_norm_fp32=False, keep_full=["1.*"])`',
            "name the BatchNorms",
            f"{LEVELS}::test_batch_norms_alone_are_kept_as_by_apex",
        ),
        Row(
            '`opt_level="O3"`',
            '`fmp.opt_level("O3")`',
            "the optimizer's moments are float32",
            f"{LEVELS}::test_o3_is_training_a_half_module",
        ),
        Row(
            '`opt_level="O4"`, `"O5"` (ROCm)',
            '`fmp.opt_level("O1", half_dtype="bf16")`, `"O2"`',
            "the names O4 and O5 are refused",
            f"{OPT_LEVEL}::test_unknown_levels_are_refused",
        ),
        Row(
            "`cast_model_type=torch.float16`",
            '`fmp.opt_level("O2")`, `"O3"`',
            "O1 refuses it, as by Apex",
            f"{LEVELS}::test_every_property",
        ),
        Row(
            "`cast_model_type=False`",
            "the same",
            "casts no model; masters and loss scaling stay",
            f"{OPT_LEVEL}::test_overrides",
        ),
        Row(
            "`patch_torch_functions=False`",
            "the same",
            "True is refused outside of O1, as by Apex",
            f"{O1}::test_overrides",
        ),
        Row(
            "`keep_batchnorm_fp32=True`",
            "the same, or `keep_norm_fp32=True`",
            "O1 refuses any value, even False, as by Apex",
            f"{LEVELS}::test_every_property",
        ),
        Row(
            "`master_weights=True`",
            "the same",
            "O1 refuses any value, as by Apex; so does O0 with True, whose parameters are their masters",
            f"{LEVELS}::test_every_property",
        ),
        Row(
            '`loss_scale="dynamic"`, `128.0`, `"128.0"`',
            "the same",
            "negative, zero and NaN are refused",
            f"{LEVELS}::test_every_property",
        ),
        Row(
            "`RuntimeError` for what makes no sense",
            "`ValueError` with a reason",
            "`TypeError` for a wrong type or an unknown name",
            f"{O1}::test_every_combination_gives_what_was_asked_for_or_a_reason",
        ),
        Row(
            "strings from a command line",
            "the same",
            "for every property, not for some",
            f"{OPT_LEVEL}::test_a_command_line_of_strings",
        ),
        Row(
            "`enabled=False`",
            "`fmp.opt_level(level, enabled=False)`",
            "the same bits as without amp; `state` has the same fields",
            f"{LEVELS}::test_disabled_is_training_without_amp_bit_for_bit",
        ),
    ],
    "Setting up": [
        Row(
            "`model, optimizer = amp.initialize(model, optimizer)`",
            "`step = fmp.train_step(loss_fn, optimizer, policy=policy)`; `state = step.init(model.params)`",
            "`model = fmp.functionalize(module)`; the module is left alone",
            "tests/test_module.py::test_nothing_given_or_wrapped_is_touched",
        ),
        Row(
            "`amp.initialize` patches torch",
            "nothing is patched",
            "two policies may run side by side, in two threads",
            f"{POLICIES}::test_two_threads_with_policies_of_their_own",
        ),
        Row(
            "lists of models and optimizers",
            "dictionaries: `params`, `optimizer`",
            "with the same keys",
            f"{LOSSES}::test_three_models_two_optimizers_and_two_losses",
        ),
        Row(
            "`num_losses=3`",
            '`fmp.train_step({"real": ..., "fake": ..., "gen": ...}, ...)`',
            "",
            f"{SCALER}::test_the_number_of_losses_has_another_place",
        ),
        Row(
            "`min_loss_scale=`, `max_loss_scale=`",
            "`fmp.DynamicLossScale(min_scale=, max_scale=)`",
            "the floor is 1 by default; Apex had none",
            f"{SCALER}::test_the_bounds_have_another_place",
        ),
        Row(
            "`cast_model_outputs=dtype`",
            "the same",
            "float32 by default",
            f"{INPUTS}::test_outputs_are_float32_unless_told_otherwise",
        ),
        Row(
            "the model returns float32 to the loss (O2, O3)",
            "`logits.float()` in the loss function",
            "`fmp.autocast(model.apply, policy)` returns float32, for evaluation",
            f"{INPUTS}::test_inside_of_a_loss_a_model_returns_what_it_computes_in",
        ),
        Row(
            "what enters the model is cast (O2, O3)",
            "the whole batch is, targets included",
            "integers stay",
            "tests/test_step.py::test_batch_frozen_buffers_and_output_are_cast",
        ),
        Row(
            "inputs are cast inside containers",
            "the same",
            "containers keep their types, named tuples too",
            f"{INPUTS}::test_containers_keep_their_types_and_only_floats_are_cast",
        ),
        Row(
            "a batch class with `.to`",
            "the same",
            "a copy is cast",
            f"{INPUTS}::test_a_batch_of_ones_own_class_is_cast_by_its_method_and_stays_as_it_is",
        ),
        Row(
            "a batch class without `.to`",
            "`@fmp.tree.dataclass`",
            "is also split by `accumulate=`",
            f"{INPUTS}::test_a_tree_dataclass_needs_no_method_and_is_split",
        ),
        Row(
            "numpy arrays pass",
            "`torch.from_numpy`",
            "an array in a batch is refused",
            f"{INPUTS}::test_arrays_of_numpy_are_refused",
        ),
        Row(
            "`model.half()` before `initialize` is an error",
            "allowed",
            "masters then start from the rounded values",
            f"{LEVELS}::test_a_model_that_is_half_already_keeps_its_values",
        ),
        Row(
            "`verbosity=2` prints each cast",
            "`fmp.explain(step, state, batch)`",
            "a table",
            "tests/policy/test_explain.py::test_a_train_step_is_explained_by_its_own_policy",
        ),
    ],
    "Loss scaling in a step": [
        Row(
            "`with amp.scale_loss(loss, optimizer) as s: s.backward()`; `optimizer.step()`",
            "`state, metrics = step(state, batch)`",
            "",
            f"{MASTERS}::test_o2_is_torch_optim_on_float32_masters_and_clips_there",
        ),
        Row(
            "`loss.float()` is yielded",
            "`metrics.loss` is float32, not scaled",
            "a float16 loss is scaled in float32",
            f"{LOSSES}::test_the_loss_reported_is_not_scaled_and_in_float32",
        ),
        Row(
            "`scale_loss(loss, [optimizer0, optimizer1])`",
            '`uses={"main": ["encoder", "head"]}`',
            "an overflow skips exactly the optimizers that the loss uses",
            f"{LOSSES}::test_three_models_two_optimizers_and_two_losses",
        ),
        Row(
            "`loss_id=1`",
            "the name of the loss",
            "a scaler for each: `loss_scale={name: ...}`",
            "tests/test_several_losses.py::test_each_loss_scale_moves_on_its_own",
        ),
        Row(
            "one scaler for several losses",
            "one loss that is the sum; or a step by hand",
            "below",
            f"{LOSSES}::test_one_scaler_for_several_losses_in_a_step_by_hand",
        ),
        Row(
            "several backward passes, one optimizer",
            "several losses that use it",
            "their gradients are added in float32",
            f"{ACCUMULATION}::test_several_backward_passes_add_up_in_the_masters",
        ),
        Row(
            "two models in turns, as in a GAN",
            "two steps, `frozen=` for the other model",
            "",
            "tests/test_several_losses.py::test_alternating_updates_are_two_steps",
        ),
        Row(
            "`delay_unscale=True`",
            "`accumulate=`; or add scaled gradients and `scaler.unscale` once",
            "below",
            f"{LOSSES}::test_delayed_unscaling_adds_scaled_gradients_and_unscales_once",
        ),
        Row(
            "a static scale is never checked",
            "`skip_nonfinite=False`",
            "checked by default",
            f"{LOSSES}::test_a_static_scale_is_checked_unless_told_otherwise",
        ),
        Row(
            "an exception inside leaves gradients scaled",
            "the state is what it was",
            "",
            f"{LOSSES}::test_an_error_in_the_loss_leaves_everything_as_it_was",
        ),
        Row(
            "a loss with several elements",
            "refused; reduce it",
            "",
            f"{LOSSES}::test_a_loss_with_dimensions_is_refused",
        ),
    ],
    "Accumulating gradients": [
        Row(
            "several backward passes on parts of a batch",
            "`fmp.train_step(..., accumulate=4)`",
            "the mean, in float32; the batch is split",
            f"{ACCUMULATION}::test_microbatches_add_up_in_the_masters",
        ),
        Row(
            "one bad pass skips the window's step",
            "the same, with `accumulate=`",
            "one back-off for a window",
            f"{ACCUMULATION}::test_a_bad_microbatch_skips_the_step_as_in_apex",
        ),
        Row(
            "a step every few iterations",
            "`fmp.optim.accumulate(optimizer, every=4)`",
            "in float32, whatever the scale was in each",
            f"{ACCUMULATION}::test_a_window_of_iterations_while_the_scale_moves",
        ),
        Row(
            "one bad iteration skips the window's step",
            "it is left out; the window ends one batch later",
            "with `fmp.optim.accumulate`",
            f"{ACCUMULATION}::test_a_bad_iteration_is_left_out_of_its_window",
        ),
        Row(
            "fp16 gradients are summed in the masters",
            "the same",
            "beyond the range of float16, too",
            "tests/test_accumulation.py::test_half_precision_gradients_are_summed_in_float32",
        ),
    ],
    "The loss scaler": [
        Row(
            "starts at 2^16; halves; doubles after 2000 good steps; at most 2^24",
            "`fmp.DynamicLossScale()`",
            "the same numbers",
            f"{SCALER}::test_the_defaults_are_those_of_apex_but_for_the_floor",
        ),
        Row(
            "the scale after any history",
            "the same",
            "the count is of steps, not of backward passes",
            f"{SCALER}::test_the_scale_and_the_count_are_those_of_apex",
        ),
        Row(
            "`_amp_state.loss_scalers[0].loss_scale()`",
            "`metrics.loss_scale`, `state.loss_scale.loss_scale`",
            "the scale used in a step, and that for the next",
            f"{SCALER}::test_scale_and_skipped_steps_are_read_from_state_and_metrics",
        ),
        Row(
            '"Gradient overflow. Skipping step" is printed',
            "`metrics.skipped`, `state.skip_count`",
            "tensors; nothing waits for the GPU until you read them",
            f"{SCALER}::test_scale_and_skipped_steps_are_read_from_state_and_metrics",
        ),
        Row(
            "large finite gradients may count as an overflow",
            "they do not",
            "Apex's Python fallback summed them first",
            f"{SCALER}::test_large_finite_gradients_are_no_overflow",
        ),
    ],
    "Optimizers": [
        Row(
            "`optimizer.step()` on fp32 masters",
            "the same",
            "then parameters are rounded to nearest",
            f"{MASTERS}::test_o2_is_torch_optim_on_float32_masters_and_clips_there",
        ),
        Row(
            "a skipped `step()`",
            "every leaf keeps its bits",
            "counts, moments, buffers and schedules, too",
            "tests/test_step.py::test_a_skipped_step_leaves_no_trace",
        ),
        Row(
            "`amp.master_params(optimizer)`",
            "`fmp.master.merge(state.params, state.master, form=policy.master_form)`",
            "float32",
            f"{MASTERS}::test_master_params_are_merged_from_the_state",
        ),
        Row(
            "`clip_grad_norm_(amp.master_params(optimizer), 1.0)`",
            "`fmp.train_step(..., clip_norm=1.0)`",
            "of unscaled gradients; `metrics.grad_norm` is the norm before",
            f"{MASTERS}::test_o2_is_torch_optim_on_float32_masters_and_clips_there",
        ),
        Row(
            "`clip_grad_value_(amp.master_params(optimizer), 0.1)`",
            "`fmp.optim.chain(fmp.optim.clip_by_value(0.1), optimizer)`",
            "",
            "tests/optim/test_clip.py::test_clip_by_value_is_that_of_torch",
        ),
        Row(
            "`scheduler = LambdaLR(optimizer, f)`, `scheduler.step()`",
            "`fmp.optim.sgd(lambda count: rate * f(count))`, `fmp.optim.schedules`",
            "of the count of updates, which a skipped step does not advance",
            f"{SCHEDULES}::test_a_schedule_counts_updates_where_a_scheduler_counts_calls",
        ),
        Row(
            "a group without weight decay",
            "`fmp.optim.adamw(rate, weight_decay=0.1, mask=lambda path, leaf: leaf.ndim >= 2)`",
            'matrices decay, and not biases or norms, whose weights `["*.weight"]` would name, too '
            "([more](optimizers.md#weight-decay-on-matrices-only))",
            f"{SCHEDULES}::test_a_group_without_weight_decay_is_a_mask",
        ),
        Row(
            "groups with rates of their own",
            '`fmp.optim.partition({"body": ..., "head": ...}, labels)`',
            "a rule from a path to a label",
            f"{SCHEDULES}::test_groups_with_rates_of_their_own_are_a_partition",
        ),
        Row(
            "`optimizer.add_param_group(group)`",
            "`state = step.extend(state, new_params)`",
            "old moments are kept, new leaves start fresh",
            f"{MASTERS}::test_adding_parameters_is_add_param_group",
        ),
        Row(
            "`LARC(optimizer)`",
            "`fmp.optim.chain(fmp.optim.larc(rate), fmp.optim.sgd(rate))`",
            "",
            f"{MASTERS}::test_larc_adapts_the_unscaled_gradients_of_the_masters",
        ),
        Row(
            "`FusedAdam`, `FusedSGD`",
            "`fmp.optim.adamw(..., fused=True)`, `sgd(..., fused=True)`",
            "with `donate=True` in place",
            "tests/test_step_fused.py::test_a_step_is_the_same_up_to_rounding",
        ),
        Row(
            "`FusedLAMB`",
            "`fmp.optim.lamb`",
            "not in one kernel",
            "tests/optim/test_lamb.py::test_is_the_algorithm_of_the_paper",
        ),
        Row(
            "any optimizer of torch",
            "`fmp.optim.from_torch(torch.optim.NAdam, lr=1e-3)`",
            "",
            "tests/optim/test_torch_bridge.py::test_bits_are_those_of_torch",
        ),
        Row(
            "`optimizer.zero_grad()`",
            "nothing",
            "gradients are values, made anew in each step",
            "tests/test_step.py::test_the_same_call_gives_the_same_bits_and_changes_none_of_its_inputs",
        ),
    ],
    "Saving and resuming": [
        Row(
            "`torch.save` of model, optimizer and `amp.state_dict()`",
            "`fmp.checkpoint.save(state, path)`",
            "one file; Apex leaves the masters out",
            f"{CHECKPOINT}::test_a_run_that_goes_on_in_another_process_ends_with_the_same_bits",
        ),
        Row(
            "three `load_state_dict`, after `initialize`",
            "`state = fmp.checkpoint.load(step.init(params), path)`",
            "bit for bit, at any step, in another process",
            f"{CHECKPOINT}::test_a_run_that_goes_on_in_another_process_ends_with_the_same_bits",
        ),
        Row(
            '`{"loss_scaler0": {"loss_scale", "unskipped"}}`',
            "`loss_scale`, `growth_count` of `state.loss_scale`",
            "its interval and bounds are saved, too",
            f"{CHECKPOINT}::test_scale_and_count_are_in_the_checkpoint",
        ),
        Row(
            "`model.state_dict()` is float32 under O2",
            "`fmp.master.merge(...)`",
            "the masters, not the rounded weights",
            f"{CHECKPOINT}::test_weights_for_evaluation_are_float32_in_a_plain_module",
        ),
        Row(
            "another opt level on restore goes unnoticed",
            "refused, naming the leaves",
            "",
            f"{CHECKPOINT}::test_a_checkpoint_of_another_opt_level_is_refused",
        ),
    ],
    "Casting functions (O1)": [
        Row(
            "lists of fp16, fp32 and promoted functions",
            "`fmp.OpRules.apex()`",
            "the same lists; on every device, not CUDA alone",
            f"{TABLES}::test_basic_casts",
        ),
        Row(
            "functions of two tensors promote",
            "the same",
            "",
            f"{TABLES}::test_two_inputs_promote_to_the_widest",
        ),
        Row(
            "`cat`, `stack` promote",
            "the same",
            "",
            f"{TABLES}::test_cat_promotes_to_the_widest",
        ),
        Row(
            "in place: the others are cast to `self`",
            "the same",
            "",
            f"{TABLES}::test_add_in_place_keeps_the_dtype_of_its_target",
        ),
        Row(
            "in place, fp32 function, half `self`: an error",
            "`fmp.BannedOpError`, a `NotImplementedError`",
            "",
            f"{TABLES}::test_exp_in_place_only_in_full_precision",
        ),
        Row(
            "float64 is cast like float32",
            "the same",
            "not by `fmp.OpRules.torch()`",
            f"{OPS}::test_float64_is_cast_by_apex_rules_and_left_by_torch_rules",
        ),
        Row(
            "`.cpu()` makes float32",
            "the same",
            "",
            f"{TABLES}::test_basic_casts",
        ),
        Row(
            "`F.binary_cross_entropy` is banned for half",
            "the same",
            "the message says what to use: `binary_cross_entropy_with_logits`",
            f"{OPS}::test_binary_cross_entropy_is_refused_by_dtype_or_always",
        ),
        Row(
            "`allow_banned`",
            "`fmp.OpRules.apex().full(F.binary_cross_entropy)`",
            "for one function, not for all; in `fmp.compat.amp`, `amp.register_float_function(F, "
            '"binary_cross_entropy")` before `initialize`, or `with amp.disable_casts():` around the call',
            f"{TABLES}::test_binary_cross_entropy_refuses_half_until_it_is_allowed",
        ),
        Row(
            '`amp.register_float_function(torch, "sigmoid")`',
            "`fmp.OpRules.apex().full(torch.sigmoid)`",
            "given as `op_rules=`; also `low`, `promote`, `banned`, `leave`",
            f"{FUNCTIONS}::test_functions_of_torch_are_registered_as_rules",
        ),
        Row(
            '`amp.register_half_function(mylib, "attend")`',
            "`mylib.attend = fmp.low_precision(mylib.attend)`",
            "",
            f"{FUNCTIONS}::test_functions_of_a_library_are_replaced_by_decorated_ones",
        ),
        Row(
            "`@amp.half_function`, `@amp.float_function`, `@amp.promote_function`",
            "`@fmp.low_precision`, `@fmp.full_precision`, `@fmp.promote`",
            "nothing inside is cast; they do nothing where no casts are on",
            "tests/policy/test_regions.py::test_everything_in_a_region_runs_in_one_dtype",
        ),
        Row(
            "a name that does not exist: `ValueError`",
            "the same",
            "with the nearest name",
            f"{FUNCTIONS}::test_what_does_not_exist_cannot_be_registered",
        ),
        Row(
            "custom `autograd.Function`: `float_function(MyFunction.apply)`",
            "`fmp.full_precision(MyFunction.apply)`",
            "forward and backward in one dtype",
            f"{FUNCTIONS}::test_a_custom_autograd_function_trains_in_the_precision_that_it_is_given",
        ),
        Row(
            "`with amp.disable_casts():`",
            "`fmp.autocast(fn, fmp.Policy(None, None, None))`",
            "for a function, not a block",
            f"{FUNCTIONS}::test_casts_are_switched_off_for_a_function",
        ),
        Row(
            "an error in `disable_casts` leaves casts off",
            "casts come back",
            "",
            f"{FUNCTIONS}::test_a_function_that_fails_leaves_no_casts_behind",
        ),
    ],
    "The cast cache (O1)": [
        Row(
            "a weight is cast once until the next `scale_loss`",
            "once in a call of the function",
            "",
            f"{CACHE}::test_a_weight_is_cast_once_in_a_call",
        ),
        Row(
            "gradients through the cache",
            "the same numbers as without one",
            "summed in float32",
            f"{CACHE}::test_gradients_have_the_bits_of_those_without_a_cache",
        ),
        Row(
            "train, evaluate, train again",
            "the same",
            "",
            f"{TABLES}::test_cached_casts_give_the_same_gradients_in_training_evaluation_and_training_again",
        ),
        Row(
            "a weight changed in place after evaluation: the old cast is used",
            "the change is seen",
            "",
            f"{CACHE}::test_a_change_between_two_uses_is_seen",
        ),
    ],
    "Recurrent networks": [
        Row(
            "`nn.LSTM`, `nn.GRU`, `nn.RNN` run in half, outputs and states too",
            "the same, under O1 and O2",
            "stacked, bidirectional, packed",
            f"{RNN}::test_whole_sequences_padded_and_packed",
        ),
        Row(
            "`nn.LSTMCell`, `nn.GRUCell`, `nn.RNNCell`",
            "the same",
            "",
            f"{RNN}::test_cells",
        ),
        Row(
            "half input to a layer in float32 (O1)",
            "the same with `fmp.functionalize`",
            "a plain `nn.LSTM` checks its input first, and refuses",
            "tests/policy/test_autocast_composites.py::test_a_recurrent_layer_after_a_linear_one_needs_functionalize",
        ),
        Row(
            "flat half copies of the weights for cuDNN",
            "no such copies",
            "masters and gradients are float32, leaf by leaf",
            f"{RNN}::test_masters_of_a_recurrent_network_are_float32",
        ),
    ],
}


def table(rows: list[Row]) -> str:
    """Renders rows as a Markdown table, without the tests."""
    lines = ["| Apex | fmp | |", "|---|---|---|", *(f"| {row.apex} | {row.fmp} | {row.note} |" for row in rows)]
    return "\n".join(line.replace("|  |", "| |") for line in lines)


def document() -> str:
    """Renders all sections, each under its heading."""
    return "\n\n".join(f"### {title}\n\n{table(rows)}" for title, rows in SECTIONS.items())


if __name__ == "__main__":
    print(document())
