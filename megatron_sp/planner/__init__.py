"""Planner (``megatron-sp plan``): predict memory and time of all layouts of a model on given GPUs, show the fastest."""
