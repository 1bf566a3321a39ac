"""A network under calibrated policies behind HTTP: it answers in small batches and never exceeds its budget."""
