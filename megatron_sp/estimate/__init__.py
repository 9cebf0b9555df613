"""Closed forms of memory, communication volume and FLOPs, and hardware specifications; nothing here needs torch."""
