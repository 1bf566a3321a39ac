"""Which networks can be cut: one of every family in timm, torchvision and Hugging Face, compared bit by bit.

    python benchmarks/cut_coverage.py              # writes results/cut_coverage.csv, an hour on one busy core
    python benchmarks/cut_coverage.py timm/vgg     # tries some families; rows are replaced one by one

A family is a module of `timm.models` or `torchvision.models` that defines classifiers; the one with the fewest weights
times pixels represents it, with random weights at its own input size. The largest are made smaller: images of 224
pixels instead of more than 331, eight blocks instead of more than 150 million weights. Families of Hugging Face are
listed here, with four layers: texts have 9 tokens, some of them padding. The three places are those of
`suggest_exits`. The chain of stages must give the network's output bit by bit, for batches of 1 and 5, and so must
stages that were rebuilt from their saved graphs. The same is asked at a second size, which the cut has not seen: images
of 32 pixels more, half or twice as many, whichever the network takes first, and texts of 13 tokens. There the chain
must be equal or refuse the batch. Every family runs in a process of its own, with one thread and a time limit.
"""

import csv
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
import torchvision
import transformers

from alight.cutting.placement import cut_evenly
from alight.cutting.stages import cut_data, stages_from_data
from alight.errors import AlightError
from alight.files import write_rows
from alight.provenance import provenance

RESULTS = Path(__file__).parent.parent / "results" / "cut_coverage.csv"
AT_LEAST = 0.95
EQUAL, REFUSED, NO_OTHER, NOT_TRIED = "equal", "refused", "network takes no other", "not tried"
SECONDS = 600.0  # time limit of a family
WORKERS = 1
MOST_PIXELS = 331  # along a side
MOST_WEIGHTS = 150e6
LENGTH, OTHER_LENGTH = 9, 13  # tokens of a text
WIDTHS = {"vocab_size": 60, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "pad_token_id": 0}
TEXTS = (
    "albert bert big_bird camembert canine convbert deberta deberta-v2 distilbert electra ernie flaubert fnet funnel"
    " gemma gpt2 ibert layoutlm llama longformer megatron-bert mistral mobilebert modernbert mpnet nystromformer opt"
    " qwen2 rembert roberta roformer squeezebert xlm xlm-roberta xlnet yoso"
).split()
IMAGES = (
    "beit bit convnext convnextv2 cvt data2vec-vision dinov2 focalnet ijepa mobilenet_v2 mobilevit poolformer pvt"
    " regnet resnet segformer swin swinv2 vit vit_msn"
).split()
FOUR_LAYERS = {"num_hidden_layers": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "funnel": {"block_sizes": [2, 2], "d_head": 8},
    "squeezebert": {"embedding_size": 32},
    "xlnet": {"d_head": 8},
    **{kind: {"num_key_value_heads": 4, "head_dim": 8} for kind in ("gemma", "mistral", "qwen2")},
    **dict.fromkeys(("beit", "data2vec-vision", "dinov2", "ijepa", "vit", "vit_msn"), FOUR_LAYERS),
}


@dataclass(frozen=True)
class Row:
    """The result for one family."""

    family: str
    model: str
    library: str
    places: str
    ok: bool
    reason: str
    second_size: str
    second: str  # what the chain does at that size: equal, refused, differs, error; or the network takes no other
    second_reason: str
    seconds: float


class Network(NamedTuple):
    """A network, how batches of so many samples and of a size are made for it, its own size, and others to try."""

    name: str
    model: torch.nn.Module
    batch: Callable[[int, int], Any]
    size: int
    others: Sequence[int]


def families() -> Iterator[str]:
    """Yield all families as library/module."""
    yield from (f"timm/{module}" for module in timm.list_modules() if timm.list_models(module=module))
    yield from sorted({f"torchvision/{_module_of(name)}" for name in _torchvision_names()})
    yield from (f"transformers/{kind}" for kind in sorted((*TEXTS, *IMAGES)))


def _torchvision_names() -> list[str]:
    return torchvision.models.list_models(module=torchvision.models)


def _module_of(name: str) -> str:
    return torchvision.models.get_model_builder(name).__module__.rpartition(".")[2]


def smallest(family: str) -> tuple[str, tuple[int, ...], dict[str, Any]]:
    """Return the network with the fewest weights times pixels of a family, its input size, and how to build it."""
    library, module = family.split("/")
    if library == "torchvision":
        names = [name for name in _torchvision_names() if _module_of(name) == module]
        known = {name: next(iter(torchvision.models.get_model_weights(name))).meta for name in names}
        best = min(names, key=lambda name: known[name]["num_params"])
        return best, (3, 299, 299) if module == "inception" else (3, 224, 224), {}
    names = timm.list_models(module=module)
    names = [name for name in names if not name.startswith("test_")] or names  # test networks represent nothing
    weights = {name: weights_of(name) for name in names}
    best = min(names, key=lambda name: weights[name] * input_size(name)[1] ** 2)
    size = input_size(best)
    return (
        best,
        size if size[1] <= MOST_PIXELS else (3, 224, 224),
        {"depth": 8} if MOST_WEIGHTS < weights[best] < float("inf") else {},
    )


def input_size(name: str) -> tuple[int, ...]:
    """Return channels, height and width of the images that a network of timm takes."""
    known = timm.get_pretrained_cfg(name)
    return tuple(known.input_size) if known else (3, 224, 224)


def weights_of(name: str) -> float:
    """Return the number of weights of a network of timm; infinity if it cannot be built without data."""
    try:
        with torch.device("meta"):
            return sum(weight.numel() for weight in timm.create_model(name).parameters())
    except Exception:
        return float("inf")


def build(family: str) -> Network:
    """Return the network that represents a family."""
    library, kind = family.split("/")
    if library == "transformers":
        return text_classifier(kind) if kind in TEXTS else image_classifier(kind)
    name, size, settings = smallest(family)
    create = timm.create_model if library == "timm" else torchvision.models.get_model
    return images(f"{name} {settings or ''}".strip(), create(name, **settings), size[1])


def images(name: str, model: torch.nn.Module, side: int) -> Network:
    """Return a network of square images."""
    others = (side + 32, side // 2, 2 * side)
    return Network(name, model.eval(), lambda samples, side: torch.randn(samples, 3, side, side), side, others)


def image_classifier(kind: str) -> Network:
    """Return a network of Hugging Face for images."""
    settings = SETTINGS.get(kind, {})
    config = transformers.AutoConfig.for_model(kind, **settings)
    auto: Any = transformers.AutoModelForImageClassification
    model: torch.nn.Module = auto.from_config(config)
    return images(f"{kind} {settings or ''}".strip(), model, getattr(config, "image_size", None) or 224)


def text_classifier(kind: str) -> Network:
    """Return a small network of Hugging Face for texts."""
    layers = FOUR_LAYERS if kind != "funnel" else {}  # which counts its blocks
    config = transformers.AutoConfig.for_model(kind, **WIDTHS, **layers, **SETTINGS.get(kind, {}))
    auto: Any = transformers.AutoModelForSequenceClassification
    model: torch.nn.Module = auto.from_config(config).eval()

    def batch(samples: int, length: int) -> dict[str, torch.Tensor]:
        mask = (torch.arange(length) < torch.randint(3, length + 1, (samples, 1))).long()
        return {"input_ids": torch.randint(5, 60, (samples, length)) * mask, "attention_mask": mask}

    return Network(f"{kind} {FOUR_LAYERS}", model, batch, LENGTH, [OTHER_LENGTH])


def try_family(family: str) -> Row:
    """Cut one family and compare the chain with the network."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    library, name = family.split("/")
    places: list[str] = []
    second = ("", "", "")
    start = time.perf_counter()
    try:
        network = build(family)
        name = network.name
        example = network.batch(1, network.size)
        places, stages = cut_evenly(network.model, example, count=3)
        again = rebuilt(network.model, stages, places, example)
        problem = difference(network, stages, network.size) or difference(network, again, network.size)
        second = at_second_size(network, stages)
    except Exception as error:  # the reason of the row
        problem = described(error)
    seconds = round(time.perf_counter() - start, 1)
    return Row(family.split("/")[1], name, library, " ".join(places), not problem, problem, *second, seconds)


@torch.no_grad()
def difference(network: Network, stages: Sequence[torch.nn.Module], size: int) -> str:
    """Return where the chain of stages differs from the network; an empty text if it does not."""
    for samples in (1, 5):
        batch = network.batch(samples, size)
        carried: Any = tuple(batch.values()) if isinstance(batch, Mapping) else (batch,)
        for stage in stages:
            carried = stage(*carried)
        expected = run(network.model, batch)
        if not torch.equal(carried, expected):
            return f"batch of {samples}: differs by {(carried - expected).abs().max():.2g}"
    return ""


def run(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Return the network's logits."""
    output = model(**batch) if isinstance(batch, Mapping) else model(batch)
    return getattr(output, "logits", output)


def at_second_size(network: Network, stages: Sequence[torch.nn.Module]) -> tuple[str, str, str]:
    """Return the first other size that the network takes, what the chain does there, and why."""
    for size in network.others:
        try:
            with torch.no_grad():
                run(network.model, network.batch(1, size))
        except Exception:  # whatever it says to sizes that it does not take
            continue
        try:
            found = difference(network, stages, size)
            return str(size), "differs" if found else EQUAL, found
        except AlightError as error:
            return str(size), REFUSED, described(error)
        except Exception as error:
            return str(size), "error", described(error)
    return "", NO_OTHER, ""


def described(error: Exception) -> str:
    """Return an error in one line, without the folders of this machine."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*/site-packages/', '', text)}"


def rebuilt(
    model: torch.nn.Module, stages: list[torch.nn.Module], places: list[str], example: Any
) -> list[torch.nn.Module]:
    """Return the stages as they come back from a saved model."""
    data, constants = cut_data(stages)
    again = stages_from_data(model, json.loads(json.dumps(data)), constants)
    return [stage.eval() for stage in again]


def in_processes(names: list[str]) -> Iterator[Row]:
    """Yield the result of each family, each in a process of its own with a time limit."""
    fork = multiprocessing.get_context("fork")  # so that the libraries are loaded once
    waiting, running = list(reversed(names)), list[tuple[str, Any, Any, float]]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            family = waiting.pop()
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=send_result, args=(family, theirs))
            process.start()
            theirs.close()
            running.append((family, process, ours, time.monotonic() + SECONDS))
        for each in list(running):
            family, process, pipe, deadline = each
            if pipe.poll(0.1) or time.monotonic() > deadline:
                running.remove(each)
                yield outcome(family, process, pipe)


def send_result(family: str, pipe: Any) -> None:
    pipe.send(try_family(family))


def outcome(family: str, process: Any, pipe: Any) -> Row:
    try:
        row = pipe.recv() if pipe.poll() else failed(family, f"took over {SECONDS:g} s")
    except EOFError:
        row = failed(family, "its process crashed")
    process.kill()
    process.join()
    found = f"{row.model} {row.places} {'ok' if row.ok else row.reason}"
    second = f"{row.second_size} {row.second} {row.second_reason}"
    print(f"{family}: {found}; {second} ({row.seconds:g} s)", flush=True)
    return row


def failed(family: str, reason: str) -> Row:
    library, module = family.split("/")
    return Row(module, "", library, "", False, reason, "", "", "", 0.0)


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    made = provenance("torch", "torchvision", "timm", "transformers", folder=RESULTS.parent)
    tries: dict[str, dict[str, Any]] = {}
    if RESULTS.exists():
        with RESULTS.open(newline="") as file:
            tries = {f"{row['library']}/{row['family']}": row for row in csv.DictReader(file)}
    for row in in_processes(names or list(families())):
        tries[f"{row.library}/{row.family}"] = asdict(row) | {"seconds": f"{row.seconds:g}"} | made
        rows = [tries[family] for family in sorted(tries)]
        write_rows(RESULTS, rows)
    cut = [row for row in rows if str(row["ok"]) == "True"]
    print(f"{len(cut)} of {len(rows)} families ({len(cut) / len(rows):.1%}) cut at three places, bit by bit")
    seconds = Counter(row["second"] or NOT_TRIED for row in cut)
    print("at a second size:", ", ".join(f"{number} {each}" for each, number in seconds.most_common()))
    wrong = seconds.keys() - {EQUAL, REFUSED, NO_OTHER, NOT_TRIED}
    return int(len(cut) < AT_LEAST * len(rows) or bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
