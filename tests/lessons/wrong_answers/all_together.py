"""Wrong answers to lesson 15."""

import copy

import torch

import minidist as md
from tests.lessons.wrong_answers import WrongAnswers

WRONG = WrongAnswers()
AXES = ("pp", "dp", "cp", "tp")


def places(rank, layout):
    """As place should be."""
    rank, tp = divmod(rank, layout.tp)
    rank, cp = divmod(rank, layout.cp)
    return (*divmod(rank, layout.dp), cp, tp)


@WRONG.to("place", "place(1, Layout(dp=2, tp=2, pp=2))", "expected (0, 0, 0, 1)", "got      (1, 0, 0, 0)")
def pp_counts_fastest(rank, layout):
    rank, pp = divmod(rank, layout.pp)
    rank, dp = divmod(rank, layout.dp)
    tp, cp = divmod(rank, layout.cp)
    return pp, dp, cp, tp


@WRONG.to("place", "as (pp, dp, cp, tp), is wrong", "expected", "got")
def dp_and_tp_swapped(rank, layout):
    rank, dp = divmod(rank, layout.dp)
    rank, cp = divmod(rank, layout.cp)
    pp, tp = divmod(rank, layout.tp)
    return pp, dp, cp, tp


@WRONG.to("place", "place(1, Layout(tp=2))", "(pp, dp, cp, tp)")
def the_order_of_the_result(rank, layout):
    rank, tp = divmod(rank, layout.tp)
    rank, cp = divmod(rank, layout.cp)
    pp, dp = divmod(rank, layout.dp)
    return tp, cp, dp, pp


@WRONG.to("place", "is 0, and should be (pp, dp, cp, tp)")
def only_one_number(rank, layout):
    return rank % layout.tp


@WRONG.to("place", "and should have whole numbers", "// an int")
def divides_into_floats(rank, layout):
    left = rank / layout.tp // 1
    return left // layout.cp // layout.dp, left // layout.cp % layout.dp, left % layout.cp, rank % layout.tp


@WRONG.to("group", 'group(0, "tp", Layout(dp=2))', "expected [0]", "got      [0, 1]")
def always_neighbours(rank, axis, layout):
    size = getattr(layout, axis) if axis != "tp" else layout.ranks
    first = rank // size * size
    return list(range(first, first + size))


@WRONG.to("group", "expected", "got")
def the_same_on_this_axis(rank, axis, layout):
    at = AXES.index(axis)
    own = places(rank, layout)[at]
    return [r for r in range(layout.ranks) if places(r, layout)[at] == own]


@WRONG.to("group", "expected [0]", "got      []")
def the_others_alone(rank, axis, layout):
    return [
        r
        for r in range(layout.ranks)
        if sum(a != b for a, b in zip(places(r, layout), places(rank, layout), strict=True)) == 1
        and places(r, layout)[AXES.index(axis)] != places(rank, layout)[AXES.index(axis)]
    ]


@WRONG.to("group", "should be a list of ranks")
def how_many(rank, axis, layout):
    return getattr(layout, axis)


@WRONG.to("group", "expected [0, 1]", "got      [1, 0]")
def its_own_rank_first(rank, axis, layout):
    at = AXES.index(axis)
    others = [
        r
        for r in range(layout.ranks)
        if places(r, layout)[:at] + places(r, layout)[at + 1 :]
        == places(rank, layout)[:at] + places(rank, layout)[at + 1 :]
    ]
    return [rank, *(r for r in others if r != rank)]


@WRONG.to("group", "and should have whole numbers", "// an int")
def ranks_that_are_floats(rank, axis, layout):
    at = AXES.index(axis)
    stride = (layout.tp * layout.cp * layout.dp, layout.tp * layout.cp, layout.tp, 1)[at]
    first = rank - places(rank, layout)[at] * stride
    return [first + i * stride / 1 for i in range(getattr(layout, axis))]


@WRONG.to("memory", "memory(1000000000, Layout(dp=4))", "expected 16", "got      4")
def data_parallel_shares_all(parameters, layout):
    return 16 * parameters / layout.ranks


@WRONG.to("memory", 'memory(1000000000, Layout(dp=4, precision="bf16"))', "expected 16", "got      8")
def half_precision_is_half_of_all(parameters, layout):
    each = 16 if layout.precision == "fp32" else 8
    return each * parameters / layout.tp / layout.pp


@WRONG.to("memory", "zero=1", "expected", "got")
def stage_one_shares_gradients(parameters, layout):
    weight, gradient, state = (4, 4, 8) if layout.precision == "fp32" else (2, 2, 12)
    n = layout.dp
    own = parameters / layout.tp / layout.pp
    shared = n if layout.zero >= 1 else 1
    return own * (weight / (n if layout.zero == 3 else 1) + gradient / shared + state / shared)


@WRONG.to("memory", "Layout(dp=2, zero=1, cp=2)", "expected", "got")
def forgets_context_parallel(parameters, layout):
    weight, gradient, state = (4, 4, 8) if layout.precision == "fp32" else (2, 2, 12)
    n, own = layout.dp, parameters / layout.tp / layout.pp
    stage = layout.zero
    return own * (
        weight / (n if stage >= 3 else 1)
        + gradient / (n if stage >= 2 else 1)
        + state / (n if stage >= 1 else 1)
    )


def state_of(parameters, layout, n, precisions=("fp32",)):
    weight, gradient, state = (4, 4, 8) if layout.precision in precisions else (2, 2, 12)
    own, stage = parameters / layout.tp / layout.pp, layout.zero
    return own * (
        weight / (n if stage >= 3 else 1)
        + gradient / (n if stage >= 2 else 1)
        + state / (n if stage >= 1 else 1)
    )


@WRONG.to("memory", 'Layout(dp=4, zero=2, precision="fp16")', "expected", "got")
def knows_one_half_precision(parameters, layout):
    return state_of(parameters, layout, layout.dp * layout.cp, ("fp32", "fp16"))


@WRONG.to("memory", "Layout(dp=2, tp=2, zero=3)", "expected", "got")
def shares_among_all_ranks(parameters, layout):
    return state_of(parameters, layout, layout.ranks)


@WRONG.to("memory", "expected", "got")
def rounds_down(parameters, layout):
    return state_of(
        parameters // (layout.tp * layout.pp) * layout.tp * layout.pp, layout, layout.dp * layout.cp
    )


def right_bytes(layout, parameters, blocks, activations, share_tp=True, both_ways=2, third=3):
    element = 4 if layout.precision == "fp32" else 2
    gradients = element * parameters / layout.pp / (layout.tp if share_tp else 1)
    return {
        "dp": (third if layout.zero == 3 else 2) * (layout.dp - 1) / layout.dp * gradients,
        "tp": 4 * blocks / layout.pp * 2 * (layout.tp - 1) / layout.tp * activations,
        "pp": min(layout.pp - 1, both_ways) * activations,
    }


@WRONG.to("bytes_per_step", "zero=3", '"dp"', "expected", "got")
def stage_three_sends_no_more(layout, parameters, blocks, activations):
    return right_bytes(layout, parameters, blocks, activations, third=2)


@WRONG.to("bytes_per_step", "Layout(dp=2, tp=2, pp=2)", '"dp"')
def gradients_of_the_whole_model(layout, parameters, blocks, activations):
    return right_bytes(layout, parameters, blocks, activations, share_tp=False)


@WRONG.to("bytes_per_step", "Layout(pp=3)", '"pp"', "expected", "got")
def a_stage_has_one_neighbour(layout, parameters, blocks, activations):
    return right_bytes(layout, parameters, blocks, activations, both_ways=1)


@WRONG.to("bytes_per_step", "Layout(tp=2)", '"tp"')
def forward_alone(layout, parameters, blocks, activations):
    found = right_bytes(layout, parameters, blocks, activations)
    return found | {"tp": found["tp"] / 2}


@WRONG.to("bytes_per_step", 'precision="fp16"', '"dp"', "expected", "got")
def only_bf16_is_half(layout, parameters, blocks, activations):
    found = right_bytes(layout, parameters, blocks, activations)
    return found | {"dp": found["dp"] * (2 if layout.precision == "fp16" else 1)}


@WRONG.to("bytes_per_step", "should be a dict with the keys")
def one_sum(layout, parameters, blocks, activations):
    return sum(right_bytes(layout, parameters, blocks, activations).values())


@WRONG.to("choose", "the plain one does not", "expected Layout(dp=2, tp=2)", "got      Layout(dp=4)")
def plain_whatever_it_needs(layouts, budget, need, seconds):
    for each in layouts:
        if each.tp == each.pp == each.cp == 1 and each.zero == 0:
            return each
    return min((each for each in layouts if need(each) <= budget), key=seconds, default=None)


@WRONG.to("choose", "the plain one is the last", "expected Layout(dp=4)", "got")
def looks_for_the_plain_one_in_front(layouts, budget, need, seconds):
    fitting = [each for each in layouts if need(each) <= budget]
    if fitting and fitting[0].tp == fitting[0].pp == fitting[0].cp == 1 and fitting[0].zero == 0:
        return fitting[0]
    return min(fitting, key=seconds, default=None)


@WRONG.to("choose", "returns what it should, but changes layouts")
def takes_out_what_does_not_fit(layouts, budget, need, seconds):
    layouts[:] = [each for each in layouts if need(each) <= budget]
    for each in layouts:
        if each.tp == each.pp == each.cp == 1 and each.zero == 0:
            return each
    return min(layouts, key=seconds, default=None)


@WRONG.to("choose", "all fit", "expected Layout(dp=4)", "got      Layout(pp=4)")
def always_the_fastest(layouts, budget, need, seconds):
    return min((each for each in layouts if need(each) <= budget), key=seconds, default=None)


@WRONG.to("choose", "the plain one does not", "expected", "got      Layout(dp=4, zero=1)")
def the_first_that_fits(layouts, budget, need, seconds):
    return next((each for each in layouts if need(each) <= budget), None)


@WRONG.to("choose", "all fit", "expected Layout(dp=4)", "got")
def less_and_not_equal(layouts, budget, need, seconds):
    fitting = [each for each in layouts if need(each) < budget]
    for each in fitting:
        if each.dp == each.ranks and each.zero == 0:
            return each
    return min(fitting, key=seconds, default=None)


@WRONG.to("choose", "raised ValueError")
def nothing_fits_is_an_error(layouts, budget, need, seconds):
    fitting = [each for each in layouts if need(each) <= budget]
    for each in fitting:
        if each.tp == each.pp == each.cp == 1 and each.zero == 0:
            return each
    return min(fitting, key=seconds)


@WRONG.to("choose", "none of them is plain", "expected Layout(tp=4)", "got      Layout(dp=2, cp=2)")
def shared_tokens_are_plain(layouts, budget, need, seconds):
    fitting = [each for each in layouts if need(each) <= budget]
    for each in fitting:
        if each.tp == each.pp == 1 and each.zero == 0:
            return each
    return min(fitting, key=seconds, default=None)


@WRONG.to("choose", "the idea is missing: calls of seconds", "of those alone that fit")
def times_them_all(layouts, budget, need, seconds):
    times = {each: seconds(each) for each in layouts}
    fitting = [each for each in layouts if need(each) <= budget]
    plain = [each for each in fitting if each.dp == each.ranks and each.zero == 0]
    return plain[0] if plain else min(fitting, key=times.get, default=None)


@WRONG.to("Checkpoint", "killed after 4 steps", "Not as it was before: the optimizer's state", "loss of step")
class WeightsAlone:
    def save(self, run):
        return copy.deepcopy(run.model.state_dict())

    def load(self, run, saved):
        run.model.load_state_dict(saved)


class Most:
    """All but what `without` names."""

    without = ""

    def save(self, run):
        saved = {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "steps": run.steps,
            "order": run.order,
            "random": torch.get_rng_state(),
        }
        return copy.deepcopy({name: value for name, value in saved.items() if name != self.without})

    def load(self, run, saved):
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.steps = saved.get("steps", run.steps)
        run.order = saved.get("order", run.order)
        if "random" in saved:
            torch.set_rng_state(saved["random"])


@WRONG.to("Checkpoint", "Not as it was before: the state of torch's random numbers")
class NoRandomState(Most):
    without = "random"

    def save(self, run):
        return super().save(run)


@WRONG.to("Checkpoint", "Not as it was before: run.order")
class NoPositionInTheData(Most):
    without = "order"

    def save(self, run):
        return super().save(run)


@WRONG.to("Checkpoint", "Not as it was before: run.steps")
class NoSteps(Most):
    without = "steps"

    def save(self, run):
        return super().save(run)


@WRONG.to("Checkpoint", "What was saved changes while the run goes on", "saved['model']", "save a copy")
class NoCopy(Most):
    def save(self, run):
        return {
            "model": run.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "steps": run.steps,
            "order": run.order,
            "random": torch.get_rng_state(),
        }


@WRONG.to("Checkpoint", "can't be read back from a file", "state_dict()")
class TheModelItself(Most):
    def save(self, run):
        return {"model": copy.deepcopy(run.model)}


@WRONG.to("Checkpoint", "Checkpoint().load", "raised KeyError", "optimiser")
class ATypingError(Most):
    def load(self, run, saved):
        run.optimizer.load_state_dict(saved["optimiser"])


@WRONG.to("Checkpoint", "Checkpoint().load", "raised AttributeError", "kept")
class KeepsItInItself(Most):
    def save(self, run):
        self.kept = super().save(run)
        return {"steps": run.steps}

    def load(self, run, saved):
        super().load(run, self.kept)


@WRONG.to("Checkpoint", "save(run) changes the run that it saves: the state of torch's random numbers")
class DrawsANumber(Most):
    def save(self, run):
        return super().save(run) | {"name": str(torch.randint(1000, ()))}


@WRONG.to("Checkpoint", "brings back another run", "has to be in what save returned")
class KeepsItInItsClass(Most):
    kept = None

    def save(self, run):
        type(self).kept = super().save(run)
        return {}

    def load(self, run, saved):
        super().load(run, self.kept)


@WRONG.to("Checkpoint", "All was there right after load, and yet the steps differ", "not loaded in place")
class PutsOtherTensorsIntoTheModel(Most):
    def load(self, run, saved):
        super().load(run, saved)
        run.model.load_state_dict(saved["model"], assign=True)


@WRONG.over_par("Checkpoint", "It passes, above par in bytes saved", "no more than the next steps read")
class TheDataToo(Most):
    def save(self, run):
        return super().save(run) | {"inputs": run.inputs.clone()}


@WRONG.to("choose", "in bf16", 'expected Layout(dp=4, precision="bf16")', "got      Layout(tp=4")
def compares_with_a_new_layout(layouts, budget, need, seconds):
    fitting = [each for each in layouts if need(each) <= budget]
    for each in fitting:
        if each == md.Layout(dp=each.dp):
            return each
    return min(fitting, key=seconds, default=None)


@WRONG.to("Checkpoint", "Not as it was before: the weights, or BatchNorm's averages", "state_dict() has both")
class ParametersAlone(Most):
    def save(self, run):
        return super().save(run) | {"model": [each.detach().clone() for each in run.model.parameters()]}

    def load(self, run, saved):
        weights = dict(zip(dict(run.model.named_parameters()), saved["model"], strict=True))
        super().load(run, saved | {"model": run.model.state_dict() | weights})
