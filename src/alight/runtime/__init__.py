"""Tensors flow: recording what the heads say, and predicting under a budget."""
