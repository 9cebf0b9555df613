"""FLOPs, parameters and pipeline stages in closed form, and memory by a rough one; nothing here needs torch."""
