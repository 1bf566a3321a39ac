"""Networks with exits: tensors have weights."""
