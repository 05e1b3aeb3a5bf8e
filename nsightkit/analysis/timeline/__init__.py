"""Where the time went, and why the GPU was idle: questions to one trace."""
