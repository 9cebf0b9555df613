"""Closed forms of memory, traffic and FLOPs, and what hardware can do; nothing here needs torch."""
