"""What follows the mixer in a layer: a dense MLP, or a mixture of experts."""
