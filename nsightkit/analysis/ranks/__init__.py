"""Many GPUs: collectives, clocks, who is late, and where a job loses its time."""
