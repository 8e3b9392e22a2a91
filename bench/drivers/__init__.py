"""Programs that run inside the comparators, each a file of its own that imports nothing of ours."""
