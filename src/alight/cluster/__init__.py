"""The same work on many machines by Ray Data: partitions of answers or of recordings, each written once."""
