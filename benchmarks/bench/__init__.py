"""Side by side: the same documents, the same adapter, the same machine, one process a system."""
