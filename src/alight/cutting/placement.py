"""Where to put exits: block ends at even shares of the cost, at which the network can be cut."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from alight.cutting.calls import NeedsTooMuchMemory
from alight.cutting.cut import CUTTERS, alive_after, cut, inputs_of
from alight.cutting.flops import FlopCounter, without_data
from alight.cutting.mixing import SamplesMixed
from alight.cutting.running import Inputs, in_mode, refusals
from alight.cutting.tracing import CONTAINERS, Trace, trace
from alight.errors import BadInput

MIN_DISTANCE = 1 / 3  # of the even distance: exits that are nearer decide on nearly the same
MAX_SHARE = 0.9  # of the cost, the head's included: a later exit saves next to nothing

HeadFlops = Callable[[tuple[int, ...], int], float]  # of a head for features of one sample of this shape, and classes


class CutPlace(NamedTuple):
    """The end of a module: shares of the network's cost until then and of a head, and how many tensors are alive."""

    name: str
    share: float
    alive: int
    head: float = 0.0

    @property
    def cost(self) -> float:
        """What an answer here costs, as a share of the network's cost."""
        return self.share + self.head


def suggest_exits(model: nn.Module, example: Any, count: int) -> list[str]:
    """Return names of `count` modules after which exits lie at even shares of the network's FLOPs, in order.

    Only block ends are suggested, those first at which nothing but the block's output is alive; the cut was tried. The
    end of a convolution or linear layer is after the normalisation, activation and pooling that follow it. Two exits
    lie at least a third of the even distance apart, wherever the network has such places.

    Args:
        model: The network.
        example: A batch as it takes it.
        count: How many exits to place before the end.

    >>> import torch
    >>> blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)]
    >>> suggest_exits(nn.Sequential(*blocks, nn.Linear(8, 3)), torch.zeros(1, 8), count=3)
    ['1', '3', '5']
    """
    return cut_evenly(model, example, count)[0]


def cut_evenly(
    model: nn.Module,
    example: Any,
    count: int,
    *,
    allow_fewer: bool = False,
    allow_crowded: bool = True,
    head_flops: HeadFlops | None = None,
) -> tuple[list[str], list[nn.Module]]:
    """Return the names that `suggest_exits` returns, and the stages of the network cut there.

    With `allow_fewer` there are one to `count`: as many as the network has places for at a distance, where it has not
    `count` places, or, without `allow_crowded`, not so many at a distance. An exit's share of the cost includes its
    head's FLOPs, those of a linear layer on averaged features unless `head_flops` says otherwise.
    """
    if count < 1:
        raise BadInput(f"{count} exits: ask for at least one")
    places, problem = cut_places(model, inputs_of(example), count, head_flops, anywhere=not allow_fewer)
    while True:
        chosen = (_up_to if allow_fewer else _chosen)(places, count, crowded=allow_crowded)
        names = [place.name for place in chosen]
        if not names or (len(names) < count and not allow_fewer):
            raise BadInput(_too_few(model, places, count, problem)) from problem
        try:
            return names, cut(model, names, example)
        except (NeedsTooMuchMemory, SamplesMixed):
            raise
        except BadInput as error:
            problem = error
            failing = [name for name in names if _fails(model, name, example)] or names[-1:]
            places = [place for place in places if place.name not in failing]


def _too_few(model: nn.Module, places: Sequence[CutPlace], count: int, problem: BadInput | None) -> str:
    found = f"{len(places)} place{'' if len(places) == 1 else 's'} found to cut a {type(model).__name__}"
    remedy = "ask for fewer, or name modules, attach_heads(network, ['layer1'], example=...)"
    if problem:
        remedy = f"elsewhere, {problem}"
    elif not places:
        remedy = "an exit with its head would cost as much as all; run the network without exits"
    return f"{found} and {count} asked for: {remedy}"


def cut_places(
    model: nn.Module, inputs: Inputs, count: int, head_flops: HeadFlops | None = None, *, anywhere: bool = False
) -> tuple[list[CutPlace], BadInput | None]:
    """Return block ends after which the network can be cut, and what prevents a cut elsewhere, if anything does.

    In a network of repeated blocks, these and the stages that hold them: not the stem before them, nor what reduces
    sizes between them. Where there are fewer than `count` blocks, a layer and what follows it until the next is a
    block, too, or the module around it, unless more is alive at its end than elsewhere, as inside a residual block; in
    a network of repeated blocks only after the last of them, or `anywhere` where these are too few as well.
    """
    runs, repeated = _runs(model, inputs), _repeated_blocks(model)
    places, problem = _block_ends(model, inputs, count, head_flops, runs, repeated)
    if anywhere and repeated and len(places) < count:
        return _block_ends(model, inputs, count, head_flops, runs, [])
    return places, problem


def _block_ends(
    model: nn.Module, inputs: Inputs, count: int, head_flops: HeadFlops | None, runs: "Runs", repeated: Sequence[str]
) -> tuple[list[CutPlace], BadInput | None]:
    """Return ends of blocks, and of layers where these are too few."""
    candidates = [name for name in _blocks(model) if not repeated or _holds_any(name, repeated)]
    blocks = [_end_of(name, runs) for name in candidates if len(runs.get(name, ())) == 1]
    places, problem = _places_among(model, inputs, runs, blocks, head_flops)
    if len(places) >= count:
        return places, problem
    places, problem = _places_among(model, inputs, runs, [*blocks, *_layer_ends(model, runs, repeated)], head_flops)
    least = min((place.alive for place in places), default=0)
    return [place for place in places if place.alive == least or place.name in blocks], problem


def _layer_ends(model: nn.Module, runs: "Runs", repeated: Sequence[str]) -> list[str]:
    """Return where layers end that are called once, after the last of the repeated blocks."""
    order = [*runs]
    last = max((order.index(name) for name in repeated if name in runs), default=-1)
    once = [name for name in order[last + 1 :] if len(runs[name]) == 1]
    return [_end_of(name, runs) for name in once if _has_one_layer(model.get_submodule(name))]


class ModuleRun(NamedTuple):
    """One call of a module: FLOPs spent when it ends, the tensor it takes, and what it returns."""

    flops: int
    taken: Tensor | None  # None where it takes several, or none
    made: Any
    is_layer: bool  # with a matrix of weights, and no module inside
    is_free: bool  # without such weights, and with an output of as many axes: a norm, an activation, a pooling


Runs = Mapping[str, Sequence[ModuleRun]]  # by the module's name, in the order of ending; "" is the network


def _places_among(
    model: nn.Module, inputs: Inputs, runs: Runs, names: Sequence[str], head_flops: HeadFlops | None
) -> tuple[list[CutPlace], BadInput | None]:
    ((total, _, output, _, _),) = runs[""]
    logits = next(each for each in tree_leaves(output) if isinstance(each, Tensor))
    count_head = head_flops or linear_flops
    costs = {}
    for name in dict.fromkeys(names):
        ((flops, _, made, _, _),) = runs[name]
        features = next((each for each in tree_leaves(made) if isinstance(each, Tensor) and each.ndim > 1), None)
        head = 0.0 if features is None else count_head(tuple(features.shape[1:]), logits.shape[-1])
        head *= len(inputs.tensors[0])
        if total and flops > 0 and flops + head < MAX_SHARE * total:
            costs[name] = flops / total, head / total
    alive, problem = _alive(model, inputs, list(costs))
    # of places with the same share, the last
    by_share = {
        costs[name][0]: CutPlace(name, costs[name][0], number, costs[name][1]) for name, number in alive.items()
    }
    return sorted(by_share.values(), key=lambda place: place.share), problem


def linear_flops(shape: tuple[int, ...], classes: int) -> float:
    """Return the FLOPs of a linear layer on averages of (channels, ...) or (tokens, channels).

    >>> linear_flops((64, 7, 7), 10)
    1280.0
    """
    return 2.0 * classes * (shape[-1] if len(shape) == 2 else shape[0])


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield names of modules that are made of others, stages and blocks, but not of what is inside blocks."""
    for name, child in module.named_children():
        if not any(True for _ in child.children()):
            continue
        if any(weight.ndim > 1 for weight in child.parameters()):
            yield prefix + name
        if any(map(_holds_blocks, child.modules())):
            yield from _blocks(child, f"{prefix}{name}.")


def _repeated_blocks(model: nn.Module) -> list[str]:
    """Return names of modules with several layers whose class the network has twice, and of what is in a row with one.

    A module of one layer, such as a stem, counts in a row of rows alone, as EfficientNet's stages are.
    """
    layers, kinds = {}, Counter[type]()
    for name, module in model.named_modules():
        if name and not isinstance(module, CONTAINERS) and not _is_layer(module):
            layers[name] = _matrices(module)
            kinds[type(module)] += layers[name] > 1
    rows = {
        _row_of(name, model)
        for name, number in layers.items()
        if number > 1 and kinds[type(model.get_submodule(name))] > 1
    }
    return [name for name, number in layers.items() if _is_in_row(name, number, _row_of(name, model), rows)]


def _is_in_row(name: str, layers: int, row: str, rows: Collection[str]) -> bool:
    return row in rows and (layers > 1 or (layers == 1 and name.count(".") - row.count(".") > 1))


def _row_of(name: str, model: nn.Module) -> str:
    """Return the outermost of the containers in containers that a module is in; its own name where it is in none."""
    parent = name.rpartition(".")[0]
    return _row_of(parent, model) if name and isinstance(model.get_submodule(parent), CONTAINERS) else name


def _holds_any(name: str, blocks: Sequence[str]) -> bool:
    return any(block == name or block.startswith(f"{name}.") for block in blocks)


def _matrices(module: nn.Module) -> int:
    return sum(weight.ndim > 1 for weight in module.parameters())


def _holds_blocks(module: nn.Module) -> bool:
    """Check whether this container holds two blocks of a kind, with at least two weights each."""
    kinds = [type(child) for child in module.children() if _matrices(child) > 1]
    return isinstance(module, CONTAINERS) and len(set(kinds)) < len(kinds)


def _is_layer(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and any(weight.ndim > 1 for weight in module.parameters())


def _has_one_layer(module: nn.Module) -> bool:
    """Check whether it is a layer, or a small block around one, as a convolution, its norm and an activation."""
    return _is_layer(module) or _matrices(module) == 1


def _end_of(name: str, runs: Runs) -> str:
    """Return the last of the norms, activations and poolings that follow a module whose output is that of a layer."""
    (run,) = runs[name]
    if not any(each.is_layer and each.made is run.made for calls in runs.values() for each in calls):
        return name
    later = [*runs][[*runs].index(name) + 1 :]
    for other in later:
        if len(runs[other]) == 1 and runs[other][0].is_free and runs[other][0].taken is run.made:
            name, (run,) = other, runs[other]
    return name


def _alive(model: nn.Module, inputs: Inputs, names: Sequence[str]) -> tuple[dict[str, int], BadInput | None]:
    """Return how many tensors are alive after each module that the network can be cut after, and the last problem."""
    if any(recognises(model) for recognises, _ in CUTTERS):
        return dict.fromkeys(names, 1), None  # its cutter knows what is carried
    traced, problem = _deepest_trace(model, inputs, names)
    alive = {}
    for name in sorted(traced.ends, key=lambda name: ([end.time for end in traced.ends[name]], -name.count("."))):
        try:
            alive[name] = len(alive_after(traced, name))
        except BadInput as error:
            problem = error
    return alive, problem


def _deepest_trace(model: nn.Module, inputs: Inputs, names: Sequence[str]) -> tuple[Trace, BadInput | None]:
    """Return a trace with as many modules opened as the network allows; why no more, if there are more."""
    problem = None
    for depth in range(max((name.count(".") for name in names), default=0), -1, -1):
        try:
            return trace(model, inputs, [name for name in names if name.count(".") <= depth]), problem
        except BadInput as error:
            problem = error
    raise problem or BadInput("the network has no modules: give one that is made of modules")


def _runs(model: nn.Module, inputs: Inputs) -> dict[str, list[ModuleRun]]:
    """Return every call of every module on the example, without data, in the order in which modules end."""
    with refusals():
        return without_data(partial(_noted, model, inputs), inputs.tensors)


def _noted(model: nn.Module, inputs: Inputs, batch: tuple[Tensor, ...]) -> dict[str, list[ModuleRun]]:
    runs: dict[str, list[ModuleRun]] = {}

    def noting(name: str, weights: int, layer: bool) -> Callable[..., None]:
        def note(_: nn.Module, arguments: tuple[Any, ...], made: Any) -> None:
            (taken,) = arguments if len(arguments) == 1 else (None,)
            taken = taken if isinstance(taken, Tensor) else None
            free = not weights and taken is not None and isinstance(made, Tensor) and made.ndim == taken.ndim
            runs.setdefault(name, []).append(ModuleRun(counter.flops, taken, made, layer, free))

        return note

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_hook(noting(name, _matrices(module), _is_layer(module))))
    try:
        with in_mode(model, training=False), FlopCounter() as counter:
            output = inputs.run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    runs[""] = [runs[""][0]._replace(made=output)]
    return runs


def _up_to(places: Sequence[CutPlace], count: int, *, crowded: bool) -> list[CutPlace]:
    """Return this number of places, or as many at a distance as there are, or one anywhere."""
    for number in range(count, 0, -1):
        choice = _chosen(places, number, crowded=crowded and number == count)
        if len(choice) == number:
            return choice
    return _chosen(places, 1, crowded=True)


def _chosen(places: Sequence[CutPlace], count: int, *, crowded: bool) -> list[CutPlace]:
    """Return the places nearest to even shares: at a distance if possible, then where little is alive."""
    single = [place for place in places if place.alive == 1]
    tries = [(single, MIN_DISTANCE), (places, MIN_DISTANCE), *([(single, 0.0), (places, 0.0)] if crowded else [])]
    choices = (_even(among, count, distance / (count + 1)) for among, distance in tries)
    return next((choice for choice in choices if choice), list(places[:count]) if crowded else [])


def _even(places: Sequence[CutPlace], count: int, distance: float) -> list[CutPlace]:
    """Return the places, in order, at least this far apart, whose costs are nearest to even shares in sum, if any."""
    late = [place for place in places if place.cost >= distance]  # before that there is little to decide on
    best = [(abs(place.cost - 1 / (count + 1)), [place]) for place in late]  # choices that end with each place
    for number in range(2, count + 1):
        longer = []
        for place in places:
            before = [
                choice for choice in best if choice[1][-1].share + distance <= place.share and place not in choice[1]
            ]
            if before:
                total, chosen = min(before, key=lambda choice: choice[0])
                longer.append((total + abs(place.cost - number / (count + 1)), [*chosen, place]))
        best = longer
    return min(best, key=lambda choice: choice[0])[1] if best else []


def _fails(model: nn.Module, name: str, example: Any) -> bool:
    try:
        cut(model, [name], example)
    except BadInput:
        return True
    return False
