"""A loss head in slices of tokens."""
