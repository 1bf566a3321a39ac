"""Shares and quantiles: how many samples should leave where, and which score lets them."""
