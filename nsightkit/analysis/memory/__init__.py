"""Where the memory went, and what a run will need."""
