"""Capture a program: nsys, ncu, torch.profiler, allocator history, timers, GPU utilization.

Importing this package loads none of its modules.
"""
