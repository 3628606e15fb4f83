"""One decoder layer for every family: an attention half and an MLP, over groups of linears."""
