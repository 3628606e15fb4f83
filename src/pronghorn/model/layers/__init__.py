"""One decoder layer for every family: a mixer and an MLP, over groups of linears."""
