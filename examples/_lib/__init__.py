"""What one page needs beyond the package, and a reader would not copy."""
