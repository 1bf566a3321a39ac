"""Prediction and recording on many machines with Ray Data: partitions of results, each written exactly once."""
