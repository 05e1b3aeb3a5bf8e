"""What runs: small programs whose faults are known, and the registry of investigations.

Nothing here is imported before it is used: most of it needs torch.
"""
