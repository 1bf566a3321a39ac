"""A network under calibrated policies, behind HTTP: answers in small batches, never ahead of the budget."""
