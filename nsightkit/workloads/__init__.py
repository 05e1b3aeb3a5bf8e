"""Programs to measure: a training step with faults, a language model, attention, a transformer layer, and ceilings.

Nothing here is imported before it is used: most of it needs torch.
"""
