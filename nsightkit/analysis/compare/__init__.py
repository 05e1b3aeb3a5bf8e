"""What changed between two runs or many, and whether that is more than noise."""
