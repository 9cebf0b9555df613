"""Process groups and collectives; the only folder that uses torch.distributed."""
