"""What the questions share: intervals, names and categories, noise, sums by group."""
