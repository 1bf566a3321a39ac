"""Guarantees: a method becomes one whose policies are certified, on cost or on accuracy, from finite samples.

    certified_mean           E[cost of a new sample] <= budget: the Dirichlet mean, or conformal risk control
    certified_probability    with probability 1 - delta over the data, E[cost] <= budget: Dirichlet quantile, or betting
    certified_batch          every batch costs at most its size times the budget: a Quota, by ranks inside the batch
    certified_stream         t samples cost at most t * budget and one sample more, at every t: a Paced policy
    certified_risk           error, excess error or disagreement <= alpha with probability 1 - delta

The method is fitted once, on one part of the data, and certified on the other: `unlabelled`, or without it half of
`labelled`. Methods that plan exit rates and meet them with survivor thresholds are certified by the exact law of the
exit shares; others by a family that moves all thresholds of the fitted policy together, so that costs are nested.
"""
