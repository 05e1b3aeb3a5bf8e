"""How far from the speed of light: what operations must cost, and what of the hardware they use."""
