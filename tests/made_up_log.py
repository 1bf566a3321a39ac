"""A log of three imaginary models: hard requests are longer, cost more, and are seldom answered right by small ones."""

import csv
from pathlib import Path

import numpy as np

MODELS = ("small", "medium", "large")
PRICES = (0.0002, 0.001, 0.004)
MOST = (0.0012, 0.006, 0.024)  # that a call can cost: six times its price


def logged_rows(seed: int = 0, requests: int = 400) -> list[dict[str, object]]:
    rng = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    for request in range(requests):
        hardness, truth = rng.uniform(), int(rng.integers(4))
        length = min(6.0, np.exp(1.2 * (hardness - 0.5) + 0.4 * rng.normal()))
        for model, price, skill in zip(MODELS, PRICES, (1.0, 1.3, 1.7), strict=True):
            right = rng.uniform() < skill - hardness
            answer = truth if right else (truth + int(rng.integers(1, 4))) % 4
            score = 0.5 * right + 1 - hardness + 0.2 * rng.normal()
            row = {"request": f"r{request}", "model": model, "score": round(score, 4), "correct": int(right)}
            rows.append({**row, "answer": "ABCD"[answer], "truth": "ABCD"[truth], "cost_usd": price * length})
    order = rng.permutation(len(rows))
    return [rows[index] for index in order]


def columns_of(rows: list[dict[str, object]], *without: str) -> dict[str, list[object]]:
    return {name: [row[name] for row in rows] for name in rows[0] if name not in without}


def write_log(path: Path, seed: int = 0, requests: int = 400) -> None:
    rows = logged_rows(seed, requests)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0]])
        writer.writeheader()
        writer.writerows(rows)
