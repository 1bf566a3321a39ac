"""Recorded outputs of networks with exits: alight.recordings finds the files beside this one."""
