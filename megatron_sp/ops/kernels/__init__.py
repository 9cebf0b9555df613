"""Triton kernels for elementwise operations, norms and sums of products; the plain forms are one folder up.

A kernel reads and writes each tensor once (rows above 8192 in a norm: once a pass), computes in fp32, and rounds once.
``launch.py`` is the way to all of them; the other modules import Triton where a kernel is first needed.
"""
