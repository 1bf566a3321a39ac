"""What a network costs: FLOPs, milliseconds, joules."""
