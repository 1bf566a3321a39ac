"""Are matrix products in fp8 or int8 faster on a GPU than in bfloat16? A text encoder, at its fastest in each.

    PYTHONPATH=src:benchmarks python experiments/low_precision_cuda.py        # 2 minutes, H200

MiniLM with 64 tokens and random weights, of which every linear layer computes in low precision: weights are scaled by
output, activations by row, as they come. Each is run in all ways in which one would (see Full in
benchmarks/runtime_cuda.py), interleaved, medians over rounds. Writes results/low_precision_cuda.csv; `speedup` is over
the fastest in bfloat16, `error` the largest difference of logits from it, as a share of the largest.
"""

import argparse
import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runtime import ROOT, clocked, network, random_inputs
from runtime_cuda import Full, compile_always, parts_for
from torch import Tensor, nn

from alight import RunSettings
from alight.files import write_rows
from alight.provenance import provenance

KINDS = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
SETTINGS = RunSettings("cuda", "bf16")
SAMPLES, ROUNDS = 8192, 9


class Low(nn.Module):
    """A linear layer whose product is computed in low precision."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.kind, self.bias = kind, linear.bias
        self.weight, self.scale = scaled(linear.weight.detach(), kind)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the products, in the precision of the inputs."""
        values, scale = scaled(inputs.flatten(0, -2), self.kind)
        if self.kind == "fp8":
            made = torch._scaled_mm(
                values, self.weight.t(), scale, self.scale.t(), bias=self.bias, out_dtype=inputs.dtype
            )
        else:
            made = (torch._int_mm(values, self.weight.t()) * scale * self.scale.t() + self.bias).to(inputs.dtype)
        return made.view(*inputs.shape[:-1], -1)


def scaled(values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return rows in low precision, and the scale of each."""
    dtype, largest = KINDS[kind]
    values = values.float()
    scale = values.abs().amax(1, keepdim=True).clamp(min=1e-6) / largest
    values = values / scale
    return (values if dtype.is_floating_point else values.round()).to(dtype), scale


def lowered(model: nn.Module, kind: str) -> nn.Module:
    """Return a copy of which every linear layer that a GPU can run so computes in low precision."""
    model = copy.deepcopy(model)
    for parent in [*model.modules()]:
        for name, each in [*parent.named_children()]:
            if isinstance(each, nn.Linear) and each.in_features % 16 == each.out_features % 16 == 0:
                setattr(parent, name, Low(each, kind))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-sizes", default="32,256,1024")
    parser.add_argument("--output", type=Path, default=ROOT / "results/low_precision_cuda.csv")
    options = parser.parse_args()
    compile_always()
    about = {"device": torch.cuda.get_device_name(), **provenance("torch", "transformers", folder=ROOT)}
    torch.manual_seed(0)
    model, example = network("minilm")
    model = model.to("cuda", torch.bfloat16)
    names, inputs = tuple(example), random_inputs(example, SAMPLES, SETTINGS)
    models = {"bf16": model} | {kind: lowered(model, kind) for kind in KINDS}
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        logits = {kind: Full(each, names, compiles=False).forward(*inputs) for kind, each in models.items()}
        for batch_size in map(int, options.batch_sizes.split(",")):
            best: dict[str, tuple[str, Any]] = {}
            for kind, each in models.items():
                runs = Full(each, names, compiles=True).ways(batch_size)
                works = {way: partial(passed, run, parts_for(run, inputs, batch_size)) for way, run in runs.items()}
                taken = {way: min(clocked(work, "cuda") for _ in range(3)) for way, work in works.items()}
                fastest = min(taken, key=taken.__getitem__)
                best[kind] = fastest, works[fastest]
            rounds = np.array([[clocked(work, "cuda") for _, work in best.values()] for _ in range(ROUNDS + 1)])[1:]
            for index, (kind, (way, _)) in enumerate(best.items()):
                low, middle, high = np.quantile(rounds[:, 0] / rounds[:, index], [0.25, 0.5, 0.75]).tolist()
                error = (logits[kind] - logits["bf16"]).abs().max() / logits["bf16"].abs().max()
                row = {"model": "minilm", "precision": kind, "batch_size": batch_size, "way": way, "speedup": middle}
                row |= {"speedup_low": low, "speedup_high": high, "ms": 1e3 * float(np.median(rounds[:, index]))}
                rows.append(row | {"samples": SAMPLES, "error": float(error)} | about)
                print({name: rows[-1][name] for name in [*row, "error"]}, flush=True)
                write_rows(options.output, rows)


def passed(run: Any, parts: Any) -> None:
    """Run all batches."""
    for part in parts:
        run(*part)


if __name__ == "__main__":
    main()
