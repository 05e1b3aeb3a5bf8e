"""Programs to measure: a training step with faults, a language model, attention, a transformer layer, and ceilings.

Import the modules by name: most of them need torch.
"""
