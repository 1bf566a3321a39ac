"""How much longer does attaching heads to a ResNet-50 take in one checkout than in another?

    python benchmarks/attach_time.py OLD NEW --pairs 9            # three exits, placed automatically
    python benchmarks/attach_time.py OLD NEW --after layer1,layer2,layer3

OLD and NEW are roots of checkouts. Each pair runs both in fresh processes on one thread, in alternating order, and
takes the CPU time of the first call of `attach_heads`, without imports. Prints the seconds and NEW over OLD of every
pair, then the median. For a share of at most 1.2 of the commit before the proof existed, OLD is 51fb6d3.
"""

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

RUN = """
import sys, time, warnings
import torch, torchvision, alight
warnings.simplefilter("ignore")
torch.set_num_threads(1)
torch.manual_seed(0)
network, example, after = torchvision.models.resnet50().eval(), torch.randn(1, 3, 224, 224), sys.argv[1:] or "auto"
start = time.process_time()
alight.attach_heads(network, after, num_classes=1000, example=example)
print(time.process_time() - start)
"""


def seconds(checkout: Path, after: list[str]) -> float:
    """Return the CPU time of the first call in a fresh process."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, *after]
    return float(subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--pairs", type=int, default=9, help="of processes (default: 9)")
    parser.add_argument("--after", default="", help="modules, separated by commas (default: placed automatically)")
    options = parser.parse_args()
    checkouts, ratios = (options.old.resolve(), options.new.resolve()), []
    for pair in range(options.pairs):
        order = (pair % 2, 1 - pair % 2)
        taken = {index: seconds(checkouts[index], [*filter(None, options.after.split(","))]) for index in order}
        ratios.append(taken[1] / taken[0])
        print(f"old {taken[0]:.2f} s, new {taken[1]:.2f} s: {ratios[-1]:.3f}", flush=True)
    print(f"median of {len(ratios)} pairs: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
