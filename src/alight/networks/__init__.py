"""Tensors with weights: networks with exits, their heads, where they come from and how they are kept."""
