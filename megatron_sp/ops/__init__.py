"""Operations local to one device, each also in plain PyTorch."""
