"""Planner (``megatron-sp plan``): enumerate the layouts of a model on given GPUs, predict memory and time, show the fastest that fit."""
