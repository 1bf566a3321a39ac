"""Where to put exits: block ends at even shares of the cost, at which the network can be cut."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from alight.cutting.cut import CUTTERS, alive_after, cut, inputs_of
from alight.cutting.flops import FlopCounter, without_data
from alight.cutting.proof import SamplesMixed
from alight.cutting.running import Inputs, in_mode, refusals
from alight.cutting.tracing import CONTAINERS, Trace, trace
from alight.errors import BadInput

MIN_DISTANCE = 1 / 3  # of the even distance: exits that are nearer decide on nearly the same
MAX_SHARE = 0.99  # of the cost: a later exit saves nothing


class CutPlace(NamedTuple):
    """The end of a module: the share of the network's cost until then, and how many tensors are alive."""

    name: str
    share: float
    alive: int


def suggest_exits(model: nn.Module, example: Any, count: int) -> list[str]:
    """Return names of `count` modules after which exits lie at even shares of the network's FLOPs, in order.

    Only block ends are suggested, those first at which nothing but the block's output is alive; the cut was tried. Two
    lie at least a third of the even distance apart, wherever the network has such places.

    >>> import torch
    >>> blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(8)]
    >>> suggest_exits(nn.Sequential(*blocks, nn.Linear(8, 3)), torch.zeros(1, 8), count=3)
    ['1', '3', '5']
    """
    return cut_evenly(model, example, count)[0]


def cut_evenly(model: nn.Module, example: Any, count: int) -> tuple[list[str], list[nn.Module]]:
    """Return the names that `suggest_exits` returns, and the stages of the network cut there."""
    if count < 1:
        raise BadInput(f"{count} exits: ask for at least one")
    places, problem = cut_places(model, inputs_of(example), count)
    while True:
        names = [place.name for place in _chosen(places, count)]
        if len(names) < count:
            remedy = f"elsewhere, {problem}" if problem else "ask for fewer, or name modules yourself"
            raise BadInput(
                f"{len(places)} places found to cut a {type(model).__name__} and {count} asked for: {remedy}"
            ) from problem
        try:
            return names, cut(model, names, example)
        except SamplesMixed:
            raise
        except BadInput as error:
            problem = error
            failing = [name for name in names if _fails(model, name, example)] or names[-1:]
            places = [place for place in places if place.name not in failing]


def cut_places(model: nn.Module, inputs: Inputs, count: int) -> tuple[list[CutPlace], BadInput | None]:
    """Return block ends after which the network can be cut, and what prevents a cut elsewhere, if anything does.

    Single layers count too where there are fewer than `count` blocks.
    """
    blocks = list(_blocks(model))
    layers = [name for name, module in model.named_modules() if name and not any(True for _ in module.children())]
    places, problem = _places_among(model, inputs, blocks)
    return (places, problem) if len(places) >= count else _places_among(model, inputs, [*blocks, *layers])


def _places_among(model: nn.Module, inputs: Inputs, names: Sequence[str]) -> tuple[list[CutPlace], BadInput | None]:
    shares = {name: share for name, share in _cost_shares(model, inputs, names).items() if 0 < share < MAX_SHARE}
    alive, problem = _alive(model, inputs, list(shares))
    # of places with the same share, the last
    by_share = {shares[name]: CutPlace(name, shares[name], number) for name, number in alive.items()}
    return sorted(by_share.values(), key=lambda place: place.share), problem


def _blocks(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield names of modules that are made of others, stages and blocks, but not of what is inside blocks."""
    for name, child in module.named_children():
        if not any(True for _ in child.children()):
            continue
        if any(weight.ndim > 1 for weight in child.parameters()):
            yield prefix + name
        if any(map(_holds_blocks, child.modules())):
            yield from _blocks(child, f"{prefix}{name}.")


def _holds_blocks(module: nn.Module) -> bool:
    """Check whether this container holds two blocks of a kind, with at least two weights each."""
    kinds = [type(child) for child in module.children() if sum(weight.ndim > 1 for weight in child.parameters()) > 1]
    return isinstance(module, CONTAINERS) and len(set(kinds)) < len(kinds)


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


def _cost_shares(model: nn.Module, inputs: Inputs, names: Sequence[str]) -> dict[str, float]:
    """Return the share of the network's FLOPs that is spent when each module ends, of those that are called once."""
    with refusals():
        spent = without_data(partial(_spent, model, inputs, names), inputs.tensors)
    (total,) = spent.pop("")
    return {name: flops[0] / total for name, flops in spent.items() if total and len(flops) == 1}


def _spent(model: nn.Module, inputs: Inputs, names: Sequence[str], batch: tuple[Tensor, ...]) -> dict[str, list[int]]:
    """Return the FLOPs spent at each end of each module; the whole network's under the empty name."""
    spent: dict[str, list[int]] = {name: [] for name in ("", *names)}

    def noting(name: str) -> Callable[..., None]:
        return lambda *_: spent[name].append(counter.flops)

    hooks = [model.get_submodule(name).register_forward_hook(noting(name)) for name in spent]
    try:
        with in_mode(model, training=False), FlopCounter() as counter:
            inputs.run(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return spent


def _chosen(places: Sequence[CutPlace], count: int) -> list[CutPlace]:
    """Return the places nearest to even shares: at a distance if possible, then where little is alive."""
    single = [place for place in places if place.alive == 1]
    tries = [(single, MIN_DISTANCE), (places, MIN_DISTANCE), (single, 0.0), (places, 0.0)]
    choices = (_even(among, count, distance / (count + 1)) for among, distance in tries)
    return next((choice for choice in choices if choice), list(places[:count]))


def _even(places: Sequence[CutPlace], count: int, distance: float) -> list[CutPlace]:
    """Return the places, in order, at least this far apart, whose shares are nearest to even ones in sum, if any."""
    best = [(abs(place.share - 1 / (count + 1)), [place]) for place in places]  # choices that end with each place
    for number in range(2, count + 1):
        longer = []
        for place in places:
            before = [
                choice for choice in best if choice[1][-1].share + distance <= place.share and place not in choice[1]
            ]
            if before:
                total, chosen = min(before, key=lambda choice: choice[0])
                longer.append((total + abs(place.share - number / (count + 1)), [*chosen, place]))
        best = longer
    return min(best, key=lambda choice: choice[0])[1] if best else []


def _fails(model: nn.Module, name: str, example: Any) -> bool:
    try:
        cut(model, [name], example)
    except BadInput:
        return True
    return False
