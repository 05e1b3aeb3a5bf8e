"""How far from the speed of light: what operations must cost, and how much of the hardware they use."""
