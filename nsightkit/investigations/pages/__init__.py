"""What a page of the guide needs beyond the analyses."""
