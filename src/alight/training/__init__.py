"""Weights change: heads and backbones are trained."""
