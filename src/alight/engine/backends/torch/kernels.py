"""Triton kernels for CUDA devices; imported only where Triton is."""

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def move_rows(source, rows, target, slots, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy row `rows[i]` of the source into row `slots[i]` of the target, `words` numbers each."""
    pair = tl.program_id(0)
    places = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < words
    numbers = tl.load(source + tl.load(rows + pair) * words + places, mask=inside)
    tl.store(target + tl.load(slots + pair) * words + places, numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def pack_logits(  # type: ignore[no-untyped-def]
    logits,
    packed,
    stride,
    classes,
    MARGIN: tl.constexpr,  # noqa: N803
    PROBABILITY: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Write class, largest logit, score, perhaps probability, and top of every row of logits, in float64.

    The top are the RANKS likeliest classes, then their log-probabilities.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + places, mask=places < classes, other=-float("inf")).to(tl.float64)
    largest, best = tl.max(values, 0, return_indices=True)
    weights = tl.exp(values - largest)
    total = tl.sum(weights, 0)
    top = 1.0 / total
    score = top
    if MARGIN:
        score = top - tl.max(tl.where(places == best, 0.0, weights), 0) / total
    there = packed + row * (3 + PROBABILITY + 2 * RANKS)
    tl.store(there, best.to(tl.float64))
    tl.store(there + 1, tl.where(total == total, largest, total))
    tl.store(there + 2, score)
    if PROBABILITY:
        tl.store(there + 3, top)
    there += 3 + PROBABILITY
    lowest = -1.7e308  # stands for the logits of masked classes, which are found before a class is found again
    waiting = tl.where(places < classes, tl.maximum(values, lowest), values)
    for rank in tl.static_range(RANKS):
        value, place = tl.max(waiting, 0, return_indices=True)
        tl.store(there + rank, place.to(tl.float64))
        tl.store(there + RANKS + rank, tl.where(value > lowest, value - largest - tl.log(total), -float("inf")))
        waiting = tl.where(places == place, -float("inf"), waiting)


@triton.jit  # type: ignore[untyped-decorator]
def take_rows(source, cursor, target, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy the rows of the source that follow the cursor, a number in device memory, into the first of the target."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < words
    numbers = tl.load(source + (tl.load(cursor) + row) * words + places, mask=inside)
    tl.store(target + row * words + places, numbers, mask=inside)


@triton.jit
def hash_below(samples, rules):  # type: ignore[no-untyped-def]
    """Return where the hash of a sample's number is below a limit: `alight.budgeting.thresholds.hash32`, bit by bit."""
    low: tl.constexpr = 0xFFFFFFFF
    mixed = (((samples & low) ^ (samples >> 32)) + tl.load(rules)) & low
    mixed = (((mixed >> 16) ^ mixed) * 0x7FEB352D) & low
    mixed = mixed ^ tl.load(rules + 1)
    mixed = (((mixed >> 16) ^ mixed) * 0x31848BAB) & low
    return ((mixed >> 15) ^ mixed) < tl.load(rules + 2)


@triton.jit  # type: ignore[untyped-decorator]
def settle_rows(  # type: ignore[no-untyped-def]
    packed,  # head values of the stage: class, largest logit, score, ...
    width,  # of a row of them
    probability,  # its column
    samples,  # numbers of those in the room, as a ring
    ring,  # its length
    decided,  # whether each leaves, and its class, where another rule decides
    threshold,
    rules,
    counters,
    updated,
    answers,
    next_samples,
    next_ring,
    source,  # one tensor of what the stage made, and the room that its rows go to
    target,
    words,
    own,  # one tensor of the stage's own room
    own_words,
    waiting,  # the place of counters: how many wait, and where in the ring the first stands
    next_waiting,
    answered,
    stage,
    size,  # rows that ran
    FIRST: tl.constexpr,  # the launch that also writes answers, sample numbers and counters  # noqa: N803
    LAST: tl.constexpr,  # takes every sample  # noqa: N803
    DECIDED: tl.constexpr,  # noqa: N803
    PROBABILITY: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # a power of two, not below size  # noqa: N803
    BLOCK: tl.constexpr,  # words that are moved at a time  # noqa: N803
):
    """Decide who leaves a stage, write their answers, and move the others to the next room.

    Every program decides about all rows, which is less work than waiting for one that does, and moves a part of one
    row. Programs past the rows that ran move what waits behind a full batch to the front of the room. An answer is a
    row of sample, class, open exit and probability; the exit of unusable logits is -1 minus its index. The first row
    holds the number of answers.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    count = tl.load(counters + waiting)
    first = tl.load(counters + waiting + 1)
    valid = rows < tl.minimum(count, size)
    largest = tl.load(packed + rows * width + 1, mask=valid, other=0.0)
    usable = tl.abs(largest) < float("inf")  # neither infinite nor NaN
    if LAST:
        leaves = valid
    elif DECIDED:
        leaves = valid & (tl.load(decided + 2 * rows, mask=valid, other=0) != 0)
    else:
        score = tl.load(packed + rows * width + 2, mask=valid, other=0.0)
        limit = tl.load(threshold + stage)
        ties = (score == limit) | (tl.load(rules + 4 * stage + 3) != 0)  # or the hash decides alone
        drawn = hash_below(tl.load(samples + (first + rows) % ring, mask=valid, other=0), rules + 4 * stage)
        leaves = valid & ((score > limit) | (ties & drawn))
    leaves = leaves | (valid & (usable == 0))
    stays = valid & (leaves == 0)
    here = rows == row
    if row < size:
        if tl.sum((stays & here).to(tl.int32), 0) > 0:
            place = tl.load(counters + next_waiting) + tl.sum((stays & (rows < row)).to(tl.int64), 0)
            for start in range(part * BLOCK, words, tl.num_programs(1) * BLOCK):
                places = start + tl.arange(0, BLOCK)
                inside = places < words
                numbers = tl.load(source + row * words + places, mask=inside)
                tl.store(target + place * words + places, numbers, mask=inside)
            if FIRST:  # noqa: SIM102, of which one is known when the kernel is compiled
                if part == 0:
                    slot = (tl.load(counters + next_waiting + 1) + place) % next_ring
                    tl.store(next_samples + slot, tl.load(samples + (first + row) % ring))
        if FIRST:  # noqa: SIM102
            if part == 0:
                if tl.sum((leaves & here).to(tl.int32), 0) > 0:
                    earlier = tl.load(counters + answered) + tl.sum((leaves & (rows < row)).to(tl.int64), 0)
                    there = answers + 4 * (1 + earlier)
                    tl.store(there, tl.load(samples + (first + row) % ring))
                    if DECIDED:
                        tl.store(there + 1, tl.load(decided + 2 * row + 1))
                    else:
                        tl.store(there + 1, tl.load(packed + row * width).to(tl.int64))
                    fine = tl.sum((usable & here).to(tl.int32), 0) > 0
                    tl.store(there + 2, tl.where(fine, stage, -1 - stage).to(tl.int64))
                    if PROBABILITY:
                        bits = tl.load(packed + row * width + probability).to(tl.int64, bitcast=True)
                        tl.store(there + 3, bits)
                if row == 0:
                    ran = tl.minimum(count, size)
                    left = tl.load(counters + answered) + tl.sum(leaves.to(tl.int64), 0)
                    tl.store(updated + waiting, count - ran)
                    tl.store(updated + waiting + 1, (first + ran) % ring)
                    tl.store(updated + answered, left)
                    tl.store(answers, left)
                    if not LAST:
                        joining = tl.sum(stays.to(tl.int64), 0)
                        tl.store(updated + next_waiting, tl.load(counters + next_waiting) + joining)
    elif row < count:
        for start in range(part * BLOCK, own_words, tl.num_programs(1) * BLOCK):
            places = start + tl.arange(0, BLOCK)
            inside = places < own_words
            numbers = tl.load(own + row * own_words + places, mask=inside)
            tl.store(own + (row - size) * own_words + places, numbers, mask=inside)


def run_each(device: str) -> torch.Tensor:
    """Launch every kernel once on a device, so that what is missing there is known; return what the last one wrote."""
    words, place = (torch.zeros(count, dtype=torch.int64, device=device) for count in (8, 1))
    move_rows[(1, 1)](words, place, words, place, 8, BLOCK=8)
    logits, packed = torch.zeros(1, 2, device=device), torch.empty(1, 3, dtype=torch.float64, device=device)
    pack_logits[(1,)](logits, packed, 2, 2, MARGIN=True, PROBABILITY=0, RANKS=0, BLOCK=2)
    return packed
