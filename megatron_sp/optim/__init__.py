"""Flat buffers, optimizers, schedules, gradient norms."""
