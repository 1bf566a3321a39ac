"""A network becomes stages: calls, tracing, cutting, placement, proof."""
