"""Does early exit pay on this machine? Timing, tuning and plans."""
