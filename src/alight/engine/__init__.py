"""Samples flow through stages and leave where the policy says."""
