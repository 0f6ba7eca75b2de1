"""`prepare`: make the engine that trains a model on the ranks of a layout."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from minidist.comm.mesh import Mesh
from minidist.model.attention import check_dtypes
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.user_functions import Loss, MakeFromNamed, MakeOptimizer, by_parameters
from minidist.parallel.engine.partition_model import checked, partition_model
from minidist.parallel.engine.prepare_checks import check_prepare_arguments, put_back_on_error
from minidist.parallel.engine.rehearsal import Rehearsal
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.gradients import GradientComm
from minidist.parallel.flat.joined_messages import broadcast_together, give_memory
from minidist.parallel.guards.claims import BY_ENGINE, claim
from minidist.parallel.guards.refusals import require_alike
from minidist.parallel.sharding import state_by_name
from minidist.parallel.sharding.share_model import share_model
from minidist.parallel.training.batch_norm import synchronize
from minidist.parallel.training.precision import LossScale, Precision
from minidist.parallel.training.recompute import parts_to_recompute, recompute_parts

REHEARSE = "MINIDIST_REHEARSE"
"""A variable of the environment; 0 has no engine rehearse that is not asked to."""


def prepare(
    model: nn.Module,
    optimizer: MakeOptimizer | MakeFromNamed,
    layout: Layout | None = None,
    loss: Loss | None = None,
    data_parallel: Mapping[str, Any] | None = None,
    clip_norm: float | None = None,
    loss_scale: LossScale | None = None,
    fully_shard: Mapping[str, Any] | None = None,
    plan: Mapping[str, str] | None = None,
    initialize: Callable[[nn.Module], object] | None = None,
    check_plan: bool = True,
    batch_norm: str | None = None,
    layers: str | None = None,
    example: Any = None,
    check_loss: bool = True,
    rehearse: bool | str | None = None,
) -> Engine:
    """An engine that trains `model` on the ranks of `layout`. Every rank of the world calls it.

    >>> engine = md.prepare(model, partial(torch.optim.AdamW, lr=3e-4), md.Layout(dp=2))
    >>> loss = engine.step(inputs, targets)  # or a batch of any structure: see `Engine.step`

    The model stays on its device and is changed in place to this rank's part. Ranks need not start from the
    same weights: rank 0 sends its own to all. With precision "bf16" or "fp16" a float32 model is converted,
    and the optimizer updates master weights that start from its float32 values (training/precision.py). With
    `recompute` parts of the model, such as its layers, keep only their inputs (training/recompute.py).

    | Axis | What it needs |
    |---|---|
    | dp | nothing; each rank has its own rows |
    | tp | a plan of matrices to cut; it is found for many models, such as Llama, GPT-2, BERT and ViT |
    | pp | a list of layers that `forward` calls one after the other (pipeline/layer_chain.py) |
    | cp | a model of transformers, or attention with an attribute `attend`; inputs and targets (B, T) |
    | ep | a mixture of experts: `GPTConfig(experts=8)`, or one of transformers, such as Mixtral |

    Ranks that differ only in tp, pp or cp pass the same rows, and the first step refuses others. All axes can
    be combined, with ZeRO 1 too. ZeRO 2 and 3 do not work with pp: they would send gradients, or parameters,
    once for each micro-batch.

    A model that fits on no rank can be made on the meta device for a layout with tp, pp or zero=3. Ranks then
    get memory for their parts and for one module at a time; rank 0 initializes modules as one process would.

    If `prepare` raises an error, the model is as it was, except for values that rank 0 has sent.

    A model may be compiled, as in torch.compile(model), or its layers, as in `layer.compile()`. Collectives,
    layers that ranks share and recomputed layers run between the graphs as they are. A pipeline calls the
    layers, so compile them for pp. The state has the model's own names, without torch.compile's "_orig_mod.".

    Args:
        model: the same architecture on all ranks.
        optimizer: a function from parameters to a torch optimizer. One whose argument is called
            `named_parameters` gets (name, parameter) pairs, to form groups by name. If its `step` requires a
            closure, each call of that runs all passes on the step's batch again.
        layout: how many ranks do what; None for one rank.
        loss: a function from outputs and targets to their mean over rows; or to (mean, weight), where the
            weight is the number of tokens that count, say, and ranks and micro-batches are averaged by it. A
            function whose first argument is called `model` gets the model, which it may call as it likes, and
            the batch. None for the loss that the model returns itself, as those of transformers do when they
            get labels; for a model that returns a tensor, `cross_entropy`.
            With tp or pp, a penalty on the weights would see only this rank's parts; use weight_decay.
        data_parallel: options of `DataParallel`, such as {"compression": "float16"}.
        clip_norm: the largest norm of the gradients over all ranks; None for no clipping. As with
            `torch.nn.utils.clip_grad_norm_`, a norm that is not finite makes weights that are not finite.
        loss_scale: for precision "fp16", how the factor on the loss starts and grows.
        fully_shard: options of `FullyShard` for zero=3, such as {"offload": "/scratch"}. And "secondary", a
            number of neighbouring ranks, those of a host: together they keep a second copy of the parameters,
            from which the backward pass gathers (hpZ of ZeRO++); it lies where the model computes.
        plan: for tp, how to cut each module, as for `parallelize`; None for `plan_for(model)`
            (tensor_parallel/plans.py).
        initialize: gives a submodule's own parameters and buffers their values, for example from a file, if
            they were on the meta device; None for the model's method `initialize_part`, or each submodule's
            `reset_parameters`.
        check_plan, check_loss: False is rehearse=False, unless that is given too.
        batch_norm: "synchronized" to take the statistics of each BatchNorm over the rows of all ranks, as one
            process does. None for those of each rank's rows: the training is then another one, and the ranks'
            running statistics are averaged before they are evaluated or exported (training/batch_norm.py).
        layers: for pp, the name of the list to cut, such as "model.layers" or "transformer.h"; None for the
            model's only one.
        example: for pp, a batch of at least one row, as the model takes it: the model runs on it once, to
            find what it computes before and after its layers. Without values, or memory for that run, its
            layers compute shapes alone. None if the model is nothing but the chain of its `layers`, or
            brings `dummy_inputs`, as transformers' language models do.
        rehearse: take step 1, six more up to step 901, and those after a change of what is trained, beside a
            single process: rank 0 takes them alone, in plain torch, with all ranks' rows. Where loss,
            gradients, parameters or buffers differ by more than rounding, the step raises ValueError on all
            ranks, names the first difference and a likely cause, and changes nothing (engine/rehearsal.py).
            None does so if rank 0 has memory for three more copies of the whole state, and the environment
            has no MINIDIST_REHEARSE=0; True, in any case; "first", in the first step alone; False, never.
            Where it cannot run, or not tell all, a line on standard error says why. Random numbers are
            replaced by constants, and such a step is then taken again. BatchNorms that are not synchronized
            use their running statistics in it. A loss that compares rows, such as a contrastive one, has to
            gather those of all data ranks:
            `minidist.parallel.tensor_parallel.gather_sequence(features, 0, group=engine.data_group)`.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: the layout has another number of ranks than the world, or differs between ranks; the
            model, the optimizer or an option does not work with an axis, which is named; or another object
            trains the model.
    """
    layout = Layout() if layout is None else layout
    options = data_parallel, fully_shard, loss_scale, clip_norm, batch_norm, rehearse
    check_prepare_arguments(model, optimizer, layout, loss, *options)
    if initialize is None:
        initialize = (fully_shard or {}).get("initialize")
    elif not layout.residency.whole_parameters:
        fully_shard = {**(fully_shard or {}), "initialize": initialize}
    if rehearse is None and not (check_plan and check_loss and os.environ.get(REHEARSE, "1") != "0"):
        rehearse = False
    # Before any other collective: ranks with other layouts would wait in other ones.
    others = {"clip_norm": clip_norm, "secondary": (fully_shard or {}).get("secondary")}
    others |= {"batch_norm": batch_norm, "layers": layers, "rehearse": rehearse}
    require_alike("md.prepare", {**vars(layout), **others}, None)
    mesh = Mesh(pp=layout.pp, dp=layout.dp, cp=layout.cp, tp=layout.tp)
    precision = Precision(layout.precision, loss_scale)
    with put_back_on_error(model, precision.dtype is not None):
        model = compiled_in_place(model)
        give_memory(model)
        rehearsal = None
        if rehearse is not False and (layout.ranks > 1 or layout.micro_batches > 1):
            rehearsal = Rehearsal(rehearse, model, optimizer, loss, layout, clip_norm)
            if (data_parallel or {}).get("compression") is not None:
                rehearsal.why_not = "compression changes the gradients"
            if layout.precision in FP8_RECIPES:
                rehearsal.why_not = "in FP8 each rank's rows have scales of their own"
        exact = precision.convert(model)
        check_dtypes(model)
        recomputed = parts_to_recompute(model, layout.recompute)
        part = partition_model(model, layout, mesh, plan, initialize, layers, precision.inputs(example))
        if batch_norm is not None:
            synchronize(model, mesh.duplicate("dp_cp"))  # gradients travel at the same time
        if precision.fp8 is not None:
            precision.fp8.wrap(part.model)
        recompute_parts(model, recomputed)
        make, row = by_parameters(optimizer, model, part.tensor_map.first), layout.residency
        if layout.tp * layout.pp * layout.ep > 1:
            make = checked(make, layout, mesh.group("tp"))
        given = dict((data_parallel if row.whole_parameters else fully_shard) or {})
        hybrid, secondary = None, given.pop("secondary", None)
        if layout.owners < layout.dp * layout.cp and not row.whole_state:
            hybrid = mesh.blocks("dp_cp", layout.owners)
        meets = layout.cp * layout.ep > 1 or batch_norm is not None
        waits = row.whole_parameters and meets  # the rounds of units come in one order
        gradient_comm = GradientComm(
            mesh.group("dp_cp"),
            hybrid=hybrid,
            secondary=mesh.blocks("dp_cp", secondary)[0] if secondary else None,
            waits_in_backward=waits,
        )
        of_experts = GradientComm(part.expert_copies, waits_in_backward=waits)
        experts = [(of_experts, part.experts)] if part.experts else []
        strategy = share_model(part.model, make, row, given, precision.master, gradient_comm, experts)
        if exact:  # masters start from rank 0's values in float32, and not from the rounded ones
            broadcast_together([*{id(value): value for value in exact.values()}.values()], None)
            part.tensor_map.write(exact, part.tensor_map.boxes(state_by_name.state_boxes(strategy)))
        engine = Engine(part, strategy, layout, loss, precision, clip_norm)
        claim(engine, BY_ENGINE, model.parameters())
        engine.rehearsal = rehearsal
        if rehearsal is not None:
            rehearsal.made(engine)
        return engine


def compiled_in_place(model: nn.Module) -> nn.Module:
    """Take torch.compile's wrappers off a model and its parts, and compile these as `part.compile()` does.

    A wrapper puts "_orig_mod." before the names of all parameters, which plans and checkpoints do not know.
    """
    for part in [*model.modules()]:
        for name, child in part.named_children():
            part._modules[name] = _unwrapped(child)
    return _unwrapped(model)


def _unwrapped(module: nn.Module) -> nn.Module:
    inner: Any = module._modules.get("_orig_mod")
    if inner is None:
        return module
    compiler: Any = module.dynamo_ctx
    inner._compiled_call_impl = compiler(inner._call_impl)
    unwrapped: nn.Module = inner
    return unwrapped
