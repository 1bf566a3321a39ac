"""Bytes become arrays: formats, batches, preprocessing, tokens."""
