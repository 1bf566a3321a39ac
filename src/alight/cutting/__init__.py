"""A network becomes stages: tracing, cutting, placement, proof."""
