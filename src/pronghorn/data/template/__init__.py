"""Chat templates: rendering, and which tokens of a rendered conversation get a loss."""
