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
    SCORE: tl.constexpr,  # noqa: N803
    MARGIN: tl.constexpr,  # noqa: N803
    PROBABILITY: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Write class, largest logit, perhaps score and probability, and top of every row of logits, in float64.

    The top are the RANKS likeliest classes, then their log-probabilities.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + places, mask=places < classes, other=-float("inf")).to(tl.float64)
    largest, best = tl.max(values, 0, return_indices=True)
    weights = tl.exp(values - largest)
    total = tl.sum(weights, 0)
    top = 1.0 / total
    there = packed + row * (2 + SCORE + PROBABILITY + 2 * RANKS)
    tl.store(there, best.to(tl.float64))
    tl.store(there + 1, tl.where(total == total, largest, total))
    if SCORE:
        score = top
        if MARGIN:
            score = top - tl.max(tl.where(places == best, 0.0, weights), 0) / total
        tl.store(there + 2, score)
    if PROBABILITY:
        tl.store(there + 2 + SCORE, top)
    there += 2 + SCORE + PROBABILITY
    lowest = -1.7e308  # stands for the logits of masked classes, which are found before a class is found again
    waiting = tl.where(places < classes, tl.maximum(values, lowest), values)
    for rank in tl.static_range(RANKS):
        value, place = tl.max(waiting, 0, return_indices=True)
        tl.store(there + rank, place.to(tl.float64))
        tl.store(there + RANKS + rank, tl.where(value > lowest, value - largest - tl.log(total), -float("inf")))
        waiting = tl.where(places == place, -float("inf"), waiting)


@triton.jit(do_not_specialize=["width", "first", "memory", "numbers", "ranks", "count", "combined", "remembered"])  # type: ignore[untyped-decorator]
def combine_rows(  # type: ignore[no-untyped-def]
    packed,  # head values of the rows that ran
    width,  # of a row of them
    first,  # column of the first score, or of the likeliest classes
    memory,  # what the stage before remembered: classes, their values, and the value of all others
    numbers,  # of the combination at this exit
    ranks,  # classes that an exit names: one, or the likeliest
    count,  # of all exits so far
    combined,  # gets answer, largest logit and score
    remembered,
    VOTES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # a power of two, not below count  # noqa: N803
):
    """Combine what an exit says about each row with all exits before it: a step of `Vote` or `GeometricMean`.

    Bit by bit, if no product is fused with a sum.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    fresh, inside = places < ranks, places < count
    earlier = inside & (places >= ranks)
    here, before, old = packed + row * width, memory + row * (2 * (count - ranks) + 1), count - ranks
    own = here if VOTES else here + first
    classes = tl.load(own + places, mask=fresh, other=0.0)
    classes = tl.where(fresh, classes, tl.load(before + places - ranks, mask=earlier, other=-1.0))
    known = tl.load(before + old + places - ranks, mask=earlier, other=0.0)
    if VOTES:
        known = tl.where(fresh, tl.load(here + first), known)
        values = 0.0 * known
        for place in range(count):
            voter = tl.sum(tl.where(places == place, classes, 0.0), 0)
            score = tl.sum(tl.where(places == place, known, 0.0), 0)
            vote = tl.load(numbers + place) + tl.load(numbers + count + place) * score
            values = values + vote * (classes == voter).to(tl.float64)
        outside = tl.load(numbers + 2 * count)
    else:
        logs = tl.load(own + ranks + places, mask=fresh, other=0.0).to(tl.float16).to(tl.float64)
        logs = tl.maximum(logs, -30.0)  # IMPOSSIBLE
        lowest = tl.sum(tl.where(places == ranks - 1, logs, 0.0), 0)
        outside = tl.load(before + 2 * old, mask=old > 0, other=0.0)
        logs = tl.where(fresh, logs, lowest)
        for place in range(ranks):
            likely = tl.sum(tl.where(places == place, classes, 0.0), 0)
            same = earlier & (classes == likely)
            logs = tl.where(same, tl.sum(tl.where(places == place, logs, 0.0), 0), logs)
            mean = tl.max(tl.where(same, known, tl.where(earlier, outside, -float("inf"))), 0)
            known = tl.where(places == place, tl.where(old > 0, mean, 0.0), known)
        values = tl.load(numbers) * known + tl.load(numbers + 1) * logs
        outside = tl.load(numbers) * outside + tl.load(numbers + 1) * lowest
        known = values
    largest, best = tl.max(tl.where(inside, values, -float("inf")), 0, return_indices=True)
    answer = tl.sum(tl.where(places == best, classes, 0.0), 0)
    rivals = tl.where(inside & (classes != answer), values, outside)
    tl.store(combined + 3 * row, answer)
    tl.store(combined + 3 * row + 1, tl.load(here + 1))
    tl.store(combined + 3 * row + 2, largest - tl.max(rivals, 0))
    there = remembered + row * (2 * count + 1)
    tl.store(there + places, classes, mask=inside)
    tl.store(there + count + places, known, mask=inside)
    tl.store(there + 2 * count, outside)


@triton.jit
def added(gain, weight, clue, counts):  # type: ignore[no-untyped-def]
    """Return the sum with one more product, if that counts."""
    return tl.where(counts, gain + tl.load(weight) * clue, gain)


@triton.jit
def above(value, bend):  # type: ignore[no-untyped-def]
    """Return how far a value is above a knot; nothing is above an infinite one."""
    return tl.where(value > bend, value - bend, 0.0)


@triton.jit(do_not_specialize=["packed", "width", "memory", "numbers", "earlier", "combined", "remembered"])  # type: ignore[untyped-decorator]
def score_rows(  # type: ignore[no-untyped-def]
    packed,  # head values of the rows that ran
    width,  # of a row of them
    memory,  # what the stage before remembered: last, highest and sum of each column, then classes and first columns
    numbers,  # of the combination at this exit
    earlier,  # exits before this one
    combined,  # gets the head values, with another first score
    remembered,
    COLUMNS: tl.constexpr,  # noqa: N803
    KNOTS: tl.constexpr,  # of each column; some are infinite  # noqa: N803
    BLOCK: tl.constexpr,  # a power of two, above earlier  # noqa: N803
):
    """Score each row by all exits so far: a step of `Gain`, bit by bit, if no product is fused with a sum.

    Weights are loaded before anything is stored, for which loads would have to wait.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside, later, count = places < earlier, earlier > 0, earlier + 1
    here, before = packed + row * width, memory + row * (3 * COLUMNS + 2 * earlier)
    known = tl.load(before + 3 * COLUMNS + places, mask=inside, other=-1.0)
    scores = tl.load(before + 3 * COLUMNS + earlier + places, mask=inside, other=0.0)
    said, first, share = tl.load(here), tl.load(here + 2), tl.load(numbers + 1)
    gain = 0.0 * first + tl.load(numbers + 2)
    for column in tl.static_range(COLUMNS):
        now = tl.load(here + 2 + column)
        best = tl.maximum(now, tl.load(before + 3 * column + 1, mask=later, other=-float("inf")))
        weights = numbers + 3 + column * (4 + 3 * KNOTS)
        gain = gain + tl.load(weights) * now
        gain = added(gain, weights + 1, tl.load(before + 3 * column, mask=later, other=0.0), later)
        gain = added(gain, weights + 2, best, later)
        gain = added(gain, weights + 3, tl.load(before + 3 * column + 2, mask=later, other=0.0) * share, later)
        for knot in tl.static_range(KNOTS):
            gain = gain + tl.load(weights + 4 + KNOTS + knot) * above(now, tl.load(weights + 4 + knot))
        for knot in tl.static_range(KNOTS):
            higher = above(best, tl.load(weights + 4 + knot))
            gain = added(gain, weights + 4 + 2 * KNOTS + knot, higher, later)
    same = (inside & (known == said)).to(tl.float64)
    agreeing, sure = tl.sum(same, 0) * share, same * scores
    surest = tl.where(later, tl.max(tl.where(inside, sure, -float("inf")), 0), 0.0)
    surest += tl.sum(tl.where(sure == sure, 0.0, sure), 0)  # NaN if one is, as of infinite scores
    weights = numbers + 3 + COLUMNS * (4 + 3 * KNOTS)
    gain = added(gain, weights, tl.sum(tl.where(places == earlier - 1, same, 0.0), 0), later)
    gain = added(gain, weights + 1, agreeing, later)
    gain = added(gain, weights + 2, agreeing * first, later)
    gain = added(gain, weights + 3, surest, later)
    gain = gain + tl.load(weights + 4 + tl.maximum(tl.minimum(said, tl.load(numbers)), 0.0).to(tl.int64))
    made, there = combined + row * width, remembered + row * (3 * COLUMNS + 2 * count)
    for column in tl.static_range(COLUMNS):
        now = tl.load(here + 2 + column)
        best = tl.maximum(now, tl.load(before + 3 * column + 1, mask=later, other=-float("inf")))
        total = tl.load(before + 3 * column + 2, mask=later, other=0.0) + now
        tl.store(there + 3 * column, now)
        tl.store(there + 3 * column + 1, best)
        tl.store(there + 3 * column + 2, total)
    more = width > 2 + COLUMNS  # a probability
    tl.store(made + 2 + COLUMNS, tl.load(here + 2 + COLUMNS, mask=more, other=0.0), mask=more)
    tl.store(made, said)
    tl.store(made + 1, tl.load(here + 1))
    tl.store(made + 2, -gain)
    tl.store(there + 3 * COLUMNS + places, tl.where(inside, known, said), mask=places < count)
    tl.store(there + 3 * COLUMNS + count + places, tl.where(inside, scores, first), mask=places < count)


@triton.jit
def hash_below(samples, rules):  # type: ignore[no-untyped-def]
    """Return where the hash of a sample's number is below a limit: `alight.budgeting.thresholds.hash32`, bit by bit."""
    low: tl.constexpr = 0xFFFFFFFF
    mixed = (((samples & low) ^ (samples >> 32)) + tl.load(rules)) & low
    mixed = (((mixed >> 16) ^ mixed) * 0x7FEB352D) & low
    mixed = mixed ^ tl.load(rules + 1)
    mixed = (((mixed >> 16) ^ mixed) * 0x31848BAB) & low
    return ((mixed >> 15) ^ mixed) < tl.load(rules + 2)


@triton.jit(do_not_specialize=["index", "numbers"])  # type: ignore[untyped-decorator]
def admit_rows(  # type: ignore[no-untyped-def]
    sent,  # by the host, where it writes: counts, sample numbers, and the address of each input
    numbers,  # that counts and sample numbers take
    index,  # of the input
    target,  # its rows
    words,  # of a row
    control,  # gets counts and sample numbers
    FIRST: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Copy the rows of one input from wherever it lies, and what the host has sent with it."""
    program = tl.program_id(0).to(tl.int64)
    source = tl.load(sent + numbers + index).to(tl.pointer_type(target.dtype.element_ty))
    end = tl.load(sent + 1) * words
    if FIRST:  # noqa: SIM102, of which one is known when the kernel is compiled; first, while the others are on their way
        if program == 0:
            for first in range(0, numbers, BLOCK):
                which = first + tl.arange(0, BLOCK)
                tl.store(control + which, tl.load(sent + which, mask=which < numbers), mask=which < numbers)
    for start in range(program * BLOCK, end, tl.num_programs(0) * BLOCK):
        here = start + tl.arange(0, BLOCK)
        tl.store(target + here, tl.load(source + here, mask=here < end), mask=here < end)


@triton.jit  # type: ignore[untyped-decorator]
def move_row(source, target, words, row, place, part, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Copy one part of a row; the other programs copy the other parts."""
    for start in range(part * BLOCK, words, tl.num_programs(1) * BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < words
        numbers = tl.load(source + row * words + places, mask=inside)
        tl.store(target + place * words + places, numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def select_batch(batch, first, second, third, fourth, BATCHES: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Return the address of a batch."""
    place = first
    if BATCHES > 1:
        place = tl.where(batch == 1, second, place)
    if BATCHES > 2:
        place = tl.where(batch == 2, third, place)
        place = tl.where(batch == 3, fourth, place)
    return place


# numbers and pointers for which Triton need not compile a variant of the kernel each, as for 1 and multiples of 16
PLAIN = """width probability samples decided tied rules waiting size stage answered arrived after seen answers ring
next_samples next_ring words_2 words_3""".split()


@triton.jit(do_not_specialize=PLAIN)  # type: ignore[untyped-decorator]
def settle_rows(  # type: ignore[no-untyped-def]
    packed,  # head values of the rows that ran: class, largest logit, score, ...; of each batch
    packed_b,
    packed_c,
    packed_d,
    width,  # of a row of them
    probability,  # its column
    samples,  # their numbers
    decided,  # whether each leaves, and its class, where another rule decides
    tied,  # the lowest and the highest score that is tied with the threshold of the stage
    rules,
    waiting,  # how many rows of a batch are of samples
    size,  # rows of a batch
    stage,
    answered,  # how many were answered before
    arrived,  # how many had arrived in the next room before
    after,  # both afterwards, written here, and where the host sees them
    seen,
    answers,  # a ring of rows
    ring,
    next_samples,  # numbers in the next room, a ring too
    next_ring,
    source,  # a tensor of what the stage made of each batch, and the next room for its rows
    source_b,
    source_c,
    source_d,
    target,
    words,
    source_2,
    source_2b,
    source_2c,
    source_2d,
    target_2,
    words_2,
    source_3,
    source_3b,
    source_3c,
    source_3d,
    target_3,
    words_3,
    BATCHES: tl.constexpr,  # that ran: 1, 2 or 4  # noqa: N803
    TENSORS: tl.constexpr,  # that are moved  # noqa: N803
    FIRST: tl.constexpr,  # the launch that also writes answers, sample numbers and counts  # noqa: N803
    LAST: tl.constexpr,  # takes every sample  # noqa: N803
    DECIDED: tl.constexpr,  # noqa: N803
    PROBABILITY: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # a power of two, not below all rows  # noqa: N803
    BLOCK: tl.constexpr,  # words that are moved at a time  # noqa: N803
):
    """Decide who leaves a stage, write their answers, and move the others to the end of the next room.

    Every program decides about all rows, which is less work than waiting for one that does, and moves a part of one
    row. An answer is a row of sample, class, open exit and probability; the exit of unusable logits is -1 minus its
    index.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    batch, batches = row // size, rows // size
    own, each = row - batch * size, rows - batches * size  # rows of their batches
    values = select_batch(batches, packed, packed_b, packed_c, packed_d, BATCHES) + each * width
    own_values = select_batch(batch, packed, packed_b, packed_c, packed_d, BATCHES) + own * width
    valid = (rows < BATCHES * size) & (each < tl.load(waiting))
    largest = tl.load(values + 1, mask=valid, other=0.0)
    usable = tl.abs(largest) < float("inf")  # neither infinite nor NaN
    if LAST:
        leaves = valid
    elif DECIDED:
        leaves = valid & (tl.load(decided + 2 * rows, mask=valid, other=0) != 0)
    else:
        score = tl.load(values + 2, mask=valid, other=0.0)
        ties = (score >= tl.load(tied)) | (tl.load(rules + 3) != 0)  # or the hash decides alone
        drawn = hash_below(tl.load(samples + rows, mask=valid, other=0), rules)
        leaves = valid & ((score > tl.load(tied + 1)) | (ties & drawn))
    leaves = leaves | (valid & (usable == 0))
    stays = valid & (leaves == 0)
    here = rows == row
    if tl.sum((stays & here).to(tl.int32), 0) > 0:
        place = (tl.load(arrived) + tl.sum((stays & (rows < row)).to(tl.int64), 0)) % next_ring
        made = select_batch(batch, source, source_b, source_c, source_d, BATCHES)
        move_row(made, target, words, own, place, part, BLOCK)
        if TENSORS > 1:
            made_2 = select_batch(batch, source_2, source_2b, source_2c, source_2d, BATCHES)
            move_row(made_2, target_2, words_2, own, place, part, BLOCK)
        if TENSORS > 2:
            made_3 = select_batch(batch, source_3, source_3b, source_3c, source_3d, BATCHES)
            move_row(made_3, target_3, words_3, own, place, part, BLOCK)
        if FIRST:  # noqa: SIM102, of which one is known when the kernel is compiled
            if part == 0:
                tl.store(next_samples + place, tl.load(samples + row))
    if FIRST:  # noqa: SIM102
        if part == 0:
            if tl.sum((leaves & here).to(tl.int32), 0) > 0:
                earlier = tl.load(answered) + tl.sum((leaves & (rows < row)).to(tl.int64), 0)
                there = answers + 4 * (earlier % ring)
                tl.store(there, tl.load(samples + row), cache_modifier=".wt")
                if DECIDED:
                    tl.store(there + 1, tl.load(decided + 2 * row + 1), cache_modifier=".wt")
                else:
                    tl.store(there + 1, tl.load(own_values).to(tl.int64), cache_modifier=".wt")
                fine = tl.sum((usable & here).to(tl.int32), 0) > 0
                tl.store(there + 2, tl.where(fine, stage, -1 - stage).to(tl.int64), cache_modifier=".wt")
                if PROBABILITY:
                    bits = tl.load(own_values + probability).to(tl.int64, bitcast=True)
                    tl.store(there + 3, bits, cache_modifier=".wt")
            if row == 0:
                left = tl.load(answered) + tl.sum(leaves.to(tl.int64), 0)
                joined = tl.load(arrived) + tl.sum(stays.to(tl.int64), 0)
                tl.store(after, left)
                tl.store(after + 1, joined)
                tl.store(seen, left)
                tl.store(seen + 1, joined)


def run_each(device: str) -> torch.Tensor:
    """Launch every kernel once on a device, so that what is missing there is known; return what the last one wrote."""
    words, place = (torch.zeros(count, dtype=torch.int64, device=device) for count in (8, 1))
    move_rows[(1, 1)](words, place, words, place, 8, BLOCK=8)
    logits, packed = torch.zeros(1, 2, device=device), torch.empty(1, 3, dtype=torch.float64, device=device)
    pack_logits[(1,)](logits, packed, 2, 2, SCORE=1, MARGIN=True, PROBABILITY=0, RANKS=0, BLOCK=2)
    return packed
