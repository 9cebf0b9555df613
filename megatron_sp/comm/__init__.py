"""Who talks to whom; the only folder that names torch.distributed."""
