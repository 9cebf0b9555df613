"""``python -m megatron_sp``, and ``torchrun -m megatron_sp`` for commands of several processes."""

from megatron_sp.commands.cli import program

if __name__ == "__main__":
    program()
